"""The GEMMs of one rank: (N, K) and experts of every linear layer, after all kinds of parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, get_args

from moe_fp8.errors import ConfigError
from moe_fp8.limits import MAX_EXPERTS, N_MULTIPLE, SCALE_BLOCK, refuse_k, refuse_n
from moe_fp8.problems import GemmLayout
from moe_fp8.warmup.engines import ANY, EngineCalls
from moe_fp8.warmup.models.description import Domain, Linear, ModelDescription, Part, whole_blocks

_TRIED_TP = (1, 2, 4, 8, 16, 32, 64)

_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class GemmShape:
    """Weights of one GEMM on one rank: `[n, k]`, or `[num_experts, n, k]` for routed experts.

    `what` is the module's usual name, with fused projections joined by "+". `whole_context`: the GEMM's rows
    may be all tokens of a context, not only the tokens of one pass. For example, a chunked prefill projects
    the cached latents up again.
    """

    what: str
    n: int
    k: int
    num_experts: int | None = None
    whole_context: bool = False

    def refusal(self) -> str:
        """Why no kernel serves this GEMM; "" if kernels do."""
        if self.num_experts is not None and not 1 <= self.num_experts <= MAX_EXPERTS:
            return f"a rank has 1 to {MAX_EXPERTS} experts, got {self.num_experts}"
        return refuse_n(self.n) or refuse_k(self.k)


def parse_shape(text: str, option: str = "shape") -> GemmShape:
    """The GEMM that `layout:n:k:experts` names, without experts for "dense". Raises ConfigError.

    All grouped layouts give the same shape. `option` names the text in the error.
    """
    layout, *numbers = text.split(":")
    expected = (
        f"layout:n:k:experts, layout one of {', '.join(get_args(GemmLayout))}; n % {N_MULTIPLE} == 0, "
        f"k % {SCALE_BLOCK} == 0, at most {MAX_EXPERTS} experts"
    )
    wrong = ConfigError(option, expected, text, "for example dense:4096:7168 or masked:4096:7168:32")
    if layout not in get_args(GemmLayout) or not all(
        number.isascii() and number.isdigit() and len(number) < 10 for number in numbers
    ):
        raise wrong
    sizes = [int(number) for number in numbers]
    experts: int | None = None
    if layout == "dense" and len(sizes) >= 2 and sizes[2:] in ([], [1]):
        n, k = sizes[:2]
    elif layout != "dense" and len(sizes) == 3:
        n, k, experts = sizes
    else:
        raise wrong
    shape = GemmShape("extra", n, k, experts)
    if shape.refusal():
        raise wrong
    return shape


@dataclass(frozen=True)
class Unplanned:
    """A linear layer of one rank that no kernel of this package computes, and the reason.

    `n` or `k` is None if the ranks' shares are no whole numbers. `layers` counts the layers that have it, and
    is 0 for a linear layer outside of the layers. `lacking`: its weights are quantized, so that a server
    needs kernels from elsewhere for it; else its weights are bf16 or fp32.
    """

    what: str
    n: int | None
    k: int | None
    num_experts: int | None
    layers: int
    reason: str
    lacking: bool

    def __str__(self) -> str:
        sizes = " x ".join("?" if size is None else str(size) for size in (self.n, self.k))
        experts = "" if self.num_experts is None else f"{self.num_experts} x "
        return f"{self.what} ({experts}{sizes}): {self.reason}"


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def demand_integer(name: str, value: int, least: int, most: int) -> None:
    """Raise ConfigError for an option that is no integer in these bounds."""
    if not is_integer(value) or not least <= value <= most:
        raise ConfigError(name, f"an integer from {least} to {most}", value)


@dataclass(frozen=True)
class Parallelism:
    """The division of a model among ranks: `tp` ranks split every layer, `ep` ranks split the experts.

    `ep` divides `tp` or is a multiple of it. If `ep` is less than `tp`, `tp / ep` ranks split each expert. If
    `ep` is greater, the experts get tokens from `ep / tp` data-parallel groups. The other numbers of ranks
    are for engines that divide kinds of layers differently; None means what `tp` and `ep` give.
    `attention_tp`: ranks that split attention, for example 1 with data-parallel attention. `mlp_tp`: ranks
    that split dense MLPs. `shared_tp`: ranks that split shared experts, 1 if each rank has them whole
    (replicated or sequence-parallel). `moe_tp`: ranks that split each routed expert. `redundant_experts`:
    copies of experts on all ranks together (EPLB). `fuse_shared`: the shared experts are further routed
    experts of each rank, so a rank has E + 1 of them. They must have the width of routed experts, and FP8
    weights where these have them.
    """

    tp: int = 1
    ep: int = 1
    attention_tp: int | None = None
    mlp_tp: int | None = None
    shared_tp: int | None = None
    moe_tp: int | None = None
    redundant_experts: int = 0
    fuse_shared: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "attention_tp", "mlp_tp", "shared_tp", "moe_tp"):
            value = getattr(self, name)
            if value is not None or name in ("tp", "ep"):
                demand_integer(name, value, 1, _MOST_RANKS)
        demand_integer("redundant_experts", self.redundant_experts, 0, _MOST_RANKS)
        if self.moe_tp is None and self.tp % self.ep and self.ep % self.tp:
            raise ConfigError("ep", f"a divisor or a multiple of tp ({self.tp})", self.ep)
        ranks = self.ways("experts") * self.ep
        if ranks % self.ways("attention"):
            raise ConfigError(
                "attention_tp", f"a divisor of the ranks that share the experts ({ranks})",
                self.ways("attention"),
            )  # fmt: skip
        for name in ("mlp_tp", "shared_tp"):
            if ranks % (getattr(self, name) or 1):
                expected = f"a divisor of the ranks that share the experts ({ranks})"
                raise ConfigError(name, expected, getattr(self, name))

    def ways(self, domain: Domain) -> int:
        """The ranks that split one layer of a kind."""
        dense = self.mlp_tp or self.tp
        return {
            "attention": self.attention_tp or self.tp,
            "mlp": dense,
            "shared": self.shared_tp or dense,
            "experts": self.moe_tp or max(1, self.tp // self.ep),
        }[domain]

    @property
    def calls(self) -> EngineCalls:
        """What the server's engine calls; no engine is named here."""
        return ANY

    @property
    def dp(self) -> int:
        """The groups of ranks with tokens of their own, whose tokens a rank's experts get."""
        return self.ways("experts") * self.ep // self.ways("attention")


def gemm_shapes(
    model: ModelDescription, parallelism: Parallelism, *, pad_intermediate: bool = False
) -> tuple[GemmShape, ...]:
    """The FP8 GEMMs of one rank that kernels of this package compute.

    With `pad_intermediate`, a rank's intermediate size that is no multiple of 128 is rounded up, as for
    weights padded with zeros offline. `unplanned` has all other linear layers. Raises ConfigError if the
    parallelism does not divide the model's heads or experts, or leaves too many experts to a rank, for which
    the remedy names settings that work, and if the shared experts cannot be fused.
    """
    return _rank(model, parallelism, pad_intermediate).gemms


def unplanned(
    model: ModelDescription, parallelism: Parallelism, *, pad_intermediate: bool = False
) -> tuple[Unplanned, ...]:
    """The linear layers of one rank that `gemm_shapes` does not have, each with the reason."""
    return _rank(model, parallelism, pad_intermediate).unplanned


def local_experts(model: ModelDescription, parallelism: Parallelism) -> int:
    """The number of routed experts on one rank; on the first rank if others have one less.

    Raises ConfigError if `ep` does not divide them, unless the engine deals them out unevenly, and for more
    experts than the ops take.
    """
    return max(_expert_counts(model, parallelism))


def _expert_counts(model: ModelDescription, parallelism: Parallelism) -> tuple[int, ...]:
    """Every number of routed experts that a rank may have."""
    total, ep = model.num_experts + parallelism.redundant_experts, parallelism.ep
    # An engine that copies experts deals them out evenly.
    if parallelism.redundant_experts or not parallelism.calls.uneven_experts:
        _divide("the number of routed experts", total, "ep", ep)
    fused = model.num_shared_experts if parallelism.fuse_shared else 0
    counts = tuple(dict.fromkeys((-(-total // ep) + fused, total // ep + fused)))
    for own in counts:
        demand_integer("experts of a rank", own, 1 + fused, MAX_EXPERTS)
    return counts


def experts_per_token(model: ModelDescription, parallelism: Parallelism) -> int:
    """The number of routed experts that a token goes to, with fused shared experts."""
    return model.experts_per_token + (model.num_shared_experts if parallelism.fuse_shared else 0)


class _Rank(NamedTuple):
    gemms: tuple[GemmShape, ...]
    unplanned: tuple[Unplanned, ...]


_UNEVEN = f"scale blocks of {SCALE_BLOCK} do not divide"


class _Uneven(Exception):
    """A width that ranks cannot share in blocks of 128; `share` is None if it is no whole number."""

    def __init__(self, width: int, ways: int) -> None:
        self.share = None if width % ways else width // ways
        super().__init__(f"{_UNEVEN} a rank's width, {width} / {ways}")


def _rank(model: ModelDescription, parallelism: Parallelism, pad: bool) -> _Rank:
    if parallelism.fuse_shared:
        _demand_fusible(model)
    try:
        return _divided(model, parallelism, pad)
    except ConfigError as error:
        remedy = working_settings(model, parallelism)
        raise ConfigError(error.field, error.expected, error.got, remedy) from error


def _demand_fusible(model: ModelDescription) -> None:
    """Raise ConfigError if the model's shared experts cannot be further routed experts."""

    def of(domain: Domain) -> list[Linear]:
        return [linear for linear in model.linears if linear.domain == domain]

    def in_fp8(domain: Domain) -> set[tuple[str, int]]:
        found = (linear for linear in of(domain) if not linear.reason)
        return {(linear.what.rpartition(".")[2], layer) for linear in found for layer in linear.layers}

    def widths(domain: Domain) -> set[int]:
        return {linear.k.units for linear in of(domain) if linear.what.endswith(".down")}

    count, shared, routed = model.num_shared_experts, widths("shared"), widths("experts")
    remedy = "plan without fuse_shared (--fuse-shared)"
    if not count:
        raise ConfigError("fuse_shared", "a model with shared experts", "a model without any", remedy)
    if shared != {count * width for width in routed}:
        expected = f"shared experts as wide as {count} of the routed experts ({count * min(routed)})"
        raise ConfigError("fuse_shared", expected, min(shared), remedy)
    if in_fp8("shared") != in_fp8("experts") or not in_fp8("shared"):
        expected = "shared experts in FP8, like the routed experts, in the same layers"
        raise ConfigError("fuse_shared", expected, "a model in which they are not", remedy)


def _divided(model: ModelDescription, parallelism: Parallelism, pad: bool) -> _Rank:
    gemms, others = [], []
    counts, calls = _expert_counts(model, parallelism), parallelism.calls
    for linear in model.linears:
        if linear.domain == "shared" and parallelism.fuse_shared and not linear.reason:
            continue  # these are among the routed experts
        if not calls.builds(linear.engine):
            continue
        fills_blocks = calls.fills_blocks if linear.partial else (False,)
        for experts, fills in product(counts if linear.routed else (None,), fills_blocks):
            one = _linear(linear, parallelism, pad, experts, fills)
            if isinstance(one, GemmShape):
                gemms.append(one)
            else:
                others.append(one)
    return _Rank(tuple(dict.fromkeys(gemms)), tuple(dict.fromkeys(others)))


def _linear(
    linear: Linear, parallelism: Parallelism, pad: bool, experts: int | None, fills: bool
) -> GemmShape | Unplanned:
    ways, reason = parallelism.ways(linear.domain), linear.reason
    by = "tp" if parallelism.attention_tp is None else "attention_tp"  # only attention has heads to share
    lacking = linear.lacking or not reason
    sizes: list[int | None] = []
    for side in (linear.n, (linear.k,)):
        try:
            sizes.append(sum(_share(part, ways, by, pad) for part in side))
        except _Uneven as uneven:
            sizes.append(None if uneven.share is None else uneven.share * len(side))
            reason = reason or str(uneven)
    n, k = sizes
    if n is not None and k is not None:
        rows = whole_blocks(n) if fills else n
        reason = reason or refuse_n(rows) or refuse_k(k)
        if not reason:
            return GemmShape(linear.what, rows, k, experts, linear.whole_context)
    return Unplanned(linear.what, n, k, experts, len(linear.layers), reason, lacking)


def _share(part: Part, ways: int, by: str, pad: bool) -> int:
    """A rank's part of one side of a weight, which `ways` ranks share; `by` is that number's name."""
    units, size, cut, padded = part
    if cut == "whole":
        return units * size
    if cut == "width":
        if pad or padded:
            return -(-units // (ways * SCALE_BLOCK)) * SCALE_BLOCK
        if units % (ways * SCALE_BLOCK):
            raise _Uneven(units, ways)
        return units // ways * size
    if cut == "kv_heads" and units < ways:
        # If there are fewer key-value heads than ranks, the heads are replicated.
        _divide("the ranks of attention", ways, "num_key_value_heads", units)
        return size
    share = _divide("the number of heads", units, by, ways) * size
    return whole_blocks(share) if padded else share


def _divide(what: str, total: int, by: str, ways: int) -> int:
    if total % ways:
        raise ConfigError(by, f"a divisor of {what} ({total})", ways)
    return total // ways


def working_settings(model: ModelDescription, parallelism: Parallelism) -> str:
    """Settings with which 128 divides every width: tp (with this ep, or ep = tp), attention_tp, padding."""

    def fits(pad: bool = False, **other: Any) -> bool:
        try:
            return not uneven(_divided(model, replace(parallelism, **other), pad).unplanned)
        except ConfigError:
            return False

    good = [
        f"tp={tp} ep={ep}"
        for tp in _TRIED_TP
        for ep in sorted({parallelism.ep, tp})
        if (tp % ep == 0 or ep % tp == 0) and fits(tp=tp, ep=ep)
    ]
    if parallelism.attention_tp is not None:
        good += [f"attention_tp={ways}" for ways in _TRIED_TP if fits(attention_tp=ways)]
    if copies := parallelism.redundant_experts:
        copies += -(model.num_experts + copies) % parallelism.ep
        if fits(redundant_experts=copies):
            good.append(f"redundant_experts={copies}")
    remedies = [f"use {', '.join(good)}"] if good else []
    if fits(pad=True):
        remedies.append(
            f"pad the weights with zeros to a multiple of {SCALE_BLOCK} offline and plan with "
            "pad_intermediate (--pad-intermediate)"
        )
    return "; or ".join(remedies) or "no tp and ep serve this model with the other settings"


def uneven(layers: Sequence[Unplanned]) -> tuple[Unplanned, ...]:
    """Those of `layers` that other parallelism or padding would serve."""
    return tuple(layer for layer in layers if layer.reason.startswith(_UNEVEN))

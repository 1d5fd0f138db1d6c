"""The FP8 GEMMs of one rank of a model: (N, K) and experts, after tensor and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from moe_fp8.errors import ConfigError
from moe_fp8.problems import SCALE_BLOCK
from moe_fp8.warmup.model import MlaAttention, ModelDescription

#: In every FP8 GEMM, N is a multiple of this number and K is a multiple of SCALE_BLOCK.
N_MULTIPLE = 64

_TRIED_TP = (1, 2, 4, 8, 16, 32, 64)


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


@dataclass(frozen=True)
class Parallelism:
    """The division of a model among ranks: `tp` ranks split every layer, `ep` ranks split the experts.

    `ep` divides `tp` or is a multiple of it. If `ep` is less than `tp`, `moe_tp` = `tp / ep` ranks split each
    expert. If `ep` is greater, the experts get tokens from `dp` = `ep / tp` data-parallel groups.
    """

    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("ep", self.ep)):
            if value < 1:
                raise ConfigError(name, "an integer >= 1", value)
        if self.tp % self.ep and self.ep % self.tp:
            raise ConfigError("ep", f"a divisor or a multiple of tp ({self.tp})", self.ep)

    @property
    def moe_tp(self) -> int:
        return max(1, self.tp // self.ep)

    @property
    def dp(self) -> int:
        return max(1, self.ep // self.tp)


def gemm_shapes(
    model: ModelDescription, parallelism: Parallelism, *, pad_intermediate: bool = False
) -> tuple[GemmShape, ...]:
    """The FP8 GEMMs of one rank.

    With `pad_intermediate`, a rank's intermediate size that is no multiple of 128 is rounded up, as for
    weights padded with zeros offline. Raises ConfigError if the parallelism does not divide the model or
    gives an N or K that no kernel serves; the remedy names settings that work.
    """
    try:
        return _shapes(model, parallelism, pad_intermediate)
    except ConfigError as error:
        remedy = _remedy(model, parallelism)
        raise ConfigError(error.field, error.expected, error.got, remedy) from error


def local_experts(model: ModelDescription, parallelism: Parallelism) -> int:
    """The number of routed experts on one rank. Raises ConfigError if `ep` does not divide them."""
    return _divide("the number of routed experts", model.num_experts, "ep", parallelism.ep)


def _shapes(model: ModelDescription, parallelism: Parallelism, pad: bool) -> tuple[GemmShape, ...]:
    shapes = (*_attention(model, parallelism.tp), *_mlps(model, parallelism, pad))
    for shape in shapes:
        for name, value, multiple in (("N", shape.n, N_MULTIPLE), ("K", shape.k, SCALE_BLOCK)):
            if value % multiple:
                raise ConfigError(f"{name} of {shape.what}", f"a multiple of {multiple}", value)
    return shapes


def _attention(model: ModelDescription, tp: int) -> list[GemmShape]:
    attention = model.attention
    hidden = model.hidden_size
    heads = _divide("num_attention_heads", attention.num_heads, "tp", tp)
    if not isinstance(attention, MlaAttention):
        # If there are fewer key-value heads than ranks, the heads are replicated.
        kv_heads = 1
        if tp <= attention.num_kv_heads:
            kv_heads = _divide("num_key_value_heads", attention.num_kv_heads, "tp", tp)
        return [
            GemmShape("qkv", (heads + 2 * kv_heads) * attention.head_dim, hidden),
            GemmShape("o", hidden, heads * attention.head_dim),
        ]
    qk_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    kv_a = attention.kv_lora_rank + attention.qk_rope_head_dim
    if attention.q_lora_rank is None:
        shapes = [GemmShape("q", heads * qk_dim, hidden), GemmShape("kv_a", kv_a, hidden)]
    else:
        shapes = [
            GemmShape("q_a+kv_a", attention.q_lora_rank + kv_a, hidden),
            GemmShape("q_b", heads * qk_dim, attention.q_lora_rank),
        ]
    kv_dim = attention.qk_nope_head_dim + attention.v_head_dim
    shapes += [
        GemmShape("kv_b", heads * kv_dim, attention.kv_lora_rank, whole_context=True),
        GemmShape("o", hidden, heads * attention.v_head_dim),
    ]
    indexer = model.indexer
    if indexer is not None and attention.q_lora_rank is not None:
        shapes += [
            GemmShape("indexer.wq_b", indexer.num_heads * indexer.head_dim, attention.q_lora_rank),
            GemmShape("indexer.wk", indexer.head_dim, hidden),
        ]
    return shapes


def _mlps(model: ModelDescription, parallelism: Parallelism, pad: bool) -> list[GemmShape]:
    hidden = model.hidden_size
    experts = local_experts(model, parallelism)
    width = model.moe_intermediate_size

    def cut(what: str, intermediate: int, ways: int) -> int:
        if pad:
            return -(-intermediate // (ways * SCALE_BLOCK)) * SCALE_BLOCK
        if intermediate % (ways * SCALE_BLOCK):
            raise ConfigError(f"{what} / {ways}", f"a multiple of {SCALE_BLOCK}", intermediate / ways)
        return intermediate // ways

    shapes = []
    if model.dense_intermediate_size is not None:
        part = cut("intermediate_size", model.dense_intermediate_size, parallelism.tp)
        shapes += [GemmShape("mlp.gate_up", 2 * part, hidden), GemmShape("mlp.down", hidden, part)]
    if model.num_shared_experts:
        part = cut("shared experts' intermediate_size", model.num_shared_experts * width, parallelism.tp)
        shapes += [GemmShape("shared.gate_up", 2 * part, hidden), GemmShape("shared.down", hidden, part)]
    part = cut("moe_intermediate_size", width, parallelism.moe_tp)
    shapes += [
        GemmShape("experts.gate_up", 2 * part, hidden, experts),
        GemmShape("experts.down", hidden, part, experts),
    ]
    return shapes


def _divide(what: str, total: int, by: str, ways: int) -> int:
    if total % ways:
        raise ConfigError(by, f"a divisor of {what} ({total})", ways)
    return total // ways


def _remedy(model: ModelDescription, parallelism: Parallelism) -> str:
    """Settings that work: other parallelism (with this `ep`, or with `ep` equal to `tp`), or padding."""

    def fits(other: Parallelism, pad: bool) -> bool:
        try:
            return bool(_shapes(model, other, pad))
        except ConfigError:
            return False

    good = [
        f"tp={tp} ep={ep}"
        for tp in _TRIED_TP
        for ep in sorted({parallelism.ep, tp})
        if (tp % ep == 0 or ep % tp == 0) and fits(Parallelism(tp, ep), False)
    ]
    remedies = [f"use {', '.join(good)}"] if good else []
    if fits(parallelism, True):
        remedies.append(
            f"pad the weights with zeros to a multiple of {SCALE_BLOCK} offline and plan with "
            "pad_intermediate (--pad-intermediate)"
        )
    return "; or ".join(remedies) or "no parallelism serves this model"

"""How a server serves a model: a rank's share of it, and the limits of the calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from moe_fp8.errors import ConfigError
from moe_fp8.limits import MAX_NEXT_N, PAGE_SIZES, refuse_next_n, refuse_page
from moe_fp8.problems import DEFAULT_NUM_SMS, OutDtype
from moe_fp8.settings import settings
from moe_fp8.warmup.engines import EngineCalls, engine_calls
from moe_fp8.warmup.models import Indexer
from moe_fp8.warmup.shapes import Parallelism, demand_integer, is_integer

_Value = TypeVar("_Value")

_OUT_DTYPES = ("bfloat16", "float32")

#: No GPU has more multiprocessors, and no size of a call is larger than fits into 31 bits.
MOST_SMS = 1024
MOST_ROWS = 2**31 - 1

#: The time of a plan grows with each number of SMs; servers have one to four of them.
_MOST_BUDGETS = 16


@dataclass(frozen=True)
class PlanOptions(Parallelism):
    """The parallelism of a server and the limits of its calls. A server uses all values of a tuple or list.

    `max_tokens`: tokens of one forward pass. `max_batch`: requests decoded together. `next_n`: the most
    tokens of a request in one decode step, or a tuple of all numbers that occur. `num_sms`: SMs that the ops
    use; with a tuple, for example 132, 112 and 78, some calls leave SMs to other kernels. `block_size`:
    tokens of a page of the indexer's cache; by default 64, or the pages that the engine may choose for the
    model. `masked_rows`: the most rows of an expert's buffer in the masked layout; by default what the engine
    makes of the other limits, or enough for `max_batch` and `next_n`, rounded up to a multiple of 128.
    `out_dtypes`: dtypes of the GEMMs' outputs. `pad_intermediate`: see `gemm_shapes`. `batch_invariant`:
    whether the server runs with MOE_FP8_BATCH_INVARIANT on; the default is this process's setting. `engine`:
    plan only what this engine calls ("vllm" or "sglang"); None plans every call that the ops serve in a
    forward pass. `weight_gradients`: plan `k_grouped_gemm_fp8`, and `gemm_fp8` with scales of 1 x 128 on both
    operands, for the weights of every GEMM, which training calls.
    """

    max_tokens: int = 16384
    max_batch: int = 256
    next_n: int | tuple[int, ...] = 1
    num_sms: int | tuple[int, ...] = DEFAULT_NUM_SMS
    block_size: int | tuple[int, ...] | None = None
    masked_rows: int | None = None
    out_dtypes: tuple[OutDtype, ...] = ("bfloat16",)
    pad_intermediate: bool = False
    batch_invariant: bool | tuple[bool, ...] = field(default_factory=lambda: settings().batch_invariant)
    engine: str | None = None
    weight_gradients: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("next_n", "num_sms", "block_size", "out_dtypes", "batch_invariant"):
            if isinstance(given := getattr(self, name), list):  # as JSON has several values
                object.__setattr__(self, name, tuple(given))
        for name in ("max_tokens", "max_batch", "masked_rows"):
            value = getattr(self, name)
            if value is not None or name != "masked_rows":
                demand_integer(name, value, 1, MOST_ROWS)
        budgets = every(self.num_sms, "num_sms")
        for value in budgets:
            demand_integer("num_sms", value, 1, MOST_SMS)
        if len(budgets) > _MOST_BUDGETS:
            raise ConfigError(
                "num_sms", f"at most {_MOST_BUDGETS} numbers", len(budgets),
                "the plan tries every call with each of them; give those that the server's calls have",
            )  # fmt: skip
        for name, refuse, served in (
            ("next_n", refuse_next_n, f"1 to {MAX_NEXT_N}"),
            ("block_size", refuse_page, f"one of {PAGE_SIZES}"),
        ):
            given = getattr(self, name)
            for value in () if given is None and name == "block_size" else every(given, name):
                if not is_integer(value):
                    raise ConfigError(name, "an integer, or a tuple of integers", value)
                if refuse(value):
                    raise ConfigError(name, served, value)
        for value in every(self.batch_invariant, "batch_invariant"):
            if not isinstance(value, bool):
                raise ConfigError("batch_invariant", "True, False or a tuple of them", value)
        for name in ("fuse_shared", "pad_intermediate", "weight_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, "True or False", getattr(self, name))
        listed = isinstance(self.out_dtypes, tuple) and self.out_dtypes
        if not listed or any(dtype not in _OUT_DTYPES for dtype in self.out_dtypes):
            raise ConfigError("out_dtypes", f"a tuple of some of {', '.join(_OUT_DTYPES)}", self.out_dtypes)
        engine_calls(self.engine)

    @property
    def calls(self) -> EngineCalls:
        """The calls of the engine, or every call that the ops serve."""
        return engine_calls(self.engine)

    @property
    def sm_budgets(self) -> tuple[int, ...]:
        """Every number of SMs that an op may be called with."""
        return every(self.num_sms)

    def pages(self, indexer: Indexer) -> tuple[int, ...]:
        """Every number of keys that a page of the cache of this indexer may have."""
        return self.calls.pages(indexer.pooled) if self.block_size is None else every(self.block_size)

    @property
    def tokens_of_requests(self) -> tuple[int, ...]:
        """Every number of tokens that the requests of a decode step may have."""
        return self.next_n if isinstance(self.next_n, tuple) else tuple(range(1, self.next_n + 1))

    @property
    def most_decoded(self) -> int:
        """The most tokens of a decode step."""
        return self.max_batch * max(self.tokens_of_requests)


def every(value: _Value | tuple[_Value, ...], name: str = "") -> tuple[_Value, ...]:
    """All values of an option that is one value or a tuple of some.

    Raises ConfigError for an empty tuple, and for a tuple of lists, sets or dicts.
    """
    if not isinstance(value, tuple):
        return (value,)
    if not value:
        raise ConfigError(name, "at least one value", value)
    if any(isinstance(each, (list, set, dict)) for each in value):
        raise ConfigError(name, "one value, or a tuple of values", value)
    return tuple(dict.fromkeys(value))

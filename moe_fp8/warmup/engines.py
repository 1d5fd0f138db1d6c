"""What engines call: the layouts, ops and outputs of a server, by the engine's name."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from moe_fp8.errors import ConfigError
from moe_fp8.problems import SEGMENT_ALIGNMENT, GemmLayout, OutDtype


@dataclass(frozen=True)
class Logits:
    """A form of prefill logits: compressed or full rows, filled with -inf or not, and their dtype."""

    compressed: bool
    fill: bool
    dtype: OutDtype


#: Keys of a page of the indexer's cache, if no engine says otherwise.
PAGES = (64,)


@dataclass(frozen=True)
class EngineCalls:
    """The calls of one engine.

    `contiguous` are its layouts of grouped GEMMs beside "masked". `further` are our ops that it calls besides
    GEMMs and logits ("moe_permute" stands for `moe_combine` too); engines mostly have kernels of their own
    for these. `logits` are its forms of prefill logits. `bf16` are linear layers that it computes in bf16
    although the checkpoint has FP8 weights. `least_heads`: the engine pads fewer heads of an indexer with
    zeros; `least_prefill_heads`: in prefill alone. `pooled_pages`: the pages of the indexer's cache that it
    may choose if the model pools the indexer's keys. `masked_step`: an expert's buffer in the masked layout
    has room for all tokens of a pass, and is longer than they are, by up to this number of rows; None if the
    layout serves decode steps only. `fills_blocks`: whether it fills the last block of a ModelOpt
    checkpoint's dense weight with rows of zeros, if 128 does not divide the rows; both ways if no engine
    says. `uneven_experts`: if the ranks do not divide the experts, the first ranks have one more.
    """

    name: str
    contiguous: tuple[GemmLayout, ...]
    further: tuple[str, ...]
    logits: tuple[Logits, ...]
    bf16: tuple[str, ...] = ()
    least_heads: int = 1
    least_prefill_heads: int = 1
    pooled_pages: tuple[int, ...] = PAGES
    masked_step: int | None = None
    fills_blocks: tuple[bool, ...] = (False,)
    uneven_experts: bool = False

    def masked_rows(self, tokens: int, decoded: int) -> int:
        """The most rows of an expert's buffer in the masked layout.

        `tokens` and `decoded` are the most tokens of one pass, and of one decode step, on all ranks together.
        """
        if self.masked_step is not None:
            return (tokens // self.masked_step + 1) * self.masked_step
        return -(-decoded // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT

    def builds(self, engine: str) -> bool:
        """Whether it builds a layer that only `engine` builds; "" stands for a layer that all engines build.

        If no engine is named, the server may have the layers of all engines.
        """
        return not self.name or engine in ("", self.name)

    def pages(self, pooled: bool) -> tuple[int, ...]:
        """The pages of the indexer's cache that the engine may choose; `pooled`: the model pools its keys."""
        return self.pooled_pages if pooled else PAGES


_DTYPES: tuple[OutDtype, ...] = ("float32", "bfloat16")

#: Every call that the ops serve.
ANY = EngineCalls(
    "", ("m_indices", "psum", "offsets"),
    (
        "quantize_fp8",
        "silu_mul_quantize",
        "grouped_gemm_silu_mul_fp8",
        "moe_permute",
        "route_topk",
        "indexer_quantize_and_cache",
        "indexer_topk",
    ),
    tuple(Logits(*form) for form in product((False, True), (False, True), _DTYPES)),
    fills_blocks=(False, True),
)  # fmt: skip

_FULL, _FILLED = Logits(False, False, "float32"), Logits(False, True, "float32")
_COMPRESSED = Logits(True, False, "float32")

_ENGINES = (
    # vLLM serves with psum and compressed logits (0.24: with m_indices and full rows). Its indexer multiplies
    # wk and weights_proj together, in bf16. Our plug-in quantizes inputs of dense layers and has experts of
    # its own. With low-latency dispatch, vLLM's masked layout serves prefill too.
    EngineCalls(
        "vllm",
        ("m_indices", "psum", "offsets"),
        ("quantize_fp8", "silu_mul_quantize", "moe_permute"),
        (_FULL, _COMPRESSED),
        ("indexer.wk",),
        least_heads=32,
        pooled_pages=(32, 64),
        masked_step=SEGMENT_ALIGNMENT,
        fills_blocks=(True,),
        uneven_experts=True,
    ),
    # SGLang's prefill takes full rows, compressed rows for DeepSeek-V4, and filled rows if keys are pooled.
    # Its masked layout serves prefill too.
    EngineCalls(
        "sglang",
        ("m_indices",),
        (),
        (_FULL, _COMPRESSED, _FILLED),
        least_prefill_heads=32,
        masked_step=256,
    ),
)

ENGINES = {engine.name: engine for engine in _ENGINES}


def engine_calls(name: str | None) -> EngineCalls:
    """The calls of the engine `name`, or for None every call that the ops serve. Raises ConfigError."""
    if name is None:
        return ANY
    if not isinstance(name, str) or name not in ENGINES:
        raise ConfigError("engine", f"one of {', '.join(ENGINES)}", name)
    return ENGINES[name]

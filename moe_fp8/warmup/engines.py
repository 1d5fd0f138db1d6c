"""What engines call: the layouts, ops and outputs of a server, by the engine's name."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from moe_fp8.errors import ConfigError
from moe_fp8.problems import GemmLayout, OutDtype


@dataclass(frozen=True)
class Logits:
    """A form of prefill logits: compressed or full rows, filled with -inf or not, and their dtype."""

    compressed: bool
    fill: bool
    dtype: OutDtype


@dataclass(frozen=True)
class EngineCalls:
    """The calls of one engine.

    `contiguous` are its layouts of grouped GEMMs beside "masked". `further` are our ops that it calls besides
    GEMMs and logits; engines mostly have kernels of their own for these. `logits` are its forms of prefill
    logits. `bf16` are linear layers that it computes in bf16 although the checkpoint has FP8 weights.
    """

    name: str
    version: str
    contiguous: tuple[GemmLayout, ...]
    further: tuple[str, ...]
    logits: tuple[Logits, ...]
    bf16: tuple[str, ...] = ()


_DTYPES: tuple[OutDtype, ...] = ("float32", "bfloat16")

#: Every call that the ops serve.
ANY = EngineCalls(
    "", "", ("m_indices", "psum", "offsets"),
    (
        "quantize_fp8",
        "silu_mul_quantize",
        "grouped_gemm_silu_mul_fp8",
        "moe_permute",
        "moe_combine",
        "route_topk",
        "indexer_quantize_and_cache",
        "indexer_topk",
    ),
    tuple(Logits(*form) for form in product((False, True), (False, True), _DTYPES)),
)  # fmt: skip

_FULL, _FILLED = Logits(False, False, "float32"), Logits(False, True, "float32")
_COMPRESSED = Logits(True, False, "float32")

_ENGINES = (
    # vLLM serves with psum and compressed logits (0.24: with m_indices and full rows). Its indexer multiplies
    # wk and weights_proj together, in bf16. Our plug-in quantizes inputs of dense layers and has own experts.
    EngineCalls(
        "vllm",
        "0.33.0",
        ("m_indices", "psum", "offsets"),
        ("quantize_fp8", "silu_mul_quantize", "moe_permute", "moe_combine"),
        (_FULL, _COMPRESSED),
        ("indexer.wk",),
    ),
    # SGLang's prefill takes full rows, compressed rows for DeepSeek-V4, and filled rows if keys are pooled.
    EngineCalls("sglang", "0.5.23", ("m_indices",), (), (_FULL, _COMPRESSED, _FILLED)),
)

ENGINES = {engine.name: engine for engine in _ENGINES}


def engine_calls(name: str | None) -> EngineCalls:
    """The calls of the engine `name`, or for None every call that the ops serve. Raises ConfigError."""
    if name is None:
        return ANY
    if name not in ENGINES:
        raise ConfigError("engine", f"one of {', '.join(ENGINES)}", name)
    return ENGINES[name]

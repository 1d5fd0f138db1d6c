"""What is known of each engine without importing it: versions, the plug-in group, what turns calls off."""

from __future__ import annotations

from dataclasses import dataclass

#: The name of our entry point in every group.
ENTRY_POINT = "moe_fp8"


@dataclass(frozen=True)
class Switch:
    """A variable of the engine that, at one of the values `off`, keeps the calls of `kinds` from us."""

    variable: str
    off: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Engine:
    """An engine with a plug-in of ours.

    `title` is its name in a sentence. The plug-in was written for `versions`. `group` is the group of entry
    points that it calls. If the variable `only` is set, the engine calls only the names in this list; with
    `lenient`, spaces in the list do not count, and an empty list is no list. `layers`: kind -> the calls that
    we serve. `rest` are the calls that its own kernels serve in any case. `invariance`: the variable, or the
    argument, which asks for results that do not depend on the batch; the engine then starts only if
    MOE_FP8_BATCH_INVARIANT is on. `forgiving`: the engine goes on without a plug-in that fails at its start;
    other engines do not start.
    """

    distribution: str
    title: str
    versions: tuple[str, ...]
    group: str
    only: str
    layers: dict[str, str]
    rest: str
    invariance: str
    lenient: bool = False
    forgiving: bool = False
    switches: tuple[Switch, ...] = ()


_DENSE = "linear layers with FP8 weights in 128 x 128 blocks, K a multiple of 128, N of 64"
_INDEXER = "the logits of sparse attention's indexer, in prefill and decode"
_REST = "attention, norms, routers, layers in bf16 or in other formats"

#: `--engine` -> the engine.
ENGINES = {
    "vllm": Engine(
        distribution="vllm",
        title="vLLM",
        versions=("0.24.0", "0.33.0"),
        group="vllm.general_plugins",
        only="VLLM_PLUGINS",
        layers={
            "dense": f"{_DENSE}, unless --linear-backend names others",
            "experts": "routed experts in this format where vLLM would take its DeepGEMM or Triton kernels",
            "indexer": _INDEXER,
        },
        rest=f"{_REST}, and experts of other backends (FlashInfer with expert parallelism)",
        invariance="VLLM_BATCH_INVARIANT",
    ),
    "sglang": Engine(
        distribution="sglang",
        title="SGLang",
        versions=("0.5.23",),
        group="sglang.srt.plugins",
        only="SGLANG_PLUGINS",
        layers={
            "dense": f"{_DENSE}, unless --fp8-gemm-backend names others",
            "experts": "routed experts in this format with --moe-runner-backend deep_gemm, or with DeepEP",
            "indexer": _INDEXER,
        },
        rest=f"{_REST}, quantization, and experts of other backends (Triton by default)",
        invariance="--enable-deterministic-inference",
        lenient=True,
        forgiving=True,
        switches=(
            Switch("SGLANG_ENABLE_JIT_DEEPGEMM", ("0", "false", "no", "n"), ("dense", "experts", "indexer")),
            Switch("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", ("1", "true", "yes", "y"), ("indexer",)),
        ),
    ),
}

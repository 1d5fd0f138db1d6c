"""SGLang's own warmup of DeepGEMM kernels, which calls each GEMM with up to 131,072 numbers of rows.

SGLang warms a GEMM up at its first call, unless its record says that this has been done. The record gets the
GEMMs whose kernels are planned and loaded. SGLang still warms up all others, and calls our kernels in a mode
that launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_fp8.integrations.planning import LoadedEngine


def skip_warmup(loaded: LoadedEngine) -> Callable[[], None]:
    """Tell SGLang that the GEMMs of `loaded` are warm; returns what takes this back."""
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils

    kinds = compile_utils.DeepGemmKernelType
    grouped = kinds.GROUPED_GEMM_NT_F8F8BF16_MASKED, kinds.GROUPED_GEMM_NT_F8F8BF16_CONTIG
    keys = [(kinds.GEMM_NT_F8F8BF16, n, k, 1) for n, k in loaded.dense]
    keys += [(kind, n, k, experts) for experts, n, k in loaded.experts for kind in grouped]
    record = compile_utils._INITIALIZATION_DICT
    added = [key for key in keys if key not in record]
    record.update(dict.fromkeys(added, True))

    def take_back() -> None:
        for key in added:
            record.pop(key, None)

    return take_back

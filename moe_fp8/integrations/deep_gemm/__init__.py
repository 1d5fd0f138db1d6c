"""A drop-in for the module `deep_gemm` on Hopper: the names that vLLM 0.24 and 0.33 and SGLang 0.5 look up.

`moe_fp8.integrations.install` puts it in the place of `deep_gemm`. A name that no kernel of ours serves, or
whose kind `install` was not given, comes from the engine's own copy, which is imported when somebody asks for
it. If that copy lacks the name, it is absent here too, so that a caller that probes for it sees that. The
import of this module needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_fp8 import __version__
from moe_fp8.integrations import kinds, vendored
from moe_fp8.integrations.deep_gemm import gemm, indexer, layout, modes, utils
from moe_fp8.integrations.forwarding import or_vendored

#: Function -> the kind of its calls, and the names under which engines look it up.
_FUNCTIONS: dict[Callable[..., Any], tuple[str, tuple[str, ...]]] = {
    gemm.fp8_gemm_nt: ("dense", ("fp8_gemm_nt", "fp8_fp4_gemm_nt")),
    gemm.m_grouped_fp8_gemm_nt_contiguous: (
        "experts",
        ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
    ),
    gemm.m_grouped_fp8_gemm_nt_masked: (
        "experts",
        (
            "m_grouped_fp8_gemm_nt_masked",
            "m_grouped_fp8_fp4_gemm_nt_masked",
            "fp8_m_grouped_gemm_nt_masked",
        ),
    ),
    gemm.k_grouped_fp8_gemm_nt_contiguous: ("experts", ("k_grouped_fp8_gemm_nt_contiguous",)),
    indexer.fp8_mqa_logits: ("indexer", ("fp8_mqa_logits", "fp8_fp4_mqa_logits")),
    indexer.get_paged_mqa_logits_metadata: ("indexer", ("get_paged_mqa_logits_metadata",)),
    indexer.fp8_paged_mqa_logits: ("indexer", ("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits")),
}

#: Name -> the kind of its calls, and the function.
_SERVED: dict[str, tuple[str, Any]] = {
    name: (kind, or_vendored(function, (name, *names)))
    for function, (kind, names) in _FUNCTIONS.items()
    for name in names
}

#: Names that belong to no kind: settings, and layouts of scales. (`utils.layout` has one more name.)
_SHARED: dict[str, Any] = {
    name: getattr(module, name)
    for module, names in (
        (layout, utils.layout.__all__),
        (modes, modes.__all__),
    )
    for name in names
    if hasattr(module, name)
}

_other = vendored.getter(__name__)

__all__ = ["__version__", "utils"]


def __getattr__(name: str) -> Any:
    found = _SERVED.get(name)
    if found is not None and found[0] in kinds.served():
        return found[1]
    if name in _SHARED:
        return _SHARED[name]
    return _other(name)


def __dir__() -> list[str]:
    own = [name for name, (kind, _) in _SERVED.items() if kind in kinds.served()]
    return sorted({*globals(), *_SHARED, *own})

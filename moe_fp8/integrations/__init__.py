"""Engines on these kernels: a module in the place of `deep_gemm`, and plug-ins for vLLM and SGLang.

`install` is what the plug-ins call if MOE_FP8_ENGINE is set. docs/vllm.md and docs/sglang.md say what changes
in an engine; docs/engines.md says how to use the ops in another engine.
"""

from moe_fp8.integrations.alias import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]

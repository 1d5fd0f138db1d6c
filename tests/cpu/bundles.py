"""What tests of kernel bundles share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_fp8.jit.bundle import Bundle

#: make(*factors, name=, folder=, force=) writes a bundle of the tiny kernel with these factors.
Make = Callable[..., Bundle]


def told(name: str) -> dict[str, Any]:
    """The coverage of a bundle for the model `name`."""
    return {"model": {"name": name}, "options": {"tp": 1}}


def keys(bundle: Bundle) -> set[str]:
    return {kernel.key for kernel in bundle.manifest.kernels}

"""Fixtures of the tests that need no GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import moe_fp8
from moe_fp8 import integrations
from moe_fp8.integrations import vendored
from moe_fp8.ops import keys
from tests.reachable_kernels import ReachableKernels, compile_reachable


@pytest.fixture(scope="session")
def reachable_kernels() -> ReachableKernels:
    """Every kernel that a call can reach, compiled once for all tests that look at the kernels."""
    return compile_reachable()


@pytest.fixture(params=[True, False], ids=["guards", "python"])
def either_comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: with torch's guards, and without them, because some versions of torch have none."""
    if not request.param:
        monkeypatch.setattr(keys, "_TensorGuards", None)


@pytest.fixture
def deep_gemm() -> Iterator[ModuleType]:
    """The module in the place of `deep_gemm`, for one test."""
    yield integrations.install()
    integrations.uninstall()
    moe_fp8.set_num_sms(None)


@pytest.fixture
def copy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The engine's own copy, which records calls of any name it has."""
    module = ModuleType("vllm.third_party.deep_gemm")
    module.calls = []  # type: ignore[attr-defined]
    for name in (
        "fp8_gemm_nt",
        "m_grouped_fp8_gemm_nt_masked",
        "k_grouped_fp8_gemm_nt_contiguous",
        "fp8_mqa_logits",
        "einsum",
        "set_num_sms",
    ):
        setattr(module, name, lambda *given, name=name, **named: module.calls.append((name, given, named)))
    for parent in ("vllm", "vllm.third_party"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", module)
    vendored.forget()
    return module

"""An error says what was wrong, expected and given, and the remedy; attributes keep this, even if pickled."""

from __future__ import annotations

import pickle

import pytest

from moe_fp8.errors import (
    ArgumentError,
    BundleError,
    CaptureError,
    CompileError,
    ConfigError,
    ContractError,
    DriverError,
    JitMissError,
    MoeFp8Error,
    ToolchainError,
    UnsupportedError,
)
from moe_fp8.specs import KernelSpec

ERRORS = [
    ArgumentError("gemm_fp8", "a", "[M, K]", [3], "reshape it"),
    ContractError("op", "masked_m", "0 to 4", 7, "enlarge", expert=3, row=2),
    CaptureError("step", "output", "the bits of an eager call", "others", "read no device data"),
    ConfigError("tp", "a divisor", 3, "use 2"),
    UnsupportedError("no kernel"),
    CompileError("gemm_fp8", "log"),
    JitMissError(KernelSpec("tiny", (), 1, 0), "abc"),
    BundleError("/b", "NVRTC", "13.0", "13.1", "build it again"),
    ToolchainError("no NVRTC"),
    DriverError("cuInit", 100, "CUDA_ERROR_NO_DEVICE"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_whole_out_of_another_process(error: MoeFp8Error) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_a_message_has_all_four_parts() -> None:
    assert str(ERRORS[0]) == "gemm_fp8: a: expected [M, K], got [3]; reshape it"
    assert str(ERRORS[3]) == "tp: expected a divisor, got 3; use 2"

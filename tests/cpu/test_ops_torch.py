"""The ops as torch sees them: schemas, meta implementations, functionalization, public names."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8.ops.registry import OPS as REGISTERED
from tests import cases
from tests.cpu.op_arguments import OPS


def _arguments(name: str, **changes: Any) -> tuple[Any, ...]:
    """Arguments of an op in the order of its schema, without NaN, which does not equal itself."""
    given = {**OPS[name](), **changes}
    for value in given.values():
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.bfloat16):
            value.nan_to_num_()
    return tuple(given[argument] for argument in REGISTERED[name].arguments)


@pytest.fixture
def fp8_allclose(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares arguments with torch.allclose, which torch does not implement for fp8."""
    allclose = torch.allclose

    def by_value(left: torch.Tensor, right: torch.Tensor, **options: Any) -> bool:
        if left.dtype is torch.float8_e4m3fn:
            left, right = left.float(), right.float()
        return allclose(left, right, **options)

    monkeypatch.setattr(torch, "allclose", by_value)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("fp8_allclose")
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.moe_fp8, name).default, _arguments(name))


_WITH_CONFIG = ("gemm_fp8", "grouped_gemm_fp8_contiguous", "grouped_gemm_fp8_masked")


@pytest.mark.parametrize("name", _WITH_CONFIG)
@pytest.mark.usefixtures("fp8_allclose")
def test_opcheck_with_a_config(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.moe_fp8, name).default, _arguments(name, config="64x96"))


@pytest.mark.parametrize("name", [*_WITH_CONFIG, "k_grouped_gemm_fp8"])
@pytest.mark.usefixtures("fp8_allclose")
def test_opcheck_of_an_output_that_is_read(name: str) -> None:
    arguments = _arguments(name, out=torch.randn(OPS[name]()["out"].shape), accumulate=True)
    torch.library.opcheck(getattr(torch.ops.moe_fp8, name).default, arguments)


@pytest.mark.parametrize("name", _WITH_CONFIG)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bad_config_is_an_error_before_anything_runs(name: str, device: str) -> None:
    given = _arguments(name, config="7x128")
    arguments = [x.to(device) if isinstance(x, torch.Tensor) else x for x in given]
    with pytest.raises(moe_fp8.ConfigError, match="7x128"):
        REGISTERED[name].call(*arguments)


def test_every_registered_op_is_checked() -> None:
    registered = {
        schema.name.removeprefix("moe_fp8::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("moe_fp8::")
    }
    assert registered == set(OPS)


def test_autocast_rounds_no_operand_of_the_reference() -> None:
    case, mqa = cases.dense_case(5, 64, 256), cases.mqa_case(4, 9, 8)

    def calls() -> tuple[torch.Tensor, ...]:
        product = moe_fp8.gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out_dtype=torch.float32)
        return product, moe_fp8.mqa_logits_fp8(*mqa.arguments(), fill=True)

    expected = calls()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = calls()
        assert torch.is_autocast_enabled("cpu")
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_meta_tensors_give_shapes() -> None:
    x = torch.empty(7, 256, device="meta")
    q, scale = moe_fp8.quantize_fp8(x)
    assert (q.shape, q.dtype, scale.stride()) == ((7, 256), torch.float8_e4m3fn, (1, 8))
    y, y_scale = moe_fp8.silu_mul_quantize(torch.empty(7, 512, device="meta", dtype=torch.bfloat16))
    assert (y.shape, y.dtype, y_scale.stride()) == ((7, 256), torch.float8_e4m3fn, (1, 8))
    b = torch.empty(192, 256, dtype=torch.float8_e4m3fn, device="meta")
    out = moe_fp8.gemm_fp8(q, scale, b, torch.empty(2, 2, device="meta"))
    assert (out.shape, out.dtype, out.device.type) == ((7, 192), torch.bfloat16, "meta")


def test_public_names_are_sorted_and_resolve() -> None:
    assert moe_fp8.__all__ == sorted(moe_fp8.__all__)
    for name in moe_fp8.__all__:
        value = getattr(moe_fp8, name)
        assert value.__name__.removeprefix("moe_fp8.") == name
        assert value.__doc__, f"{name} has no docstring"
    assert set(moe_fp8.__all__) <= set(dir(moe_fp8))
    with pytest.raises(AttributeError, match="gemm_fp9"):
        moe_fp8.gemm_fp9  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_cuda() -> None:
    code = (
        "import sys, moe_fp8; "
        "assert not [m for m in sys.modules if m.split('.')[0] in ('torch', 'cuda', 'numpy')]; "
        "moe_fp8.gemm_fp8; "
        "launching = {'moe_fp8.ops.launch', 'moe_fp8.ops.gemm.cuda', 'moe_fp8.jit.driver'}; "
        "assert not launching & set(sys.modules), 'before any CUDA call'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

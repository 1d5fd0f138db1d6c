"""The ops as torch sees them: schemas, meta implementations, functionalisation, public names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8.ops.registry import OPS as REGISTERED
from tests import cache_cases, cases
from tests.k_grouped_cases import k_grouped_case


def _gemm() -> tuple[Any, ...]:
    case = cases.dense_case(4, 64, 256)
    return case.a, case.a_scale, case.b, case.b_scale, torch.zeros(4, 64, dtype=torch.bfloat16)


def _contiguous() -> tuple[Any, ...]:
    case = cases.contiguous_case("offsets", (3, 2), 64, 128)
    out = torch.zeros(5, 64, dtype=torch.bfloat16)
    return case.a, case.a_scale, case.b, case.b_scale, case.index, "offsets", 3, out


def _masked() -> tuple[Any, ...]:
    case = cases.masked_case((4, 4), 4, 64, 128)
    return case.a, case.a_scale, case.b, case.b_scale, case.index, None, torch.zeros(2, 4, 64)


def _mqa() -> tuple[Any, ...]:
    return (*cases.mqa_case(4, 9, 8).arguments(), False, True, torch.zeros(4, 9))


def _metadata() -> tuple[Any, ...]:
    return torch.tensor([3, 700], dtype=torch.int32), 64, 1, torch.zeros(5, 2, dtype=torch.int32)


def _paged() -> tuple[Any, ...]:
    case = cases.paged_case([64, 128], 1, 8, 64)
    metadata = moe_fp8.paged_mqa_logits_metadata(case.context_lens, block_size=64, num_sms=3)
    out = torch.zeros(2, 128)
    return case.q, case.kv_cache, case.weights, case.context_lens, case.block_table, metadata, out


def _quantize() -> tuple[Any, ...]:
    q = torch.zeros(5, 256, dtype=torch.float8_e4m3fn)
    return torch.randn(5, 256), q, torch.empty_strided((5, 2), (1, 8)).zero_(), False


def _silu_mul() -> tuple[Any, ...]:
    q = torch.zeros(2, 5, 256, dtype=torch.float8_e4m3fn)
    scale = torch.empty_strided((2, 5, 2), (16, 1, 8)).zero_()
    masked_m = torch.tensor([2, 5], dtype=torch.int32)
    return torch.randn(2, 5, 512).bfloat16(), masked_m, q, scale, False, 7.0, True


def _gemm_silu_mul() -> tuple[Any, ...]:
    case = cases.contiguous_case("offsets", (3, 2), 256, 256)
    q = torch.zeros(5, 128, dtype=torch.float8_e4m3fn)
    scale = torch.empty_strided((5, 1), (1, 8)).zero_()
    operands = case.a, case.a_scale, case.b, case.b_scale, case.index
    return *operands, None, 0.5, True, True, q, scale


def _k_grouped() -> tuple[Any, ...]:
    case = k_grouped_case((128, 0, 256), 5, 64)
    return *case.operands(), case.addend(), True


def _permute() -> tuple[Any, ...]:
    a = torch.zeros(10, 256, dtype=torch.float8_e4m3fn)
    a_scale = torch.empty_strided((10, 2), (1, 12)).zero_()
    counts = torch.zeros(5, dtype=torch.int32), torch.zeros(5, 2, dtype=torch.int32)
    ids = torch.randint(0, 8, (5, 2))
    numbers = torch.tensor([-1, 0, 1, -1, 2, 3, -1, 0], dtype=torch.int32)
    return torch.randn(5, 256).bfloat16(), None, ids, numbers, a, a_scale, *counts, True


def _combine() -> tuple[Any, ...]:
    rows = torch.tensor([[0, 3], [-1, 2], [1, -1]], dtype=torch.int32)
    return torch.randn(4, 64).bfloat16(), rows, torch.rand(3, 2), torch.zeros(3, 64).bfloat16()


def _route() -> tuple[Any, ...]:
    outputs = torch.zeros(5, 4), torch.zeros(5, 4, dtype=torch.int32)
    return torch.randn(5, 64), torch.randn(64), *outputs, "sigmoid", 8, 4, True, 2.5


def _cache() -> tuple[Any, ...]:
    case = cache_cases.cache_case(5)
    return case.k, case.kv_cache, case.slot_mapping, False


def _topk() -> tuple[Any, ...]:
    starts, ends = torch.tensor([[0, 3, 5], [9, 7, 5]], dtype=torch.int32)
    return torch.randn(3, 9), 4, starts, ends, True, torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4)


OPS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gemm_fp8": _gemm,
    "grouped_gemm_fp8_contiguous": _contiguous,
    "grouped_gemm_fp8_masked": _masked,
    "mqa_logits_fp8": _mqa,
    "_mqa_logits_fp8_chunk": lambda: (*_mqa(), 8, 18),
    "paged_mqa_logits_fp8": _paged,
    "paged_mqa_logits_metadata": _metadata,
    "quantize_fp8": _quantize,
    "silu_mul_quantize": _silu_mul,
    "grouped_gemm_silu_mul_fp8": _gemm_silu_mul,
    "k_grouped_gemm_fp8": _k_grouped,
    "moe_permute": _permute,
    "moe_combine": _combine,
    "route_topk": _route,
    "indexer_quantize_and_cache": _cache,
    "indexer_topk": _topk,
    "_indexer_topk_chunk": lambda: (*_topk(), 3, torch.zeros(3, 2, dtype=torch.int32)),
}


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
    torch.library.opcheck(getattr(torch.ops.moe_fp8, name).default, OPS[name]())


_WITH_CONFIG = ("gemm_fp8", "grouped_gemm_fp8_contiguous", "grouped_gemm_fp8_masked")


@pytest.mark.parametrize("name", _WITH_CONFIG)
@pytest.mark.usefixtures("fp8_allclose")
def test_opcheck_with_a_config(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.moe_fp8, name).default, (*OPS[name](), "64x96"))


@pytest.mark.parametrize("name", _WITH_CONFIG)
@pytest.mark.usefixtures("fp8_allclose")
def test_opcheck_of_an_output_that_is_read(name: str) -> None:
    *operands, out = OPS[name]()
    promise = () if name == "grouped_gemm_fp8_masked" else (False,)
    arguments = (*operands, torch.randn(out.shape), None, *promise, True)
    torch.library.opcheck(getattr(torch.ops.moe_fp8, name).default, arguments)


@pytest.mark.parametrize("name", _WITH_CONFIG)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bad_config_is_an_error_before_anything_runs(name: str, device: str) -> None:
    arguments = [x.to(device) if isinstance(x, torch.Tensor) else x for x in OPS[name]()]
    with pytest.raises(moe_fp8.ConfigError, match="7x128"):
        REGISTERED[name].call(*arguments, "7x128")


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

"""gemm_fp8 on the GPU against float64."""

from __future__ import annotations

import pytest
import torch

from moe_fp8 import ArgumentError, gemm_fp8, jit, linear_fp8, quantize_fp8
from tests import cases


def _run(case: cases.GemmCase, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    out = case.poisoned(dtype)
    assert gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out=out) is out
    return out


# These shapes have token counts on both sides of every tile size, N that are no multiple of 128, K of one
# block, and odd tile counts for tiles that work in pairs.
SHAPES = [
    (1, 64, 128),
    (1, 4096, 7168),
    (3, 576, 7168),
    (7, 2112, 512),
    (8, 2112, 7168),
    (9, 192, 256),
    (16, 320, 1024),
    (17, 2112, 128),
    (32, 7168, 256),
    (33, 576, 384),
    (64, 4096, 512),
    (65, 192, 2048),
    (65, 8192, 512),
    (74, 8192, 1024),
    (100, 4096, 512),
    (127, 64, 128),
    (128, 7168, 2048),
    (129, 192, 384),
    (129, 9216, 512),
    (190, 9216, 512),
    (257, 2112, 1536),
    (384, 576, 128),
    (641, 3648, 256),
    (1000, 4096, 1024),
    (2049, 1536, 512),
    (4096, 2112, 512),
    (8200, 7168, 256),
]


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_dense(m: int, n: int, k: int) -> None:
    case = cases.dense_case(m, n, k, "cuda")
    cases.check_gemm(case, _run(case))


@pytest.mark.parametrize("m", [1, 20, 74, 130, 1500])
def test_dense_with_constant_weights(m: int) -> None:
    case = cases.dense_case(m, 2112, 768, "cuda")
    operands = case.a, case.a_scale, case.b, case.b_scale
    torch.cuda.synchronize()  # nothing may write the weights any more
    out = gemm_fp8(*operands, out=case.poisoned(), constant_weights=True)
    cases.check_gemm(case, out)
    assert torch.equal(out, _run(case))


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("m", [1, 70, 600])
@torch.inference_mode()
def test_linear_is_the_two_ops(m: int, power_of_two: bool, constant: bool) -> None:
    case = cases.dense_case(m, 576, 512, "cuda")
    x = torch.randn(m, 512, generator=cases.generator(1, "cuda"), device="cuda").bfloat16()
    torch.cuda.synchronize()
    q, scale = quantize_fp8(x, power_of_two=power_of_two)
    expected = gemm_fp8(q, scale, case.b, case.b_scale)
    options = {"power_of_two": power_of_two, "constant_weights": constant}
    for out in (None, case.poisoned(), case.poisoned()):  # prepared, moved, and moved again
        got = linear_fp8(x, case.b, case.b_scale, out=out, **options)
        assert torch.equal(got, expected) and (out is None or got is out)


@pytest.mark.parametrize("m, n, k", [(1, 576, 128), (20, 192, 512), (130, 2112, 256), (1500, 4096, 384)])
def test_dense_fp32_output(m: int, n: int, k: int) -> None:
    case = cases.dense_case(m, n, k, "cuda")
    cases.check_gemm(case, _run(case, torch.float32))


@pytest.mark.sanitizer
@pytest.mark.parametrize("m", [5, 70, 200])
def test_small(m: int) -> None:
    case = cases.dense_case(m, 192, 256, "cuda")
    cases.check_gemm(case, _run(case))


@pytest.mark.parametrize("m", [1, 12, 30, 64])
@pytest.mark.parametrize("k", [2048, 3200, 4096])
def test_split_along_k(m: int, k: int) -> None:
    # There are few tiles and a long K, so the CTAs of a cluster each take a part of K. The parts have unequal
    # lengths for K = 3200.
    case = cases.dense_case(m, 576, k, "cuda")
    first = _run(case)
    cases.check_gemm(case, first)
    for _ in range(10):
        assert torch.equal(_run(case), first)


def test_writes_nothing_outside_of_the_output() -> None:
    case = cases.dense_case(37, 576, 256, "cuda")
    storage = torch.full((39, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out=storage[1:38])
    cases.check_gemm(case, storage[1:38])
    assert storage[0].isnan().all() and storage[38].isnan().all()


@pytest.mark.parametrize("m, n, k", [(1, 4096, 7168), (100, 2112, 1024), (2048, 4096, 512)])
def test_repeats_bit_for_bit(m: int, n: int, k: int) -> None:
    case = cases.dense_case(m, n, k, "cuda")
    first = _run(case)
    for _ in range(5):
        assert torch.equal(_run(case), first)


def test_power_of_two_scales() -> None:
    gen = cases.generator(3, "cuda")
    a, a_scale = cases.activations(50, 512, gen, power_of_two=True)
    b, b_scale = cases.weights(1, 192, 512, gen)
    case = cases.GemmCase("dense", a, a_scale, b[0], b_scale[0], None, ((0, 0, 50),))
    cases.check_gemm(case, _run(case))


@pytest.mark.parametrize("m", [1, 5, 130])
def test_other_scale_layouts_are_converted_and_counted(m: int) -> None:
    case = cases.dense_case(m, 192, 512, "cuda")
    expected = _run(case)
    for other in (case.a_scale.contiguous(), case.a_scale.T.contiguous().T):
        before = jit.counters().scale_conversions
        out = gemm_fp8(case.a, other, case.b, case.b_scale)
        assert torch.equal(out, expected)
        assert jit.counters().scale_conversions == before + 1


def test_quantize_then_multiply() -> None:
    gen = cases.generator(4, "cuda")
    q, scale = quantize_fp8(torch.randn(77, 1024, generator=gen, device="cuda", dtype=torch.bfloat16))
    b, b_scale = cases.weights(1, 192, 1024, gen)
    case = cases.GemmCase("dense", q, scale, b[0], b_scale[0], None, ((0, 0, 77),))
    cases.check_gemm(case, _run(case))


def test_no_rows() -> None:
    case = cases.dense_case(0, 192, 256, "cuda")
    assert gemm_fp8(case.a, case.a_scale, case.b, case.b_scale).shape == (0, 192)


def test_replay_reads_new_values() -> None:
    static = cases.dense_case(20, 576, 512, "cuda", seed=0)
    out = _run(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm_fp8(static.a, static.a_scale, static.b, static.b_scale, out=out)
    for seed in (1, 2):
        fresh = cases.dense_case(20, 576, 512, "cuda", seed=seed)
        static.a.copy_(fresh.a)
        static.a_scale.copy_(fresh.a_scale)
        out.fill_(float("nan"))
        graph.replay()
        cases.check_gemm(static, out)


def test_more_than_2_31_activations() -> None:
    m, n, k = 300_000, 64, 7168
    assert m * k > 2**31
    gen = cases.generator(6, "cuda")
    # Every byte except NaN's exponent: all values are finite and quick to make.
    a = torch.randint(0, 256, (m, k), generator=gen, device="cuda", dtype=torch.uint8)
    a = a.bitwise_and_(0xBF).view(torch.float8_e4m3fn)
    a_scale = (torch.rand(k // 128, m, generator=gen, device="cuda") + 0.1).T
    b, b_scale = cases.weights(1, n, k, gen)
    out = gemm_fp8(a, a_scale, b[0], b_scale[0])
    for rows in (slice(0, 500), slice(m - 500, m)):
        case = cases.GemmCase("dense", a[rows], a_scale[rows], b[0], b_scale[0], None, ((0, 0, 500),))
        cases.check_gemm(case, out[rows])


def test_devices_must_agree() -> None:
    case = cases.dense_case(4, 192, 256, "cuda")
    with pytest.raises(ArgumentError, match="b_scale: expected device cuda"):
        gemm_fp8(case.a, case.a_scale, case.b, case.b_scale.cpu())


def test_opcheck() -> None:
    case = cases.dense_case(4, 192, 256, "cuda")
    checks = ("test_autograd_registration", "test_faketensor")
    arguments = (case.a, case.a_scale, case.b, case.b_scale, torch.zeros_like(case.poisoned()))
    torch.library.opcheck(torch.ops.moe_fp8.gemm_fp8.default, arguments, test_utils=checks)


def test_inference_mode_takes_the_short_way_to_the_same_result() -> None:
    case = cases.dense_case(20, 576, 512, "cuda")
    expected = _run(case)
    with torch.inference_mode():
        assert torch.equal(_run(case), expected)
        with pytest.raises(ArgumentError):
            gemm_fp8(case.a[:, :384], case.a_scale, case.b, case.b_scale)

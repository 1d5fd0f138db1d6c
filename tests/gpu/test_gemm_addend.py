"""`c` of the GEMMs on the GPU: the result is the product plus `c`, bit for bit; scales of 1 x 128 on `b`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_fp8 import k_grouped_gemm_fp8
from moe_fp8.heuristics import gemm_configs
from tests import cases
from tests.gemm_addend_cases import addend, call, check_sum, named_case

LAYOUTS = ("m_indices", "psum", "offsets", "masked")

#: Segments end on either side of a tile, alone and in pairs; some segments are empty.
ROWS = (3, 0, 130, 64, 200, 128, 0, 65, 257, 1, 192, 330)


def _valid(case: cases.GemmCase, out: Tensor) -> Tensor:
    picks = [(e, slice(a, b)) if case.layout == "masked" else slice(a, b) for e, a, b in case.runs]
    return torch.cat([out[pick] for pick in picks])


def _check(case: cases.GemmCase, config: str | None = None) -> None:
    """Into an output of its own, and in place; both equal the product of the same config, plus `c`."""
    c = addend(case)
    product = call(case, out=case.poisoned(torch.float32), config=config)
    out = call(case, c=c, out=case.poisoned(torch.float32), config=config)
    check_sum(case, out, c)
    assert torch.equal(_valid(case, out), _valid(case, product) + _valid(case, c))
    in_place = c.clone()
    call(case, c=in_place, out=in_place, config=config)
    assert torch.equal(_valid(case, in_place), _valid(case, out))
    check_sum(case, in_place, c)


@pytest.mark.parametrize("m", [1, 8, 50, 64, 100, 128, 192, 330])
@pytest.mark.parametrize("n, k", [(576, 512), (2112, 3200)])
def test_dense_in_every_config(m: int, n: int, k: int) -> None:
    case = named_case("dense", (m,), n, k, "cuda")
    for config in gemm_configs("dense", k):
        _check(case, str(config))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_in_every_config(layout: str) -> None:
    case = named_case(layout, ROWS, 576, 512, "cuda")
    for config in gemm_configs(layout, 512):  # type: ignore[arg-type]
        _check(case, str(config))


@pytest.mark.parametrize("name", ["dense", "dense of rows"])
@pytest.mark.parametrize(
    "m, n, k", [(1, 4096, 7168), (17, 2112, 512), (64, 7168, 2048), (641, 3648, 256), (4096, 2112, 4096)]
)
def test_dense_of_the_selectors_choice(name: str, m: int, n: int, k: int) -> None:
    _check(named_case(name, (m,), n, k, "cuda"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [(1,) * 40, (9, 0, 17, 33) * 4, (300, 0, 1000, 129)])
def test_grouped_of_the_selectors_choice(layout: str, rows: tuple[int, ...]) -> None:
    _check(named_case(layout, rows, 2112, 1024, "cuda"))


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", ["dense", "dense of rows", *LAYOUTS])
@pytest.mark.parametrize("rows", [(5,), (70, 0, 130)])
def test_small(name: str, rows: tuple[int, ...]) -> None:
    _check(named_case(name, rows, 192, 256, "cuda"))


@pytest.mark.parametrize("name", ["dense", "dense of rows", "offsets", "masked"])
def test_sums_repeat(name: str) -> None:
    case = named_case(name, (60, 4), 2112, 4096, "cuda")
    c = addend(case)
    first = _valid(case, call(case, c=c))
    for _ in range(10):
        assert torch.equal(_valid(case, call(case, c=c)), first)


@pytest.mark.parametrize("name", ["dense", "dense of rows", "offsets", "masked"])
def test_replays_add_once_more(name: str) -> None:
    case = named_case(name, (60, 4), 576, 1024, "cuda")
    c = addend(case)
    kept = c.clone()
    call(case, c=c, out=c)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call(case, c=c, out=c)
    c.copy_(kept)
    graph.replay()
    expected = kept.clone()
    for _ in range(3):
        call(case, c=expected, out=expected)
    assert torch.equal(_valid(case, c), _valid(case, expected))


@pytest.mark.parametrize("layout", ["dense", *LAYOUTS])
def test_kernels_of_all_configs_in_a_row_add_to_one_output(layout: str) -> None:
    """Each kernel starts while the kernel before it still writes the sums that it reads."""
    case = named_case(layout, ROWS, 576, 1024, "cuda")
    configs = [str(config) for config in gemm_configs(layout, 1024)]  # type: ignore[arg-type]
    c = addend(case)
    expected = c
    for config in configs:
        expected = call(case, c=expected, config=config)
    sums = c.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for config in configs:
            call(case, c=sums, out=sums, config=config)
    for _ in range(20):
        sums.copy_(c)
        graph.replay()
        assert torch.equal(_valid(case, sums), _valid(case, expected))


@pytest.mark.parametrize("name", ["dense", "dense of rows", "offsets"])
@pytest.mark.parametrize("m", [7, 200])
def test_rows_of_the_output_apart_keep_what_lies_between(name: str, m: int) -> None:
    case = named_case(name, (m,), 320, 512, "cuda")
    storage = torch.full((m, 328), cases.SENTINEL, device="cuda")
    c = addend(case)
    call(case, c=c, out=storage[:, :320])
    check_sum(case, storage[:, :320], c)
    assert (storage[:, 320:] == cases.SENTINEL).all()


# M that no tile divides, N of half a tile, odd numbers of tiles along either side and of both.
@pytest.mark.parametrize("m", [1, 64, 129, 200, 384, 1000])
@pytest.mark.parametrize("n", [64, 192, 320, 2112])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_rows(m: int, n: int, dtype: torch.dtype) -> None:
    rng = random.Random(m + n)
    case = named_case("dense of rows", (m,), n, 128 * rng.randint(1, 30), "cuda")
    storage = torch.full((m + 2, n), cases.SENTINEL, dtype=dtype, device="cuda")
    call(case, out=storage[1:-1])
    cases.check_gemm(case, storage[1:-1])
    assert (storage[[0, -1]] == torch.tensor(cases.SENTINEL, dtype=dtype, device="cuda")).all()
    other = call(case, out_dtype=torch.float32, constant_weights=True)
    assert torch.equal(other.to(dtype), storage[1:-1]), "bf16 is the rounded fp32"


def test_scales_of_rows_equal_ragged_k() -> None:
    case = named_case("dense of rows", (300,), 320, 1664, "cuda")
    offsets = torch.tensor([0, 1664], dtype=torch.int32, device="cuda")
    operands = (case.a, case.a_scale, case.b, case.b_scale)
    assert torch.equal(call(case, out_dtype=torch.float32), k_grouped_gemm_fp8(*operands, offsets)[0])


def test_ragged_k_without_tokens() -> None:
    values = [torch.empty(rows, 0, dtype=torch.float8_e4m3fn, device="cuda") for rows in (130, 192)]
    scales = [torch.empty(rows, 0, device="cuda") for rows in (130, 192)]
    operands = (values[0], scales[0], values[1], scales[1], torch.zeros(4, dtype=torch.int32, device="cuda"))
    out = torch.full((3, 130, 192), float("nan"), device="cuda")
    assert not k_grouped_gemm_fp8(*operands, out=out).any()
    c = torch.randn_like(out)
    assert torch.equal(k_grouped_gemm_fp8(*operands, c=c), c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k_grouped_gemm_fp8(*operands, out=out)
    out.fill_(1)
    graph.replay()
    assert not out.any()

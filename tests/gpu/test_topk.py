"""indexer_topk on the GPU gives the reference's numbers; logits that nothing may read are NaN."""

from __future__ import annotations

import pytest
import torch

from moe_fp8 import ContractError, heuristics, indexer_topk
from moe_fp8.ops.indexer.topk import topk_chunk_op
from moe_fp8.problems import IndexerTopkProblem
from tests import topk_cases
from tests.topk_cases import TopkCase

DTYPES = (torch.float32, torch.bfloat16)
KS = (1, 7, 512, 1000, 2048, 4096)


def _choose(case: TopkCase, k: int, by_value: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.full((case.logits.shape[0], k), 7, dtype=case.logits.dtype, device=case.logits.device)
    out = indexer_topk(case.logits, topk=k, ks=case.starts, ke=case.ends, sorted=by_value, values=values)
    return out, values


def _check(case: TopkCase, k: int, by_value: bool = False) -> None:
    on_gpu = case.to("cuda")
    got, wanted = _choose(on_gpu, k, by_value), _choose(case, k, by_value)
    plain = indexer_topk(on_gpu.logits, topk=k, ks=on_gpu.starts, ke=on_gpu.ends, sorted=by_value)
    assert torch.equal(got[0].cpu(), wanted[0])
    assert torch.equal(plain.cpu(), wanted[0])
    as_bits = torch.int32 if case.logits.dtype is torch.float32 else torch.int16
    assert torch.equal(got[1].cpu().view(as_bits), wanted[1].view(as_bits))


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("columns", [1, 5, 511, 4096, 8191, 8193, 20_001, 65_537, 300_007])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row(dtype: torch.dtype, columns: int, by_value: bool) -> None:
    for k in KS:
        _check(topk_cases.topk_case(1, columns, dtype, "normal", "full", seed=k), k, by_value)


@pytest.mark.parametrize("k", [7, 2048])
@pytest.mark.parametrize("kind", topk_cases.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_million_columns(dtype: torch.dtype, kind: str, k: int) -> None:
    _check(topk_cases.topk_case(1, 1_048_576 + 3, dtype, kind, "full", offset=1), k, True)


@pytest.mark.parametrize(
    "rows, columns", [(300, 1000), (17, 30_000), (150, 30_000), (40, 100_003), (3, 70_001)]
)
@pytest.mark.parametrize("of_ranges", ["full", "causal", "random"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(dtype: torch.dtype, of_ranges: str, rows: int, columns: int) -> None:
    for k in (512, 2048):
        _check(topk_cases.topk_case(rows, columns, dtype, "normal", of_ranges, seed=rows), k)


@pytest.mark.parametrize("rows", [1, 20, 40, 100, 200])
@pytest.mark.parametrize("kind", topk_cases.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_kind_by_clusters_of_every_size(dtype: torch.dtype, kind: str, rows: int) -> None:
    case = topk_cases.topk_case(rows, 70_000, dtype, kind, "random", seed=rows)
    _check(case, 1000, by_value=rows % 3 == 1)


def test_the_rows_above_reach_clusters_of_every_size() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    configs = [
        heuristics.topk_config(IndexerTopkProblem(r, 70_000, num_sms=sms)) for r in (1, 20, 40, 100, 200)
    ]
    assert {config.cluster for config in configs} == {1, 2, 4, 8}
    assert {config.num_threads for config in configs} == {512, 1024}


@pytest.mark.parametrize("stride, offset", [(30_000, 3), (30_001, 0), (30_002, 1), (30_004, 2), (32_768, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_alignments(dtype: torch.dtype, stride: int, offset: int) -> None:
    case = topk_cases.topk_case(9, 30_000, dtype, "normal", "full", stride=stride, offset=offset)
    for k in (7, 2048):
        _check(case, k)


def test_one_row_for_all() -> None:
    row = torch.randn(1, 20_000, device="cuda")
    assert torch.equal(
        indexer_topk(row.expand(300, -1), topk=512), indexer_topk(row, topk=512).expand(300, -1)
    )


def test_elements_past_two_gigabytes() -> None:
    columns = 20_000
    storage = torch.full((5 * (1 << 29) + columns,), float("nan"), dtype=torch.bfloat16, device="cuda")
    logits = storage.as_strided((6, columns), (1 << 29, 1))
    logits.copy_(topk_cases.draw("normal", 6, columns))
    assert torch.equal(indexer_topk(logits, topk=512).cpu(), indexer_topk(logits.cpu(), topk=512))


def test_ranges_are_clamped() -> None:
    logits = torch.arange(8.0, device="cuda").repeat(4, 1)
    starts = torch.tensor([-3, 5, 9, 6], dtype=torch.int32, device="cuda")
    ends = torch.tensor([2, 100, 12, 1], dtype=torch.int32, device="cuda")
    got = indexer_topk(logits, topk=3, ks=starts, ke=ends)
    assert got.tolist() == [[0, 1, -1], [5, 6, 7], [-1] * 3, [-1] * 3]


def test_no_rows_and_no_columns() -> None:
    assert indexer_topk(torch.empty(0, 9, device="cuda"), topk=4).shape == (0, 4)
    assert indexer_topk(torch.empty(2, 0, device="cuda"), topk=3).tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("kind", ["normal", "few"])
@pytest.mark.parametrize("rows, columns", [(1, 300_000), (200, 20_000)])
def test_repeats_bit_for_bit(rows: int, columns: int, kind: str) -> None:
    case = topk_cases.topk_case(rows, columns, kind=kind).to("cuda")
    first = _choose(case, 2048, True)
    for _ in range(5):
        for got, wanted in zip(_choose(case, 2048, True), first, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("rows, columns", [(3, 100_000), (200, 9000)])
def test_replay_reads_logits_and_ranges_anew(rows: int, columns: int) -> None:
    static = topk_cases.topk_case(rows, columns).to("cuda")
    out, values = _choose(static, 600, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indexer_topk(static.logits, topk=600, ks=static.starts, ke=static.ends, out=out, values=values)
    for seed in range(4):
        case = topk_cases.topk_case(rows, columns, seed=seed)
        for ours, fresh in (
            (static.logits, case.logits),
            (static.starts, case.starts),
            (static.ends, case.ends),
        ):
            assert ours is not None and fresh is not None
            ours.copy_(fresh)
        graph.replay()
        for got, wanted in zip((out, values), _choose(case, 600, False), strict=True):
            assert torch.equal(got.cpu(), wanted)


@pytest.mark.sanitizer
@pytest.mark.parametrize("rows, columns", [(2, 33_001), (5, 9001), (140, 300)])
@pytest.mark.parametrize("kind", ["normal", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small(dtype: torch.dtype, kind: str, rows: int, columns: int) -> None:
    _check(topk_cases.topk_case(rows, columns, dtype, kind, "random", offset=1), 100, True)


@pytest.mark.sanitizer
def test_small_with_more_columns_than_candidates() -> None:
    for kind in ("normal", "equal"):
        _check(topk_cases.topk_case(1, 140_001, kind=kind, of_ranges="full"), 100, True)


@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_names_the_row() -> None:
    case = topk_cases.topk_case(3, 9, of_ranges="full").to("cuda")
    ends = torch.tensor([9, 0, 9], dtype=torch.int32, device="cuda")
    indexer_topk(case.logits, topk=4, ke=ends)
    ends[1] = 10
    with pytest.raises(ContractError, match="row 1"):
        indexer_topk(case.logits, topk=4, ke=ends)


def _named(case: topk_cases.TopkCase, by_value: bool, carried: torch.Tensor) -> torch.Tensor:
    out = torch.empty(case.logits.shape[0], 40, dtype=torch.int32, device=case.logits.device)
    topk_chunk_op(case.logits, 40, case.starts, case.ends, by_value, out, None, 700, carried)
    return out.cpu()


@pytest.mark.parametrize("rows, columns", [(5, 60), (1, 70_001), (200, 9000)])
def test_what_columns_are_called(rows: int, columns: int) -> None:
    case = topk_cases.topk_case(rows, columns, torch.float32, "normal", "random")
    carried = torch.randint(0, 1 << 20, (rows, 50), dtype=torch.int32)
    for by_value in (False, True):
        named = [
            _named(logits, by_value, carried.to(logits.logits.device)) for logits in (case, case.to("cuda"))
        ]
        assert torch.equal(*named)

"""The measured table: its answer for a problem, and the legal contents of a device's shipped table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moe_fp8 import heuristics
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.problems import GemmLayout, GemmProblem

PutTable = Callable[..., None]
N, K = 4096, 7168

#: Devices whose table the package ships.
SHIPPED = [device for device in gemm_table.DEVICES if gemm_table.table_file(device).is_file()]


def row(rows: int, config: str, **changes: Any) -> dict[str, Any]:
    return {"layout": "dense", "n": N, "k": K, "num_experts": 1, "rows": rows, "config": config, **changes}


def choice(m: int, **changes: Any) -> str:
    problem = GemmProblem("dense", m, N, K, device="h200")
    return str(heuristics.gemm_config(replace(problem, **changes)))


def modelled(m: int) -> str:
    return str(heuristics.gemm_config(GemmProblem("dense", m, N, K)))


def test_a_row_serves_its_number_of_rows_and_fewer(put_table: PutTable) -> None:
    put_table([row(32, "128x128"), row(8, "128x256/2p")])
    assert [choice(m) for m in (1, 8, 9, 32)] == ["128x256/2p", "128x256/2p", "128x128", "128x128"]
    assert choice(33) == modelled(33)


def test_a_row_ends_above_what_was_measured_before_it(put_table: PutTable) -> None:
    put_table([row(64, "128x128", above=16)])
    assert [choice(m) for m in (17, 64)] == ["128x128", "128x128"]
    assert [choice(m) for m in (1, 16, 65)] == [modelled(m) for m in (1, 16, 65)]


def test_a_row_with_an_unknown_tile_leaves_the_choice_to_the_model(put_table: PutTable) -> None:
    put_table([row(8, "9x9")])
    assert choice(8) == modelled(8)


def test_only_the_same_problem_on_the_same_device_reads_a_row(put_table: PutTable) -> None:
    put_table([row(8, "128x256/2p")])
    assert choice(8) == "128x256/2p"
    for change in ({"device": ""}, {"device": "h100"}, {"n": 2048}, {"k": 2048}, {"batch_invariant": True}):
        problem = replace(GemmProblem("dense", 8, N, K, device="h200"), **change)
        assert gemm_table.lookup(problem) is None, change
    assert choice(8, config="64x96") == "64x96", "the caller goes before the table"


def test_a_row_serves_calls_on_the_sms_that_it_was_measured_on(put_table: PutTable) -> None:
    grouped_row = row(8, "64x96", layout="psum", num_experts=4)
    put_table(
        [row(8, "128x256/2p"), row(8, "128x128", num_sms=78), grouped_row, {**grouped_row, "num_sms": 66}]
    )
    dense = GemmProblem("dense", 8, N, K, device="h200")
    grouped = GemmProblem("psum", 4096, N, K, 4, 8, device="h200")
    for problem, served in ((dense, [132, 112, 96, 78]), (grouped, [132, 66])):
        found = [sms for sms in (132, 112, 96, 78, 66) if gemm_table.lookup(replace(problem, num_sms=sms))]
        assert found == served
    assert choice(8, num_sms=78) == "128x128"


def test_grouped_rows_are_those_of_an_expert(put_table: PutTable) -> None:
    put_table([row(8, "64x96", layout="psum", num_experts=4)])
    problem = GemmProblem("psum", 4096, N, K, 4, 8, device="h200")
    assert str(heuristics.gemm_config(problem)) == "64x96"
    assert gemm_table.lookup(GemmProblem("psum", 4096, N, K, 4, 9, device="h200")) is None
    assert gemm_table.lookup(GemmProblem("dense", 8, N, K, device="h200")) is None


@pytest.mark.parametrize("layout", ["m_indices", "psum", "offsets", "masked"])
def test_grouped_rows_serve_every_layout(put_table: PutTable, layout: GemmLayout) -> None:
    def found(rows: int) -> str:
        return str(gemm_table.lookup(GemmProblem(layout, 4096, N, K, 4, rows, device="h200")))

    put_table(
        [
            row(8, "64x96", layout="psum", num_experts=4),
            row(100, "192x128", layout="masked", num_experts=4),
        ]
    )
    assert found(8) == "64x96"
    assert found(100) == "192x128"


def test_devices_are_those_with_a_table(put_table: PutTable) -> None:
    put_table([])
    assert gemm_table.devices() == ("",)
    put_table([row(8, "64x96")], "h100")
    assert gemm_table.devices() == ("", "h100")
    put_table([row(8, "64x96")])
    assert gemm_table.devices() == ("", "h100", "h200")


def test_devices_go_by_the_drivers_name() -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB")
    names += ("NVIDIA GH200 480GB",)  # its memory and clocks are others
    assert [gemm_table.device_of(name) for name in names] == ["h200", "h100", "h100", "", ""]


def test_the_package_ships_tables() -> None:
    assert set(SHIPPED) == {"h100", "h200"}


@pytest.mark.parametrize("device", SHIPPED)
def test_every_row_of_the_packages_tables_can_be_used(device: str) -> None:
    file = gemm_table.table_file(device)
    seen = set()
    for found in json.loads(file.read_text())["rows"]:
        layout: GemmLayout = found["layout"]
        n, k, experts = found["n"], found["k"], found["num_experts"]
        problem = GemmProblem(layout, 2**20, n, k, experts, found["rows"], device=device)
        if layout == "dense":
            problem = GemmProblem(layout, found["rows"], n, k, device=device)
        assert str(gemm_table.lookup(problem)) == found["config"], found
        assert 0 <= found.get("above", 0) < found["rows"]
        key = (*gemm_table.row_key(found), found["rows"])
        assert key not in seen, "measured twice"
        seen.add(key)

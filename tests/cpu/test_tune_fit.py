"""Fitting the GEMM cost model to timings, and the shipped timings, constants and table."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from moe_fp8 import cli, tune
from moe_fp8.errors import ConfigError
from moe_fp8.heuristics import gemm_configs
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.tune import Timing, fit
from moe_fp8.tune.sample import expert_counts
from moe_fp8.tune.timings import of_this_version, read_timings, regret, untimed, write_timings

TIMINGS = Path(__file__).parents[2] / "benchmarks" / "timings"


def made_up(count: int, fitted: gemm_costs.Constants, noise: float = 0.01) -> list[Timing]:
    """Timings as the model itself would have them, but for noise."""
    rng = random.Random(1)
    timings = []
    for target, rows in islice(tune.sample(2), count):
        for counts in expert_counts(target, rows):
            us = {}
            for config in gemm_configs(target.layout, target.k):
                some = tuple((one, 1) for one in counts)
                work = gemm_costs.work(config, some, target.n, target.k, 132, target.layout != "dense")
                predicted = work.microseconds(fitted, gemm_costs.tile_name(config))
                us[str(config)] = predicted * rng.uniform(1 - noise, 1 + noise)
            timings.append(Timing(target, rows, counts, us))
    return timings


def test_a_fit_finds_the_constants_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_STEPS", 250)
    true = gemm_costs.constants()
    fitted = fit.fit(made_up(160, true))
    for tile, block in true.block.items():
        # 8 x 128 reads for longer than it computes, so timings tell less of its blocks.
        assert fitted.block[tile] == pytest.approx(block, rel=0.3 if tile == "8x128" else 0.15), tile
    assert fitted == fit.fit(made_up(160, true)), "equal timings give equal constants"


def test_nothing_is_fitted_to_nothing() -> None:
    with pytest.raises(ConfigError, match="--timings"):
        fit.fit([])


def test_a_tile_that_was_not_timed_is_named() -> None:
    left = [
        replace(one, us={name: us for name, us in one.us.items() if name != "64x96"})
        for one in made_up(30, gemm_costs.constants())
    ]
    with pytest.raises(ConfigError, match=r"none of 64x96'$"):
        fit.fit(left)


def test_a_target_is_either_fitted_to_or_tested_on() -> None:
    timings = made_up(30, gemm_costs.constants())
    fitted_to, tested_on = fit.held_out(timings)
    assert len(fitted_to) + len(tested_on) == len(timings) and len(fitted_to) > len(tested_on) > 0
    assert not {one.target for one in fitted_to} & {one.target for one in tested_on}


def test_timings_are_written_and_read_the_same(tmp_path: Path) -> None:
    file, timings = tmp_path / "timings.gz", made_up(3, gemm_costs.constants(), noise=0)
    rounded = [
        Timing(one.target, one.rows, one.counts, {c: round(us, 3) for c, us in one.us.items()})
        for one in timings
    ]
    write_timings(file, {"device": "NVIDIA H200"}, timings)
    assert read_timings(file) == ({"device": "NVIDIA H200"}, rounded)
    file.write_bytes(a_file({"device": "NVIDIA H200"}))
    assert [(one.us, one.num_sms) for one in read_timings(file)[1]] == [({"8x128": 10.0}, 132)]
    file.write_bytes(a_file({"device": "NVIDIA H100 PCIe", "num_sms": 114}))
    assert [one.num_sms for one in read_timings(file)[1]] == [114]


NO_DEVICE: list[Any] = [{}, [], None, "NVIDIA H200", {"device": 200}]
NO_SMS: list[Any] = ["114", 0, None]
NO_TIMES: list[Any] = [{}, [], None, {"8x128": 0}, {"8x128": -1}, {"8x128": float("nan")}]


def a_file(about: Any, **changes: Any) -> bytes:
    """A file of one timing with these changes, after the first line `about`."""
    line = {"layout": "dense", "n": 4096, "k": 7168, "rows": 8, "counts": [8], "us": {"8x128": 10.0}}
    return gzip.compress(f"{json.dumps(about)}\n{json.dumps(line | changes)}\n".encode(), mtime=0)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"\x1f\x8b\x08\x00",
        *(a_file(about) for about in NO_DEVICE),
        *(a_file({"device": "NVIDIA H200", "num_sms": sms}) for sms in NO_SMS),
        *(a_file({"device": "NVIDIA H200"}, us=us) for us in NO_TIMES),
        *(a_file({"device": "NVIDIA H200"}, counts=counts) for counts in ([], ["x"])),
        a_file({"device": "NVIDIA H200"}, layout="sparse"),
        *(a_file({"device": "NVIDIA H200"}, n=n) for n in (0, 4097, float("inf"))),
        *(a_file({"device": "NVIDIA H200"}, **{name: float("inf")}) for name in ("k", "rows")),
        *(a_file({"device": "NVIDIA H200"}, counts=counts) for counts in ([-5], [8, 8])),
        gzip.compress(b'{"device": "NVIDIA H200"}\n'),
        gzip.compress(b'{"device": "NVIDIA H200"}\n' + b"[" * 100_000),
    ],
    ids=range(29),
)
def test_what_are_no_timings_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "timings.gz"
    file.write_bytes(text)
    assert cli.main(["tune", "--fit", "--timings", str(file), "--out", str(tmp_path / "out.json")]) == 2
    assert cli.main(["tune", "--table", "--timings", str(file), "--out", str(tmp_path / "out.json")]) == 2
    assert not (tmp_path / "out.json").exists()
    assert cli.main(["tune", "--fit"]) == 2


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_a_shipped_table_is_what_the_shipped_timings_give(device: str, tmp_path: Path) -> None:
    timings, out = TIMINGS / f"{device}_models.gz", tmp_path / "table.json"
    assert cli.main(["tune", "--table", "--timings", str(timings), "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == json.loads(gemm_table.table_file(device).read_text())


def test_the_shipped_model_loses_little_on_gemms_that_it_was_not_fitted_to() -> None:
    _, tested_on = fit.held_out(read_timings(TIMINGS / "h200_sample.gz")[1])
    lost = regret(tested_on, lambda timing: tune.run._choice(gemm_costs.constants(), timing))
    assert len(lost) == 6 and all(share < 0.045 for share in lost.values()), lost


def test_choices_that_were_not_timed_are_counted(tmp_path: Path) -> None:
    timings = made_up(12, gemm_costs.constants(), noise=0)
    best = partial(tune.run._choice, gemm_costs.constants())
    assert untimed(timings, best) == 0
    without = [
        replace(one, us={name: us for name, us in one.us.items() if name != best(one)}) for one in timings
    ]
    assert untimed(without, best) == len(timings) and regret(without, best) == {}
    write_timings(tmp_path / "timings.gz", {"device": "NVIDIA H200"}, without)
    told = tune.run.retable(tmp_path / "timings.gz", tmp_path / "table.json")
    assert told.endswith(f"{len(timings)} of {len(timings)} choices were not timed and do not count")


def test_configs_of_removed_tiles_are_left_out(tmp_path: Path) -> None:
    """Timings may be older than the package: a config that no GEMM may use now would win and never run."""
    timings = made_up(12, gemm_costs.constants())
    older = [replace(one, us={**one.us, "64x999": 0.5 * min(one.us.values())}) for one in timings]
    assert of_this_version(older) == of_this_version(timings) == timings
    told = []
    for name, each in (("now", timings), ("older", older)):
        write_timings(tmp_path / name, {"device": "NVIDIA H200"}, each)
        told.append(tune.run.retable(tmp_path / name, tmp_path / f"{name}.json").partition(": ")[2])
    assert told[0] == told[1]
    assert (tmp_path / "now.json").read_text() == (tmp_path / "older.json").read_text()


def test_the_shipped_timings_are_small() -> None:
    assert sum(file.stat().st_size for file in TIMINGS.iterdir()) < 3 << 20

"""`moe-fp8 tune` as a command, without a GPU: what it writes, whatever happens to it, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from moe_fp8 import cli, tune
from moe_fp8.errors import ConfigError, MoeFp8Error, ToolchainError
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.jit import driver
from moe_fp8.jit.driver import DeviceInfo
from moe_fp8.tune import Target, Timing, read_timings, run, table
from moe_fp8.tune.timings import write_timings

MODEL = Path(__file__).parent.parent / "configs" / "qwen3_30b.json"
H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, (13, 0))
DENSE, GROUPED = Target("dense", 4096, 7168, 1), Target("psum", 4096, 7168, 8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Target, int]]:
    """A GPU on which the last config takes 8 us and all others take 10."""
    timed: list[tuple[Target, int]] = []

    def time_configs(
        target: Target, rows: int, counts: Sequence[int], configs: Sequence[str], replays: int
    ) -> dict[str, float]:
        assert len(counts) == target.num_experts and sum(counts) == rows * target.num_experts
        timed.append((target, rows))
        return {config: 8.0 if config == configs[-1] and rows != 16 else 10.0 for config in configs}

    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "device_info", lambda: H200)
    monkeypatch.setattr(run, "preload", lambda specs, jobs, progress: len(specs))
    monkeypatch.setattr(run, "time_configs", time_configs)
    return timed


def test_tune_writes_what_gains(
    gpu: list[tuple[Target, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    arguments = ["tune", "--shape", "dense:4096:7168", "--rows", "64,40,16,8", "--out", str(out), "--json"]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert gpu == [(DENSE, 8), (DENSE, 16), (DENSE, 40), (DENSE, 64)]
    written = json.loads(out.read_text())
    assert told == {"file": str(out), "timed": 4, "rows": written["rows"]}
    assert {found["gain"] for found in written["rows"]} == {0.2}
    assert [(found["rows"], found["above"]) for found in written["rows"]] in (
        [(8, 0), (40, 32), (64, 40)],
        [(8, 0), (64, 32)],
    )
    assert set(written) == {"device", "num_sms", "driver", "cuda", "torch", "date", "rows"}
    assert written["device"] == "NVIDIA H200"


def test_timings_are_kept_without_a_table(gpu: list[tuple[Target, int]], tmp_path: Path) -> None:
    file = tmp_path / "timings.gz"
    assert cli.main(["tune", "--sample", "6", "--seed", "5", "--timings", str(file), "--quiet"]) == 0
    machine, first = read_timings(file)
    assert machine["device"] == "NVIDIA H200" and {(one.target, one.rows) for one in first} == set(gpu)
    assert [path.name for path in tmp_path.iterdir()] == ["timings.gz"]
    before = file.read_bytes()
    assert cli.main(["tune", "--sample", "6", "--seed", "5", "--timings", str(file), "--quiet"]) == 0
    assert file.read_bytes() == before, "equal problems replace each other"
    assert (
        cli.main(["tune", "--shape", "dense:64:128", "--rows", "3", "--timings", str(file), "--quiet"]) == 0
    )
    assert len(read_timings(file)[1]) == len(first) + 1
    assert cli.main(["tune", "--sample", "6"]) == 2, "nowhere to put them"


def test_a_spent_budget_writes_what_was_timed(gpu: list[tuple[Target, int]], tmp_path: Path) -> None:
    problems = [(DENSE, 1), (DENSE, 8), (GROUPED, 1)]
    path, timings = tune.tune(problems, tmp_path / "t.json", max_seconds=0, quiet=True)
    assert len(gpu) == len(timings) == len(table.read_rows(path)) == 1


def test_no_timing_begins_after_a_build_that_spent_the_budget(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])

    def preload(specs: object, jobs: object, progress: object) -> None:
        now[0] += 40

    monkeypatch.setattr(run, "preload", preload)
    problems = [(DENSE, 1), (GROUPED, 1)]
    _, timings = tune.tune(problems, tmp_path / "t.json", max_seconds=60, quiet=True)
    assert [timing.target for timing in timings] == [DENSE]


def test_no_build_begins_after_the_budget(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[object] = []
    monkeypatch.setattr(run, "preload", lambda specs, jobs, progress: builds.append(specs))
    tune.tune([(DENSE, 1), (GROUPED, 1)], tmp_path / "t.json", max_seconds=1e-9, quiet=True)
    assert len(builds) == len(gpu) == 1


def test_an_error_writes_what_was_timed(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.time_configs

    def failing(target: Target, rows: int, *rest: Any) -> dict[str, float]:
        if rows == 8:
            raise MoeFp8Error("wrong")
        return before(target, rows, *rest)

    monkeypatch.setattr(run, "time_configs", failing)
    with pytest.raises(MoeFp8Error, match="wrong"):
        tune.tune([(DENSE, 1), (DENSE, 8)], tmp_path / "t.json", quiet=True)
    assert [found["rows"] for found in table.read_rows(tmp_path / "t.json")] == [1]


def test_a_gemm_that_does_not_fit_into_the_gpu_is_named(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("tried to allocate 384 GiB\nmore about it")

    monkeypatch.setattr(run, "time_configs", full)
    with pytest.raises(MoeFp8Error, match=r"dense 4096x7168, 8 rows: .*384 GiB; leave this GEMM out"):
        tune.tune([(DENSE, 8)], tmp_path / "t.json", quiet=True)


@pytest.mark.parametrize("kind", ["--fit", "--table"])
def test_the_timings_that_are_read_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file = tmp_path / "timings.gz"
    file.write_bytes(b"timings")
    assert cli.main(["tune", kind, "--timings", str(file), "--out", str(file)]) == 2
    assert capsys.readouterr().err.startswith("error: --out: ") and file.read_bytes() == b"timings"


def test_the_models_choice_is_that_of_the_devices_sms(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "device_info", lambda: H200._replace(name="NVIDIA H100 PCIe", num_sms=114))
    file, out = tmp_path / "timings.gz", tmp_path / "table.json"
    target = Target("dense", 1536, 2048, 1)
    chosen, chosen_for_more = (str(gemm_costs.cheapest(target.problem(1024, sms))) for sms in (114, 132))
    # Its time tells nothing of the choice for 114 SMs.
    monkeypatch.setattr(
        run, "time_configs", lambda *given: {chosen: 10.0, "64x96": 8.0, chosen_for_more: 8.0}
    )
    _, timings = tune.tune([(target, 1024)], out, timings_file=file, quiet=True)
    machine, kept = read_timings(file)
    assert chosen != chosen_for_more
    assert machine["num_sms"] == 114 and kept == timings
    assert run._choice(gemm_costs.constants(), kept[0]) == chosen
    (row,) = table.read_rows(out)
    assert row["gain"] == 0.2 and row["num_sms"] == 114
    run.retable(file, tmp_path / "again.json")
    assert table.read_rows(tmp_path / "again.json") == [row]


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def receive(*numbers: int) -> None:
    """Get these signals, none of which may end this process."""
    for number in numbers:
        assert signal.getsignal(number) != signal.SIG_DFL
        signal.raise_signal(number)


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("when", ["timing", "writing"])
def test_signals_end_the_work_and_what_was_timed_is_written(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, when: str
) -> None:
    time_configs, merged = run.time_configs, run.merge_timings
    handlers = [signal.getsignal(one) for one in ENDING]

    def timing_ends(target: Target, rows: int, *rest: Any) -> dict[str, float]:
        if rows == 8 and when == "timing":
            try:
                receive(number)
            finally:
                receive(*ENDING)
        return time_configs(target, rows, *rest)

    def writing_goes_on(*timings: Any) -> list[Timing]:
        receive(number, *ENDING)
        return merged(*timings)

    monkeypatch.setattr(run, "time_configs", timing_ends)
    monkeypatch.setattr(run, "merge_timings", writing_goes_on)
    file = tmp_path / "timings.gz"
    argv = ["tune", "--shape", "dense:4096:7168", "--rows", "1,8", "--timings", str(file), "--quiet"]
    if number == signal.SIGINT:
        assert cli.main(argv) == 130
    else:
        with pytest.raises(SystemExit) as left:
            cli.main(argv)
        assert left.value.code == 128 + number
    assert [timing.rows for timing in read_timings(file)[1]] == ([1] if when == "timing" else [1, 8])
    assert [signal.getsignal(one) for one in ENDING] == handlers


def test_ignored_signals_and_handlers_of_the_caller_stay(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, received = run.time_configs, []
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    term = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))

    def time_configs(*arguments: Any) -> dict[str, float]:
        receive(signal.SIGHUP, signal.SIGTERM)
        return before(*arguments)

    monkeypatch.setattr(run, "time_configs", time_configs)
    try:
        _, timings = tune.tune([(DENSE, 1)], tmp_path / "t.json", quiet=True)
    finally:
        signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGTERM, term)
    assert len(timings) == 1 and received == [signal.SIGTERM]


class _Gone(StringIO):
    """A pipe whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_lost_log_does_not_end_the_work(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, stderr in enumerate((_Gone(), None)):  # None: it is closed
        monkeypatch.setattr(sys, "stderr", stderr)
        file = tmp_path / f"timings{number}.gz"
        tune.tune([(DENSE, 1), (DENSE, 8)], timings_file=file)
        assert [timing.rows for timing in read_timings(file)[1]] == [1, 8]


def on_an_h100(file: Path, out: Path) -> tuple[bytes, bytes]:
    """Files of another device; returns their contents."""
    machine, row = {"device": "NVIDIA H100"}, {"rows": 8, "above": 0, "config": "64x96", "gain": 0.5}
    write_timings(file, machine, [Timing(DENSE, 8, (8,), {"64x96": 8.0})])
    table.write_table(out, machine, [{**DENSE._asdict(), **row}])
    return file.read_bytes(), out.read_bytes()


def test_files_of_another_device_are_refused_before_timing(
    gpu: list[tuple[Target, int]], tmp_path: Path
) -> None:
    file, out = tmp_path / "timings.gz", tmp_path / "table.json"
    before = on_an_h100(file, out)
    with pytest.raises(ConfigError, match=r"--timings.*NVIDIA H200.*timings.gz, of NVIDIA H100"):
        tune.tune([(DENSE, 1)], timings_file=file, quiet=True)
    with pytest.raises(ConfigError, match=r"--out.*NVIDIA H200.*table.json, of NVIDIA H100"):
        tune.tune([(DENSE, 1)], out, quiet=True)
    assert not gpu and (file.read_bytes(), out.read_bytes()) == before


def test_timings_on_another_number_of_sms_are_refused_before_timing(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "timings.gz"
    tune.tune([(DENSE, 1)], timings_file=file, quiet=True)
    before = file.read_bytes()
    gpu.clear()
    monkeypatch.setattr(driver, "device_info", lambda: H200._replace(num_sms=66))
    with pytest.raises(ConfigError, match=r"--timings.*on 66 SMs.*timings.gz, on 132"):
        tune.tune([(DENSE, 8)], timings_file=file, quiet=True)
    assert not gpu and file.read_bytes() == before


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("name", ["timings.gz", "table.json"])
def test_a_file_that_no_longer_fits_is_kept_and_so_is_what_was_timed(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damaged: bool
) -> None:
    file, out, time_configs = tmp_path / "timings.gz", tmp_path / "table.json", run.time_configs

    def meanwhile(*arguments: Any) -> dict[str, float]:
        on_an_h100(file, out)
        if damaged:
            (tmp_path / name).write_text("damaged")
        return time_configs(*arguments)

    monkeypatch.setattr(run, "time_configs", meanwhile)
    given: dict[str, Any] = {"timings_file": file} if name == "timings.gz" else {"out": out}
    with pytest.raises(ConfigError, match="what was timed now is in ") as refused:
        tune.tune([(DENSE, 1)], **given, quiet=True)
    kept = Path(refused.value.remedy.removeprefix("what was timed now is in "))
    assert kept.parent == tmp_path and {*tmp_path.iterdir()} == {file, out, kept}
    if name == "timings.gz":
        machine, timings = read_timings(kept)
        assert (machine["device"], [one.rows for one in timings]) == ("NVIDIA H200", [1])
        assert damaged or [one.rows for one in read_timings(file)[1]] == [8]
    else:
        assert [found["rows"] for found in table.read_rows(kept, "NVIDIA H200")] == [1]
        assert damaged or [found["rows"] for found in table.read_rows(out, "NVIDIA H100")] == [8]


@pytest.mark.parametrize("name", ["timings.gz", "table.json"])
def test_what_was_timed_is_kept_if_the_folder_is_gone(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, time_configs = tmp_path / "folder", run.time_configs
    folder.mkdir()

    def meanwhile(*arguments: Any) -> dict[str, float]:
        shutil.rmtree(folder)
        return time_configs(*arguments)

    monkeypatch.setattr(run, "time_configs", meanwhile)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given: dict[str, Any] = {"timings_file" if name == "timings.gz" else "out": folder / name}
    with pytest.raises(ConfigError, match=r"can be written.*what was timed now is in ") as refused:
        tune.tune([(DENSE, 1)], **given, quiet=True)
    kept = Path(refused.value.remedy.removeprefix("what was timed now is in "))
    read = read_timings(kept)[1] if name == "timings.gz" else table.read_rows(kept, "NVIDIA H200")
    assert len(read) == 1 and [*tmp_path.iterdir()] == [kept]


def test_links_stay_links_and_two_files_are_two(gpu: list[tuple[Target, int]], tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    with pytest.raises(ConfigError, match="another file than --timings"):
        tune.tune([(DENSE, 1)], link, timings_file=tmp_path / "real.json", quiet=True)
    assert not gpu and [*tmp_path.iterdir()] == [link]
    tune.tune([(DENSE, 1)], link, quiet=True)
    assert link.is_symlink() and len(table.read_rows(link, "NVIDIA H200")) == 1


@pytest.mark.parametrize("both", [False, True])
def test_a_file_that_no_longer_fits_does_not_keep_the_other_from_being_written(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: bool
) -> None:
    file, out, time_configs = tmp_path / "timings.gz", tmp_path / "table.json", run.time_configs

    def meanwhile(*arguments: Any) -> dict[str, float]:
        on_an_h100(file, out if both else tmp_path / "other.json")
        return time_configs(*arguments)

    monkeypatch.setattr(run, "time_configs", meanwhile)
    with pytest.raises(ConfigError, match=r"--timings.*what was timed now is in .*timings\..*gz"):
        tune.tune([(DENSE, 1)], out, timings_file=file, quiet=True)
    (written,) = tmp_path.glob("table.*.json" if both else "table.json")
    assert [found["rows"] for found in table.read_rows(written, "NVIDIA H200")] == [1]


@pytest.mark.parametrize(
    "argv",
    [
        ["--tp", "8", "--shape", "dense:4096:7168"],
        ["--quantize", "fp8-block", "--shape", "dense:4096:7168"],
        ["--fuse-shared", "--sample", "2"],
        ["--seed", "1", "--shape", "dense:4096:7168"],
        ["--rows", "8", "--sample", "2"],
    ],
)
def test_options_without_effect_are_refused(
    gpu: list[tuple[Target, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert cli.main(["tune", *argv, "--timings", str(tmp_path / "timings.gz")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {argv[0]}: expected --") and not gpu


def test_timings_that_came_in_the_meantime_are_kept(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before = tmp_path / "timings.gz", run.time_configs

    def another(target: Target, rows: int, *rest: Any) -> dict[str, float]:
        monkeypatch.setattr(run, "time_configs", before)
        tune.tune([(DENSE, 8)], timings_file=file, quiet=True)
        return before(target, rows, *rest)

    monkeypatch.setattr(run, "time_configs", another)
    tune.tune([(DENSE, 1)], timings_file=file, quiet=True)
    assert [timing.rows for timing in read_timings(file)[1]] == [1, 8]


@pytest.mark.parametrize("merging", ["merge_timings", "merge"])
def test_two_that_write_at_once_keep_both_timings(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merging: str
) -> None:
    """The second begins while the first is between reading a file and writing it."""
    file, out, merged = tmp_path / "timings.gz", tmp_path / "table.json", getattr(run, merging)
    second = Thread(target=lambda: tune.tune([(DENSE, 8)], out, timings_file=file, quiet=True))

    def slow(*arguments: Any) -> Any:
        monkeypatch.setattr(run, merging, merged)
        second.start()
        second.join(1)
        return merged(*arguments)

    monkeypatch.setattr(run, merging, slow)
    tune.tune([(DENSE, 1)], out, timings_file=file, quiet=True)
    second.join()
    assert [timing.rows for timing in read_timings(file)[1]] == [1, 8]
    assert [found["rows"] for found in table.read_rows(out)] in ([1, 8], [8])


def test_a_file_system_without_locks_takes_timings(
    gpu: list[tuple[Target, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    file = tmp_path / "timings.gz"
    tune.tune([(DENSE, 1)], timings_file=file, quiet=True)
    assert [timing.rows for timing in read_timings(file)[1]] == [1]


def test_a_gpu_without_a_table_needs_out(
    gpu: list[tuple[Target, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "device_info", lambda: H200._replace(name="NVIDIA H20"))
    with pytest.raises(ConfigError, match="--out"):
        tune.tune([(DENSE, 1)], quiet=True)
    assert not gpu


def test_tune_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "device_count", lambda: 0)
    with pytest.raises(ToolchainError, match="no Hopper GPU"):
        tune.tune([(DENSE, 1)], tmp_path / "t.json")
    assert cli.main(["tune", "--model", str(MODEL)]) == 3
    assert capsys.readouterr().err.startswith("error: tuning times kernels")
    assert cli.main(["tune"]) == 2
    assert cli.main(["tune", "--shape", "dense:1:1"]) == 2

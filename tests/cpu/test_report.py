"""The tables in README.md and docs/ match the results files, and the generator's texts are right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, report, targets, unseen_shapes
from benchmarks.results import ROOT, Row, shape_dict

DEVICE: dict[str, Any] = {
    "device": "h200",
    "device_name": "NVIDIA H200",
    "driver": "580",
    "cuda": "13.0",
    "torch": "2.11",
    "commit": "abc",
    "date": "2026-01-01",
}


def _device(*rows: Row) -> dict[str, Any]:
    stamped = [{**row.to_json("h200"), "date": "2026-01-01", "commit": "abc", "pdl": True} for row in rows]
    return {**DEVICE, "rows": stamped}


def test_the_tables_in_the_repository_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _dense(m: int, ours: float, peer: float | None, **more: str) -> Row:
    peers = {"deep_gemm-2.8.1": peer} if peer else {"scaled_mm-2.11.0": 1.0}
    return Row("dense", {"m": m, "n": 64, "k": 128, **more}, ours, 5e9, 20e6, peers)


def test_the_accounting_says_how_far_every_target_is() -> None:
    rows = [
        _dense(1, 10.0, 40.0),
        _dense(128, 10.0, 10.0),
        _dense(3, 10.0, None),  # without the peer of the targets
        _dense(200, 10.0, 10.0),
        _dense(2000, 10.0, 11.0),
        _dense(2, 10.0, 15.0, set="development"),
        Row("host", {"op": "a"}, 4.0),
        Row("host", {"op": "b", "call": "again"}, 9.0),
        Row("host", {"op": "b", "call": "new address"}, 12.0),
        Row("host", {"op": "b", "call": "new m"}, 20.5),
    ]
    text = report.accounting([_device(*rows)])
    assert "| dense, m <= 128 | 2 listed | 2.00 | 1.50 | 1.00 | 1.00 | yes | 2026-01-01 `abc` |" in text
    assert "| dense, m <= 128 | 1 development | 1.50 | 1.50 | 1.50 | 1.00 | yes |" in text
    assert "| dense, m 129 to 1023 | 1 listed | 1.00 | 1.15 | 1.00 | 0.98 | no |" in text
    assert "| dense, m >= 1024 | 1 listed | 1.10 | 1.05 | 1.10 | 0.98 | yes |" in text
    host = "| host time of an eager call"
    assert (
        "| host time of the same eager call again | 2 listed | 6.00 us | - | 9.00 us | at most 8.00 | no |"
        in text
    )
    assert f"{host} at a new address | 1 listed | 12.00 us | - | 12.00 us | at most 12.00 | yes |" in text
    assert f"{host} with a new M | 1 listed | 20.50 us | - | 20.50 us | at most 20.00 | no |" in text
    assert "masked" not in text and "(plots/h200_dense.svg)" in text


def test_the_readme_publishes_as_unseen_only_rows_of_that_set() -> None:
    rows = [_dense(1, 10.0, 13.0), _dense(2, 10.0, 20.0, set="development"), _dense(2000, 10.0, 11.0)]
    text = report.summary([_device(*rows)])
    assert (
        "| `gemm_fp8`, up to 128 rows | 1 listed | 1.30 | 1.30 | missed by 13.3% | 2026-01-01 `abc` |" in text
    )
    assert "| `gemm_fp8`, more rows | 1 listed | 1.10 | 1.10 | held |" in text
    assert "No unseen shapes have been measured yet" in text and "drawn from" not in text
    masked = {"layout": "masked", "num_experts": 2, "rows_per_expert": 4, "n": 64, "k": 128}
    rows.append(Row("masked", masked, 10.0, peers={"deep_gemm-2.8.1": 13.0}))
    unseen = _device(_dense(3, 10.0, 15.0, set="unseen"))
    unseen["rows"][0]["commit"] = "0123456789" * 4
    text = report.summary([{**DEVICE, "rows": [*_device(*rows)["rows"], *unseen["rows"]]}])
    few = "| `gemm_fp8`, up to 128 rows | 1 of 15 unseen | 1.50 | 1.50 | held | 2026-01-01 `0123456` |"
    assert few in text
    assert "| `grouped_gemm_fp8_masked` | 1 listed | 1.30 | 1.30 | held |" in text
    all_failed = "| `gemm_fp8`, more rows | 0 of 15 unseen | - | - | 2 of 2 missed, by at most 100.0% |"
    assert all_failed in text
    assert "Listed shapes were chosen by hand" in text


@pytest.mark.parametrize("missing", [0, 1])
def test_a_drawn_shape_without_a_row_is_missed(missing: int) -> None:
    commit = "0123456789" * 4
    shapes = [shape for shape in unseen_shapes.dense(commit) if shape.m <= 128]
    terms = [shape_dict(shape) | {"set": "unseen"} for shape in shapes[missing:]]
    device = _device(*(Row("dense", shape, 1.0, peers={"deep_gemm-2.8.1": 2.0}) for shape in terms))
    for row in device["rows"]:
        row["commit"] = commit
    count = f"| {len(shapes) - missing} of {len(shapes)} unseen | 2.00 |"
    assert count in report.summary([device]) and count in report.accounting([device])


def test_drawn_shapes_are_counted_without_the_peer_too() -> None:
    row = _dense(3, 10.0, None, set="unseen")
    row.notes = {"batch-invariant us": 12.5}
    device = _device(row)
    device["rows"][0]["commit"] = "0123456789" * 4
    (line,) = targets.standings(device)
    assert (line.figures, line.drawn) == ((0.8,), 15)


def test_lines_say_that_deep_gemm_ran_without_programmatic_dependent_launch() -> None:
    rows = [_dense(1, 10.0, 14.0), _dense(2000, 10.0, 11.0), Row("host", {"op": "a"}, 4.0)]
    rows[2].peers = {"deep_gemm-2.8.1": 5.0}
    device = _device(*rows)
    texts = [generate([device]) for generate in (report.summary, report.accounting, report.full)]
    assert not any("dependent launch" in text for text in texts)
    for row in device["rows"][1:]:
        del row["pdl"]
    summary, accounting, full = (
        generate([device]) for generate in (report.summary, report.accounting, report.full)
    )
    for text in (summary, accounting):
        assert text.count("`abc`, no PDL |") == 1 and text.count("ran without programmatic") == 1
    assert "| `gemm_fp8`, more rows | 1 listed | 1.10 | 1.10 | held | 2026-01-01 `abc`, no PDL |" in summary
    # Host time is not a ratio to DeepGEMM.
    assert "at most 8.00 | yes | 2026-01-01 `abc` |" in accounting
    assert full.count("Measured 2026-01-01 `abc`. DeepGEMM ran without programmatic") == 2


def test_a_table_names_the_runs_of_its_rows_and_the_versions_that_are_known() -> None:
    device = _device(_dense(1, 10.0, 14.0), _dense(2, 10.0, 14.0), _dense(3, 10.0, 14.0))
    for row, commit in zip(device["rows"], ("def", "abc", "012"), strict=True):
        row["commit"] = commit
    device["rows"][2] |= {"driver": "590", "cuda": "13.1", "torch": "2.12", "date": "2026-01-02"}
    text = report.full([device])
    assert "Measured 2026-01-01 `abc`, `def`; 2026-01-02 `012` (driver 590, CUDA 13.1, PyTorch 2.12)." in text
    assert "The last run was 2026-01-01 `abc` (driver 580, CUDA 13.0, PyTorch 2.11)." in text
    for generate in (report.summary, report.accounting):
        assert "580" not in generate([device])


def test_the_readme_counts_absolute_targets_and_those_without_a_line() -> None:
    shape = {"tokens": 8}
    layer = Row("moe_layer", shape, 40.0, peers={"vllm": 60.0}, notes={"floor us": 20.0})
    rows = [layer, Row("host", {"op": "a"}, 9.0), Row("compile", {"kernel": "a"}, 1e5)]
    text = report.summary([_device(*rows)])
    name = "`fused_moe`, against the faster of vLLM 0.24's DeepGEMM and Triton experts"
    layers = f"| {name} | 1 listed | 1.50 | 1.50 |"
    assert f"{layers} 1 of 2 missed, by at most 31.6% |" in text
    assert (
        "2 more targets have no line here. 1 of them is missed: host time of the same eager call again."
        in text
    )
    layer.us = 30.0
    assert f"{layers.replace('1.50', '2.00')} held |" in report.summary([_device(layer)])


def test_a_device_without_rows_for_a_target_has_only_its_rows() -> None:
    shape = {"model": "qwen3_30b", "experts": "deep_gemm", "prompt": 256}  # only decode has a target
    steps = [
        Row("engine", {**shape, "time": time}, 10.0, peers={"vllm deep_gemm": 15.0})
        for time in ("gpu", "wall")
    ]
    small = {**_device(*steps), "device_name": "NVIDIA H100"}
    large = _device(_dense(1, 10.0, 13.0), _dense(2000, 10.0, 11.0))
    for text in (report.summary([large, small]), report.accounting([large, small])):
        assert "NVIDIA H200" in text and "NVIDIA H100" not in text
    assert "## NVIDIA H100" in report.full([large, small])
    assert "On one NVIDIA H100:" in report.engine([large, small])


@pytest.mark.parametrize(
    ("layout", "rows", "line"),
    [
        ("psum", 64, "contiguous (psum, offsets), 1 to 64 rows an expert"),
        ("offsets", 65, "contiguous, 64 to 256 rows"),
        ("m_indices", 64, "contiguous, 64 to 256 rows"),
        ("m_indices", 63, "contiguous (m_indices), below 64 rows"),
        ("psum", 257, "contiguous, above 256 rows"),
    ],
)
def test_a_contiguous_row_counts_for_one_target(layout: str, rows: int, line: str) -> None:
    shape = {"layout": layout, "rows_per_expert": rows}
    device = _device(Row("contiguous", shape, 1.0, peers={"deep_gemm-2.8.1": 1.0}))
    assert [at.target.name for at in targets.standings(device)] == [line]


def test_a_plot_is_redrawn_when_its_figures_change(tmp_path: Path) -> None:
    before, after = _device(_dense(1, 10.0, 40.0)), _device(_dense(1, 11.0, 40.0))
    (plot,) = plots.plots(before, tmp_path)
    assert [series.name for series in plot.series] == ["moe_fp8", "deep_gemm-2.8.1"]
    ours, theirs = (series.points[0] for series in plot.series)
    assert ours == pytest.approx((1, 2000 / 4550, 500 / 1979), abs=1e-4)
    assert theirs == pytest.approx((1, ours[1] / 4, ours[2] / 4), abs=1e-4)
    assert not plot.is_current()
    plots.draw(plot)
    assert plot.is_current() and not next(plots.plots(after, tmp_path)).is_current()
    drawn = plot.path.read_bytes()
    plots.draw(plot)
    assert plot.path.read_bytes() == drawn and len(drawn) < 100_000
    assert list(plots.plots({**before, "device": "unmeasured"}, tmp_path)) == []


def test_every_row_and_figure_is_in_the_full_table() -> None:
    rows = [
        Row(
            "dense",
            {"m": 1, "n": 64},
            12.345,
            flops=5e9,
            nbytes=20e6,
            peers={"peer": 24.69},
            rel_error=1.7e-3,
        ),
        Row("dense", {"m": 4096, "n": 64}, 1234.5, flops=5e9, nbytes=20e6, rel_error=1.7e-3),
    ]
    text = report.full([_device(*rows)])
    assert "| m | n | us | peer us | ratio | TFLOP/s | GB/s | share of ceiling | rel. error |" in text
    assert "| 1 | 64 | 12.3 | 24.7 | 2.00 | 405 | 1,620 | 0.36 | 1.7e-03 |" in text
    assert "| 4096 | 64 | 1,234 |  |  | 4 | 16 | 0.00 | 1.7e-03 |" in text


def _full_size(batch: int, **shares: float) -> Row:
    shape = {"model": "m", "layers": 4, "batch": batch, "context": 4096}
    named = {name.replace("_", " ") if name.startswith("torch") else name: x for name, x in shares.items()}
    return Row("full_size", shape, 2000.0, peers={"eager": 4000.0}, notes={"shares": named})


def test_shares_of_a_step_become_a_table() -> None:
    rows = [
        _full_size(1, torch_matmul=0.62, gemm_fp8=0.3, idle=0.05, moe_combine=0.03),
        _full_size(8, gemm_fp8=0.8, idle=0.1, torch_matmul=0.0795, quantize_fp8=0.02),
    ]
    text = report.full([_device(*rows)])
    assert "| model | layers | batch | context | us | eager us | ratio |" in text
    assert "| m | 4 | 8 | 4096 | 2,000 | 4,000 | 2.00 |" in text
    assert "| batch | gemm_fp8 | moe_combine | quantize_fp8 | torch matmul | idle |" in text
    assert "| 1 | 30.0% | 3.0% |  | 62.0% | 5.0% |" in text
    assert "| 8 | 80.0% |  | 2.0% | 8.0% | 10.0% |" in text
    assert "Shares" not in report.full([_device(_dense(1, 10.0, 40.0), _full_size(1))])


def test_what_clients_see_becomes_a_table_and_a_target() -> None:
    def seen(us: float, tokens: float) -> dict[str, Any]:
        return {"tokens/s": tokens, "first token, p50 ms": 12.5, "decode step, us": us}

    shape = {"model": "m", "streams": 64, "prompt": 128, "answer": 512}
    notes = {**seen(1050.0, 4000.0), "replay, us": 1000.0, "replays": "in a row"}
    notes["eager"] = seen(9000.0, 500.0)
    device = _device(Row("http", shape, 1050.0, peers={"eager": 9000.0}, notes=notes))
    text = report.full([device])
    assert "| 64 | 512 | graph | 4,000 | 12.5 |  |  |  | 1,050 | 1,000 |" in text
    assert "| 64 | 512 | eager | 500 | 12.5 |  |  |  | 9,000 |  |" in text
    (line,) = [line for line in report.accounting([device]).splitlines() if "64 streams" in line]
    assert "1.05" in line and "at most 1.10" in line and "| yes |" in line and "a synchronization" not in text
    # In older rows each replay was launched and waited for alone, which a server's steps are not.
    del device["rows"][0]["notes"]["replays"]
    assert "a launch and a synchronization" in report.full([device])
    assert "64 streams" not in report.accounting([device])
    assert "clients" not in report.full([_device(_full_size(1))])


def test_shares_of_a_step_become_a_plot_with_a_bar_for_each_batch(tmp_path: Path) -> None:
    device = _device(_full_size(1, torch_matmul=0.7, gemm_fp8=0.3), _full_size(8, gemm_fp8=0.9, idle=0.1))
    (plot,) = plots.plots({**device, "device": "unmeasured"}, tmp_path)
    assert plot.path == tmp_path / "unmeasured_full_size.svg"
    assert isinstance(plot, plots.SharePlot) and plot.kinds == ("gemm_fp8", "torch matmul", "idle")
    assert plot.bars == (("batch 1", (0.3, 0.7, 0.0)), ("batch 8", (0.9, 0.0, 0.1)))
    plots.draw(plot)
    drawn = plot.path.read_text()
    assert plot.is_current() and "90%" in drawn and "batch 8" in drawn and "torch matmul" in drawn
    other = _device(_full_size(1, torch_matmul=0.7, gemm_fp8=0.3), _full_size(8, gemm_fp8=0.8, idle=0.2))
    (changed,) = plots.plots({**other, "device": "unmeasured"}, tmp_path)
    assert not changed.is_current()
    text = report.accounting([device])
    assert "share of each kind of kernel in a step](plots/h200_full_size.svg)" in text
    assert list(plots.plots(_device(_full_size(1)), tmp_path)) == []


def test_a_changed_result_makes_a_file_stale(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = report.BEGIN.format(name="t"), report.END.format(name="t")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    pages = [(page, "t", report.summary)]
    fresh = report.stale(pages, [])
    assert fresh[page].startswith("before\n") and fresh[page].endswith("after\n") and "old" not in fresh[page]
    page.write_text(fresh[page])
    assert report.stale(pages, []) == {}
    assert page in report.stale(pages, [_device(_dense(1, 1.0, 1.0))])
    with pytest.raises(ValueError, match="expected one"):
        report.rewritten("no markers", "t", "body")


def test_both_sections_of_a_page_are_renewed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    old = [f"{report.BEGIN.format(name=name)}\nold {name}\n{report.END.format(name=name)}\n" for name in "ab"]
    page.write_text("between\n".join(old))
    pages = [(page, name, lambda results, name=name: f"new {name}") for name in "ab"]
    fresh = report.stale(pages, [])[page]
    assert "new a" in fresh and "new b" in fresh and "old" not in fresh
    page.write_text(fresh.replace("new a", "changed by hand"))
    assert report.stale(pages, []) == {page: fresh}


def test_an_engines_steps_become_a_line_for_each_model_and_kind_of_experts() -> None:
    def step(batch: int, time: str, peer: float) -> Row:
        shape = {"model": "a", "experts": "triton", "batch": batch, "time": time}
        return Row("engine", shape, 100.0, peers={"vllm triton": peer})

    start = {"model": "a", "experts": "triton", "start": "cold", "time": "to first token"}
    rows = [step(1, "gpu", 200.0), step(8, "gpu", 800.0), step(1, "wall", 110.0), step(8, "wall", 110.0)]
    rows.append(Row("engine", start, 2e7, peers={"vllm triton": 5e7}))
    rows.append(Row("engine", {**start, "model": "only starts"}, 2e7, peers={"vllm triton": 5e7}))
    for time, peer in (("gpu", 150.0), ("wall", 90.0)):
        shape = {"model": "a", "experts": "triton", "prompt": 256, "time": time}
        rows.append(Row("engine", shape, 100.0, peers={"vllm triton": peer}))
    text = report.engine([_device(*rows)])
    assert "| a | triton | 256 | 1.50 | 1.50 | 0.90 | 0.90 |" in text
    assert "| a | triton | 1, 8 | 4.00 | 2.00 | 1.10 | 1.10 | 2.50 |  |" in text
    assert "only starts" not in text
    assert report.engine([]) == "No device has been measured yet."


@pytest.mark.parametrize("text", [None, "no JSON", '{"rows": [{}]}'])
def test_a_file_without_results_is_an_error(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("sys.argv", ["report", "--show", str(file)])
    with pytest.raises(SystemExit) as ended:
        report.main()
    assert ended.value.code == 2 and "rows.json is no results file" in capsys.readouterr().err

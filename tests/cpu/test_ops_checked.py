"""Checked mode: the replay file of a broken contract, and what the mode costs, on and off."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_fp8 import (
    ContractError,
)
from moe_fp8.jit.files import distrust
from moe_fp8.ops import examine, registry
from moe_fp8.settings import parse_settings
from tests import checked_calls, graph_cases
from tests.cpu.test_ops_contracts import _contiguous

pytestmark = pytest.mark.usefixtures("checked_mode")


def test_a_replay_file_describes_the_call(checked_mode: Path) -> None:
    with pytest.raises(ContractError) as caught:
        _contiguous("offsets", [0, 3, 2, 256])
    error = caught.value
    (file,) = checked_mode.iterdir()
    assert error.replay_file == str(file) and str(error).endswith(f"(replay file: {file})")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    content = json.loads(file.read_text())
    assert content["op"] == "grouped_gemm_fp8_contiguous"
    wrong = content["error"]
    assert (wrong["argument"], wrong["expert"], wrong["row"], wrong["got"]) == (
        "offsets", 1, 2, "3 to 2 for expert 1",
    )  # fmt: skip
    assert content["arguments"]["layout"] == "offsets"
    assert content["arguments"]["index"]["values"] == [0, 3, 2, 256]
    scale = content["arguments"]["a_scale"]
    assert (scale["shape"], scale["dtype"], scale["device"]) == ([256, 1], "torch.float32", "cpu")
    assert "values" not in scale
    assert content["kernel"] is None  # there is none on a CPU
    assert content["settings"]["checked"] is True and content["versions"]["torch"] == torch.__version__


def test_a_replay_file_has_small_tensors_of_integers_and_is_its_owners(checked_mode: Path) -> None:
    def broken() -> None:
        raise ContractError("op", "x", "this", "that")

    tensors = {
        "ids": torch.tensor([3, -1]),
        "large": torch.zeros((1 << 16) + 1, dtype=torch.int32),
        "bytes": torch.zeros(2, dtype=torch.uint8),
    }
    with pytest.raises(ContractError):
        examine.examine("op", tensors, broken)
    (file,) = checked_mode.iterdir()
    described = json.loads(file.read_text())["arguments"]
    assert {name: one.get("values") for name, one in described.items()} == {
        "ids": [3, -1], "large": None, "bytes": None,
    }  # fmt: skip
    assert checked_mode.stat().st_mode & 0o777 == 0o700


def test_a_package_that_is_not_installed_has_no_version(checked_mode: Path) -> None:
    assert examine._version("moe-fp8-of-nobody") is None


def test_each_failure_has_a_file(checked_mode: Path) -> None:
    for _ in range(2):
        with pytest.raises(ContractError):
            _contiguous("offsets", [0, 3, 2, 256])
    assert len(list(checked_mode.iterdir())) == 2


def test_without_a_folder_the_error_is_the_same(checked_mode: Path) -> None:
    checked_mode.write_text("this is a file")
    with pytest.raises(ContractError, match=r"no replay file: .*replay") as caught:
        _contiguous("offsets", [0, 3, 2, 256])
    assert (caught.value.expert, caught.value.replay_file) == (1, None)


def test_a_kernel_that_cannot_be_told_hides_nothing(checked_mode: Path) -> None:
    def broken() -> None:
        raise ContractError("op", "x", "this", "that")

    def kernel() -> dict[str, str]:
        raise OSError("no compiler")

    with pytest.raises(ContractError, match="replay file"):
        examine.examine("op", {"x": None}, broken, kernel)
    (file,) = checked_mode.iterdir()
    assert json.loads(file.read_text())["kernel"] == {"unknown": "no compiler"}


def test_the_folder_of_replay_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for given, folder in (
        ({"MOE_FP8_CHECKED_DIR": str(tmp_path), "HOME": "/home/me"}, tmp_path),
        ({"HOME": "/home/me"}, Path("/home/me/.cache/moe_fp8/checked")),
    ):
        monkeypatch.setattr(examine, "settings", lambda given=given: parse_settings(given))
        assert examine._folder() == folder
    monkeypatch.setattr(examine, "settings", lambda: parse_settings({}))
    folder = examine._folder()
    assert folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_a_replay_file_does_not_open_the_store_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The store's folder is the parent; with this umask, a plain folder could be written by the group."""
    given = {"MOE_FP8_CACHE_DIR": str(tmp_path / "store")}
    monkeypatch.setattr(examine, "settings", lambda: parse_settings(given))
    before = os.umask(0o002)
    try:
        written = examine._write("op", {})
    finally:
        os.umask(before)
    assert isinstance(written, Path) and not distrust((tmp_path / "store").stat())


@pytest.mark.parametrize("name", graph_cases.CASES)
def test_contents_cost_nothing_unless_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = graph_cases.CASES[name].call
    checked_calls.past_the_dispatcher(monkeypatch)
    with checked_calls.ChecksCounter() as counter:
        call(graph_cases.CASES[name].inputs(0, "cpu"))
    assert (counter.count > 0) == (name not in checked_calls.WITHOUT_CONTENTS)
    checked_calls.turn_off(monkeypatch)
    with checked_calls.ChecksCounter() as counter:
        call(graph_cases.CASES[name].inputs(0, "cpu"))
    assert counter.count == 0


def test_a_capture_is_not_checked_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_a_gpu = SimpleNamespace(is_cuda=True, is_meta=False, device=-1)  # a device that torch leaves alone
    capturing = [True, True, False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.pop(0))
    registry._say_unchecked.cache_clear()
    assert [registry.checked(on_a_gpu) for _ in range(3)] == [False, False, True]
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "not checked while a stream is captured" in caplog.text


def test_contents_are_not_read_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "settings", lambda: parse_settings({}))
    assert not registry.checked(torch.zeros(1))
    monkeypatch.setattr(registry, "settings", lambda: parse_settings({"MOE_FP8_CHECKED": "1"}))
    assert registry.checked(torch.zeros(1))

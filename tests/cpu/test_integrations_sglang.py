"""The plug-in for SGLang, on stand-ins for SGLang's modules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_fp8 import paged_mqa_logits_metadata
from moe_fp8.errors import ConfigError, UnsupportedError
from moe_fp8.integrations import installed, sglang
from tests.cpu.sglang_stand_in import StandIn, engine, set_variables

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OURS = "moe_fp8.integrations.deep_gemm"

__all__ = ["engine"]


def test_names_that_sglang_holds_are_replaced_and_given_back(engine: StandIn) -> None:
    theirs, theirs_layout = engine.deep_gemm, engine.entrypoint._get_mn_major_tma_aligned_tensor
    assert engine.resolve()() == "deep_gemm.fp8_mqa_logits"
    sglang.activate(("dense", "indexer"))
    assert sglang.active() and installed() == ("dense", "indexer")
    for module in (engine.entrypoint, engine.compile_utils):
        assert module.deep_gemm.__name__ == OURS
        assert module.deep_gemm.fp8_gemm_nt.__module__ == f"{OURS}.gemm"
    assert engine.entrypoint._get_mn_major_tma_aligned_tensor.__module__ == f"{OURS}.layout"
    assert engine.resolve().__module__ == f"{OURS}.indexer", "a kept result is looked up again"
    assert engine.entrypoint.deep_gemm.bf16_gemm_nt() == "deep_gemm.bf16_gemm_nt", "no kernel of ours"
    assert not hasattr(engine.entrypoint.deep_gemm, "fp8_mega_moe"), "what both lack is absent"

    sglang.deactivate()
    assert not sglang.active() and installed() == ()
    assert engine.entrypoint.deep_gemm is engine.compile_utils.deep_gemm is theirs
    assert engine.entrypoint._get_mn_major_tma_aligned_tensor is theirs_layout
    assert engine.resolve()() == "deep_gemm.fp8_mqa_logits"
    sglang.deactivate()


def test_a_function_with_a_name_that_we_do_not_serve_is_replaced_too(engine: StandIn) -> None:
    """In sgl-deep-gemm, `fp4_gemm_nt` is the same function as `fp8_gemm_nt`."""
    theirs = engine.deep_gemm.fp4_gemm_nt = engine.deep_gemm.fp8_gemm_nt
    engine.entrypoint.held = theirs
    sglang.activate(("dense",))
    assert engine.entrypoint.held.__module__ == f"{OURS}.gemm"
    sglang.activate(("experts",))
    assert engine.entrypoint.held is theirs
    sglang.deactivate()
    assert engine.entrypoint.held is theirs


def test_a_kind_that_is_not_served_stays_sglangs(engine: StandIn) -> None:
    sglang.activate(("experts",))
    assert engine.entrypoint.deep_gemm.fp8_gemm_nt() == "deep_gemm.fp8_gemm_nt"


@pytest.mark.parametrize("kinds", [("dense", "indexer"), ("dense", "experts")])
def test_sglangs_own_schedule_is_replaced_with_the_logits(engine: StandIn, kinds: tuple[str, ...]) -> None:
    theirs = engine.dsv4.get_paged_mqa_logits_metadata
    sglang.activate(kinds)
    if "indexer" in kinds:
        lens = torch.tensor([[0], [5000], [130]])
        made = engine.dsv4.get_paged_mqa_logits_metadata(lens, 64, 132)
        assert torch.equal(made, paged_mqa_logits_metadata(lens.int(), block_size=64, num_sms=132))
    else:
        assert engine.dsv4.get_paged_mqa_logits_metadata is theirs
    sglang.deactivate()
    assert engine.dsv4.get_paged_mqa_logits_metadata is theirs


def test_a_release_without_a_schedule_of_its_own_is_served(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(engine.dsv4, "get_paged_mqa_logits_metadata")
    sglang.activate(("indexer",))
    assert sglang.active() and not hasattr(engine.dsv4, "get_paged_mqa_logits_metadata")
    monkeypatch.delitem(sys.modules, engine.dsv4.__name__)
    sglang.activate(("indexer",))
    assert sglang.active()


def test_sglangs_own_deep_gemm_follows_the_modes(engine: StandIn) -> None:
    told: list[tuple[str, Any]] = []
    for name in ("set_compile_mode", "set_num_sms", "set_pdl"):
        setattr(engine.deep_gemm, name, lambda value, name=name: told.append((name, value)))
    sglang.activate(("experts",))
    replaced = engine.entrypoint.deep_gemm
    replaced.set_compile_mode(1)
    assert replaced.bf16_gemm_nt() and told == [("set_compile_mode", 1)], "told when it is first needed"
    replaced.set_compile_mode(0)
    replaced.set_num_sms(100)
    replaced.set_pdl(False)
    assert told[1:] == [("set_compile_mode", 0), ("set_num_sms", 100), ("set_pdl", False)]


def test_nothing_is_changed_if_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({"sm": 100}, "Hopper"),
        ({"cuda": False}, "Hopper"),  # a GPU of AMD's may have the same capability
        ({"enabled": False}, "SGLANG_ENABLE_JIT_DEEPGEMM"),
    ):
        engine = StandIn(monkeypatch, **options)
        with pytest.raises(UnsupportedError, match=message):
            sglang.activate(("dense",))
        assert not sglang.active() and installed() == () and not engine.hooks.hooks
        assert engine.entrypoint.deep_gemm is engine.deep_gemm is sys.modules["deep_gemm"]
    StandIn(monkeypatch)
    with pytest.raises(ConfigError, match="dance"):
        sglang.activate(("dance",))
    assert not sglang.active()


@pytest.mark.parametrize("installed_too", [True, False])
def test_sglang_decides_with_its_own_deep_gemm(
    installed_too: bool, engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may call `activate` before it imports what makes SGLang look for `deep_gemm`."""
    wrapper = "sglang.srt.layers.deep_gemm_wrapper"
    monkeypatch.delitem(sys.modules, f"{wrapper}.configurer")
    monkeypatch.delattr(sys.modules[wrapper], "configurer")
    monkeypatch.setattr(sys.modules[wrapper], "__path__", [str(tmp_path)], raising=False)
    (tmp_path / "configurer.py").write_text(
        "try:\n    import deep_gemm\n    ENABLE_JIT_DEEPGEMM = True\n"
        "except ImportError:\n    ENABLE_JIT_DEEPGEMM = False\n"
    )
    if installed_too:
        sglang.activate(("dense",))
        assert installed() == ("dense",)
        assert sys.modules[f"{wrapper}.configurer"].deep_gemm.__name__ == OURS
    else:
        monkeypatch.setitem(sys.modules, "deep_gemm", None)
        with pytest.raises(UnsupportedError, match="install sgl-deep-gemm"):
            sglang.activate(("dense",))
        assert not sglang.active() and installed() == ()
    sys.modules.pop(f"{wrapper}.configurer")


def test_a_deep_gemm_that_is_blocked_replaces_nothing(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    engine.entrypoint.nothing = None  # type: ignore[attr-defined]
    sglang.activate(("dense",))
    assert engine.entrypoint.nothing is None
    sglang.deactivate()
    assert engine.entrypoint.nothing is None and sys.modules["deep_gemm"] is None


def test_a_deep_gemm_whose_import_fails_does_not_disturb_the_end(
    engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_gemm.py").write_text("raise RuntimeError('no GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_gemm"]:
        monkeypatch.delitem(sys.modules, name)
    sglang.activate(("dense",))
    sglang.deactivate()
    assert not sglang.active() and "deep_gemm" not in sys.modules


def test_a_second_activation_replaces_the_first(engine: StandIn) -> None:
    sglang.activate(("dense",))
    with pytest.raises(ConfigError, match="dance"):
        sglang.activate(("dance",))
    assert installed() == ("dense",)
    sglang.activate(("experts",))
    assert installed() == ("experts",)
    sglang.deactivate()
    assert engine.entrypoint.deep_gemm is engine.deep_gemm is sys.modules["deep_gemm"]


def test_sglang_calls_register(engine: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch)
    sglang.register()
    assert not sglang.active(), "MOE_FP8_ENGINE is not set"
    set_variables(monkeypatch, "dense", "experts")
    with monkeypatch.context() as process:
        process.delitem(sys.modules, "sglang.srt.managers.scheduler")
        sglang.register()
        assert not sglang.active(), "the process runs no model"
    sglang.register()
    sglang.register()
    assert installed() == ("dense", "experts")
    assert list(engine.hooks.hooks) == ["sglang.srt.model_executor.model_runner.ModelRunner.load_model"]
    assert not engine.hooks._patched, "SGLang applies hooks after all plug-ins"
    sglang.activate(("indexer",))
    sglang.register()
    assert installed() == ("indexer",), "a script has chosen"


def test_the_entry_point_is_registered() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {
        "moe_fp8": "moe_fp8.integrations.sglang:register"
    }

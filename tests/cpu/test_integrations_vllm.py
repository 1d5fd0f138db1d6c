"""The plug-in for vLLM: what it changes in vLLM's modules, and that it takes all of it back."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

import pytest

from moe_fp8 import __version__, jit
from moe_fp8.errors import ConfigError, SettingError, UnsupportedError
from moe_fp8.integrations import installed, planning
from moe_fp8.integrations import vllm as plug_in
from moe_fp8.settings import parse_settings, settings
from tests.cpu.vllm_stand_in import (
    BatchedDeepGemmExperts,
    DeepGemmExperts,
    DeepGemmKernel,
    Fake,
    module,
    vllm,
)

__all__ = ["vllm"]


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (None, ()),
        ("", ()),
        ("0", ()),
        ("1", ("dense", "experts", "indexer")),
        ("indexer,dense", ("dense", "indexer")),
    ],
)
def test_the_variable(value: str | None, kinds: tuple[str, ...]) -> None:
    given = {} if value is None else {"MOE_FP8_ENGINE": value}
    assert parse_settings(given).engine == kinds


@pytest.mark.parametrize("value", [",", "yes", "dense;experts", "moe", "dense,moe"])
def test_a_bad_variable_is_an_error(value: str) -> None:
    with pytest.raises(SettingError, match="dense, experts, indexer"):
        parse_settings({"MOE_FP8_ENGINE": value})


@pytest.mark.parametrize("value", [None, "", "0"])
def test_register_does_nothing_without_the_variable(
    value: str | None, vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the other variables say, which stop nobody who does not use the package."""
    settings.cache_clear()
    monkeypatch.setenv("MOE_FP8_JOBS", "many")
    if value is not None:
        monkeypatch.setenv("MOE_FP8_ENGINE", value)
    plug_in.register()
    assert not plug_in.active() and vllm.kernels == [DeepGemmKernel] and installed() == ()
    monkeypatch.setenv("MOE_FP8_ENGINE", "1")
    with pytest.raises(SettingError, match="MOE_FP8_JOBS"):
        plug_in.register()


@pytest.mark.parametrize("platform", ["is_cpu", "is_unspecified"])
def test_register_does_nothing_without_a_gpu(
    platform: str, vllm: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of vLLM's commands call plug-ins, and some, such as `vllm bench serve`, run where no GPU is."""
    monkeypatch.setenv("MOE_FP8_ENGINE", "1")
    for name, value in (("is_cuda", False), ("is_device_capability", False), (platform, True)):
        monkeypatch.setattr(vllm.platform, name, lambda *capability, value=value: value)
    plug_in.register()
    assert not plug_in.active() and vllm.kernels == [DeepGemmKernel] and installed() == ()
    assert "no GPU" in caplog.text
    with pytest.raises(UnsupportedError, match="Hopper"):
        plug_in.activate(["dense"])


def test_register_changes_vllm_and_deactivate_restores_it(
    vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = vllm.oracle.backend_to_kernel_cls, vllm.loader.load_model, vllm.own_loader.load_model
    monkeypatch.setenv("MOE_FP8_ENGINE", "1")
    monkeypatch.setattr(plug_in, "settings", lambda: parse_settings({"MOE_FP8_ENGINE": "1"}))
    plug_in.register()
    plug_in.register()  # vLLM may call it again
    assert plug_in.active() and installed() == ("dense", "experts", "indexer")
    assert [kernel.__name__ for kernel in vllm.kernels] == ["MoeFp8LinearKernel", "DeepGemmKernel"]
    assert vllm.named["deep_gemm"] == set(vllm.kernels)  # --linear-backend deep_gemm
    for backend in ("deepgemm", "triton"):
        ours, theirs = vllm.oracle.backend_to_kernel_cls(backend)
        assert ours.__name__ == "MoeFp8Experts" and theirs == f"{backend} experts"
    assert vllm.oracle.backend_to_kernel_cls("marlin") == ["marlin experts"]
    assert vllm.wrapper._fp8_gemm_nt_impl is None and os.environ["VLLM_DEEP_GEMM_WARMUP"] == "skip"
    assert set(vllm.envs.environment_variables) == {"MOE_FP8_ENGINE"}
    # A compiled model of other kinds, or of another version, has another name.
    told = vllm.envs.environment_variables["MOE_FP8_ENGINE"]()
    assert told == f"dense,experts,indexer {__version__}"
    plug_in.deactivate()
    assert vllm.envs.environment_variables == {}
    assert not plug_in.active() and installed() == () and vllm.kernels == [DeepGemmKernel]
    assert vllm.named["deep_gemm"] == {DeepGemmKernel}
    after = vllm.oracle.backend_to_kernel_cls, vllm.loader.load_model, vllm.own_loader.load_model
    assert after == before
    assert os.environ["VLLM_DEEP_GEMM_WARMUP"] == "relax"


def test_register_keeps_what_the_process_has_activated(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in.activate(["indexer"])
    monkeypatch.setenv("MOE_FP8_ENGINE", "1")
    monkeypatch.setattr(plug_in, "settings", lambda: parse_settings({"MOE_FP8_ENGINE": "1"}))
    plug_in.register()
    assert installed() == ("indexer",)


def test_a_vllm_without_the_newer_names_is_left_without_them(vllm: Fake) -> None:
    """Some versions of vLLM lack one of them or the other."""
    del vllm.wrapper._paged_mqa_logits_schedule_slots, vllm.wrapper.DeepGemmQuantScaleFMT._oracle_cache
    for change in (lambda: plug_in.activate(["indexer"]), plug_in.deactivate):
        change()
        assert not hasattr(vllm.wrapper, "_paged_mqa_logits_schedule_slots")
        assert not hasattr(vllm.wrapper.DeepGemmQuantScaleFMT, "_oracle_cache")


def test_loaders_get_all_their_arguments(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some calls have a prefix of the layers' names, too."""
    given: list[Any] = []
    monkeypatch.setattr(
        vllm.loader, "load_model", lambda self, *configs, **options: given.append((configs, options))
    )
    monkeypatch.setattr("moe_fp8.integrations.vllm.model.describe_loaded", lambda *_: None)
    monkeypatch.setattr(planning, "warm", lambda loaded, undo: None)
    plug_in.activate(["dense"])
    vllm.loader().load_model("server", model_config="model", prefix="draft")
    vllm.loader().load_model("server", "model", "draft")
    assert given == [(("server", "model"), {"prefix": "draft"}), (("server", "model", "draft"), {})]


def test_some_kinds_leave_the_others_alone(vllm: Fake) -> None:
    plug_in.activate(["indexer"])
    assert vllm.kernels == [DeepGemmKernel] and vllm.oracle.backend_to_kernel_cls("deepgemm") == [
        "deepgemm experts"
    ]
    assert os.environ["VLLM_DEEP_GEMM_WARMUP"] == "relax"
    assert vllm.wrapper._paged_mqa_logits_schedule_slots(132, 4) == 132
    for kinds, warmup in ((["dense"], "relax"), (["experts"], "relax"), (["dense", "experts"], "skip")):
        plug_in.activate(kinds)
        assert os.environ["VLLM_DEEP_GEMM_WARMUP"] == warmup, "what we do not serve is warmed up"
    assert vllm.wrapper._paged_mqa_logits_schedule_slots(132, 4) == 66


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("kinds", [("dense",), ("experts",), ("indexer",)])
def test_vllms_own_layers_of_deep_gemm_need_its_copy(
    kinds: tuple[str, ...], copy: bool, vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM looks only whether a `deep_gemm` is there, and ours is, with the kinds that we serve alone."""
    if copy:
        module(monkeypatch, "vllm.third_party.deep_gemm", fp8_gemm_nt=print)
    classes = DeepGemmKernel, DeepGemmExperts, BatchedDeepGemmExperts
    before = [dict(vars(cls)) for cls in classes]
    plug_in.activate(kinds)
    assert DeepGemmKernel.is_supported(90)[0] == (copy or "dense" in kinds)
    assert not DeepGemmKernel.is_supported(80)[0]
    if copy:
        assert type("Derived", (DeepGemmKernel,), {}).is_supported(90) == (True, "Derived")
    for experts in (DeepGemmExperts, BatchedDeepGemmExperts):
        assert experts._supports_current_device() == (copy or "experts" in kinds)
    plug_in.deactivate()
    assert [dict(vars(cls)) for cls in classes] == before


def test_vllm_looks_names_up_again_behind_each_change(vllm: Fake) -> None:
    wrapper, imports = vllm.wrapper, sys.modules["vllm.utils.import_utils"]
    wrapper.is_deep_gemm_supported = cache(lambda: installed())
    wrapper.is_deep_gemm_supported.__module__ = wrapper.__name__
    assert wrapper.is_deep_gemm_supported() == ()
    imports.has_deep_gemm = cache(lambda: installed())  # type: ignore[attr-defined]
    imports.has_deep_gemm.__module__ = imports.__name__  # type: ignore[attr-defined]
    assert imports.has_deep_gemm() == ()
    # What another module keeps has nothing to do with `deep_gemm`.
    wrapper.get_config = cache(lambda: object())
    kept = wrapper.get_config()
    for change, kinds in ((lambda: plug_in.activate(["dense"]), ("dense",)), (plug_in.deactivate, ())):
        wrapper._fp8_gemm_nt_impl, wrapper.DeepGemmQuantScaleFMT._oracle_cache = print, 3
        change()
        assert wrapper._fp8_gemm_nt_impl is wrapper.DeepGemmQuantScaleFMT._oracle_cache is None
        assert wrapper.is_deep_gemm_supported() == imports.has_deep_gemm() == kinds
        assert wrapper.get_config() is kept


def test_a_second_activation_replaces_the_first(vllm: Fake) -> None:
    plug_in.activate(["dense", "experts"])
    with pytest.raises(ConfigError, match="dens"):
        plug_in.activate(["dens"])
    assert installed() == ("dense", "experts") and len(vllm.kernels) == 2
    plug_in.activate(["dense"])
    assert installed() == ("dense",) and len(vllm.kernels) == 2
    assert vllm.oracle.backend_to_kernel_cls("triton") == ["triton experts"]
    plug_in.activate(["indexer"])
    assert vllm.kernels == [DeepGemmKernel]


@pytest.mark.parametrize(
    ("before", "during"),
    [
        (None, "MOE_FP8_"),
        ("", "MOE_FP8_"),
        ("MY_, OWN_", "MY_,OWN_,MOE_FP8_"),
        ("MY_,MOE_FP8_", "MY_,MOE_FP8_"),
    ],
)
def test_ray_workers_get_all_variables(
    vllm: Fake, monkeypatch: pytest.MonkeyPatch, before: str | None, during: str
) -> None:
    prefixes = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    if before is not None:
        monkeypatch.setenv(prefixes, before)
    plug_in.activate(["indexer"])
    assert os.environ[prefixes] == during
    plug_in.deactivate()
    assert os.environ.get(prefixes) == before


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_experts_are_invariant_if_the_ops_are(
    vllm: Fake, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    plug_in.activate(["experts"])
    from moe_fp8.integrations.vllm import experts

    given = parse_settings({"MOE_FP8_BATCH_INVARIANT": value})
    monkeypatch.setattr(experts, "settings", lambda: given)
    assert experts.MoeFp8Experts._supports_batch_invariance() == (value == "1")


def test_batch_invariance_must_be_ours_too(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    with pytest.raises(SettingError, match="MOE_FP8_BATCH_INVARIANT"):
        plug_in.activate(["dense"])
    assert not plug_in.active() and vllm.kernels == [DeepGemmKernel]
    monkeypatch.setattr(plug_in, "settings", lambda: parse_settings({"MOE_FP8_BATCH_INVARIANT": "1"}))
    plug_in.activate(["dense"])
    assert plug_in.active()


def test_a_freeze_of_the_process_is_kept(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "load_plan", lambda plan: len(plan.specs))
    loaded = planning.LoadedEngine("vllm", "Model", max_tokens=8, max_batch=8, max_positions=64, num_sms=132)
    for kept in (True, False):
        if kept:
            jit.freeze("strict")
        undo: list[Any] = []
        planning.warm(loaded, undo)
        assert jit.is_frozen() and bool(undo) != kept
        for call in undo:
            call()
        assert jit.is_frozen() == kept
        jit.unfreeze()


@pytest.mark.parametrize("other", ["is_cuda", "is_device_capability"])
def test_another_gpu_is_refused_before_any_change(vllm: Fake, other: str) -> None:
    """GPUs of another vendor may have the number of Hopper's capability, too."""
    setattr(vllm.platform, other, lambda *capability: False)
    with pytest.raises(UnsupportedError, match="Hopper"):
        plug_in.activate(["dense"])
    assert not plug_in.active() and vllm.kernels == [DeepGemmKernel]


def test_loaders_of_every_depth_are_changed_once(vllm: Fake) -> None:
    """A loader that inherits its method calls the changed method already."""
    deep = type("Deep", (vllm.own_loader,), {"load_model": lambda self, *configs: None})
    inherits = type("Inherits", (deep,), {})
    before = vars(deep)["load_model"]
    plug_in.activate(["dense"])
    assert vars(deep)["load_model"] is not before and "load_model" not in vars(inherits)
    plug_in.deactivate()
    assert vars(deep)["load_model"] is before


def test_a_failure_leaves_nothing_changed(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vllm.oracle, "backend_to_kernel_cls")
    with pytest.raises(AttributeError):
        plug_in.activate(["dense", "experts"])
    assert not plug_in.active() and vllm.kernels == [DeepGemmKernel] and installed() == ()

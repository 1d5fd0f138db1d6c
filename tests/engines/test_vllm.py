"""vLLM's own functions, executed from their sources, on what the plug-in for vLLM changes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fp8.integrations import vllm as plug_in
from moe_fp8.settings import parse_settings
from tests.engines.layers import EngineLayers
from tests.engines.sources import ENGINES, Engine, skipped
from tests.engines.vllm_layers import EXPERTS, KERNEL, nothing, wrapper_stand_ins

pytestmark = pytest.mark.skipif(skipped(), reason="ENGINE_SOURCES=skip")

VLLM = pytest.mark.parametrize(
    "engine", [engine for engine in ENGINES if engine.package == "vllm"], ids=lambda engine: engine.name
)
OURS = "moe_fp8.integrations.vllm.experts"


@pytest.fixture
def ours() -> Iterator[None]:
    """The module of our experts is imported anew, because its class derives from the active vLLM's."""
    sys.modules.pop(OURS, None)
    yield
    sys.modules.pop(OURS, None)


@VLLM
def test_elastic_ep_builds_our_experts(engine: Engine, ours: None) -> None:
    layer = "vllm.model_executor.layers.fused_moe"
    staging = f"{layer}.eep_reconfigure"
    formats = SimpleNamespace(from_oracle=lambda: 1, FLOAT32_CEIL_UE8M0=1)
    provided = {
        "vllm.utils.deep_gemm.DeepGemmQuantScaleFMT": formats,
        "vllm.utils.deep_gemm.get_mk_alignment_for_contiguous_layout": lambda: [128, 128],
        f"{layer}.activation.ApplyMoEActivationConfig": SimpleNamespace(from_configs=nothing),
        "vllm.logger.init_logger": lambda name: wrapper_stand_ins()["vllm.logger.logger"],
    }
    with EngineLayers(engine, (staging, KERNEL, EXPERTS), provided).active() as layers:
        kernel = layers.module(KERNEL)
        cls = importlib.import_module(OURS).MoeFp8Experts
        quant_config = SimpleNamespace(
            block_shape=[128, 128], quant_dtype=torch.float8_e4m3fn, per_act_token_quant=False,
            per_out_ch_quant=False, gemm1_clamp_limit=None, gemm1_alpha=None, gemm1_beta=None,
        )  # fmt: skip
        made = layers.module(staging)._make_eep_experts(
            SimpleNamespace(moe_quant_config=quant_config),
            object.__new__(cls),
            SimpleNamespace(activation_format=kernel.FusedMoEActivationFormat.Standard),
            SimpleNamespace(),
        )
        assert type(made) is cls and made.quant_config is quant_config


@VLLM
def test_ray_workers_have_our_settings(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "MOE_FP8_ENGINE": "dense,indexer", "MOE_FP8_BATCH_INVARIANT": "1", "MOE_FP8_BUNDLE": "/srv/kernels",
        "MOE_FP8_CACHE_DIR": "/fast/cache", "MOE_FP8_CHECKED": "1", "MOE_FP8_JOBS": "3",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "")
    log = SimpleNamespace(**dict.fromkeys(("info", "warning"), nothing))
    provided: dict[str, Any] = {
        "vllm.config.utils.normalize_value": str,
        "vllm.logger.init_logger": lambda name: log,
    }
    with EngineLayers(engine, ("vllm.envs", "vllm.ray.ray_env"), provided).active() as layers:
        factors = layers.module("vllm.envs").compile_factors
        try:
            plug_in._separate_compiled_models(("dense", "indexer"))
            plug_in._share_settings()
            names = layers.module("vllm.ray.ray_env").get_env_vars_to_copy()
            copied = {name: os.environ[name] for name in names if name in os.environ}
            here = factors()
            assert parse_settings(copied) == parse_settings({**copied, **given})
            assert {name for name in here if name.startswith("MOE_FP8_")} == {"MOE_FP8_ENGINE"}
            # A worker begins with these variables, and calls the plug-in too.
            plug_in._share_settings()
            assert factors() == here
        finally:
            plug_in.deactivate()

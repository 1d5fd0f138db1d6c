"""Checkpoints some of whose layers are FP8 in blocks, and ModelOpt's partial blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.errors import ModelError
from moe_fp8.warmup import PlanOptions, describe, load_model, plan, read_config
from moe_fp8.warmup.shapes import Parallelism, gemm_shapes
from tests.model_configs import CONFIGS, in_blocks
from tests.quantizations import FP8, quantized, tensors


def nvfp4(*targets: str) -> dict[str, Any]:
    """A group of compressed-tensors in another format than FP8 blocks."""
    tensor = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
    return {"targets": list(targets), "weights": tensor, "input_activations": tensor}


@pytest.mark.parametrize(
    ("targets", "other"),
    [
        (["re:.*self_attn.*"], ["re:.*mlp\\.experts.*"]),
        (["re:.*self_attn.*"], ["Linear"]),
        (["Linear"], ["re:.*mlp\\.experts.*"]),
    ],
)
def test_a_group_of_compressed_tensors_may_have_another_format(targets: list[str], other: list[str]) -> None:
    quantization = tensors()
    groups = quantization["config_groups"]
    groups["group_0"]["targets"] = targets
    for order in ({"group_1": nvfp4(*other), **groups}, {**groups, "group_1": nvfp4(*other)}):
        planned = plan(
            quantized({**quantization, "config_groups": order}), PlanOptions(max_tokens=8, max_batch=1)
        )
        assert {layer.what for layer in planned.lacking} == {"experts.gate_up", "experts.down"}
        assert all("config_groups" in layer.reason for layer in planned.lacking)
        fp8 = {linear.what for linear in planned.model.linears if not linear.reason}
        assert fp8 == {"qkv", "o"}


def test_the_first_group_of_compressed_tensors_that_names_a_module_counts() -> None:
    """As in vLLM's `find_matched_target`; the class of all layers is last, and its last group counts."""
    blocks = tensors()["config_groups"]["group_0"]
    for groups, expected in (
        ([nvfp4("re:.*o_proj"), blocks | {"targets": ["re:.*self_attn.*"]}], {"qkv"}),
        ([blocks | {"targets": ["re:.*self_attn.*"]}, nvfp4("re:.*o_proj")], {"qkv", "o"}),
        ([blocks | {"targets": ["Linear", "re:.*o_proj"]}, nvfp4("re:.*")], {"o"}),
        ([nvfp4("Linear", "re:.*o_proj"), blocks | {"targets": ["re:.*self_attn.*"]}], {"qkv"}),
        ([blocks, nvfp4("Linear")], set()),
    ):
        description = quantized({**tensors(), "config_groups": dict(zip("abc", groups, strict=False))})
        assert {linear.what for linear in description.linears if not linear.reason} == expected


def mixed(**formats: str) -> dict[str, Any]:
    """ModelOpt's checkpoint with the formats of `attention` and `experts`; other layers have none."""
    modules = {
        "attention": [f"self_attn.{name}_proj" for name in "qkvo"],
        "experts": [f"mlp.experts.{i}.{name}_proj" for i in range(128) for name in ("gate", "up", "down")],
    }
    names = {
        f"model.layers.{layer}.{module}": {"quant_algo": algorithm}
        for kind, algorithm in formats.items()
        for layer in range(48)
        for module in modules[kind]
    }
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": names}


@pytest.mark.parametrize(
    ("formats", "fp8", "other"),
    [
        ({"attention": "FP8_PB_WO", "experts": "NVFP4"}, {"qkv", "o"}, {"experts.gate_up", "experts.down"}),
        ({"attention": "fp8_pb_wo"}, {"qkv", "o"}, set()),
        (
            {"attention": "FP8", "experts": "FP8_BLOCK_SCALES"},
            {"experts.gate_up", "experts.down"},
            {"qkv", "o"},
        ),
    ],
)
def test_the_layers_of_a_mixed_modelopt_checkpoint_have_formats(
    formats: dict[str, str], fp8: set[str], other: set[str]
) -> None:
    told = mixed(**formats)
    nested = {"quant_method": "modelopt_mixed", "quantization": {k: told[k] for k in list(told)[1:]}}
    for quantization in (told, nested):
        planned = plan(quantized(quantization), PlanOptions(max_tokens=8, max_batch=1))
        assert {linear.what for linear in planned.model.linears if not linear.reason} == fp8
        assert {layer.what for layer in planned.lacking} == other
        assert all("quantized_layers" in layer.reason for layer in planned.lacking)


def test_the_modules_that_a_mixed_modelopt_checkpoint_excludes_are_bf16() -> None:
    told = mixed(attention="FP8_PB_WO", experts="NVFP4") | {"ignore": ["model.layers.0.self_attn*"]}
    description = quantized(told)
    parts = [(linear.layers, bool(linear.reason)) for linear in description.linears if linear.what == "o"]
    assert parts == [(tuple(range(1, 48)), False), ((0,), True)]


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("quantized_layers", {"quantized_layers": {}}),
        ("quantized_layers", {"quantized_layers": ["self_attn"]}),
        ("NVFP4", {"quantized_layers": {"model.layers.0.self_attn.q_proj": {"quant_algo": "NVFP4"}}}),
        ("quant_algo", {"quantized_layers": {"model.layers.0.self_attn.q_proj": {}}}),
        ("q_proj", {"quantized_layers": {"model.layers.0.self_attn.q_proj": "FP8_PB_WO"}}),
        (
            "group_size",
            {"quantized_layers": {"lm_head": {"quant_algo": "FP8_PB_WO", "group_size": 64}}},
        ),
    ],
)
def test_other_mixed_modelopt_checkpoints_are_refused(named: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        quantized(mixed(attention="FP8_PB_WO") | changes)
    assert caught.value.field.startswith("quantization_config.")


def test_the_formats_of_an_older_mixed_checkpoint_are_in_the_file_of_modelopt(tmp_path: Path) -> None:
    config, told = read_config(CONFIGS / "qwen3_30b.json"), mixed(attention="FP8_PB_WO", experts="NVFP4")
    short = {name: told[name] for name in ("quant_method", "quant_algo")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": short}))
    with pytest.raises(ModelError, match="quantized_layers"):
        load_model(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": told}))
    assert {linear.what for linear in load_model(tmp_path).linears if not linear.reason} == {"qkv", "o"}


@pytest.mark.parametrize(("engine", "widths"), [("vllm", {2176}), ("sglang", {2112}), (None, {2112, 2176})])
def test_vllm_fills_the_last_block_of_modelopts_weights(engine: str | None, widths: set[int]) -> None:
    """vLLM's FP8_PB_WO multiplies whole blocks of 128; other checkpoints have all rows as they are."""
    config = read_config(CONFIGS / "deepseek_v3.json")
    options = PlanOptions(engine=engine, tp=8, ep=8, max_tokens=8, max_batch=1)

    def planned(quantization: dict[str, Any], what: str) -> set[int | None]:
        rows = plan(describe(config | {"quantization_config": quantization}), options).rows
        return {row.n for row in rows if "gemm_fp8" in row.op and what in row.what}

    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    down = [f"model.layers.{i}.self_attn.{name}" for i in range(61) for name in ("q_a_proj", "kv_a_proj")]
    formats = {name: {"quant_algo": "FP8_PB_WO"} for name in down}
    for quantization in (
        modelopt,
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": formats},
    ):
        assert planned(quantization, "q_a+kv_a") == widths
    assert planned(FP8, "q_a+kv_a") == {2112}
    for what in ("q_b", "experts.gate_up"):
        assert planned(modelopt, what) == planned(FP8, what) != set()


@pytest.mark.parametrize("engine", ["vllm", "sglang", None])
def test_vllm_fills_widths_that_no_kernel_serves_without(engine: str | None) -> None:
    """Qwen3.5's `in_proj_ba` has 16 columns on a rank: in vLLM one block of 128."""
    config = in_blocks("qwen35_397b") | {
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    }
    planned = plan(describe(config), PlanOptions(engine=engine, tp=8, ep=8, max_tokens=8, max_batch=1))
    widths = {row.n for row in planned.rows if "linear_attn.in_proj_ba" in row.what and row.op == "gemm_fp8"}
    assert widths == (set() if engine == "sglang" else {128})
    assert [layer.n for layer in planned.lacking] == ([] if engine == "vllm" else [16])
    found = {shape.n for shape in gemm_shapes(describe(config), Parallelism(8, 8)) if "_ba" in shape.what}
    assert found == {128}


def test_vllm_fills_no_block_of_experts() -> None:
    """With a hidden size that 128 does not divide, the last block of each down projection is partial."""
    config = read_config(CONFIGS / "deepseek_v3.json") | {
        "hidden_size": 7168 - 64,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    }
    found = gemm_shapes(describe(config), PlanOptions(engine="vllm", tp=8, ep=8))
    widths = {shape.what: shape.n for shape in found if shape.what.endswith(".down")}
    assert widths == {"mlp.down": 7168, "shared.down": 7168, "experts.down": 7168 - 64}

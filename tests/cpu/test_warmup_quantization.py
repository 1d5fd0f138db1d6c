"""`quantization_config` as checkpoints have it: which layers are FP8 blocks, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.errors import ModelError
from moe_fp8.warmup import ModelDescription, PlanOptions, describe, load_model, plan, read_config
from moe_fp8.warmup.models import Linear, Part, blocks
from moe_fp8.warmup.shapes import Parallelism, gemm_shapes
from tests.quantizations import FP8, quantized, tensors

CONFIGS = Path(__file__).parent.parent / "configs"


def in_bf16(description: ModelDescription) -> set[str]:
    """The layers that the list of the config makes bf16."""
    return {linear.what for linear in description.linears if "quantization_config" in linear.reason}


@pytest.mark.parametrize(
    "quantization",
    [
        FP8,
        {**FP8, "fmt": "float8_e4m3fn", "scale_fmt": "ue8m0"},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        tensors(),
        tensors(weights_block_structure="128x128"),
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "fp8_pb_wo", "exclude_modules": []}},
    ],
)
def test_blocks_of_three_forms_are_one_plan(quantization: dict[str, Any]) -> None:
    small = PlanOptions(max_tokens=8, max_batch=1)
    assert plan(quantized(quantization), small).rows == plan(quantized(FP8), small).rows


@pytest.mark.parametrize(
    ("named", "quantization"),
    [
        ("weight_block_size", {"quant_method": "fp8"}),
        ("weight_block_size", {**FP8, "weight_block_size": [32, 32]}),
        ("e5m2", {**FP8, "fmt": "e5m2"}),
        ("static", {**FP8, "activation_scheme": "static"}),
        ("channel", tensors(weights_strategy="channel")),
        ("tensor", tensors(weights_strategy="tensor")),
        ("weights.num_bits", tensors(weights_num_bits=4)),
        ("int", tensors(weights_type="int")),
        ("input_activations.dynamic", tensors(inputs_dynamic=False)),
        ("token", tensors(inputs_strategy="token")),
        ("input_activations.group_size", tensors(inputs_group_size=64)),
        ("weights.block_structure", tensors(weights_block_structure="128x²")),
        ("weights.block_structure", tensors(weights_block_structure=f"128x{'1' * 5000}")),
        ("weights.block_structure", tensors(weights_block_structure="128x64")),
        ("NVFP4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        ("mxfp4", {"quant_method": "mxfp4"}),
        ("quantization_config", None),
        ("config_groups", {"quant_method": "compressed-tensors"}),
        ("modules_to_not_convert", {**FP8, "modules_to_not_convert": "lm_head"}),
    ],
)
def test_other_forms_are_refused_by_name(named: str, quantization: Any) -> None:
    with pytest.raises(ModelError) as caught:
        quantized(quantization)
    assert named in str(caught.value)
    assert caught.value.field.startswith("quantization_config")


def unpadded(description: ModelDescription) -> tuple[Linear, ...]:
    """The linear layers as if engines padded none."""

    def plain(part: Part) -> Part:
        return part._replace(padded=False)

    return tuple(
        replace(linear, n=tuple(map(plain, linear.n)), k=plain(linear.k)) for linear in description.linears
    )


def test_a_bf16_checkpoint_is_planned_if_the_engine_quantizes_it() -> None:
    made = quantized(None, "fp8-block")
    # vLLM quantizes the router of this model, too. Checkpoints list it as not converted.
    *linears, router, head = unpadded(made)
    assert (*linears, router.because(blocks.ROUTER), head) == quantized(FP8).linears
    other = describe(read_config(CONFIGS / "glm_45_air.json"), quantize="fp8-block")
    assert [linear.reason for linear in other.linears if linear.what == "router"] == [blocks.ROUTER]
    # A rank's share of the experts' 768 columns would be 96; vLLM pads it.
    found = {shape.what: (shape.n, shape.k) for shape in gemm_shapes(made, Parallelism(8, 1))}
    assert (found["experts.gate_up"], found["experts.down"]) == ((256, 2048), (2048, 128))
    with pytest.raises(ModelError, match="quantize"):
        quantized(None, "int8")
    with pytest.raises(ModelError, match="no quantization_config"):
        quantized(FP8, "fp8-block")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["lm_head", "gate"], set()),  # these are bf16 anyway
        (["self_attn"], {"qkv", "o"}),
        (["o_proj"], {"o"}),
        (["q_proj"], {"qkv"}),
        (["model.layers.*.self_attn"], {"qkv", "o"}),
        (["mlp.experts"], {"experts.gate_up", "experts.down"}),
        (["proj", "q", "expert"], set()),  # parts of names are no names
        (["re:.*self_attn.*"], {"qkv", "o"}),
        (["re:.*experts.*down_proj$"], {"experts.down"}),
        ([f"model.layers.{i}.self_attn.o_proj" for i in range(48)], {"o"}),
        (["language_model.model.layers.0.self_attn.o_proj"], {"o"}),
        (["layers.0.self_attn.o_proj"], {"o"}),
        (["transformer.layers.0.self_attn.o_proj"], {"o"}),
        # Layers of other parts of a model.
        ([f"model.vision_tower.layers.{i}.self_attn.q_proj" for i in range(48)], set()),
        (["vision_tower.layers.*.mlp", "mtp.layers.0.self_attn.o_proj"], set()),
        # ModelOpt's wildcards.
        (["*self_attn*"], {"qkv", "o"}),
        (["*.self_attn.*"], {"qkv", "o"}),
        ([f"model.layers.{i}.self_attn*" for i in range(48)], {"qkv", "o"}),
        (["model.layers.*.self_attn.o_*"], {"o"}),
        (["*.experts.*.down_proj", "*mlp.gate", "*lm_head*"], {"experts.down"}),
        (["vision_tower*", "model.visual.*", "*q"], set()),
        (["*"], {"qkv", "o", "experts.gate_up", "experts.down"}),
        # Names of engines for fused projections.
        (["qkv_proj"], {"qkv"}),
        ([f"model.layers.{i}.self_attn.qkv_proj" for i in range(48)], {"qkv"}),
        (
            ["re:.*self_attn\\.qkv_proj$", "model.layers.*.mlp.experts.gate_up_proj"],
            {"qkv", "experts.gate_up"},
        ),
        (["re:.*mlp\\.experts\\.\\d+\\.down_proj$"], {"experts.down"}),
    ],
)
def test_modules_that_are_not_converted(names: list[str], expected: set[str]) -> None:
    assert in_bf16(quantized({**FP8, "modules_to_not_convert": names})) == expected


@pytest.mark.parametrize("place", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        *((FP8, field) for field in ("modules_to_not_convert", "ignored_layers", "ignore")),
        (tensors(), "ignore"),
        *(
            ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, f)
            for f in ("exclude_modules", "ignore")
        ),
    ],
)
def test_every_name_of_the_list_counts(place: str, quantization: dict[str, Any], field: str) -> None:
    config = read_config(CONFIGS / "qwen3_30b.json") | {"quantization_config": None}
    description = describe(config | {place: {**quantization, field: ["self_attn"]}})
    skipped = {linear.what for linear in description.linears if f"{place}.{field}" in linear.reason}
    assert skipped == {"qkv", "o"}


def test_a_layer_that_is_bf16_in_some_layers_is_both() -> None:
    names = ["model.layers.0.self_attn.o_proj", "model.layers.7.mlp.experts.3.down_proj"]
    description = quantized({**FP8, "modules_to_not_convert": names})
    parts = [(linear.layers, bool(linear.reason)) for linear in description.linears if linear.what == "o"]
    assert parts == [(tuple(range(1, 48)), False), ((0,), True)]
    assert in_bf16(description) == {"o", "experts.down"}
    planned = plan(description, PlanOptions(max_tokens=8, max_batch=1))
    assert {"o", "experts.down"} <= {what for row in planned.rows for what in row.what}
    assert {layer.what: layer.layers for layer in planned.unplanned}["o"] == 1


def test_wildcards_of_one_layer_hold_in_it() -> None:
    description = quantized(
        {**FP8, "modules_to_not_convert": ["model.layers.0.self_attn*", "*.7.self_attn.o*"]}
    )
    attention = [linear for linear in description.linears if linear.what in ("qkv", "o")]
    assert {one.what: one.layers for one in attention if one.reason} == {"qkv": (0,), "o": (0, 7)}


def test_the_fused_down_projection_of_latent_attention_is_understood() -> None:
    config = read_config(CONFIGS / "deepseek_v3.json")
    config["quantization_config"]["modules_to_not_convert"] = ["self_attn.fused_qkv_a_proj"]
    assert in_bf16(describe(config)) == {"q_a+kv_a"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["Linear"], {"qkv": 48, "o": 48, "experts.gate_up": 48, "experts.down": 48}),
        (["Linear", "FusedMoE"], {"qkv": 48, "o": 48, "experts.gate_up": 48, "experts.down": 48}),
        (["re:.*mlp\\.experts.*"], {"experts.gate_up": 48, "experts.down": 48}),
        (["model.layers.0.self_attn"], {"qkv": 1, "o": 1}),
        (["self_attn", "re:.*gate_up_proj$"], {"qkv": 48, "o": 48, "experts.gate_up": 48}),
    ],
)
def test_compressed_tensors_may_name_its_targets(targets: list[str], expected: dict[str, int]) -> None:
    quantization = tensors()
    quantization["config_groups"]["group_0"]["targets"] = targets
    fp8 = [linear for linear in quantized(quantization).linears if not linear.reason]
    assert {linear.what: len(linear.layers) for linear in fp8} == expected


def test_the_targets_of_all_groups_count() -> None:
    quantization = tensors()
    groups = quantization["config_groups"]
    groups["group_1"] = {**groups["group_0"], "targets": ["re:.*mlp\\.experts.*"]}
    groups["group_0"]["targets"] = ["self_attn"]
    assert in_bf16(quantized(quantization)) == set()


@pytest.mark.parametrize("targets", [[], "Linear", [1], ["FusedMoE"], ["re:.*mlp.*", "LinearBase"]])
def test_other_targets_are_refused(targets: Any) -> None:
    quantization = tensors()
    quantization["config_groups"]["group_0"]["targets"] = targets
    with pytest.raises(ModelError, match="names of modules") as caught:
        quantized(quantization)
    assert caught.value.field.endswith(".targets")


def test_the_modules_that_longcat_disables_are_bf16() -> None:
    """Of the prediction layer, which follows 28 layers, only the projection may be in the list ("mtp")."""
    attention, mlp, mtp = ("q_a+kv_a", "q_b", "kv_b", "o"), ("mlp.gate_up", "mlp.down"), (28,)
    own = tuple(range(28))
    for names, expected in (
        (["self_attn"], dict.fromkeys(attention, own)),
        (["mlps"], dict.fromkeys(mlp, own)),
        (["self_attn", "mlps"], dict.fromkeys(attention + mlp, own)),
        (["mtp"], {"mtp.eh_proj": mtp}),
        (["mlps", "mtp"], {"mtp.eh_proj": mtp} | dict.fromkeys(mlp, own)),
    ):
        config = read_config(CONFIGS / "longcat_flash.json") | {"quantization_config": FP8}
        description = describe(config | {"disable_quant_module": names})
        assert {
            linear.what: linear.layers
            for linear in description.linears
            if "disable_quant_module" in linear.reason
        } == expected
        bare = read_config(CONFIGS / "longcat_flash.json") | {"disable_quant_module": names}
        assert unpadded(describe(bare, quantize="fp8-block")) == description.linears


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mimo_v2_flash", {"quantization_config": {**FP8, "store_dtype": "mxfp4", "mxfp4_block_size": 32}}),
        ("qwen3_30b", {"quantization_config": {**FP8, "routed_experts_quant_method": "mxfp4"}}),
        ("glm_5", {"quantization_config": FP8, "expert_dtype": "fp4"}),
        ("glm_5", {"quantization_config": {**FP8, "expert_dtype": "mxfp4"}}),
    ],
)
def test_experts_in_fp4_are_told_in_any_model(name: str, fields: dict[str, Any]) -> None:
    """Engines read these fields whatever the architecture is."""
    config = read_config(CONFIGS / f"{name}.json")
    eight, four = describe(config | {"quantization_config": FP8}), describe(config | fields)
    served = {linear.what for linear in eight.linears if not linear.reason}
    assert served - {linear.what for linear in four.linears if not linear.reason} == {
        "experts.gate_up", "experts.down",
    }  # fmt: skip
    with pytest.raises(ModelError, match="experts in FP4 are not served yet"):
        plan(four, PlanOptions(max_tokens=8, max_batch=1), strict=True)


def test_the_names_of_hys_shared_experts_are_understood() -> None:
    """The hub and vLLM have another name than transformers."""
    config = read_config(CONFIGS / "hy_v3.json")
    for name in ("shared_mlp", "shared_experts"):
        names = [
            f"model.layers.{i}.mlp.{name}.{part}_proj" for i in range(100) for part in ("gate", "up", "down")
        ]
        found = describe(config | {"quantization_config": {**FP8, "ignored_layers": names}})
        assert in_bf16(found) == {"shared.gate_up", "shared.down"}
        quantization = tensors()
        quantization["config_groups"]["group_0"]["targets"] = [rf"re:.*mlp\.{name}\..*_proj$"]
        found = describe(config | {"quantization_config": quantization})
        assert {linear.what for linear in found.linears if not linear.reason} == {
            "shared.gate_up",
            "shared.down",
        }


def test_the_names_of_longcats_dense_mlps_are_understood() -> None:
    names = [f"model.layers.{layer}.mlps.{half}.down_proj" for layer in range(28) for half in (0, 1)]
    config = read_config(CONFIGS / "longcat_flash.json")
    config["quantization_config"] = {**FP8, "ignored_layers": names}
    assert in_bf16(describe(config)) == {"mlp.down"}


def test_the_file_of_modelopt_beside_the_config_counts(tmp_path: Path) -> None:
    config = read_config(CONFIGS / "qwen3_30b.json")
    stated = config.pop("quantization_config")
    told = {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head", "*self_attn*"]}
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": told}))
    for extra, expected in (({}, {"qkv", "o"}), ({"quantization_config": stated}, set())):
        (tmp_path / "config.json").write_text(json.dumps(config | extra))
        for path in (tmp_path, tmp_path / "config.json"):
            assert in_bf16(load_model(path)) == expected
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no quantization_config"):
        load_model(tmp_path, quantize="fp8-block")
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ModelError, match=r"FP8_PB_WO.*NVFP4"):
        load_model(tmp_path)
    beside.write_text("{")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "expression",
    ["(", "a{99999999999}", f"a{{{'9' * 5000}}}", "(" * 5000, "a" * 5000 + "(" * 5000 + ")" * 5000],
)
def test_bad_expressions_are_errors(expression: str) -> None:
    with pytest.raises(ModelError, match="regular expressions") as caught:
        quantized({**FP8, "modules_to_not_convert": [f"re:{expression}"]})
    assert caught.value.field == "quantization_config.modules_to_not_convert"
    with pytest.raises(ModelError, match="regular expressions") as caught:
        quantized(tensors() | {"ignore": [f"re:{expression}"]})
    assert caught.value.field == "quantization_config.ignore"


@pytest.mark.parametrize("number", ["9" * 5000, "48", "٣", "²"])
def test_layers_that_the_model_does_not_have_are_no_match(number: str) -> None:
    names = [f"model.layers.{number}.self_attn.o_proj"]
    assert in_bf16(quantized({**FP8, "modules_to_not_convert": names})) == set()


def test_the_lists_of_real_checkpoints() -> None:
    next_80b = describe(read_config(CONFIGS / "qwen3_next_80b.json"))
    reasons = {linear.what: linear.reason for linear in next_80b.linears}
    assert all(reasons[what] for what in ("router", "lm_head", "shared.gate", "linear_attn.in_proj_ba"))
    assert not reasons["linear_attn.in_proj_qkvz"] and not reasons["experts.down"]
    minimax = describe(read_config(CONFIGS / "minimax_m2.json"))
    assert {linear.what for linear in minimax.linears if linear.reason} == {"router", "lm_head"}
    air = describe(read_config(CONFIGS / "glm_45_air.json"), quantize="fp8-block")
    mlps = {f"{part}.{name}" for part in ("mlp", "shared", "experts") for name in ("gate_up", "down")}
    assert {linear.what for linear in air.linears if not linear.reason} == {"qkv", "o", *mlps}


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("gpt_oss_120b", "mxfp4"),
        ("minimax_m3_mxfp8", "mxfp8"),
        ("glm_45_air_fp8", "weights.strategy: expected 'block', got 'channel'"),
        ("glm_46_fp8", "weights.strategy: expected 'block', got 'channel'"),
        ("kimi_k25", "weights.type: expected 'float', got 'int'"),
        ("kimi_k25_transformers", "weights.type: expected 'float', got 'int'"),
    ],
)
def test_other_formats_of_releases_are_refused_by_name(name: str, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        describe(read_config(CONFIGS / f"{name}.json"))


def test_fp4_experts_and_the_batched_projection_are_listed_as_lacking() -> None:
    for name in ("deepseek_v4_flash", "deepseek_v4_pro"):
        planned = plan(
            describe(read_config(CONFIGS / f"{name}.json")), PlanOptions(max_tokens=8, max_batch=1)
        )
        assert [layer.what for layer in planned.lacking] == ["o_a", "experts.gate_up", "experts.down"]
        assert any(row.op == "paged_mqa_logits_fp8" for row in planned.rows)
    base = describe(read_config(CONFIGS / "deepseek_v4_flash.json") | {"expert_dtype": "fp8"})
    assert [layer.what for layer in plan(base, PlanOptions(max_tokens=8, max_batch=1)).lacking] == ["o_a"]

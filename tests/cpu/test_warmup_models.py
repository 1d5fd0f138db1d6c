"""HF config -> ModelDescription."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.errors import ConfigError, ModelError
from moe_fp8.warmup import (
    ModelDescription,
    Parallelism,
    describe,
    gemm_shapes,
    load_model,
)
from moe_fp8.warmup.models import Indexer
from moe_fp8.warmup.models.families import known
from moe_fp8.warmup.models.fields import Fields
from moe_fp8.warmup.models.layers import expert_layers
from tests.model_configs import CONFIGS, config, in_blocks, model, shapes, shapes_of


def layers_of(description: ModelDescription, what: str) -> list[int]:
    return [layer for linear in description.linears if linear.what == what for layer in linear.layers]


def test_qwen3_may_have_a_shared_expert() -> None:
    assert not any(what.startswith("shared") for what in shapes("qwen3_30b", 1, 1))
    assert shapes("qwen3_30b", 1, 1, shared_expert_intermediate_size=0) == shapes("qwen3_30b", 1, 1)
    found = shapes("qwen3_30b", 2, 1, shared_expert_intermediate_size=768)
    assert (found["shared.gate_up"], found["shared.down"]) == ((768, 2048, None), (2048, 384, None))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("qwen3_30b", "num_shared_experts"),
        ("glm_45", "moe_shared_expert_intermediate_size"),
        ("hy_v3", "moe_shared_expert_intermediate_size"),
        ("kimi_k2", "shared_intermediate_size"),
    ],
)
def test_shared_experts_of_another_spelling_are_not_dropped(name: str, field: str) -> None:
    assert describe(in_blocks(name) | {field: 0}) == describe(in_blocks(name))
    with pytest.raises(ModelError, match=f"{field}: expected 0"):
        describe(in_blocks(name) | {field: 1024})


def test_the_prediction_layers_of_mimo_are_sliding_and_have_dense_mlps() -> None:
    description = describe(in_blocks("mimo_v2_flash") | {"num_nextn_predict_layers": 2})
    last = description.num_layers
    assert {last, last + 1} <= {*layers_of(description, "mlp.gate_up")}
    assert not {last, last + 1} & {*layers_of(description, "experts.gate_up")}
    full, sliding = (linear for linear in description.linears if linear.what == "qkv")
    assert {last, last + 1} <= {*sliding.layers} and not {last, last + 1} & {*full.layers}
    assert [part.units for part in sliding.n] == [64, 8, 8]


def test_hy_v4_may_gate_whole_heads() -> None:
    for gating, columns in (("elementwise", 256), ("headwise", 1)):
        description = describe(in_blocks("hy_v4") | {"gating_type": gating})
        (gate,) = (linear for linear in description.linears if linear.what == "gate")
        assert [(part.units, part.size) for part in gate.n] == [(64, columns)]


def test_deepseek_v32_is_described() -> None:
    description = load_model(CONFIGS / "deepseek_v32.json")
    assert description.indexer == Indexer(64, 128, 2048)
    assert (description.num_experts, description.experts_per_token) == (256, 8)
    assert layers_of(description, "mlp.down") == [0, 1, 2]
    # The prediction layer has experts too.
    assert layers_of(description, "experts.down") == list(range(3, 62))
    assert description.name == "deepseek_v32"
    assert model("deepseek_v3").indexer is None


def test_qwen3_is_described() -> None:
    description = model("qwen3_235b")
    assert layers_of(description, "mlp.down") == []
    assert description.num_shared_experts == 0
    # A listed layer without experts has a dense MLP.
    assert layers_of(model("qwen3_235b", mlp_only_layers=[0]), "mlp.down") == [0]
    assert len(layers_of(model("qwen3_235b", decoder_sparse_step=2), "mlp.down")) == 47


def test_folder_and_file_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("qwen3_30b")))
    assert load_model(folder).name == "my-model"
    assert load_model(folder / "config.json").name == "my-model"
    assert load_model(folder).linears == load_model(CONFIGS / "qwen3_30b.json").linears


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("hidden_size", {"hidden_size": ...}),
        ("hidden_size", {"hidden_size": "7168"}),
        ("hidden_size", {"hidden_size": True}),
        ("hidden_size", {"hidden_size": 0}),
        ("moe_intermediate_size", {"moe_intermediate_size": None}),
        ("intermediate_size", {"intermediate_size": ...}),
        ("n_routed_experts", {"n_routed_experts": ...}),
        ("n_routed_experts", {"num_experts": 128}),
        ("num_experts_per_tok", {"num_experts_per_tok": 257}),
        ("first_k_dense_replace", {"first_k_dense_replace": 62}),
        ("mlp_only_layers", {"mlp_only_layers": "0,1"}),
        ("v_head_dim", {"v_head_dim": ...}),
        ("kv_lora_rank", {"kv_lora_rank": ...}),
        ("index_topk", {"index_topk": ...}),
        ("index_n_heads", {"index_n_heads": ..., "index_head_dim": ..., "index_topk": ...}),
        ("q_lora_rank", {"q_lora_rank": None}),
        ("torch_dtype", {"torch_dtype": "int8"}),
        ("torch_dtype", {"dtype": "float16"}),
        ("model_type", {"model_type": ...}),
        ("quantization_config", {"quantization_config": ...}),
        ("quant_method", {"quantization_config": {"quant_method": "awq", "weight_block_size": [128, 128]}}),
        ("weight_block_size", {"quantization_config": {"quant_method": "fp8"}}),
        (
            "weight_block_size",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}},
        ),
    ],
)
def test_bad_configs_name_the_field(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        model("deepseek_v32", **changes)
    assert field in caught.value.field


def test_gqa_heads_must_group() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        model("qwen3_30b", num_key_value_heads=5)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("moe_intermediate_size", [1536, 3072]),
        ("num_shared_expert", [1, 2]),
        ("moe_intermediate_size", [0, 1.5]),
    ],
)
def test_layers_of_several_sizes_are_refused(field: str, values: list[int]) -> None:
    config = in_blocks("hunyuan_a13b")
    half = config["num_hidden_layers"] // 2
    with pytest.raises(ConfigError) as caught:
        describe(config | {field: [value for value in values for _ in range(half)]})
    assert caught.value.field == field


def test_a_number_for_each_layer_may_be_the_same_number() -> None:
    config = in_blocks("hunyuan_a13b")
    layers = config["num_hidden_layers"]
    each = {"moe_intermediate_size": 3072, "num_shared_expert": 1, "moe_topk": 8}
    one = describe(config | each)
    listed = {name: [value] * layers for name, value in each.items()}
    assert describe(config | listed) == one
    # The most experts of a token bound every buffer.
    assert describe(config | listed | {"moe_topk": [2, *[8] * (layers - 1)]}) == one


@pytest.mark.parametrize("name", ["qwen3_next_80b", "qwen35_397b"])
def test_attention_has_a_gate_unless_the_config_says_otherwise(name: str) -> None:
    config = in_blocks(name)
    place = config.get("text_config", config)
    found = {}
    for gate in (None, True, False):
        place["attn_output_gate"] = gate
        found[gate] = next(one.n for one in gemm_shapes(describe(config), Parallelism()) if one.what == "qkv")
    queries = place["num_attention_heads"] * place["head_dim"]
    assert found[None] == found[True] == found[False] + queries
    place["attn_output_gate"] = "no"
    with pytest.raises(ModelError, match="attn_output_gate: expected true or false"):
        describe(config)


@pytest.mark.parametrize("name", ["qwen3_next_80b", "longcat_flash", "hy_v4"])
@pytest.mark.parametrize("given", [None, "marvel_9"])
def test_a_model_may_be_read_as_a_known_one(name: str, given: str | None) -> None:
    config = in_blocks(name)
    known = describe(config)
    read = describe(config | {"model_type": given}, read_as=known.architecture)
    assert read == known


def test_the_docs_name_every_architecture() -> None:
    text = (CONFIGS.parents[1] / "docs" / "warmup.md").read_text(encoding="utf-8")
    listed = text.partition("Known are ")[2].partition(". ")[0]
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(known())


def test_a_missing_model_type_may_be_named() -> None:
    with pytest.raises(ModelError, match=r"model_type: expected a string.*--read-as"):
        model("deepseek_v3", model_type=...)


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_unreadable_config_is_a_config_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, range(8)),
        ({"first_k_dense_replace": 3}, range(3, 8)),
        ({"moe_layer_num_skipped": 3}, range(3, 8)),
        ({"moe_layer_num_skipped": [3] * 8}, range(3, 8)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5, 7)),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, (2, 4, 6)),
        ({"moe_layer_freq": [0, 1, 0, 1, 1, 0, 0, 1]}, (1, 3, 4, 7)),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 5, "moe_layer_interval": 2}, (3, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, range(1, 8)),
        ({"mlp_layer_types": ["dense", "dense", *["sparse"] * 6]}, range(2, 8)),
    ],
)
def test_configs_spell_the_layers_with_experts(fields: dict[str, Any], sparse: Iterable[int]) -> None:
    assert expert_layers(Fields(fields), 8) == tuple(sparse)


@pytest.mark.parametrize("place", ["text_config", "language_config", "llm_config"])
def test_the_language_model_has_a_config_of_its_own(place: str) -> None:
    nested = {"model_type": "with_images", "vision_config": {"hidden_size": 64}, place: config("qwen3_30b")}
    assert describe(nested, name="qwen3_30b") == model("qwen3_30b")


def test_missing_fields_have_the_defaults_of_engines() -> None:
    assert model("qwen3_next_80b", full_attention_interval=...) == model("qwen3_next_80b")
    assert model("qwen3_30b", torch_dtype=..., dtype=...).dtype == "bfloat16"
    assert model("qwen3_30b", torch_dtype=..., dtype="float16").dtype == "float16"


def test_sliding_layers_may_name_only_what_differs() -> None:
    usual = config("dots3_note")
    differing = {name[4:]: value for name, value in usual.items() if name.startswith("swa_")}
    differing = {name: value for name, value in differing.items() if usual.get(name) != value}
    assert 0 < len(differing) < 6
    first = usual["layer_types"].index("sliding_attention")
    changes = {name: ... for name in usual if name.startswith("swa_")}
    found = model("dots3_note", **changes, per_layer_config={f"{first:02d}": differing})
    assert found.linears == model("dots3_note").linears


def test_sliding_layers_have_a_gate_of_their_own_kind() -> None:
    usual = {linear.n for linear in model("dots3_note").linears if linear.what == "gate"}
    changed = model("dots3_note", swa_attention_gate_type="elementwise")
    gates = {linear.n: linear.layers for linear in changed.linears if linear.what == "gate"}
    (columns,) = gates.keys() - usual
    assert columns[0].size == config("dots3_note")["swa_v_head_dim"]
    sliding = [i for i, word in enumerate(config("dots3_note")["layer_types"]) if word == "sliding_attention"]
    assert {*sliding} <= {*gates[columns]}


def test_longcat_counts_layers_and_not_attentions() -> None:
    """Older releases of transformers write both numbers."""
    usual = in_blocks("longcat_flash")
    assert describe({**usual, "num_hidden_layers": 56}) == describe(usual)
    assert describe({**usual, "num_nextn_predict_layers": 1}) == describe(usual)
    assert shapes_of(describe(usual))["mtp.eh_proj"] == (6144, 12288, None)


def test_the_shared_mlp_of_hunyuan_has_a_dense_width() -> None:
    found = shapes_of(describe({**in_blocks("hunyuan_a13b"), "intermediate_size": 6144}))
    assert (found["shared.gate_up"], found["shared.down"]) == ((12288, 4096, None), (4096, 6144, None))
    assert found["experts.down"] == (4096, 3072, 64)


def test_a_null_of_the_language_model_hides_no_outer_field() -> None:
    usual = config("qwen3_30b")
    nested = {**usual, "text_config": dict.fromkeys(usual)}
    assert describe(nested, name="qwen3_30b") == model("qwen3_30b")


def test_further_words_for_layers_are_left_out() -> None:
    words = config("dots3_note")["layer_types"]
    more = [*words, "sliding_attention", "sliding_attention"]
    assert model("dots3_note", layer_types=more) == model("dots3_note")

"""Any config, however wrong, gives a plan or a typed error, and soon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fp8.errors import ConfigError, ModelError
from moe_fp8.warmup import PlanOptions, describe, plan, read_config
from moe_fp8.warmup.models.fields import NESTED
from tests.model_configs import in_blocks

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))

#: A config takes at most 1.6 s; a config whose plan grows without bound takes far more than this.
MOST_SECONDS = 20.0

scalars: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2**40)
    | st.sampled_from([0, 1, 2, 3, 7, 63, 64, 127, 128, 129, 576, 2**31, 2**63])
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.sampled_from(["bfloat16", "fp8", "e5m2", "static", "deepseek_v3", "qwen3_moe", "sparse", "dense"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """The places of all fields, those of nested objects too."""
    found: list[tuple[str, ...]] = []
    for name, value in config.items():
        found.append((name,))
        if isinstance(value, dict):
            found += [(name, *path) for path in paths(value)]
    return found


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A config with a few fields changed, removed or added."""
    config = read_config(CONFIGS / f"{draw(st.sampled_from(NAMES))}.json")
    other = read_config(CONFIGS / f"{draw(st.sampled_from(NAMES))}.json")
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(paths(config)))
        place = config
        for name in path[:-1]:
            place = place[name]
        change = draw(st.sampled_from(("value", "remove", "scale", "borrow", "add")))
        if change == "remove":
            del place[path[-1]]
        elif change == "scale" and isinstance(place[path[-1]], int):
            place[path[-1]] = place[path[-1]] * draw(st.integers(-1, 5)) // draw(st.integers(1, 4))
        elif change == "borrow":
            name = draw(st.sampled_from(sorted(other)))
            config[name] = other[name]
        elif change == "add":
            place[draw(st.text(min_size=1, max_size=8))] = draw(values)
        else:
            place[path[-1]] = draw(values)
        if not config:
            break
    return config


@settings(max_examples=250, deadline=None)
@given(config=mutated(), tp=st.sampled_from((1, 8)), ep=st.sampled_from((1, 8, 32)))
def test_a_mutated_config_gives_a_plan_or_a_typed_error(config: dict[str, Any], tp: int, ep: int) -> None:
    started = time.process_time()
    try:
        planned = plan(describe(config), PlanOptions(tp=tp, ep=ep, max_tokens=2_000_000))
        assert planned.specs
        planned.to_dict()
    except ConfigError as error:
        assert error.field and str(error)
    assert time.process_time() - started < MOST_SECONDS


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_nextn_predict_layers"])
def test_layers_without_number_are_refused(name: str) -> None:
    config = read_config(CONFIGS / "deepseek_v32.json")
    assert describe({**config, name: 10_000}).linears
    with pytest.raises(ModelError, match=f"{name}: expected an integer from . to 10,000, got 10001"):
        describe({**config, name: 10_001})


def test_all_missing_fields_are_named_at_once() -> None:
    config = read_config(CONFIGS / "deepseek_v32.json")
    for name in ("hidden_size", "kv_lora_rank", "vocab_size", "num_experts_per_tok"):
        del config[name]
    with pytest.raises(ModelError) as caught:
        describe(config)
    for name in ("hidden_size", "kv_lora_rank", "vocab_size", "num_experts_per_tok"):
        assert name in caught.value.field


def test_an_unknown_architecture_is_named() -> None:
    config = read_config(CONFIGS / "deepseek_v3.json") | {"model_type": "marvel_9"}
    with pytest.raises(ModelError, match="marvel_9") as caught:
        describe(config)
    assert caught.value.field == "model_type" and "deepseek_v3" in caught.value.expected
    assert "read_as" in caught.value.remedy
    # A user who knows better says so.
    assert (
        describe(config, read_as="deepseek_v3").linears
        == describe(config | {"model_type": "deepseek_v3"}).linears
    )
    with pytest.raises(ModelError, match="hidden_size"):
        describe({"model_type": "marvel_9", "quantization_config": {}})


def test_a_model_that_no_kernel_serves_is_refused() -> None:
    config = read_config(CONFIGS / "qwen3_235b.json") | {"hidden_size": 1}
    with pytest.raises(ModelError, match=r"a layer that a kernel serves.*K is a positive multiple of 128"):
        plan(describe(config), PlanOptions(ep=32))


def _flash(**changes: Any) -> dict[str, Any]:
    return {**read_config(CONFIGS / "deepseek_v4_flash.json"), **changes}


def test_the_experts_of_deepseek_v4_are_of_the_named_format() -> None:
    config = _flash()
    quantized = config["quantization_config"] | {"expert_dtype": "fp8"}
    config.pop("expert_dtype", None)
    assert describe(config | {"quantization_config": quantized}) == describe(config | {"expert_dtype": "fp8"})
    for unknown in ("mxfp8", "int4", 5, []):
        with pytest.raises(ModelError, match="expert_dtype: expected fp4, mxfp4, fp8 or float8_e4m3fn"):
            describe(config | {"expert_dtype": unknown})


@pytest.mark.parametrize("ratios", [[0, 0], [], [0, 0, 8, 128] * 20])
def test_ratios_of_compression_are_given_for_each_layer(ratios: list[int]) -> None:
    with pytest.raises(ModelError, match="compress_ratios: expected 0, 4 or 128 for each of 43 layers"):
        describe(_flash(compress_ratios=ratios))


@pytest.mark.parametrize("name", ["glm_53_flash", "minimax_m3_transformers", "dots3_note"])
def test_kinds_of_layers_are_not_guessed(name: str) -> None:
    config = in_blocks(name)
    assert describe(config).linears
    text = next((config[key] for key in NESTED if key in config), config)
    del text["layer_types"]
    with pytest.raises(ModelError, match="layer_types"):
        describe(config)


def test_an_unknown_word_for_a_layer_is_refused() -> None:
    config = read_config(CONFIGS / "deepseek_v3.json")
    words = ["Dense"] * 3 + ["sparse"] * 58
    with pytest.raises(ModelError, match=r"mlp_layer_types: .*Dense"):
        describe(config | {"mlp_layer_types": words})

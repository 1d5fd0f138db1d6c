"""The loader: configs and checkpoints as they are published, and random weights."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_fp8
from moe_fp8.errors import ModelError
from server_example.model.config import ModelConfig
from server_example.model.layers import Fp8Weight
from server_example.model.transformer import ModelWeights, Transformer
from server_example.model.weights import load_weights
from tests.demo_model import demo_folder, model_run
from tests.model_configs import CONFIGS

__all__ = ["demo_folder"]

CPU = torch.device("cpu")
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


def shard(folder: Path, to: Path, count: int, extra: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with `extra` tensors, in `count` files with an index, as the hub has it."""
    to.mkdir()
    shutil.copy(folder / "config.json", to)
    tensors = load_file(folder / "model.safetensors") | extra
    weight_map = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:06d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::count]}
        save_file(part, to / name)
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (to / "model.safetensors.index.json").write_text(json.dumps(index))
    return to


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flat(part: object) -> list[torch.Tensor]:
    """Every tensor of a tree of dataclasses and tuples."""
    if isinstance(part, torch.Tensor):
        return [part]
    parts = part if isinstance(part, tuple) else vars(part).values()
    return [tensor for each in parts for tensor in flat(each)]


def load(folder: Path) -> ModelWeights:
    return load_weights(folder, ModelConfig.load(folder), CPU)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v32_transformers"])
def test_the_published_config_is_read(name: str) -> None:
    config = ModelConfig.load(CONFIGS / f"{name}.json", rope_scaling=YARN)
    assert config.rope.rope_theta == 10000
    yarn = config.rope.rope_scaling
    assert yarn is not None
    assert yarn.rotation_scale == 1
    assert yarn.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert ModelConfig.load(CONFIGS / f"{name}.json", eos_token_id=[7]).eos_token_id == 7
    assert config.num_nextn_predict_layers == 1 and config.power_of_two_scales
    # Among 32 pairs, those up to 10 turn more than 32 times in 4096 tokens; those from 23 on, less than once.
    frequency = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    ratio = yarn.frequencies(frequency, 10000.0) / frequency
    assert ratio[:11].eq(1).all() and ratio[10:24].diff().lt(0).all()
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40, dtype=torch.float64))


def test_shards_hold_the_same_model(
    demo_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {
        "model.layers.4.eh_proj.weight": torch.ones(2),
        "model.layers.4.shared_head.norm.weight": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    folder = shard(demo_folder, tmp_path / "model", 3, extra)
    with pytest.raises(ModelError, match=r"model.layers.4.eh_proj"):
        load(folder)
    edit_json(folder / "config.json", num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO, "server_example"):
        loaded = flat(load(folder))
    assert "3 tensors are not used" in caplog.text
    expected = flat(load(demo_folder))
    assert len(loaded) == len(expected)
    for ours, theirs in zip(loaded, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.float().equal(theirs.float())


def test_joined_weights_have_the_rows_and_scales_of_their_parts(demo_folder: Path) -> None:
    tensors, weights = load_file(demo_folder / "model.safetensors"), load(demo_folder)

    def check(weight: Fp8Weight, *names: str) -> None:
        parts = [
            Fp8Weight(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]).dequantized()
            for name in names
        ]
        assert weight.dequantized().equal(torch.cat(parts))

    name = "model.layers.2"
    layer = weights.layers[2]
    check(layer.attention.qkv_a, f"{name}.self_attn.q_a_proj", f"{name}.self_attn.kv_a_proj_with_mqa")
    experts = layer.feed_forward.experts
    for expert in (0, 5):
        prefix = f"{name}.mlp.experts.{expert}"
        one = Fp8Weight(experts.gate_up.weight[expert], experts.gate_up.scale[expert])
        check(one, f"{prefix}.gate_proj", f"{prefix}.up_proj")
        check(Fp8Weight(experts.down.weight[expert], experts.down.scale[expert]), f"{prefix}.down_proj")


def test_a_broken_index_is_named(demo_folder: Path, tmp_path: Path) -> None:
    folder = shard(demo_folder, tmp_path / "model", 2, {})
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    first, second = sorted(set(good.values()))
    norm = "model.norm.weight"
    other = second if good[norm] == first else first

    edit_json(index, weight_map={**good, norm: other})
    with pytest.raises(ModelError, match=norm):
        load(folder)
    edit_json(index, weight_map={**good, norm: "../elsewhere.safetensors"})
    with pytest.raises(ModelError, match=r"index\.json"):
        load(folder)
    for broken in (
        "[]",
        "[" * 100_000,
        '{"weight_map": {}}',
        json.dumps({"weight_map": {**good, norm: "\ud800"}}),
        json.dumps({"weight_map": {**good, norm: "a\0b"}}),
    ):
        index.write_text(broken)
        with pytest.raises(ModelError, match=r"index\.json"):
            load(folder)
    index.write_text(json.dumps({"weight_map": good}))
    (folder / second).unlink()
    with pytest.raises(ModelError, match=second):
        load(folder)


def test_files_that_the_index_does_not_list_are_not_read(demo_folder: Path, tmp_path: Path) -> None:
    folder = shard(demo_folder, tmp_path / "model", 2, {})
    save_file({"model.norm.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    load(folder)


def test_a_tensor_that_a_layer_does_not_use_is_refused(demo_folder: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.bias"
    with pytest.raises(ModelError, match=name):
        load(shard(demo_folder, tmp_path / "model", 2, {name: torch.ones(2)}))


def test_the_first_layers_of_a_checkpoint_run_alone(
    demo_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its further layers, and those that predict further tokens, are left out."""
    folder = shard(demo_folder, tmp_path / "model", 2, {"model.layers.4.eh_proj.weight": torch.ones(2)})
    edit_json(folder / "config.json", num_nextn_predict_layers=1)
    config = ModelConfig.load(folder, num_hidden_layers=2)
    with caplog.at_level(logging.INFO, "server_example"):
        weights = load_weights(folder, config, CPU)
    assert "tensors are not used, such as model.layers." in caplog.text
    expected = load(demo_folder).layers[:2]
    for ours, theirs in zip(flat(weights.layers), flat(expected), strict=True):
        assert ours.float().equal(theirs.float())


def test_a_dtype_that_torch_lacks_is_named(demo_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_folder, folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = "model.layers.0.mlp.down_proj.weight"
    rows, columns = header[name]["shape"]
    header[name] |= {"dtype": "F6_E2M3", "shape": [rows * columns * 4 // 3]}
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    with pytest.raises(ModelError, match=name):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tensor_that_is_not_quantized_may_have_any_float(
    demo_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    name = "model.norm.weight"
    shutil.copy(demo_folder / "config.json", tmp_path)
    tensors = load_file(demo_folder / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path).norm.equal(tensors[name].float())


def test_a_missing_tensor_is_named(demo_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load(folder)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    weights = load(folder)
    assert weights.head is weights.embedding
    save_file(tensors | {"lm_head.weight": torch.ones(2)}, folder / "model.safetensors")
    weights = load(folder)
    assert weights.head is weights.embedding, "a copy of it is not read"
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load(folder)


@pytest.mark.parametrize("scale_format", [None, "ue8m0"])
def test_random_weights_have_the_checkpoints_sizes(
    demo_folder: Path, tmp_path: Path, scale_format: str | None
) -> None:
    shutil.copy(demo_folder / "config.json", tmp_path)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": scale_format}
    config = ModelConfig.load(tmp_path, num_hidden_layers=2, quantization_config=quantization)
    weights = load_weights(tmp_path, config, CPU, load_format="dummy")
    again = load_weights(tmp_path, config, CPU, load_format="dummy")
    expected = load(demo_folder)
    assert len(weights.layers) == 2
    for ours, repeated, theirs in zip(
        flat(weights.layers), flat(again.layers), flat(expected.layers[:2]), strict=True
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.float().equal(repeated.float())
    experts = weights.layers[1].feed_forward.experts
    values = experts.down.weight.float()
    assert float(values.std()) == pytest.approx(64, rel=0.02)
    assert not values[0].equal(values[1])
    mantissa, _ = experts.down.scale.frexp()
    assert (mantissa == 0.5).all() == (scale_format == "ue8m0")

    model = Transformer(config, weights, max_positions=256, num_workers=8)
    run = model_run(model, 80)
    logits = run.prefill(list(range(1, 71)))
    assert logits.isfinite().all() and float(logits.std()) > 0.1
    assert run.decode(5).isfinite().all()
    for cache in run.caches:
        mantissa, _ = cache.index_scales[run.pages].flatten()[:71].frexp()
        assert (mantissa == 0.5).all() == (scale_format == "ue8m0")


def test_several_shared_experts_are_one_wide_mlp(demo_folder: Path) -> None:
    config = ModelConfig.load(demo_folder, num_hidden_layers=2, n_shared_experts=2)
    shared = load_weights(demo_folder, config, CPU, load_format="dummy").layers[1].feed_forward.shared
    assert shared.down.weight.shape == (config.hidden_size, 2 * config.moe_intermediate_size)
    assert shared.gate_up.weight.shape == (4 * config.moe_intermediate_size, config.hidden_size)


@pytest.mark.parametrize("scale_format", [None, "ue8m0"])
def test_every_activation_is_quantized_in_the_models_format(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch, scale_format: str | None
) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": scale_format}
    config = ModelConfig.load(demo_folder, num_hidden_layers=2, quantization_config=quantization)
    weights = load_weights(demo_folder, config, CPU, load_format="dummy")
    formats = {}

    def recorded(name: str) -> Any:
        op = getattr(moe_fp8, name)

        def call(*arguments: Any, power_of_two: bool, **options: Any) -> Any:
            formats[name] = power_of_two
            return op(*arguments, power_of_two=power_of_two, **options)

        return call

    names = (
        "quantize_fp8", "linear_fp8", "silu_mul_quantize", "fused_moe", "indexer_quantize_and_cache",
    )  # fmt: skip
    for name in names:
        monkeypatch.setattr(moe_fp8, name, recorded(name))
    model = Transformer(config, weights, max_positions=64, num_workers=8)
    model_run(model, 64).prefill([1, 2, 3])
    assert formats == dict.fromkeys(names, scale_format == "ue8m0")

"""Every weight matrix of transformers' own models is in the planner's list, with the same sizes.

The models are built without memory (on the meta device), from the configs that transformers' classes write.
The planner's code is not used to read them: names and shapes come from the modules themselves.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from moe_fp8.warmup import ModelDescription, describe, read_config
from tests.model_configs import CONFIGS, in_blocks
from tests.model_configs import NAMES as CONFIG_NAMES

if sys.version_info < (3, 11):
    pytest.skip("transformers 5.23 needs Python 3.11", allow_module_level=True)

from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

#: Configs that a class of transformers wrote, each with the config of the same model as the hub has it.
NAMES = (
    *(name for name in CONFIG_NAMES if name.endswith("_transformers") and "gpt_oss" not in name),
    "hy_v3",
)

#: Matrices that multiply no hidden states: embeddings, convolutions, biases by position or head, encoders.
NO_LINEAR = re.compile(
    r"embed|conv1d|position_bias|index_kpool|sinks|A_log|dt_bias|visual|vision|audio|rotary|hc_base|e_score"
)

#: Names of the models -> names that the planner's layers have in checkpoints.
RENAMED = (
    (r"compressor\.indexer\.scorer\.", "indexer."),
    (r"compressor\.indexer\.(kv|gate)_proj", "indexer.compressor"),
    (r"compressor\.indexer\.q_b_proj", "indexer.wq_b"),
    (r"compressor\.(kv|gate)_proj", "compressor"),
    (r"indexer\.(q|k)_proj", "indexer"),
    (r"indexer\.index_kpool_compress_gate", "indexer.kpool"),
    (r"forget_gate\.", ""),
    (r"mlps\.\d\.", "mlps."),
    (r"self_attn\.\d\.", "self_attn."),
    (r"mlp\.router\.classifier|mlp\.gate\.wg|mlp\.router$", "mlp.gate"),
    (r"block_sparse_moe", "mlp"),
    (r"\.experts\.gate_up_proj", ".experts.gate"),
    (r"gate_up_proj", "gate_proj"),
    (r"\.experts\.down_proj", ".experts.down"),
    (r"^(attn_hc|ffn_hc|mlp_hc|hc_head|hc_\w+)\.(fn|hc_fn)$", "hyper_connections"),
)

#: Names that stand for several matrices of a layer, which the planner lists as one.
SUMMED = ("self_attn.compressor", "self_attn.indexer.compressor", "self_attn.indexer")

Sizes = tuple[int, int, int | None]


def shape_of(name: str, parameter: torch.Tensor) -> Sizes:
    """(n, k, experts) of a weight."""
    if parameter.dim() == 3:
        experts, n, k = parameter.shape
        return n, k, experts
    n, k = parameter.shape
    return n, k, None


def built(config: dict[str, Any]) -> nn.Module:
    """The language model of a config, on the meta device."""
    given = {
        name: value for name, value in config.items() if name not in ("quantization_config", "model_type")
    }
    whole = CONFIG_MAPPING[config["model_type"]](**given)
    text = whole.text_config if "text_config" in config else whole
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(text)
        except ValueError:
            return AutoModel.from_config(text)


@cache
def matrices(name: str) -> dict[tuple[int | None, str], list[Sizes]]:
    """The weight matrices of a model by layer and name; names that LongCat has twice share a list."""
    found: dict[tuple[int | None, str], list[Sizes]] = {}
    for path, parameter in built(read_config(CONFIGS / f"{name}.json")).named_parameters():
        if parameter.dim() < 2 or NO_LINEAR.search(path):
            continue
        below = re.match(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(.*)", path)
        layer, module = (int(below[1]), below[2]) if below else (None, path.removeprefix("model."))
        module = module.removesuffix(".weight")
        for pattern, replacement in RENAMED:
            module = re.sub(pattern, replacement, module)
        found.setdefault((layer, module), []).append(shape_of(path, parameter))
    return found


def described(name: str) -> ModelDescription:
    return describe(in_blocks(name))


def covered(model: ModelDescription) -> dict[tuple[int | None, str], tuple[str, Sizes]]:
    """What the planner lists, by layer and the checkpoint's names; fused layers have several names."""
    found = {}
    for linear in model.linears:
        if linear.engine == "sglang":
            continue  # it fuses projections that are also listed without it, and pads them
        n = sum(part.units * part.size for part in linear.n)
        sizes = (n, linear.k.units * linear.k.size, model.num_experts if linear.routed else None)
        for module in linear.modules:
            module = module.replace("block_sparse_moe", "mlp")
            module = re.sub(EXPERTS, lambda m: "experts." + MLP[m[1]], module)
            for layer in linear.layers or (None,):
                found[layer, module] = (linear.what, sizes)
    return found


EXPERTS = re.compile(r"(?<!_)experts\.(gate|up|down|w1|w2|w3)(_proj)?$")
MLP = {"gate": "gate", "up": "gate", "w1": "gate", "w3": "gate", "down": "down", "w2": "down"}


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_is_listed_with_its_sizes(name: str) -> None:
    model = described(name)
    listed = covered(model)
    sums: dict[tuple[int | None, str], int] = {}
    for (layer, module), shapes in matrices(name).items():
        place = (layer, module)
        if module == "hyper_connections":
            place = (None, module)
        assert place in listed, (
            f"{name}: layer {layer} has {module} {shapes}, which the planner does not list"
        )
        what, (n, k, experts) = listed[place]
        if "longcat" in name and what == "experts.gate_up":
            experts = 768  # transformers gives the 256 zero-experts weights, which it never uses
        for shape in shapes if module in SUMMED else shapes[:1]:
            assert shape[1:] == (k, experts), (place, what, shape, (n, k, experts))
            key = (-1 if place[0] is None else place[0], what)
            sums[key] = sums.get(key, 0) + shape[0]
    widths = {
        (layer, linear.what): sum(part.units * part.size for part in linear.n)
        for linear in model.linears
        for layer in linear.layers or (-1,)
    }
    for place, total in sums.items():
        assert total == widths[place] or place[1] == "hyper_connections", (name, place, total)


@pytest.mark.parametrize("name", NAMES)
def test_no_listed_layer_is_invented(name: str) -> None:
    model, real = described(name), matrices(name)
    layers = {layer for layer, _ in real}
    for linear in model.linears:
        if linear.what.startswith(("mtp.", "hyper_connections")):
            continue  # transformers has no prediction layers
        for layer in linear.layers or (None,):
            if layer not in layers:
                continue  # a prediction layer
            names = {module.replace("block_sparse_moe", "mlp") for module in linear.modules}
            names |= {re.sub(EXPERTS, lambda m: "experts." + MLP[m[1]], each) for each in names}
            assert any((layer, each) in real for each in names), (name, layer, linear.what)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_transformers")])
def test_both_spellings_are_one_model(name: str) -> None:
    ours, theirs = described(name.removesuffix("_transformers")), described(name)

    def sizes(model: ModelDescription) -> set[tuple[Any, ...]]:
        return {
            (linear.what, linear.n, linear.k, linear.layers, linear.reason)
            for linear in model.linears
            if not linear.what.startswith("mtp.")
        }

    depth = min(ours.num_layers, theirs.num_layers)
    assert ours.num_layers == theirs.num_layers
    for one, other in ((ours, theirs), (theirs, ours)):
        assert {(what, n, k) for what, n, k, *_ in sizes(one)} == {
            (what, n, k) for what, n, k, *_ in sizes(other)
        }
    assert depth and (ours.num_experts, ours.experts_per_token) == (
        theirs.num_experts,
        theirs.experts_per_token,
    )
    assert (ours.indexer, ours.max_positions) == (theirs.indexer, theirs.max_positions)

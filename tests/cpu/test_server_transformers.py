"""The example model, and the model that trains it, compute what transformers' DeepSeek-V3.2 computes.

Each variant changes the demo checkpoint's config. transformers loads the dequantized weights in fp32. The
comparison is tight without the rounding of activations: the ops are then replaced by their maths in fp32.
With the rounding, it is as close as FP8 allows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_fp8
from moe_fp8.warmup import read_config
from server_example.cache import LayerCache
from server_example.model.batch import PrefillBatch, Run
from server_example.model.config import ModelConfig
from server_example.model.layers import Fp8Weight, Quantizer
from server_example.model.transformer import Transformer
from server_example.pages import PAGE_TOKENS
from server_example.train.model import TrainedModel
from tests.demo_model import demo_folder, load_model, model_run
from tests.model_configs import CONFIGS

if sys.version_info < (3, 11):
    pytest.skip("transformers 5.23 needs Python 3.11", allow_module_level=True)

from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

__all__ = ["demo_folder"]

TOKENS, DECODED = 96, 16
CPU = torch.device("cpu")

PUBLISHED_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
#: With the published 4096, the positions of this test turn no stretched pair far.
YARN = PUBLISHED_YARN | {"original_max_position_embeddings": 64}

VARIANTS: dict[str, dict[str, Any]] = {
    "all tokens selected": {"index_topk": TOKENS},
    "a selection": {"index_topk": 16},
    "yarn": {"index_topk": 16, "rope_scaling": YARN},
    "yarn, magnitude of the rotation": {"index_topk": TOKENS, "rope_scaling": YARN | {"mscale": 0.707}},
    "yarn, no magnitudes": {
        "index_topk": TOKENS,
        "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 32},
    },
    "yarn, given attention factor, no truncation": {
        "index_topk": TOKENS,
        "rope_scaling": YARN | {"attention_factor": 1.3, "truncate": False},
    },
    "transformers' spelling": {
        "index_topk": TOKENS,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0}
        | {name: value for name, value in YARN.items() if name != "type"},
    },
    "no groups": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-2},
    "weights not normalized": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "tied embeddings": {"tie_word_embeddings": True, "index_topk": TOKENS},
}


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    scaled = {name for name in tensors if name.endswith("_scale_inv")}
    return {
        name: Fp8Weight(tensor, tensors[f"{name}_scale_inv"]).dequantized()
        if f"{name}_scale_inv" in scaled
        else tensor.float()
        for name, tensor in tensors.items()
        if name not in scaled
    }


def make_variant(
    demo: Path, folder: Path, changes: dict[str, Any], *, embedding: float = 0.25
) -> tuple[Path, DeepseekV32ForCausalLM]:
    """A checkpoint for our loader, and the same weights in transformers' model.

    The demo model's embedding is multiplied by `embedding`: smaller, so that the layers matter as much.
    """
    tensors = load_file(demo / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "k_norm" in name:
            # The demo model's indexers have a trivial norm.
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        if name == "model.embed_tokens.weight":
            tensor *= embedding
    config = json.loads((demo / "config.json").read_text()) | changes
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    ours, theirs = folder / "ours", folder / "theirs"
    ours.mkdir()
    theirs.mkdir()
    save_file(tensors, ours / "model.safetensors", metadata={"format": "pt"})
    (ours / "config.json").write_text(json.dumps(config))
    save_file(dequantized(tensors), theirs / "model.safetensors", metadata={"format": "pt"})
    del config["quantization_config"]
    (theirs / "config.json").write_text(json.dumps(config))
    model, report = DeepseekV32ForCausalLM.from_pretrained(
        theirs, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return ours, model.eval()


class Exact:
    """The model's ops without any rounding to bf16 or FP8, in plain torch."""

    @staticmethod
    def quantize_fp8(x: torch.Tensor, *, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return x, torch.ones(x.shape[0], 1)

    @staticmethod
    def gemm_fp8(
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        *,
        constant_weights: bool = False,
    ) -> torch.Tensor:
        return a @ Fp8Weight(b, b_scale).dequantized().T

    @staticmethod
    def linear_fp8(
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        *,
        power_of_two: bool,
        constant_weights: bool,
    ) -> torch.Tensor:
        return Exact.gemm_fp8(x, x, weight, weight_scale)

    @staticmethod
    def silu_mul_quantize(x: torch.Tensor, *, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = x.chunk(2, dim=-1)
        return Exact.quantize_fp8(torch.nn.functional.silu(gate) * up, power_of_two=power_of_two)

    @staticmethod
    def fused_moe(
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        *,
        power_of_two: bool,
    ) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(gate_up.shape[0]):
            hidden = Exact.gemm_fp8(x, weights, gate_up[expert], gate_up_scale[expert])
            hidden, scale = Exact.silu_mul_quantize(hidden, power_of_two=power_of_two)
            share = (weights * (ids == expert)).sum(1, keepdim=True)
            out += share * Exact.gemm_fp8(hidden, scale, down[expert], down_scale[expert])
        return out

    @staticmethod
    def indexer_quantize_and_cache(
        keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *, power_of_two: bool
    ) -> None:
        cache.index_copy_(0, slots, keys)

    @staticmethod
    def indexer_select(
        queries: torch.Tensor,
        keys: torch.Tensor,
        key_scale: torch.Tensor,
        head_weights: torch.Tensor,
        key_start: torch.Tensor,
        key_end: torch.Tensor,
        *,
        topk: int,
        workspace: torch.Tensor,
    ) -> torch.Tensor:
        scores = torch.einsum("qhd,kd->qhk", queries, keys).relu()
        scores = torch.einsum("qhk,qh->qk", scores, head_weights)
        position = torch.arange(keys.shape[0])
        hidden = (position < key_start[:, None]) | (position >= key_end[:, None])
        best = scores.masked_fill(hidden, -torch.inf).topk(topk, dim=1)
        return best.indices.int().masked_fill(best.values == -torch.inf, -1)

    @staticmethod
    def paged_indexer_select(
        queries: torch.Tensor,
        cache: torch.Tensor,
        head_weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        topk: int,
        max_context_len: int,
        num_sms: int,
    ) -> torch.Tensor:
        position = torch.arange(max_context_len)
        rows = []
        for row, table in enumerate(block_table.long()):
            slots = table[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
            ends = context_lens[row : row + 1]
            query, weights = queries[row], head_weights[row : row + 1]
            rows.append(
                Exact.indexer_select(
                    query, cache[slots], ends, weights, 0 * ends, ends, topk=topk, workspace=ends
                )
            )
        return torch.cat(rows)


class ExactCache(LayerCache):
    """The keys of the indexer are fp32 [slots, D] in `index`."""

    def read_index(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.index[slots]
        return keys, torch.ones(keys.shape[0])


def exact_logits(model: Transformer, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """fp32 [T, vocab]: from two chunks of prefill, of which the second reads the cache, and decode steps."""
    monkeypatch.setattr(Quantizer, "dtype", torch.float32)
    for name in [name for name in vars(Exact) if not name.startswith("_")]:
        monkeypatch.setattr(moe_fp8, name, getattr(Exact, name))
    run = model_run(model, len(tokens))
    for number, cache in enumerate(run.caches):
        keys = torch.zeros(cache.latent.shape[0], model.config.index_head_dim)
        run.caches[number] = ExactCache(cache.latent.float(), keys, keys, keys)
    logits: list[torch.Tensor] = []
    for end in (len(tokens) // 2, len(tokens) - DECODED):
        batch = PrefillBatch.of([Run(tokens[run.length : end], run.length, run.pages)], CPU)
        logits.extend(model.score(batch, run.caches))
        run.length = end
    logits.extend(run.decode(token) for token in tokens[run.length :])
    return torch.stack(logits)


def some_tokens() -> torch.Tensor:
    return torch.randint(1, 512, (TOKENS,), generator=torch.Generator().manual_seed(1))


def errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The relative error of each token's logits."""
    return (ours - theirs).norm(dim=1) / theirs.norm(dim=1)


@torch.inference_mode()
def their_logits(model: DeepseekV32ForCausalLM) -> torch.Tensor:
    return model(some_tokens()[None]).logits[0]


@pytest.fixture(scope="module")
def unchanged(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """transformers' logits with a selection that no variant has."""
    return their_logits(
        make_variant(demo_folder, tmp_path_factory.mktemp("unchanged"), {"index_topk": 32})[1]
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree(
    variant: str,
    demo_folder: Path,
    unchanged: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, theirs = make_variant(demo_folder, tmp_path, VARIANTS[variant])
    expected = their_logits(theirs)
    config = ModelConfig.load(folder)
    trained = TrainedModel(config, TOKENS, CPU).eval()
    weights = dequantized(load_file(folder / "model.safetensors"))
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    trained.load_state_dict(weights)
    with torch.inference_mode():
        assert float(errors(trained(some_tokens()[None], "sparse")[0][0], expected).max()) < 5e-5

    ours = exact_logits(load_model(folder, CPU, num_workers=8), some_tokens().tolist(), monkeypatch)
    # Both compute in fp32, in other orders.
    assert float(errors(ours, expected).max()) < 5e-5
    assert float(errors(expected, unchanged).max()) > 1e-2, "the variant changes nothing"


def test_logits_agree_within_the_rounding_to_fp8(demo_folder: Path, tmp_path: Path) -> None:
    folder, theirs = make_variant(demo_folder, tmp_path, {"index_topk": TOKENS}, embedding=1.0)
    model, tokens = load_model(folder, CPU, num_workers=8), some_tokens().tolist()
    run = model_run(model, TOKENS)
    prefilled = TOKENS - DECODED
    batch = PrefillBatch.of([Run(tokens[:prefilled], 0, run.pages)], CPU)
    logits = list(model.score(batch, run.caches))
    run.length = prefilled
    logits.extend(run.decode(token) for token in tokens[prefilled:])
    found = errors(torch.stack(logits), their_logits(theirs)).sort().values
    # Each GEMM's activations are off by about 3.7%. A token whose experts change by it is off by more.
    assert float(found.median()) < 0.08, found
    assert float(found[int(0.9 * TOKENS)]) < 0.25, found


def test_a_config_that_transformers_wrote_is_read() -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    written = DeepseekV32Config(rope_parameters={**PUBLISHED_YARN, "rope_theta": 10000.0}).to_dict()
    config = ModelConfig.model_validate({**written, "quantization_config": quantization})
    published = ModelConfig.model_validate(
        read_config(CONFIGS / "deepseek_v32.json") | {"rope_scaling": PUBLISHED_YARN}
    )
    assert config.rope == published.rope
    differing = {
        name for name in ModelConfig.model_fields if getattr(config, name) != getattr(published, name)
    }
    assert differing == {
        "quantization_config",
        "bos_token_id",
        "eos_token_id",
        "mlp_layer_types",
        "num_nextn_predict_layers",
    }

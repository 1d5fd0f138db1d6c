"""The model on the reference ops: against a plain dense model, and its two phases against each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_fp8.errors import ConfigError
from moe_fp8.ops import registry
from moe_fp8.ops.gemm import public as gemm
from server_example.model.batch import DecodeBatch, PrefillBatch, Run
from server_example.model.config import ModelConfig
from server_example.model.layers import rms_norm
from server_example.model.moe import Moe
from server_example.model.rope import Rope
from server_example.model.transformer import Transformer
from server_example.model.weights import load_weights
from tests.demo_model import (
    PROMPTS,
    TIE,
    behind,
    demo_folder,
    demo_model,
    model_run,
    new_caches,
    text_tokens,
)

__all__ = ["demo_folder", "demo_model"]

GREEDY_TOKENS = 64


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


class DenseModel:
    """The architecture in fp32 on dequantized weights, without cache or sparsity, with K and V expanded."""

    def __init__(self, folder: Path) -> None:
        self.config = ModelConfig.load(folder)
        tensors = load_file(folder / "model.safetensors")
        self.tensors = {}
        for name, tensor in tensors.items():
            scale = tensors.get(f"{name}_scale_inv")
            if scale is not None:
                n, k = tensor.shape
                blocks = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
                tensor = tensor.float() * blocks
            self.tensors[name] = tensor.float()

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        c = self.config
        length = x.shape[0]
        positions = torch.arange(length)
        rope = Rope(c.qk_rope_head_dim, c.rope, length, x.device)
        q = self.linear(
            self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm"), f"{name}.q_b_proj"
        )
        q = q.view(length, c.num_attention_heads, -1)
        latent, k_rope = self.linear(x, f"{name}.kv_a_proj_with_mqa").split(
            (c.kv_lora_rank, c.qk_rope_head_dim), 1
        )
        kv = self.linear(self.norm(latent, f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj")
        k, v = kv.view(length, c.num_attention_heads, -1).split((c.qk_nope_head_dim, c.v_head_dim), 2)
        k_rope = rope(k_rope[:, None], positions, interleaved=True).expand(-1, c.num_attention_heads, -1)
        q_rope = rope(q[..., c.qk_nope_head_dim :], positions, interleaved=True)
        q = torch.cat((q[..., : c.qk_nope_head_dim], q_rope), 2).transpose(0, 1)
        k = torch.cat((k, k_rope), 2).transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v.transpose(0, 1), is_causal=True)
        return self.linear(out.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(torch.nn.functional.silu(gate) * up, f"{name}.down_proj")

    def moe(self, x: torch.Tensor, name: str) -> torch.Tensor:
        c = self.config
        out = self.mlp(x, f"{name}.shared_experts")
        scores = self.linear(x, f"{name}.gate").sigmoid()
        for row in range(x.shape[0]):
            choice = scores[row] + self.tensors[f"{name}.gate.e_score_correction_bias"]
            groups = choice.view(c.n_group, -1)
            best = groups.topk(2, 1).values.sum(1).topk(c.topk_group).indices.tolist()
            size = groups.shape[1]
            allowed = [expert for expert in range(c.n_routed_experts) if expert // size in best]
            chosen = sorted(allowed, key=lambda expert: -float(choice[expert]))[: c.num_experts_per_tok]
            total = sum(float(scores[row, expert]) for expert in chosen)
            for expert in chosen:
                share = float(scores[row, expert]) / total * c.routed_scaling_factor
                out[row] += share * self.mlp(x[row], f"{name}.experts.{expert}")
        return out

    def logits(self, tokens: list[int]) -> torch.Tensor:
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for number in range(self.config.num_hidden_layers):
            name = f"model.layers.{number}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            normed = self.norm(x, f"{name}.post_attention_layernorm")
            dense = number < self.config.first_k_dense_replace
            x = x + (self.mlp(normed, f"{name}.mlp") if dense else self.moe(normed, f"{name}.mlp"))
        return self.linear(self.norm(x, "model.norm"), "lm_head")[-1]


def test_agrees_with_the_dense_model_while_all_tokens_are_selected(
    demo_folder: Path, demo_model: Transformer
) -> None:
    dense = DenseModel(demo_folder)
    errors = []
    for seed, length in enumerate((1, 2, 17, 40, demo_model.config.index_topk)):
        tokens = text_tokens(length, seed)
        errors.append(difference(model_run(demo_model, length).prefill(tokens), dense.logits(tokens)))
    # Quantizing activations to FP8 alone makes an error of about 3.7% in each GEMM.
    assert max(errors) < 0.15, errors
    assert sorted(errors)[2] < 0.08, errors


@pytest.mark.parametrize("length", [2, 20, 60, 128])
def test_decode_equals_prefill(demo_model: Transformer, length: int) -> None:
    errors = []
    for part in range(3):
        tokens = text_tokens(length, part)
        whole, split = model_run(demo_model, length), model_run(demo_model, length)
        expected = whole.prefill(tokens)
        first = max(1, length - 10)
        split.prefill(tokens[:first])
        for token in tokens[first:]:
            logits = split.decode(token)
        errors.append(difference(logits, expected))
    # This is the same arithmetic in other shapes. An ulp of fp32 that flips a rounding to FP8 grows to a
    # percent.
    assert sorted(errors)[1] < 0.03, errors


def test_decode_equals_prefill_beyond_the_selection(demo_model: Transformer) -> None:
    errors = []
    for seed in range(5):
        tokens = text_tokens(150, seed)
        whole, split = model_run(demo_model, 150), model_run(demo_model, 150)
        expected = whole.prefill(tokens)
        split.prefill(tokens[:70])
        split.prefill(tokens[70:-1])
        errors.append(difference(split.decode(tokens[-1]), expected))
    # Rounding may decide the last selected key, and one different key shows.
    assert sorted(errors)[2] < 0.05, errors


def test_selection_is_the_best_of_the_visible_tokens(demo_model: Transformer) -> None:
    length, layer = 150, demo_model.layers[0]
    tokens = text_tokens(length, 3)
    request = model_run(demo_model, length)
    batch = PrefillBatch.of([Run(tokens, 0, request.pages)], demo_model.device)
    seen = {}
    original = layer.attention.indexer.select

    def select(*args: object) -> object:
        seen["selection"] = original(*args)
        seen["x"], seen["q_latent"] = args[0], args[1]
        return seen["selection"]

    layer.attention.indexer.select = select
    try:
        demo_model.prefill(batch, request.caches)
    finally:
        layer.attention.indexer.select = original
    selection, indexer = seen["selection"], layer.attention.indexer
    topk = demo_model.config.index_topk
    assert selection.valid.sum(1).tolist() == [min(row + 1, topk) for row in range(length)]

    weights = indexer.weights
    keys = seen["x"] @ weights.wk.dequantized().T
    keys = torch.nn.functional.layer_norm(keys, keys.shape[-1:], weights.k_norm, weights.k_norm_bias)
    keys = indexer.rope(keys[:, None, :64], batch.positions, interleaved=False)[:, 0], keys[:, 64:]
    queries = (seen["q_latent"] @ weights.wq_b.dequantized().T).view(length, indexer.heads, indexer.dim)
    queries = torch.cat(
        (indexer.rope(queries[..., :64], batch.positions, interleaved=False), queries[..., 64:]), 2
    )
    # The Hadamard rotation cancels in the product.
    scores = torch.einsum("qhd,kd->qhk", queries, torch.cat(keys, 1)).relu()
    scores = torch.einsum("qhk,qh->qk", scores, seen["x"] @ weights.weights_proj.T)
    for row in (20, 100, 149):
        expected = batch.context_slots[scores[row, : row + 1].topk(min(row + 1, topk)).indices]
        chosen = selection.slots[row][selection.valid[row]]
        shared = len(set(expected.tolist()) & set(chosen.tolist()))
        assert shared >= 0.85 * len(expected), (row, shared)


def test_prefilled_requests_do_not_depend_on_their_batch(demo_model: Transformer) -> None:
    """New requests beside one that goes on. A decode step shows that the cache has the same tokens."""
    caches, alone, runs, requests = new_caches(demo_model, 14), [], [], []
    for number, (start, length) in enumerate(((0, 5), (33, 130), (0, 1), (0, 70))):
        tokens, other = text_tokens(start + length, number), model_run(demo_model, 192)
        request = model_run(demo_model, 192)
        request.caches, request.pages = caches, [3 * number + 2, 3 * number + 1, 3 * number + 3]
        for each in (request, other):
            if start:
                each.prefill(tokens[:start])
        alone += [other.prefill(tokens[start:]), other.decode(7)]
        runs.append(Run(tokens[start:], start, request.pages))
        requests.append(request)
    together = demo_model.prefill(PrefillBatch.of(runs, demo_model.device), caches)
    for request, run in zip(requests, runs, strict=True):
        request.length = run.start + len(run.token_ids)
    rows = [
        row for first, request in zip(together, requests, strict=True) for row in (first, request.decode(7))
    ]
    torch.testing.assert_close(torch.stack(rows), torch.stack(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", [0, 40, 79])
@pytest.mark.parametrize("first", [False, True])
def test_a_nan_stays_in_its_own_request(
    demo_model: Transformer, monkeypatch: pytest.MonkeyPatch, place: int, first: bool
) -> None:
    """Of three requests that are prefilled and decoded together, one has a token without a finite value."""
    broken, *healthy = text_tokens(80), text_tokens(30, 1), text_tokens(1, 2)
    token = next(
        token for token in range(1, demo_model.config.vocab_size) if token not in sum(healthy, broken)
    )
    broken[place] = token
    prompts = [broken, *healthy] if first else [*healthy, broken]

    def logits() -> list[torch.Tensor]:
        caches = new_caches(demo_model, 7)
        runs = [Run(tokens, 0, [2 * number + 1, 2 * number + 2]) for number, tokens in enumerate(prompts)]
        prefilled = demo_model.prefill(PrefillBatch.of(runs, demo_model.device), caches)
        step = {
            "tokens": torch.tensor([7] * 3),
            "context_lens": torch.tensor([len(run.token_ids) + 1 for run in runs], dtype=torch.int32),
            "block_table": torch.tensor([run.pages for run in runs], dtype=torch.int32),
        }
        return [prefilled, demo_model.decode(step, caches)["logits"]]

    expected = logits()
    embedding = demo_model.weights.embedding.clone()
    embedding[token] = float("nan")
    monkeypatch.setattr(demo_model, "weights", replace(demo_model.weights, embedding=embedding))
    for found, wanted in zip(logits(), expected, strict=True):
        for prompt, row, other in zip(prompts, found, wanted, strict=True):
            assert row.isnan().any() if prompt is broken else torch.equal(row, other)


def test_decode_rows_do_not_depend_on_their_batch(demo_model: Transformer) -> None:
    caches = new_caches(demo_model, 12)
    alone, together = [], []
    requests = []
    for number, length in enumerate((5, 40, 90)):
        request = model_run(demo_model, 128)
        request.caches, request.pages = caches, [3 * number + 2, 3 * number + 1]
        request.prefill(text_tokens(length, number))
        requests.append(request)
    inputs = [request.decode_inputs(7 + number) for number, request in enumerate(requests)]
    batch = {name: torch.cat([row[name] for row in inputs]) for name in inputs[0]}
    padding = {"tokens": 0, "context_lens": 0, "block_table": 0}
    padded = {
        name: torch.cat((value, torch.full((2, *value.shape[1:]), padding[name], dtype=value.dtype)))
        for name, value in batch.items()
    }
    outside = [cache.index[9:].clone() for cache in caches]
    alone = [request.decode(7 + number) for number, request in enumerate(requests)]
    together = demo_model.decode(padded, caches)["logits"]
    assert together.isfinite().all()
    for row, expected in enumerate(alone):
        assert difference(together[row], expected) < 0.03
    for cache, before in zip(caches, outside, strict=True):
        assert torch.equal(cache.index[9:], before), "a padded row wrote outside the dummy page"


def test_padding_reaches_no_expert(demo_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    op = registry.OPS["grouped_gemm_fp8_contiguous"]

    def poisoned(*arguments: Any) -> None:
        op.call(*arguments)
        given = dict(zip(op.arguments, arguments, strict=True))
        counts.append(int(given["index"][-1]))
        given["out"][counts[-1] :] = torch.nan

    monkeypatch.setitem(registry.OPS, "grouped_gemm_fp8_contiguous", op._replace(call=poisoned))
    moe = next(each.feed_forward for each in demo_model.layers if isinstance(each.feed_forward, Moe))
    x = torch.randn(4, demo_model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    lens = torch.tensor([3, 0, 9, 0], dtype=torch.int32)
    batch = DecodeBatch(torch.zeros(4, dtype=torch.int64), lens, torch.zeros(4, 1, dtype=torch.int32))
    out = moe(x, batch)
    assert counts == [2 * demo_model.config.num_experts_per_tok] * 2
    assert out.isfinite().all()
    monkeypatch.undo()
    active = x[[0, 2]]
    prefill = PrefillBatch.of([Run([0, 0], 0, [1])], demo_model.device)
    assert difference(out[[0, 2]], moe(active, prefill)) < 5e-3


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_survive_another_devices_rounding_up_to_ties(
    demo_folder: Path, demo_model: Transformer, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(demo_folder / "tokenizer.json")).encode(prompt).ids
    chosen, logits = model_run(demo_model, 128).greedy(tokens, GREEDY_TOKENS)
    generator = torch.Generator().manual_seed(1)

    def noisy(op: registry.Op) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            # The results before the rounding to bf16: Hopper's FP8 tensor core keeps about 14 bits.
            given = dict(zip(op.arguments, arguments, strict=True))
            exact = torch.empty(given["out"].shape)
            op.call(*(given | {"out": exact}).values())
            size = exact.nan_to_num().square().mean(-1, keepdim=True).sqrt()
            given["out"].copy_(exact + torch.randn(exact.shape, generator=generator) * size * 2**-14)

        return call

    for name in ("gemm_fp8", "grouped_gemm_fp8_contiguous"):
        op = registry.OPS[name]
        monkeypatch.setitem(registry.OPS, name, op._replace(call=noisy(op)))
    monkeypatch.setattr(gemm, "gemm_op", registry.OPS["gemm_fp8"].call)
    other = model_run(demo_model, 128).follow(tokens, chosen)
    short = behind(other, chosen)
    assert float(short.max()) < TIE and int((short > 0).sum()) <= GREEDY_TOKENS / 10
    errors = (other - logits).norm(dim=1) / logits.norm(dim=1)
    assert 0 < float(errors.median()) < 0.05
    assert len(set(chosen)) > 10, "the text is degenerate"


def edited(folder: Path, to: Path, **changes: object) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config.update(changes)
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("index_head_dim", 64),
        ("kv_lora_rank", 100),
        ("rope_scaling", {"type": "yarn", "factor": 40}),
        ("rope_scaling", {"type": "linear", "factor": 4}),
        ("rope_scaling", "yarn"),
        ("eos_token_id", [1, 2]),
        ("attention_bias", True),
        ("mlp_layer_types", ["sparse", "sparse", "sparse"]),
        ("quantization_config", {"quant_method": "gptq"}),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [64, 128]}),
        ("num_experts_per_tok", 9),
        ("n_group", 3),
        ("topk_group", 99),
        ("v_head_dim", 33),
        ("qk_rope_head_dim", 32),
    ],
)
def test_config_is_refused_with_the_field(
    demo_folder: Path, tmp_path: Path, field: str, value: object
) -> None:
    folder = edited(demo_folder, tmp_path / "model", **{field: value})
    with pytest.raises(ConfigError) as error:
        ModelConfig.load(folder)
    assert field in str(error.value)


def test_weights_are_checked_against_the_config(demo_folder: Path, tmp_path: Path) -> None:
    folder = edited(demo_folder, tmp_path / "model")
    config, tensors = ModelConfig.load(folder), load_file(folder / "model.safetensors")
    device = torch.device("cpu")
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"

    def broken(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ConfigError) as error:
            load_weights(folder, config, device)
        return str(error.value)

    assert name in broken({key: value for key, value in tensors.items() if key != name})
    assert name in broken({**tensors, name: torch.ones(1, 1)})
    assert name in broken({**tensors, name: tensors[name].bfloat16()})
    norm = "model.norm.weight"
    assert norm in broken({**tensors, norm: tensors[norm].to(torch.float8_e4m3fn)})
    assert norm in broken({**tensors, norm: tensors[norm].int()})
    assert "model.layers.9" in broken({**tensors, "model.layers.9.extra": torch.ones(1)})
    save_file({norm: tensors[norm]}, folder / "more.safetensors")
    assert norm in broken(tensors)
    (folder / "more.safetensors").write_bytes(b"no tensors")
    assert "more.safetensors" in broken(tensors)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path / "nowhere")

"""Layers of DeepSeek-V3.2's full size with random weights: they fit, run, and decode as they prefill."""

from __future__ import annotations

from pathlib import Path

import torch

from server_example.backend import choose_backend
from server_example.model.batch import PrefillBatch, Run
from server_example.model.config import ModelConfig
from server_example.model.transformer import Transformer
from server_example.model.weights import load_weights
from tests.demo_model import model_run
from tests.model_configs import CONFIGS

TOKENS, DECODED = 96, 9


def test_full_size_layers_run_on_random_weights() -> None:
    # One dense layer and one of experts; a small vocabulary, because the head is no part of the layers.
    config = ModelConfig.load(
        CONFIGS / "deepseek_v32.json", num_hidden_layers=2, first_k_dense_replace=1, vocab_size=1024
    )
    backend = choose_backend("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights = load_weights(Path("unused"), config, backend.device, load_format="dummy")
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert 11e9 < held < 14e9
    assert peak - held < 2e9, "a matrix at a time should be more than enough room"

    model = Transformer(config, weights, max_positions=256, num_workers=backend.num_sms)
    tokens = torch.randint(1, 1024, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    whole, split = model_run(model, TOKENS), model_run(model, TOKENS)
    batch = PrefillBatch.of([Run(tokens, 0, whole.pages)], backend.device)
    expected = model.score(batch, whole.caches)[-DECODED:].cpu()
    split.prefill(tokens[:-DECODED])
    logits = torch.stack([split.decode(token) for token in tokens[-DECODED:]])
    assert expected.isfinite().all() and float(expected.std()) > 0.1
    # Rounding may change one of a token's experts, whose weights are random; the other tokens agree closely.
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.median()) < 0.1, errors

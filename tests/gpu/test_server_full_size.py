"""Layers of DeepSeek-V3.2's full size with random weights: they fit, run, and decode as they prefill."""

from __future__ import annotations

from pathlib import Path

import torch

from server_example.backend import choose_backend
from server_example.model.config import ModelConfig
from server_example.model.transformer import Transformer
from server_example.model.weights import load_weights
from tests.demo_model import model_run
from tests.model_configs import CONFIGS

TOKENS = 96


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
    expected = whole.prefill(tokens)
    split.prefill(tokens[:-1])
    logits = split.decode(tokens[-1])
    assert expected.isfinite().all() and float(expected.std()) > 0.1
    assert float((logits - expected).norm() / expected.norm()) < 0.1

"""The example's trained model for tests, which run it directly or through an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from server_example.cache import LayerCache
from server_example.model.batch import PrefillBatch, Run
from server_example.model.config import ModelConfig
from server_example.model.transformer import Transformer
from server_example.model.weights import load_weights
from server_example.pages import pages_for
from server_example.settings import SHAKESPEARE

PROMPTS = (
    "Who was the Thane lives yet;",
    "[Exit Servant.]",
    "If trembling I inhabit then, protest me",
)

#: Another order of sums moves logits: a value rounds to its neighbour, or a last selected token changes.
#: Tokens whose logits differ by at most this are a tie.
TIE = 0.5


@pytest.fixture(scope="module")
def demo_folder() -> Path:
    return SHAKESPEARE


@pytest.fixture(scope="module")
def demo_model(demo_folder: Path) -> Iterator[Transformer]:
    yield load_model(demo_folder, torch.device("cpu"), num_workers=8)


def text_tokens(count: int, part: int = 0) -> list[int]:
    """`count` tokens of the text that the model was not trained on, from a place that depends on `part`."""
    tokenizer = Tokenizer.from_file(str(SHAKESPEARE / "tokenizer.json"))
    text = (SHAKESPEARE / "heldout.txt").read_text(encoding="utf-8")
    return list(tokenizer.encode(text[5000 * part :][: 16 * count]).ids)[:count]


def behind(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """By how much each token's logit is less than the largest of its row; `logits` [N, vocab]."""
    return logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def load_model(folder: Path, device: torch.device, num_workers: int) -> Transformer:
    config = ModelConfig.load(folder)
    weights = load_weights(folder, config, device)
    return Transformer(config, weights, max_positions=1024, num_workers=num_workers)


class ModelRun:
    """One request on a model, without server or engine. `pages` are in no particular order."""

    def __init__(self, model: Transformer, pages: list[int], caches: list[LayerCache] | None = None) -> None:
        self.model = model
        self.pages = pages
        self.length = 0
        self.caches = caches or new_caches(model, max(pages) + 1)

    def prefill(self, tokens: list[int]) -> torch.Tensor:
        batch = PrefillBatch.of([Run(tokens, self.length, self.pages)], self.model.device)
        logits = self.model.prefill(batch, self.caches)
        self.length += len(tokens)
        return logits[0].cpu()

    def decode_inputs(self, token: int) -> dict[str, torch.Tensor]:
        return {
            "tokens": torch.tensor([token]),
            "context_lens": torch.tensor([self.length + 1], dtype=torch.int32),
            "block_table": torch.tensor([self.pages], dtype=torch.int32),
        }

    def decode(self, token: int) -> torch.Tensor:
        inputs = {name: value.to(self.model.device) for name, value in self.decode_inputs(token).items()}
        logits = self.model.decode(inputs, self.caches)["logits"][0]
        self.length += 1
        return logits.cpu()

    def follow(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Logits [len(tokens), vocab]: row i is the row that chooses tokens[i]."""
        logits = [self.prefill(prompt)]
        logits.extend(self.decode(token) for token in tokens[:-1])
        return torch.stack(logits)

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
        """`count` tokens and the logits that chose them."""
        logits = [self.prefill(prompt)]
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < count:
            logits.append(self.decode(tokens[-1]))
            tokens.append(int(logits[-1].argmax()))
        return tokens, torch.stack(logits)


def new_caches(model: Transformer, num_pages: int) -> list[LayerCache]:
    return [LayerCache.allocate(model.config, num_pages, model.device) for _ in model.layers]


def model_run(model: Transformer, tokens: int) -> ModelRun:
    """A request with room for `tokens`, on pages that are neither adjacent nor in order."""
    count = pages_for(tokens)
    return ModelRun(model, [2 * page + 1 for page in reversed(range(count))])

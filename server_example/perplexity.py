"""`python -m server_example.perplexity DIR`: a model's perplexity in bf16 and in FP8, side by side.

bf16 is the model in plain PyTorch, on the weights of DIR/bf16 if they are there. FP8 is the model as it is
served: on the reference ops on the CPU, and on Hopper kernels where there is such a GPU. All attend to the
indexer's tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from server_example.extra import server_extra

with server_extra():
    import torch
    from tokenizers import Tokenizer

    from moe_fp8.errors import ConfigError, MoeFp8Error
    from server_example.backend import Backend, choose_backend
    from server_example.cache import LayerCache
    from server_example.model.batch import PrefillBatch, Run
    from server_example.model.config import ModelConfig
    from server_example.model.transformer import Transformer
    from server_example.model.weights import load_weights
    from server_example.pages import pages_for
    from server_example.train.export import HELD_OUT_TEXT, load_plain
    from server_example.train.model import TrainedModel

#: int64 [T] on the CPU -> logits [T, vocab] after every token.
Scorer = Callable[[torch.Tensor], torch.Tensor]

#: Name of a backend -> what computes there.
ARITHMETIC = {"reference": "reference ops on the CPU", "cuda": "Hopper kernels"}


@dataclass(frozen=True)
class Perplexity:
    """`nats` is the mean loss of a token; `bits_per_byte` does not depend on the tokenizer."""

    arithmetic: str
    tokens: int
    nats: float
    bits_per_byte: float


@torch.inference_mode()
def measure(arithmetic: str, scorer: Scorer, tokens: torch.Tensor, num_bytes: int, window: int) -> Perplexity:
    """Every token but the first is predicted once, from the tokens before it in its window."""
    total = 0.0
    for start in range(0, tokens.shape[0] - 1, window):
        part = tokens[start : start + window + 1]
        logits = scorer(part[:-1]).float().cpu()
        total += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
    count = tokens.shape[0] - 1
    return Perplexity(arithmetic, count, total / count, total / math.log(2) / num_bytes)


def bf16_scorer(model: TrainedModel, device: torch.device) -> Scorer:
    def score(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits, _ = model(tokens[None].to(device), "sparse")
        return logits[0]

    return score


def fp8_scorer(folder: Path, config: ModelConfig, backend: Backend, window: int) -> Scorer:
    weights = load_weights(folder, config, backend.device)
    model = Transformer(config, weights, max_positions=window, num_workers=backend.num_sms)
    pages = list(range(1, pages_for(window) + 1))
    caches = [LayerCache.allocate(config, len(pages) + 1, backend.device) for _ in model.layers]

    def score(tokens: torch.Tensor) -> torch.Tensor:
        return model.score(PrefillBatch.of([Run(tokens.tolist(), 0, pages)], backend.device), caches)

    return score


def every_backend() -> list[Backend]:
    """The reference, and Hopper kernels if they can run here."""
    found = choose_backend()
    return [found] if found.name == "reference" else [choose_backend("cpu"), found]


def compare(
    folder: Path, text: str, backends: Sequence[Backend], *, max_tokens: int, window: int
) -> list[Perplexity]:
    """The perplexity of at most `max_tokens` tokens of `text`: first in bf16, then in FP8 on each backend."""
    config = ModelConfig.load(folder)
    window = min(window, config.max_position_embeddings)
    # The loader of the server checks the checkpoint.
    fp8 = {
        f"FP8, {ARITHMETIC[backend.name]}": fp8_scorer(folder, config, backend, window)
        for backend in backends
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = torch.tensor(tokenizer.encode(text).ids[: max_tokens + 1])
    if tokens.shape[0] < 2:
        raise ConfigError("text", "at least two tokens", tokens.shape[0])
    num_bytes = len(tokenizer.decode(tokens[1:].tolist()).encode())
    device = backends[-1].device
    plain = TrainedModel(config, window, device).eval()
    weights = load_plain(folder, plain)
    scorers = {f"{weights}, plain PyTorch": bf16_scorer(plain, device)} | fp8
    return [measure(name, scorer, tokens, num_bytes, window) for name, scorer in scorers.items()]


def report(rows: list[Perplexity]) -> str:
    """A table; its last column is how much FP8 changes the perplexity."""
    plain = rows[0]
    lines = [f"perplexity  bits of a byte  change  arithmetic ({plain.tokens} tokens)"]
    for row in rows:
        change = "" if row is plain else f"{math.exp(row.nats - plain.nats) - 1:+.2%}"
        lines.append(f"{math.exp(row.nats):10.3f}  {row.bits_per_byte:14.4f}  {change:>6}  {row.arithmetic}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server_example.perplexity", description=__doc__)
    parser.add_argument("folder", type=Path, help="a model that server_example.train wrote")
    parser.add_argument("--text", type=Path, help=f"the text; without it, {HELD_OUT_TEXT} in the folder")
    parser.add_argument("--tokens", type=int, default=8192, help="at most as many tokens of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens of a context")
    parser.add_argument("--device", choices=("all", "cpu", "cuda"), default="all")
    options = parser.parse_args()
    text: Path = options.text or options.folder / HELD_OUT_TEXT
    try:
        for file in (text, options.folder / "tokenizer.json"):
            if not file.is_file():
                raise ConfigError(
                    file.name, "a file", str(file), "pass the folder of a model, or --text FILE"
                )
        rows = compare(
            options.folder,
            text.read_text(encoding="utf-8"),
            every_backend() if options.device == "all" else [choose_backend(options.device)],
            max_tokens=options.tokens,
            window=options.window,
        )
    except MoeFp8Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

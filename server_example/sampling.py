"""The choice of a token from logits: the likeliest, or on the host a random draw that a seed repeats."""

from __future__ import annotations

import torch

from server_example.messages import SamplingParams


class Sampler:
    """The sampler of one request. Its choices depend only on its logits and seed, not on the batch."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """`logits` is fp32 [vocab] on the CPU, the largest is finite, and the temperature is above 0."""
        # Without the difference, a temperature near 0 makes infinities, which have no probabilities.
        below = logits.double() - logits.max()
        probabilities = (below / self.params.temperature).softmax(dim=0)
        if self.params.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            # Keep the smallest set whose mass reaches top_p: a token stays if the mass before it is below
            # top_p.
            before = ordered.cumsum(0) - ordered
            probabilities = torch.zeros_like(probabilities)
            probabilities[order] = ordered.masked_fill(before >= self.params.top_p, 0.0)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row of `logits` [B, vocab], int64 [B]; -1 if its logit is not finite.

    The logits of such a row (NaN, an infinity) have no probabilities. Nothing waits for the device.
    """
    tokens = logits.argmax(-1)  # NaN counts as the largest.
    largest = logits.gather(-1, tokens[:, None])[:, 0]
    return tokens.masked_fill(~largest.isfinite(), -1)


def log_probabilities(logits: torch.Tensor, token: int, count: int) -> list[tuple[int, float]]:
    """Natural logarithms of the model's own probabilities, before temperature and top_p.

    The first entry is `token`; the `count` most probable tokens follow, best first. `logits` is fp32 [vocab]
    on the CPU. Values have a floor of -9999, since JSON has no infinity.
    """
    values = logits.double().log_softmax(dim=0).clamp(min=-9999.0)
    best = values.topk(min(count, values.numel()))
    return [
        (token, float(values[token])),
        *zip(best.indices.tolist(), best.values.tolist(), strict=True),
    ]

"""Fits the constants of the GEMM cost model to timings. Needs no GPU.

Most of the loss is the expected loss of time from the model's choice, for a choice that falls to each config
with a probability that falls with its predicted time. The rest is the error of predicted times, in which
configs near the best count most.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_fp8.errors import ConfigError
from moe_fp8.heuristics import every_gemm_config, gemm_configs
from moe_fp8.heuristics.gemm import costs
from moe_fp8.heuristics.gemm.costs import Constants, Work
from moe_fp8.jit.files import publish
from moe_fp8.tune.timings import Timing, class_of

#: One of this many targets is left out of the fit, to test it.
_HELD_OUT = 4

_STEPS, _LEARNING_RATE = 700, 0.02
#: Temperature of the choice, in parts of a predicted time; and that of the weights of errors.
_CHOICE, _NEAR_BEST = 0.04, 0.3
#: From this error on a config's loss grows in proportion.
_HUBER = 0.1
_REGRET_WEIGHT = 0.3


def _start(tiles: Sequence[str]) -> dict[str, list[float]]:
    """Orders of magnitude, from which the fit begins."""
    return {
        "kernel": [0.5] * len(tiles),
        "block": [0.06 + 2e-5 * math.prod(map(int, tile.split("/")[0].split("x"))) for tile in tiles],
        "grouped": [1.0],
        "tile": [0.1],
        "element": [2e-5],
        "parts": [0.3],
        "part_element": [2e-4],
        "crowd": [0.5],
        "memory_rate": [4.4e6],
        "sm_rate": [1e5],
        "reread": [0.5],
        "overlap": [2.0],
    }


@dataclass(frozen=True)
class _Cases:
    """Every timed config of many timings, one element each, with the numbers of its tile and its timing."""

    work: Work
    tile: Tensor
    timing: Tensor
    log_us: Tensor
    best: Tensor  # the least `log_us` of the same timing
    weight: Tensor  # of the timing: its class counts as much as any other

    @classmethod
    def of(cls, timings: Sequence[Timing], tiles: Sequence[str]) -> _Cases:
        works, tile, timing, us = [], [], [], []
        for number, timed in enumerate(timings):
            target = timed.target
            configs = {str(config): config for config in gemm_configs(target.layout, target.k)}
            counts = tuple((count, 1) for count in timed.counts)
            for name in timed.us.keys() & configs.keys():
                grouped = target.layout != "dense"
                works.append(costs.work(configs[name], counts, target.n, target.k, timed.num_sms, grouped))
                tile.append(tiles.index(costs.tile_name(configs[name])))
                timing.append(number)
                us.append(timed.us[name])
        log_us, numbers = _tensor(us).log(), torch.tensor(timing)
        fields = [_tensor(values) for values in zip(*works, strict=True)]
        best = _by_timing(numbers, log_us, "amin")
        classes = [class_of(timed) for timed in timings]
        weight = _tensor([1 / classes.count(classes[number]) for number in timing])
        return cls(Work(*fields), torch.tensor(tile), numbers, log_us, best, weight / len(set(classes)))

    def predict(self, logs: dict[str, Tensor]) -> Tensor:
        """Logarithms of predicted times."""
        values = {name: value.exp() for name, value in logs.items()}
        fitted = Constants(**values | {"overlap": 1 + values["overlap"]})
        predicted: Tensor = self.work.microseconds(fitted, self.tile)
        return predicted.log()

    def loss(self, logs: dict[str, Tensor]) -> Tensor:
        predicted = self.predict(logs)
        weight = self.weight * torch.exp((self.best - self.log_us) / _NEAR_BEST)
        error = torch.nn.functional.huber_loss(predicted, self.log_us, delta=_HUBER, reduction="none")
        least = _by_timing(self.timing, predicted.detach(), "amin")
        chance = torch.exp((least - predicted) / _CHOICE)
        chance = chance / _by_timing(self.timing, chance, "sum")
        regret = (self.weight * chance * (self.log_us - self.best)).sum()
        return (weight * error).sum() / weight.sum() + _REGRET_WEIGHT * regret


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _by_timing(timing: Tensor, values: Tensor, reduce: str) -> Tensor:
    """For each element the sum or the least of all elements with the same number of a timing."""
    empty = torch.zeros(int(timing[-1]) + 1, dtype=torch.float64)
    return empty.scatter_reduce(0, timing, values, reduce, include_self=False)[timing]


def fit(timings: Sequence[Timing]) -> Constants:
    """The constants that choose best for `timings`; always the same for equal timings.

    Raises ConfigError if a tile of the package was not timed.
    """
    tiles = sorted({costs.tile_name(config) for config in every_gemm_config()})
    if not timings:
        raise ConfigError("--timings", "timings to fit to", "none")
    timed = {name for timing in timings for name in timing.us}
    names = {costs.tile_name(config) for config in every_gemm_config() if str(config) in timed}
    if untimed := {*tiles} - names:
        raise ConfigError("--timings", "timings of every tile", f"none of {', '.join(sorted(untimed))}")
    cases = _Cases.of(timings, tiles)
    logs = {name: _tensor(values).log() for name, values in _start(tiles).items()}
    logs["overlap"] = _tensor([1.0]).log()  # the part above 1
    for value in logs.values():
        value.requires_grad_()
    optimizer = torch.optim.Adam(logs.values(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        cases.loss(logs).backward()
        optimizer.step()
        schedule.step()
    values = {name: value.detach().exp() for name, value in logs.items()}
    values["overlap"] += 1
    rounded = {name: [float(f"{one:.4g}") for one in value.tolist()] for name, value in values.items()}
    return Constants(
        **{
            name: dict(zip(tiles, value, strict=True)) if len(value) == len(tiles) else value[0]
            for name, value in rounded.items()
        }
    )


def held_out(timings: Sequence[Timing]) -> tuple[list[Timing], list[Timing]]:
    """(to fit to, to test on): all timings of a target fall on the same side."""
    order = {target: at for at, target in enumerate(sorted({timing.target for timing in timings}))}
    split: tuple[list[Timing], list[Timing]] = [], []
    for timing in timings:
        split[order[timing.target] % _HELD_OUT == 0].append(timing)
    return split


def write_constants(path: Path, about: Mapping[str, Any], fitted: Constants) -> None:
    """Put the constants at `path`, as `costs.constants` reads them."""
    text = json.dumps({**about, "constants": fitted._asdict()}, indent=2) + "\n"
    publish(path, text.encode())

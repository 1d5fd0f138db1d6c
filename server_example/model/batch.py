"""The inputs of one forward pass: its tokens, their cache slots, and the keys that they may see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from server_example.pages import PAGE_TOKENS


class Run(NamedTuple):
    """Tokens of a request at the positions `start`, `start` + 1, ...; it owns `pages`, in this order."""

    token_ids: list[int]
    start: int
    pages: list[int]


@dataclass(frozen=True)
class PrefillBatch:
    """A run of tokens of each of R requests, one after the other.

    `tokens`, `positions`, `slots` are int64 [T]; a slot is a token's place in the cache. `context_slots`
    int64 [N] has the slots of every request's positions up to the end of its run. `key_start`, `key_end` are
    int32 [T]: query t sees the keys key_start[t] <= j < key_end[t] of these N. `last` int64 [R] has the row
    of each run's last token. Each layer of experts appends its choice to `routed`: ids int32 [T, k].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    context_slots: torch.Tensor
    key_start: torch.Tensor
    key_end: torch.Tensor
    last: torch.Tensor
    routed: list[torch.Tensor] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, runs: Sequence[Run], device: torch.device) -> PrefillBatch:
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        num_tokens = num_keys = 0
        for token_ids, start, pages in runs:
            context = torch.arange(start + len(token_ids), dtype=torch.int64)
            slots = torch.tensor(pages, dtype=torch.int64)[context // PAGE_TOKENS] * PAGE_TOKENS
            slots += context % PAGE_TOKENS
            positions = context[start:]
            parts["tokens"].append(torch.tensor(token_ids, dtype=torch.int64))
            parts["positions"].append(positions)
            parts["slots"].append(slots[start:])
            parts["context_slots"].append(slots)
            parts["key_start"].append(torch.full(positions.shape, num_keys, dtype=torch.int32))
            parts["key_end"].append((num_keys + positions + 1).to(torch.int32))
            num_tokens += len(token_ids)
            num_keys += len(context)
            parts["last"].append(torch.tensor([num_tokens - 1]))
        return cls(**{name: torch.cat(part).to(device) for name, part in parts.items()})

    def to_slots(self, keys: torch.Tensor) -> torch.Tensor:
        """Rows of `context_slots`, int64 [T, k] -> cache slots."""
        return self.context_slots[keys]


@dataclass(frozen=True)
class DecodeBatch:
    """One token for each of B requests; a padded row has context length 0 and a table of dummy pages.

    `tokens` is int64 [B]. `context_lens` int32 [B] counts the token itself. `block_table` is int32 [B, P].
    Each layer of experts appends its choice to `routed`: ids int32 [B, k], -1 for padded rows.
    Every method has fixed shapes and stays on the device, because it is captured into a graph.
    """

    tokens: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    routed: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, inputs: Mapping[str, torch.Tensor]) -> DecodeBatch:
        return cls(inputs["tokens"], inputs["context_lens"], inputs["block_table"])

    @property
    def max_context_len(self) -> int:
        return self.block_table.shape[1] * PAGE_TOKENS

    @property
    def active(self) -> torch.Tensor:
        """bool [B]: whether a row is a request and not padding."""
        return self.context_lens > 0

    @property
    def positions(self) -> torch.Tensor:
        return (self.context_lens - 1).clamp_min(0).to(torch.int64)

    @property
    def slots(self) -> torch.Tensor:
        return self.to_slots(self.positions[:, None])[:, 0]

    def to_slots(self, keys: torch.Tensor) -> torch.Tensor:
        """Positions int64 [B, k] -> cache slots."""
        pages = self.block_table.gather(1, keys // PAGE_TOKENS).to(torch.int64)
        return pages * PAGE_TOKENS + keys % PAGE_TOKENS

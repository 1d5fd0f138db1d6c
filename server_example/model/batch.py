"""The inputs of one forward pass: its tokens, their cache slots, and the keys that they may see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from server_example.cache import PAGE_TOKENS


@dataclass(frozen=True)
class PrefillBatch:
    """A run of `tokens` of one request at `positions`; the last position is N - 1.

    `tokens`, `positions` are int64 [T]. `context_slots` int64 [N] has the cache slot of every position of the
    request up to the end of this run. `key_start`, `key_end` are int32 [T]: query t sees keys key_start[t] <=
    j < key_end[t]. Each layer of experts appends its choice to `routed`: ids int32 [T, k].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    context_slots: torch.Tensor
    key_start: torch.Tensor
    key_end: torch.Tensor
    routed: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, token_ids: list[int], start: int, pages: list[int], device: torch.device) -> PrefillBatch:
        """A batch of `token_ids` at positions start, start + 1, ...; the request owns `pages`, in order."""
        end = start + len(token_ids)
        context = torch.arange(end, dtype=torch.int64)
        slots = torch.tensor(pages, dtype=torch.int64)[context // PAGE_TOKENS] * PAGE_TOKENS
        positions = context[start:]
        return cls(
            tokens=torch.tensor(token_ids, dtype=torch.int64).to(device),
            positions=positions.to(device),
            context_slots=(slots + context % PAGE_TOKENS).to(device),
            key_start=torch.zeros(len(token_ids), dtype=torch.int32, device=device),
            key_end=(positions + 1).to(torch.int32).to(device),
        )

    @property
    def slots(self) -> torch.Tensor:
        """Cache slots of this run's tokens, int64 [T]."""
        return self.context_slots[self.context_slots.shape[0] - self.tokens.shape[0] :]

    def to_slots(self, keys: torch.Tensor) -> torch.Tensor:
        """Positions int64 [T, k] -> cache slots."""
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

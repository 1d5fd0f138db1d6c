"""The paged cache's storage on the device, and the tables of page numbers that are copied there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server_example.model.config import ModelConfig
from server_example.pages import DUMMY_PAGE, PAGE_TOKENS


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer. A slot is `page * PAGE_TOKENS + offset`.

    `latent` is bf16 [slots, kv_lora_rank + rope]. `index` is uint8 [pages, PAGE_TOKENS, 1, D + 4]; a page has
    PAGE_TOKENS*D fp8 bytes and then PAGE_TOKENS fp32 scales. `index_keys` (uint8 [pages, PAGE_TOKENS, D]) and
    `index_scales` (fp32 [pages, PAGE_TOKENS]) are views of `index`.
    """

    latent: torch.Tensor
    index: torch.Tensor
    index_keys: torch.Tensor
    index_scales: torch.Tensor

    @classmethod
    def allocate(cls, config: ModelConfig, num_pages: int, device: torch.device) -> LayerCache:
        dim = config.index_head_dim
        index = torch.zeros(num_pages, PAGE_TOKENS, 1, dim + 4, dtype=torch.uint8, device=device)
        pages = index.view(num_pages, -1)
        return cls(
            latent=torch.zeros(
                num_pages * PAGE_TOKENS, config.latent_dim, dtype=torch.bfloat16, device=device
            ),
            index=index,
            index_keys=pages[:, : PAGE_TOKENS * dim].view(num_pages, PAGE_TOKENS, dim),
            index_scales=pages[:, PAGE_TOKENS * dim :].view(torch.float32),
        )

    def write_latent(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Writes `values` [T, latent_dim] to `slots` int64 [T]."""
        self.latent.index_copy_(0, slots, values.to(self.latent.dtype))

    def read_index(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys float8 [N, D] and scales fp32 [N] of int64 slots [N]; both are contiguous."""
        page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        return self.index_keys[page, offset].view(torch.float8_e4m3fn), self.index_scales[page, offset]


class BlockTable:
    """On the host, the page numbers of each seat of a batch, padded with `DUMMY_PAGE`."""

    def __init__(self, seats: int, width: int) -> None:
        self._rows = torch.full((seats, width), DUMMY_PAGE, dtype=torch.int32)
        self._written: list[tuple[list[int] | None, int]] = [(None, 0)] * seats

    def rows(self, seats: list[int], pages: list[list[int]]) -> torch.Tensor:
        """int32 [B, width] of B requests. A list of pages may only grow; other pages come as another list."""
        for seat, held in zip(seats, pages, strict=True):
            written, count = self._written[seat]
            if written is not held:
                self._rows[seat] = DUMMY_PAGE
                count = 0
            if count < len(held):
                self._rows[seat, count : len(held)] = torch.tensor(held[count:], dtype=torch.int32)
            self._written[seat] = held, len(held)
        return self._rows[seats]

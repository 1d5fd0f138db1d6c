"""Cases of `indexer_quantize_and_cache`: keys, slots and a cache with known bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases import generator


@dataclass(frozen=True)
class CacheCase:
    """Keys, slots and a cache: `kv_cache` is a view of `storage`, uint8 [pages, page stride].

    `storage` includes the bytes between pages.
    """

    k: Tensor
    storage: Tensor
    block_size: int
    slot_mapping: Tensor

    @property
    def kv_cache(self) -> Tensor:
        pages, page_stride = self.storage.shape
        width = self.k.shape[1] + 4
        return self.storage.as_strided(
            (pages, self.block_size, 1, width), (page_stride, width, width, 1), self.storage.storage_offset()
        )

    def to(self, device: str) -> CacheCase:
        """A copy on `device`; rows of k are as far apart as here."""
        k = torch.empty_strided(self.k.shape, self.k.stride(), dtype=self.k.dtype, device=device)
        return CacheCase(
            k.copy_(self.k), self.storage.to(device, copy=True), self.block_size, self.slot_mapping.to(device)
        )


def keys(rows: int, dim: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[rows, dim] whose rows differ by orders of magnitude.

    Row 1 is zero, and row 2 is tiny except for two outliers.
    """
    gen = generator(seed, "cpu")
    k = torch.randn(rows, dim, generator=gen) * torch.randn(rows, 1, generator=gen).exp()
    if rows > 2:
        k[1] = 0
        k[2] *= 1e-6
        k[2, :2] = torch.tensor([6e4, -6e4])
    return k.to(dtype)


def slots(rows: int, num_slots: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """[rows] distinct slots in random order.

    One slot in four is to be skipped: it is -1, another negative number, or past the cache.
    """
    gen = generator(seed, "cpu")
    mapping = torch.randperm(num_slots, generator=gen)[:rows]
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    skipped = torch.tensor([-1, -2, low, num_slots, num_slots + 1, high])
    mapping[2::4] = skipped[torch.arange(len(mapping[2::4])) % len(skipped)]
    return mapping.to(dtype)


def cache_case(
    rows: int,
    dim: int = 128,
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    *,
    slot_dtype: torch.dtype = torch.int64,
    pages: int = 0,
    page_padding: int = 0,
    row_padding: int = 0,
    seed: int = 0,
) -> CacheCase:
    """A case with `page_padding` bytes between pages and `row_padding` elements between rows.

    By default there are enough pages for all rows.
    """
    pages = pages or -(-rows // block_size) + 2
    gen = generator(seed, "cpu")
    size = (pages, block_size * (dim + 4) + page_padding)
    spread = torch.full((rows, dim + row_padding), float("nan")).to(dtype)
    k = spread[:, :dim].copy_(keys(rows, dim, dtype, seed))
    return CacheCase(
        k=k,
        storage=torch.randint(0, 256, size, dtype=torch.uint8, generator=gen),
        block_size=block_size,
        slot_mapping=slots(rows, pages * block_size, seed, slot_dtype),
    )

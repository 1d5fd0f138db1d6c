"""The batch sizes, in requests, for which a graph is captured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.arguments import integer


class BatchBuckets:
    """Increasing batch sizes; a batch of n requests runs in the smallest bucket that holds n.

    `sizes` are positive ints in any order; duplicates are allowed. Raises `ArgumentError` if there is no
    size or if a size is no positive int.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        if not isinstance(sizes, Iterable):
            remedy = "BatchBuckets.up_to(largest) makes them of one number"
            raise ArgumentError("BatchBuckets", "sizes", "several sizes", sizes, remedy)
        self.sizes: tuple[int, ...] = tuple(
            sorted({integer("BatchBuckets", "sizes", size) for size in sizes})
        )
        if not self.sizes or self.sizes[0] < 1:
            raise ArgumentError("BatchBuckets", "sizes", "at least one size, all positive", self.sizes)

    @classmethod
    def up_to(cls, largest: int) -> BatchBuckets:
        """Buckets of 1, 2, 4, then multiples of 8; `largest` itself is always a bucket.

        The steps are small because padded requests cost time too. Raises `ArgumentError` if `largest` is not
        positive.
        """
        largest = integer("BatchBuckets.up_to", "largest", largest, 1)
        sizes = [size for size in (1, 2, 4) if size < largest]
        sizes.extend(range(8, largest, 8))
        return cls([*sizes, largest])

    @property
    def largest(self) -> int:
        """The most requests that a batch may have."""
        return self.sizes[-1]

    def bucket(self, requests: int) -> int:
        """The smallest size >= requests. Raises `ArgumentError` below 1 or above the largest bucket."""
        requests = integer("BatchBuckets.bucket", "requests", requests)
        if not 1 <= requests <= self.largest:
            remedy = "split the batch or add a larger bucket" if requests > 0 else ""
            raise ArgumentError("BatchBuckets.bucket", "requests", f"1 to {self.largest}", requests, remedy)
        return self.sizes[bisect_left(self.sizes, requests)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchBuckets) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        return f"BatchBuckets({list(self.sizes)})"

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

"""The pages of the cache, as the host counts them. The storage itself is in `cache.py`."""

from __future__ import annotations

PAGE_TOKENS = 64
#: Page 0 belongs to no request: padded rows of a batch write to it, and nothing reads it.
DUMMY_PAGE = 0


class PagePool:
    """The free pages of the cache, kept on the host. Page `DUMMY_PAGE` is never handed out."""

    def __init__(self, num_pages: int) -> None:
        self.capacity = num_pages - 1
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def use(self) -> float:
        """The share of the pages that requests hold, from 0 to 1."""
        return 1 - len(self._free) / self.capacity

    def take(self, count: int) -> list[int] | None:
        """`count` pages; None, and no page is taken, if fewer pages are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        if not set(pages).isdisjoint(self._free):
            raise RuntimeError(f"pages {sorted(set(pages) & set(self._free))} were freed twice")
        self._free.extend(reversed(pages))


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)

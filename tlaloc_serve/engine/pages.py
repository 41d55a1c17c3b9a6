"""Pages of a KV pool, and where a token lives in them. Integers only; nothing here knows about devices.

Page 0 of every pool is scratch: page tables are padded with it and no sequence ever owns it. A token at position `p` of
a sequence with pages `t` lives in slot `t[(p // page) % len(ring)] * page + p % page`, where the ring is the whole
table in the full pool and the sequence's few ring pages in the windowed one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tlaloc_serve.errors import CapacityError

SCRATCH_PAGE = 0
DROPPED_SLOT = -1  # a write there is dropped by every body


class PageAllocator:
    """The free pages of one pool of `num_pages` pages, page 0 excluded. The lowest free page goes out first."""

    def __init__(self, name: str, num_pages: int):
        self.name = name
        self.capacity = num_pages - 1
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` pages. Raises CapacityError, taking none, when fewer are free."""
        if count > len(self._free):
            raise CapacityError(
                self.name, "not enough free pages", got=f"{len(self._free)} of {self.capacity}", want=count
            )
        return tuple(self._free.pop() for _ in range(count))

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Raises CapacityError for a page that is not out: two owners give wrong answers."""
        for page in pages:
            if page in self._free or not SCRATCH_PAGE < page <= self.capacity:
                raise CapacityError(self.name, f"page {page} was given back but is not in use")
        self._free.extend(pages)
        self._free.sort(reverse=True)


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold `tokens` positions."""
    return -(-tokens // page_size)


def page_of(block: int, pages: Sequence[int]) -> int:
    """The page of logical block `block`; a list shorter than the sequence is a ring."""
    return pages[block % len(pages)]


def slot_of(position: int, pages: Sequence[int], page_size: int) -> int:
    """The slot of the token at `position`."""
    return page_of(position // page_size, pages) * page_size + position % page_size

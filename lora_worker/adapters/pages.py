"""Which slots and pages of the pool are free.

An adapter takes one slot and as many pages of `PAGE_RANKS` ranks as its greatest rank needs, so that one of rank 8
costs an eighth of one of rank 64. Pages are alike and need not be neighbours, hence no room is ever lost between them;
neighbours are preferred, since they are read without being gathered.
"""

from __future__ import annotations

import bisect


class PageAllocator:
    """Numbers of free slots and pages, in order."""

    def __init__(self, *, slots: int, pages: int) -> None:
        self.slots = slots
        self.pages = pages
        self._free_slots = list(range(slots))
        self._free_pages = list(range(pages))

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def take(self, count: int) -> tuple[int, tuple[int, ...]]:
        """A slot and `count` pages: the first neighbours that are free, else the first of all."""
        assert self._free_slots, "no slot is free"
        assert count <= len(self._free_pages), f"{count} pages asked for, {len(self._free_pages)} are free"
        start = self._first_run(count)
        pages = tuple(self._free_pages[start : start + count])
        del self._free_pages[start : start + count]
        return self._free_slots.pop(0), pages

    def give_back(self, slot: int, pages: tuple[int, ...]) -> None:
        bisect.insort(self._free_slots, slot)
        for page in pages:
            bisect.insort(self._free_pages, page)

    def check_integrity(self, slots: list[int], pages: list[int]) -> None:
        """`slots` and `pages` are those in use."""
        assert sorted(self._free_slots + slots) == list(range(self.slots)), f"slots lost or shared: {slots}"
        assert sorted(self._free_pages + pages) == list(range(self.pages)), f"pages lost or shared: {pages}"

    def _first_run(self, count: int) -> int:
        """Where in the free pages the first `count` neighbours begin; 0 where there are none."""
        free = self._free_pages
        found = (i for i in range(len(free) - count + 1) if free[i + count - 1] - free[i] == count - 1)
        return next(found, 0)

"""The unit of the pool's memory."""

from __future__ import annotations

# Memory is handed out in pages of so many ranks.
PAGE_RANKS = 8


def run_of(pages: tuple[int, ...]) -> slice | None:
    """The rows of pages that are neighbours; None where they are not."""
    first = pages[0]
    if pages != tuple(range(first, first + len(pages))):
        return None
    return slice(first * PAGE_RANKS, (first + len(pages)) * PAGE_RANKS)


def pages_for(rank: int) -> int:
    """The pages that an adapter takes whose greatest rank is this."""
    return -(-rank // PAGE_RANKS)

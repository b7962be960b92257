"""The unit of the pool's memory."""

from __future__ import annotations

# Memory is handed out in pages of so many ranks.
PAGE_RANKS = 8


def pages_for(rank: int) -> int:
    """The pages that an adapter takes whose greatest rank is this."""
    return -(-rank // PAGE_RANKS)

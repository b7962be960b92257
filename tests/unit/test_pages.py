"""Slots and pages of the pool."""

from __future__ import annotations

import random

import pytest

from lora_worker.adapters.pages import PageAllocator


def test_neighbours_are_preferred_and_others_do() -> None:
    allocator = PageAllocator(slots=6, pages=6)
    taken = [allocator.take(1) for _ in range(6)]
    assert [pages for _, pages in taken] == [(0,), (1,), (2,), (3,), (4,), (5,)]
    for i in (0, 2, 3):
        allocator.give_back(*taken[i])
    assert allocator.take(2) == (0, (2, 3))
    allocator.give_back(*taken[5])
    assert allocator.take(2) == (2, (0, 5))


def test_whatever_is_taken_and_given_back_nothing_is_lost() -> None:
    chance = random.Random(1)
    allocator = PageAllocator(slots=5, pages=12)
    taken: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(500):
        count = chance.randrange(1, 5)
        if allocator.free_slots and allocator.free_pages >= count and chance.random() < 0.6:
            taken.append(allocator.take(count))
        elif taken:
            allocator.give_back(*taken.pop(chance.randrange(len(taken))))
        allocator.check_integrity([slot for slot, _ in taken], [page for _, pages in taken for page in pages])


def test_integrity_tells_of_a_lost_page() -> None:
    allocator = PageAllocator(slots=2, pages=2)
    slot, _ = allocator.take(2)
    with pytest.raises(AssertionError, match="pages lost"):
        allocator.check_integrity([slot], [0])

"""Which adapters a worker pins."""

from __future__ import annotations

import pytest

from lora_worker.adapters.reference import AdapterReference, LoadReport
from lora_worker.adapters.room import PinRoom
from lora_worker.errors import AdapterConflictError
from lora_worker.fleet.registry.pins import check_pin, pinned_here


def reference(name: str, *, pinned: bool = True, digest: str | None = None) -> AdapterReference:
    report = LoadReport(name, "/a", digest or name, [8], [1.0], 1, 1)
    return AdapterReference(name, "/a", digest or name, 8, has_bias=False, nbytes=1, pinned=pinned, report=report)


def test_pins_of_the_settings_come_before_those_of_the_fleet_and_one_slot_stays_unpinned() -> None:
    references = [reference("a"), reference("b"), reference("own", pinned=False), reference("no", pinned=False)]
    assert pinned_here(references, {"own"}, PinRoom(3, 9)) == ({"own", "a"}, {"b"})
    assert pinned_here(references, {"own"}, PinRoom(4, 9)) == ({"own", "a", "b"}, set())


def test_two_names_of_one_content_take_one_slot() -> None:
    references = [reference("a", digest="same"), reference("b", digest="same"), reference("c")]
    assert pinned_here(references, (), PinRoom(2, 9)) == ({"a", "b"}, {"c"})


def test_a_pin_too_many_names_the_worker() -> None:
    with pytest.raises(AdapterConflictError, match="on gpu0@here, pinning 'b' would pin 2 of 2 slots"):
        check_pin("b", [reference("a"), reference("b")], (), PinRoom(2, 9), worker="gpu0@here")


def test_pages_for_an_adapter_of_the_greatest_rank_stay_unpinned() -> None:
    references = [reference("a"), reference("b"), reference("c")]
    assert pinned_here(references, (), PinRoom(9, 2)) == ({"a", "b"}, {"c"})
    with pytest.raises(AdapterConflictError, match="raise lora_pool_ranks"):
        check_pin("c", references, (), PinRoom(9, 2), worker="gpu0@here")

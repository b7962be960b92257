"""When a peer is held to be dead."""

from __future__ import annotations

from lora_worker.fleet.membership.lease import Contact

LEASE = 15.0
PEER = frozenset({"peer"})
NOBODY: frozenset[str] = frozenset()


def beats(contact: Contact, first: int, last: int, expired: frozenset[str]) -> None:
    for second in range(first, last):
        contact.beat(float(second), expired)


def test_a_peer_that_is_expired_at_two_beats_is_dead_after_a_lease_of_unbroken_contact() -> None:
    contact = Contact(LEASE)
    beats(contact, 0, 20, NOBODY)
    contact.beat(20.0, PEER)
    assert not contact.dead
    contact.beat(21.0, PEER)
    assert contact.dead == PEER


def test_a_peer_that_was_expired_once_lives() -> None:
    contact = Contact(LEASE)
    beats(contact, 0, 20, NOBODY)
    for second in range(20, 40, 2):
        contact.beat(float(second), PEER)
        contact.beat(second + 1.0, NOBODY)
        assert not contact.dead


def test_after_a_restart_of_redis_all_are_expired_and_nobody_is_dead_for_a_lease() -> None:
    contact = Contact(LEASE)
    beats(contact, 0, 20, NOBODY)
    contact.lost()
    beats(contact, 50, 65, PEER)
    assert not contact.dead
    contact.beat(65.0, PEER)
    assert contact.dead == PEER


def test_a_pause_of_one_s_own_begins_the_count_anew() -> None:
    contact = Contact(LEASE)
    beats(contact, 0, 20, NOBODY)
    beats(contact, 40, 55, PEER)
    assert not contact.dead
    contact.beat(55.0, PEER)
    assert contact.dead == PEER


def test_a_worker_that_has_just_started_waits_a_lease_too() -> None:
    contact = Contact(LEASE)
    beats(contact, 100, 115, PEER)
    assert not contact.dead

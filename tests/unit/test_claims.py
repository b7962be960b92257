"""How much a worker claims, in plain numbers."""

from __future__ import annotations

from lora_worker.fleet.claiming.claims import ANNOUNCE_SECONDS, MOST_CLAIMED, PATIENCE_SECONDS, Claims, Limits, Load

IDLE = Load(in_hand=0, held=(0, 0, 0, 0), has_unstarted=False, unsettled=0, is_paused=False)


def holding(*held: int) -> Load:
    """Rows by priority step, some of which have not started."""
    return IDLE._replace(in_hand=sum(held), held=held, has_unstarted=True)


def limits(claims: Claims, load: Load, *, credit: int = 136, now: float = 0.0, is_alone: bool = False) -> Limits:
    return claims.limits(load, credit, now, is_alone=is_alone)


def test_own_work_is_claimed_far_ahead_and_others_for_free_rows_only() -> None:
    claims = Claims(rows=8)
    busy = limits(claims, holding(100, 0, 0, 0))
    assert (busy.ahead, busy.free, busy.near) == (36, 0, (0, 0, 0, 0))
    half = limits(claims, holding(5, 0, 0, 0))
    assert (half.ahead, half.free, half.near) == (MOST_CLAIMED, 3, (5, 5, 5, 5))


def test_with_no_credit_left_management_and_the_inbox_are_claimed_still() -> None:
    full = limits(Claims(rows=8), holding(136, 0, 0, 0))
    assert full.ahead == full.free == 0
    assert full.inbox > 0
    assert full.manage > 0


def test_no_more_management_tasks_are_claimed_than_would_run_at_once() -> None:
    assert limits(Claims(rows=8), IDLE._replace(free_managers=3)).manage == 3
    assert limits(Claims(rows=8), IDLE._replace(free_managers=0)).manage == 0


def test_base_requests_are_claimed_ahead_by_a_worker_without_peers() -> None:
    load = holding(10, 0, 0, 0)
    assert limits(Claims(rows=8), load).near == (0, 0, 0, 0)
    assert limits(Claims(rows=8), load, is_alone=True).near == (126, 126, 126, 126)


def test_rows_hold_back_only_base_requests_that_are_no_more_urgent() -> None:
    assert limits(Claims(rows=8), holding(0, 3, 0, 100)).near == (10, 7, 7, 0)


def test_management_tasks_are_claimed_as_far_as_there_are_threads() -> None:
    assert limits(Claims(rows=8), IDLE._replace(free_managers=3)).manage == 3


def test_what_an_owner_leaves_lying_is_taken_after_a_moment_and_what_changes_is_not() -> None:
    claims = Claims(rows=8)
    claims.watch({"lora.p01": b"one", "lora.p02": b"two"}, 1.0)
    assert not claims.stuck(1.0 + PATIENCE_SECONDS / 2)
    claims.watch({"lora.p01": b"one", "lora.p02": b"three"}, 1.0 + PATIENCE_SECONDS / 2)
    assert claims.stuck(1.0 + PATIENCE_SECONDS) == ["lora.p01"]
    claims.watch({}, 1.0 + PATIENCE_SECONDS)
    claims.watch({"lora.p01": b"one"}, 1.0 + PATIENCE_SECONDS)
    assert not claims.stuck(1.0 + PATIENCE_SECONDS)


def test_room_is_announced_once_a_while_and_taken_back() -> None:
    claims = Claims(rows=8)
    assert limits(claims, IDLE).room == -1
    claims.note(IDLE, 0, now=1.0)
    assert limits(claims, IDLE, now=1.1).room == 10
    assert limits(claims, IDLE, now=1.2).room == -1
    assert limits(claims, IDLE, now=1.1 + ANNOUNCE_SECONDS).room == 10
    claims.note(IDLE, 5, now=2.2)
    assert limits(claims, IDLE, now=2.3).room == 0
    assert limits(claims, IDLE, now=2.4).room == -1


def test_a_paused_worker_claims_no_rows_and_asks_for_none() -> None:
    claims = Claims(rows=8)
    claims.note(IDLE, 0, now=1.0)
    paused = limits(claims, IDLE._replace(is_paused=True), now=3.0)
    assert (paused.ahead, paused.free, paused.room, paused.listen) == (0, 0, -1, 0)
    assert paused.near == (0, 0, 0, 0)  # nor does it keep what comes by the inbox


def test_a_worker_with_room_asks_again_at_once_and_any_other_in_a_while() -> None:
    claims = Claims(rows=8)
    claims.note(IDLE, 5, now=100.0)
    assert claims.is_due(100.0)
    claims.note(holding(50, 0, 0, 0), 5, now=100.0)
    assert not claims.is_due(100.0)
    assert claims.is_due(100.05)
    claims.note(IDLE, 0, now=200.0)
    assert not claims.is_due(200.05)  # nothing has come for long
    assert claims.is_due(200.11)

"""claim.lua on a real Redis: what a claim takes, in which order, and that it falls nowhere in between."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import OutOfMemoryError

from lora_worker.embedded import EmbeddedServer
from lora_worker.fleet.claiming.claimer import ClaimedMessage, Claimer, PreparedClaim
from lora_worker.fleet.claiming.claims import Limits, Load
from lora_worker.fleet.connection import script
from lora_worker.fleet.keys import Keys, list_of, lists_of
from lora_worker.fleet.members import Member, Members
from lora_worker.messages import GENERATE

SCRIPT = script("claim")
HERE, PEER = "here@host:1", "peer@host:2"
NOTHING = Limits(ahead=0, near=(0, 0, 0, 0), free=0, spill=4, inbox=0, manage=0, turn=0, room=-1, listen=0)


class Here:
    """The part of a fleet's member that a claim needs."""

    def __init__(self) -> None:
        self.keys = Keys("lora", 8)
        self.worker_id = HERE
        self.members: Members | None = Members(
            1,
            tuple(
                Member(worker_id, is_draining=False, pinned=frozenset(), resident=frozenset())
                for worker_id in (HERE, PEER)
            ),
        )

    def note_fleet(self, version: int, generation: int) -> None: ...


class Queues:
    """Puts messages into the fleet's lists, and claims them."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.keys = Keys("lora", 8)
        self.claimer = Claimer(Here(), rows=8, base_name="base", load=lambda: LOAD, hand_over=lambda _: None)
        self.own, self.others = self.claimer.partitions
        self.stuck: list[str] = []
        redis.zadd(self.keys.workers, {HERE: 1e12, PEER: 1e12})

    def put(self, queue: str, count: int, priority: int = 0, label: str = "") -> None:
        for i in range(count):
            self.redis.lpush(list_of(queue, priority), f"{label or queue}/{priority}/{i}")

    def claim(self, **limits: Any) -> list[str]:
        """The messages that a claim with these limits brings."""
        return [message.raw.decode() for message in self.claimed(**limits)[1]]

    def claimed(self, **limits: Any) -> tuple[list[Any], list[ClaimedMessage]]:
        claim: PreparedClaim = self.claimer._prepared(LOAD, NOTHING._replace(**limits), self.stuck)
        answer: Any = self.redis.eval(SCRIPT, len(claim.keys), *claim.keys, *claim.arguments)
        return answer, claim.read(answer)

    @property
    def recorded(self) -> dict[Any, Any]:
        return self.redis.hgetall(self.keys.unacked(HERE))


LOAD = Load(in_hand=0, held=(0, 0, 0, 0), has_unstarted=False, unsettled=0, is_paused=False)


@pytest.fixture
def queues(server: EmbeddedServer) -> Iterator[Queues]:
    with Redis(port=server.port) as redis:
        redis.flushdb()
        yield Queues(redis)
        redis.config_set("maxmemory", 0)


def test_what_is_popped_is_recorded_with_the_list_it_came_from(queues: Queues) -> None:
    queue = queues.own[0]
    queues.redis.lpush(list_of(queue, 3), b'{"a": [], "b": "\xc3\xa9"}')
    assert queues.claim(ahead=5) == ['{"a": [], "b": "é"}']
    (record,) = queues.recorded.values()
    assert record == list_of(queue, 3).encode() + b'\n{"a": [], "b": "\xc3\xa9"}'
    assert not queues.redis.exists(*lists_of(queue))


def test_without_a_lease_nothing_is_claimed(queues: Queues) -> None:
    queues.put(queues.own[0], 3)
    for score in (0, 1):
        queues.redis.zadd(queues.keys.workers, {HERE: score})
        answer, messages = queues.claimed(ahead=5, manage=5, inbox=5)
        assert answer[0] == 0
        assert not messages
    assert not queues.recorded
    queues.redis.zrem(queues.keys.workers, HERE)
    assert not queues.claim(ahead=5)


def test_own_partitions_take_turns_and_come_before_others(queues: Queues) -> None:
    for queue in (*queues.own[:2], queues.others[0]):
        queues.put(queue, 10)
    taken = Counter(message.split("/")[0] for message in queues.claim(ahead=6, free=8, spill=0))
    assert taken == {queues.own[0]: 3, queues.own[1]: 3, queues.others[0]: 2}


def test_others_backlogs_are_taken_from_above_the_spill_limit_for_free_rows(queues: Queues) -> None:
    queues.put(queues.others[0], 6)
    queues.put(queues.others[1], 3)
    assert Counter(m.split("/")[0] for m in queues.claim(ahead=50, free=8, spill=4)) == {queues.others[0]: 2}
    assert len(queues.claim(ahead=50, free=8, spill=0)) == 7
    queues.put(queues.others[1], 30)
    assert len(queues.claim(ahead=50, free=8, spill=0)) == 8
    assert not queues.claim(ahead=50, free=0, spill=0)


def test_small_backlogs_of_others_are_shown_and_taken_when_they_are_stuck(queues: Queues) -> None:
    queues.put(queues.others[0], 3, 6)
    queues.put(queues.others[1], 1)
    answer, messages = queues.claimed(free=8)
    assert not messages
    names = queues.claimer._prepared(LOAD, NOTHING, []).lists
    watched = {names[answer[4][i] - 1]: answer[4][i + 1] for i in range(0, len(answer[4]), 2)}
    assert list(watched) == [queues.others[1], list_of(queues.others[0], 6)]
    assert queues.claimed(free=0)[0][4] == []
    queues.stuck = [list_of(queues.others[0], 6)]
    assert len(queues.claim(free=8)) == 3


def test_the_highest_priority_comes_first_and_one_in_eight_is_the_lowest(queues: Queues) -> None:
    for priority in (9, 0):
        queues.put(queues.own[0], 40, priority)
    _, messages = queues.claimed(ahead=16, turn=0)
    priorities = [message.raw.decode().split("/")[1] for message in messages]
    assert priorities == [*"00000009", *"00000009"]
    assert [message.is_promoted for message in messages] == [p == "9" for p in priorities]
    assert queues.claim(ahead=1, turn=7)[0].split("/")[1] == "9"


def test_each_of_the_lower_priorities_has_its_turn_of_the_share(queues: Queues) -> None:
    for priority in (0, 3, 6, 9):
        queues.put(queues.own[0], 50, priority)
    taken = Counter(message.split("/")[1] for message in queues.claim(ahead=48, turn=0))
    assert taken == {"0": 42, "9": 2, "6": 2, "3": 2}


def test_a_share_whose_turn_finds_nothing_falls_to_the_others(queues: Queues) -> None:
    for priority in (0, 3):
        queues.put(queues.own[0], 60, priority)
    taken = [message.split("/")[1] for message in queues.claim(ahead=48, turn=0)]
    assert taken == ["0", "0", "0", "0", "0", "0", "0", "3"] * 6


def test_the_lowest_alone_is_not_promoted(queues: Queues) -> None:
    queues.put(queues.own[0], 20, 9)
    assert not any(message.is_promoted for message in queues.claimed(ahead=16)[1])


def test_management_and_the_inbox_are_claimed_beyond_the_credit(queues: Queues) -> None:
    queues.put(queues.keys.manage, 3)
    queues.put(queues.keys.inbox, 100, 6)
    queues.put(queues.own[0], 100)
    taken = Counter(message.split("/")[0] for message in queues.claim(ahead=0, manage=16, inbox=64))
    assert taken == {"lora.manage": 3, "lora": 64}


def test_base_requests_wait_when_enough_are_here_unless_others_want_their_turn(queues: Queues) -> None:
    queues.put(queues.keys.base, 50)
    assert len(queues.claim(ahead=30, near=(5, 5, 5, 5))) == 5
    queues.put(queues.own[0], 3)
    taken = Counter(message.split("/")[0] for message in queues.claim(ahead=30, near=(0, 0, 0, 0)))
    assert taken[queues.own[0]] == 3
    assert 2 <= taken["lora.base"] <= 4


def test_urgent_base_requests_come_before_less_urgent_others(queues: Queues) -> None:
    """What is near is counted for each priority: rows of a batch that run hold up no base request above them."""
    queues.put(queues.keys.base, 3)
    queues.put(queues.own[0], 10, 9)
    taken = [message.split("/")[0] for message in queues.claim(ahead=4, near=(2, 2, 2, 0))]
    assert taken == ["lora.base", "lora.base", queues.own[0], queues.own[0]]


def test_with_the_lease_lapsed_a_message_is_kept_as_it_was() -> None:
    here = Here()
    claimer = Claimer(here, rows=8, base_name="base", load=lambda: LOAD, hand_over=lambda _: None)
    assert claimer.has_choice(here.keys.inbox)
    here.members = None
    assert not claimer.has_choice(here.keys.inbox)
    assert claimer.target(here.keys.inbox, GENERATE, None, 0) is None


def test_management_tasks_of_the_inbox_wait_for_a_thread_in_their_queue(queues: Queues) -> None:
    load = LOAD
    claimer = Claimer(Here(), rows=8, base_name="base", load=lambda: load, hand_over=lambda _: None)
    assert claimer.target("lora", "lora_worker.load_lora_adapter", None, 3) is None
    load = LOAD._replace(free_managers=0)
    target = claimer.target("lora", "lora_worker.load_lora_adapter", None, 3)
    assert target
    assert target.list_name == list_of(queues.keys.manage, 3)


def test_a_worker_that_takes_nothing_keeps_nothing_of_the_inbox(queues: Queues) -> None:
    """Else it would hand it back, and claim it again, and so on."""
    paused = LOAD._replace(is_paused=True)
    claimer = Claimer(Here(), rows=8, base_name="base", load=lambda: paused, hand_over=lambda _: None)
    target = claimer.target("lora", GENERATE, None, 0)
    assert target
    assert target.list_name == queues.keys.base


def test_a_direct_queue_is_claimed_like_an_own_partition(queues: Queues) -> None:
    queues.put(queues.keys.direct(HERE), 2)
    queues.put(queues.keys.direct(PEER), 2)
    assert len(queues.claim(ahead=30, free=8, spill=0)) == 2


def test_idle_workers_are_heard_of_by_those_with_something_to_spare(queues: Queues) -> None:
    queues.redis.hset(queues.keys.idle, PEER, f"5 {queues.redis.time()[0]}")
    queues.redis.hset(queues.keys.idle, "old@host:3", "5 1000")
    assert queues.claimed(listen=1)[0][3] == [PEER.encode(), 5]
    assert queues.claimed(listen=0)[0][3] == []
    queues.claimed(room=7)
    said: Any = queues.redis.hget(queues.keys.idle, HERE)
    assert said.split()[0] == b"7"
    queues.claimed(room=0)
    assert not queues.redis.hexists(queues.keys.idle, HERE)
    queues.put(queues.own[0], 1)
    queues.claimed(room=7, ahead=1)  # it got something after all
    assert not queues.redis.hexists(queues.keys.idle, HERE)


def test_a_full_redis_drains(queues: Queues) -> None:
    queues.put(queues.own[0], 30)
    queues.redis.config_set("maxmemory", 1)
    with pytest.raises(OutOfMemoryError):
        queues.redis.lpush("more", "x")
    assert len(queues.claim(ahead=16, room=3)) == 16
    assert len(queues.recorded) == 16


def test_a_large_backlog_comes_in_bounded_answers(queues: Queues) -> None:
    for i in range(12):
        queues.redis.lpush(queues.own[0], json.dumps({"i": i, "text": "x" * 1_000_000}))
    assert len(queues.claim(ahead=64)) == 9
    assert len(queues.claim(ahead=64)) == 3

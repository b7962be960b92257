"""Joins the claim script to the worker: what to send it, and what to do with its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from lora_worker.fleet.claiming.claims import Claims, Limits, Load
from lora_worker.fleet.claiming.forwarding import Forwarder, Target
from lora_worker.fleet.keys import PRIORITY_STEPS, Keys, list_of, step_of
from lora_worker.fleet.members import Members
from lora_worker.messages import GENERATE


class ClaimedMessage(NamedTuple):
    """A message as it lay in Redis; `is_promoted`: it came before others as the share of the lower priorities."""

    queue: str
    tag: str
    is_promoted: bool
    raw: bytes


class PreparedClaim(NamedTuple):
    """What is sent to claim.lua: `queues` names the places within a priority step, `lists` all of its lists."""

    queues: list[str]
    lists: list[str]
    keys: list[str]
    arguments: list[Any]
    load: Load

    def read(self, answer: list[Any]) -> list[ClaimedMessage]:
        return [
            ClaimedMessage(self.queues[(place - 1) % len(self.queues)], tag.decode(), bool(promoted), raw)
            for place, tag, promoted, raw in answer[5:]
        ]


class Here(Protocol):
    """What a claimer asks of the fleet's member."""

    keys: Keys
    worker_id: str

    @property
    def members(self) -> Members | None: ...

    def note_fleet(self, version: int, generation: int) -> None: ...


class Claimer:
    """Celery's loop owns it.

    Args:
        load: what the worker has at this moment.
        hand_over: gives unstarted rows to peers with nothing to do: their ids, and how many rows each could take.
    """

    def __init__(
        self,
        here: Here,
        *,
        rows: int,
        base_name: str,
        load: Callable[[], Load],
        hand_over: Callable[[dict[str, int]], None],
    ) -> None:
        self._here = here
        self._policy = Claims(rows)
        self._load = load
        self._hand_over = hand_over
        self._forwarder = Forwarder(here.keys, here.worker_id, base_name)
        self._members: Members | None = None
        self._partitions: tuple[list[str], list[str]] = ([], [])
        self._claims_sent = 0
        self._credit = 0

    @property
    def may_claim(self) -> bool:
        return self._here.members is not None and not self._load().is_paused

    @property
    def has_free_rows(self) -> bool:
        return self._load().held_rows < self._policy.rows

    @property
    def partitions(self) -> tuple[list[str], list[str]]:
        """This worker's own, and the others'."""
        members = self._here.members
        if members is not None and (self._members is None or members.takers != self._members.takers):
            self._partitions = members.own_partitions(self._here.worker_id, self._here.keys)
            self._forwarder.set_own(self._partitions[0])
        self._members = members
        return self._partitions

    @property
    def _is_alone(self) -> bool:
        members = self._here.members
        return members is not None and len(members.members) == 1

    def is_due(self, now: float) -> bool:
        return self._policy.is_due(now)

    def prepare(self, credit: int, now: float) -> PreparedClaim | None:
        """The next claim; None while the worker knows nothing of the fleet yet."""
        if self._here.members is None:
            self._policy.wait(now)
            return None
        load, self._credit = self._load(), credit
        limits = self._policy.limits(load, credit, now, is_alone=self._is_alone)
        return self._prepared(load, limits, self._policy.stuck(now))

    def note(self, claim: PreparedClaim, answer: list[Any], taken: int, now: float) -> None:
        """Remember what a claim has brought, before its messages are delivered."""
        _, version, generation, _, watched, *_ = answer
        self._policy.note(claim.load, taken, now)
        self._policy.watch({claim.lists[watched[i] - 1]: watched[i + 1] for i in range(0, len(watched), 2)}, now)
        self._here.note_fleet(version, generation)

    def share(self, answer: list[Any]) -> None:
        """Give idle peers something, after the messages of a claim were delivered."""
        peers = answer[3]
        if peers:
            self._hand_over({peers[i].decode(): peers[i + 1] for i in range(0, len(peers), 2)})

    def has_choice(self, queue: str) -> bool:
        """Whether a message that was claimed from here may belong elsewhere."""
        members, keys = self._here.members, self._here.keys
        if members is None:  # the own lease has lapsed meanwhile: whoever is restored this message finds it as it was
            return False
        # Whoever sent it to this worker's own queue had a reason.
        here = (keys.manage, keys.base, keys.direct(self._here.worker_id))
        return queue == keys.inbox or (members.has_pins and queue not in here)

    def target(self, queue: str, task: str, model: object, priority: int) -> Target | None:
        """Where a claimed message goes on to; None: it is run here."""
        members, load = self._here.members, self._load()
        if members is None:
            return None
        if queue == self._here.keys.inbox:
            if task != GENERATE:
                return None if load.free_managers else Target(list_of(self._here.keys.manage, priority))
            room = self._policy.takes_base(load, self._credit, is_alone=self._is_alone)
            has_room = room[step_of(priority)] > 0
            return self._forwarder.of_inbox(model, priority, members, has_room=has_room)
        return self._forwarder.to_pinning(model, priority, members)

    def _prepared(self, load: Load, limits: Limits, stuck: list[str]) -> PreparedClaim:
        keys = self._here.keys
        own, others = self.partitions
        direct = keys.direct(self._here.worker_id)
        queues = [keys.manage, keys.inbox, keys.base, direct, *own, *others]
        ahead, near, *rest = limits
        self._claims_sent += 1
        names = [keys.workers, keys.unacked(self._here.worker_id), keys.fleet, keys.generation, keys.idle]
        lists = [list_of(queue, step) for step in PRIORITY_STEPS for queue in queues]
        return PreparedClaim(
            queues,
            lists,
            names + lists,
            [
                *(self._here.worker_id, f"{self._claims_sent:012d}-", len(PRIORITY_STEPS), 1 + len(own)),
                *(ahead, " ".join(map(str, near)), *rest),
                *stuck,
            ],
            load,
        )

"""Which queue a task goes to, and which worker comes first for a queue."""

from __future__ import annotations

from collections import Counter

import pytest
from kombu.transport.redis import Channel

from lora_worker.fleet.keys import Keys, list_of, lists_of
from lora_worker.fleet.routing import node_of, partition_of, queue_for, rank
from lora_worker.messages import GENERATE, LIST_LORA_ADAPTERS

KEYS = Keys("lora", 64)
WORKERS = [f"gpu{i}@host:{i:012x}" for i in range(4)]
# The test vector of docs/fleet.md, for routers in other languages.
VECTOR = {"alice": 7, "bob": 0, "customer-0042": 2, "Llama-3.1-sql.v2": 44, "é": 62}


@pytest.mark.parametrize(("name", "partition"), VECTOR.items())
def test_the_formula_gives_the_documented_partitions(name: str, partition: int) -> None:
    assert partition_of(name, 64) == partition
    assert queue_for(GENERATE, name, KEYS) == f"lora.p{partition:02d}"


def test_base_requests_go_to_the_inbox_and_management_past_every_backlog() -> None:
    assert queue_for(GENERATE, None, KEYS) == "lora"
    assert queue_for(GENERATE, "llama", KEYS, base_name="llama") == "lora"
    assert queue_for(GENERATE, 17, KEYS) == "lora"  # a worker refuses it with a sentence
    assert queue_for(LIST_LORA_ADAPTERS, None, KEYS) == "lora.manage"


def test_kombu_finds_the_lists_of_a_queue_by_the_same_names() -> None:
    channel = Channel.__new__(Channel)
    for priority in range(10):
        assert channel._q_for_pri("lora.p07", priority) == list_of("lora.p07", priority)
    assert lists_of("lora") == [channel._q_for_pri("lora", step) for step in (0, 3, 6, 9)]


def first(queue: str, workers: list[str]) -> str:
    return rank(queue, workers)[0]


def test_when_a_worker_goes_only_its_own_partitions_move() -> None:
    before = {queue: first(queue, WORKERS) for queue in KEYS.partitions}
    after = {queue: first(queue, WORKERS[1:]) for queue in KEYS.partitions}
    for queue, owner in before.items():
        assert after[queue] == (rank(queue, WORKERS)[1] if owner == WORKERS[0] else owner)


def test_each_worker_gets_a_share() -> None:
    shares = Counter(first(queue, WORKERS) for queue in KEYS.partitions)
    assert set(shares) == set(WORKERS)
    assert max(shares.values()) < 2 * len(KEYS.partitions) / len(WORKERS)


def test_a_worker_that_restarts_has_the_partitions_it_had() -> None:
    restarted = [*WORKERS[:3], "gpu3@host:ffffffffffff"]
    for queue in KEYS.partitions:
        assert node_of(first(queue, restarted)) == node_of(first(queue, WORKERS))

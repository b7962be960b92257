"""Requests go where their adapter is, without leaving others idle."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis import Redis
from support.fleet import KEYS, Fleet, Sent
from support.worker_process import wait_for

from lora_worker.embedded import EmbeddedServer
from lora_worker.fleet.routing import node_of, partition_of, rank

from .conftest import Say

ADAPTERS = 60
ZIPF = 0.8
SLOTS = 8
ROWS = 16
LOAD_SECONDS = 0.2


class Outcome(NamedTuple):
    """What a burst through a fleet came to."""

    requests_per_second: float
    hit_rate: float
    max_over_mean: float


def zipf(fleet: Fleet, count: int, chance: random.Random) -> list[str | None]:
    """Adapters as popular as Zipf's law has it."""
    weights = [1 / (place + 1) ** ZIPF for place in range(len(fleet.adapters))]
    return list(chance.choices(fleet.adapters, weights, k=count))


def run_burst(fleet: Fleet, adapters: list[str | None]) -> Outcome:
    """Send them all, and see how they were answered."""
    chance = random.Random(1)
    started_at = time.monotonic()
    sent = [request for adapter in adapters for request in fleet.send(1, chance, adapters=[adapter], max_tokens=30)]
    fleet.wait_for_answers()
    seconds = time.monotonic() - started_at
    fleet.check_answers()
    fleet.check_nothing_is_left()
    results = [result["result"] for result in fleet.results(sent) if result]
    load = Counter(result["lora_worker"]["worker"] for result in results)
    stats = wait_for(lambda: fleet.client.app.control.inspect(timeout=2).stats(), "the workers answer")
    pools = [info["pool"]["lora"]["pool"] for info in stats.values()]
    loads = sum(pool["loads"] for pool in pools)
    return Outcome(len(sent) / seconds, 1 - loads / len(sent), max(load.values()) * len(fleet.workers) / len(sent))


@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.slow)])
def test_affinity_hits_more_than_one_shared_queue(
    server: EmbeddedServer, tmp_path: Path, say: Say, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared queue: stock claims, with no more in hand than rows, from the inbox alone."""
    monkeypatch.setenv("PACED_LOAD_SECONDS", str(LOAD_SECONDS))
    settings = {"max_running_requests": ROWS, "max_loras_per_batch": SLOTS}
    outcomes: dict[str, Outcome] = {}
    for name, more in (("affinity", {}), ("one queue", {"transport": "stock", "max_waiting_requests": 0})):
        folder = tmp_path / name
        folder.mkdir()
        with Redis(port=server.port) as connection:
            connection.flushdb()
        with Fleet(server, folder, 3, ADAPTERS, is_routed=name == "affinity", **settings, **more) as fleet:
            outcomes[name] = run_burst(fleet, zipf(fleet, count, random.Random(8)))
        found = outcomes[name]
        say(
            f"{name}: {found.requests_per_second:.0f} requests/s, hit rate {found.hit_rate:.2f}, "
            f"max over mean load {found.max_over_mean:.2f}"
        )
    assert outcomes["affinity"].hit_rate > outcomes["one queue"].hit_rate
    assert outcomes["affinity"].max_over_mean < 1.5


def test_an_adapter_s_requests_go_to_the_worker_that_comes_first_for_it(server: EmbeddedServer, tmp_path: Path) -> None:
    with Fleet(server, tmp_path, 3, 12) as fleet:
        chance = random.Random(9)
        wait_for(lambda: len(fleet.live) == 3, "all workers are known")
        time.sleep(2)  # a round of each worker's steward
        sent = [request for name in fleet.adapters for request in fleet.send(3, chance, adapters=[name])]
        fleet.wait_for_answers()
        # A worker that gets no processor time for a while loses its turn to a peer with nothing to do.
        placed = [
            worker_of(result) == owner(request, fleet)
            for request, result in zip(sent, fleet.results(sent), strict=True)
        ]
        assert sum(placed) > 0.8 * len(sent)


def worker_of(result: dict[str, Any] | None) -> str:
    assert result is not None
    name: str = result["result"]["lora_worker"]["worker"]
    return name


def owner(request: Sent, fleet: Fleet) -> str:
    """The worker that comes first for a request."""
    assert request.adapter is not None
    return node_of(rank(KEYS.partitions[partition_of(request.adapter, 64)], fleet.live)[0])


def test_requests_of_the_inbox_find_their_way_and_management_passes_them(
    server: EmbeddedServer, tmp_path: Path, say: Say
) -> None:
    """From a client that knows one queue: a load task behind a backlog waits for forwarding, not for the backlog."""
    with Fleet(server, tmp_path, 2, 6, is_routed=False, max_waiting_requests=16) as fleet:
        chance = random.Random(10)
        fleet.send(1000, chance, max_tokens=100)
        listed = fleet.plain.send_task("lora_worker.list_lora_adapters", queue="lora")
        started_at = time.monotonic()
        assert len(listed.get(timeout=60)) == 6
        seconds = time.monotonic() - started_at
        assert fleet.unanswered > 400
        say(f"a management task behind 1,000 generations in the inbox was answered after {seconds:.1f} s")
        fleet.wait_for_answers()
        fleet.check_answers()
        fleet.check_nothing_is_left()


def test_idle_workers_get_what_another_holds_unstarted(server: EmbeddedServer, tmp_path: Path, say: Say) -> None:
    """All requests are for one adapter, so for one partition, and its owner claims far ahead."""
    with Fleet(server, tmp_path, 3, 3) as fleet:
        fleet.send(400, random.Random(11), adapters=fleet.adapters[:1], max_tokens=200)
        fleet.wait_for_answers()
        fleet.check_answers()
        load = Counter(result["result"]["lora_worker"]["worker"] for result in fleet.results(fleet.sent) if result)
        say(f"400 requests for one adapter ran as {sorted(load.values())}")
        assert len(load) == 3
        assert max(load.values()) < 2 * 400 / 3


def test_an_adapter_that_is_pinned_on_one_worker_runs_there(server: EmbeddedServer, tmp_path: Path) -> None:
    with Fleet(server, tmp_path, 2, 4) as fleet:
        folder = fleet.folder_of(fleet.adapters[0])
        entry = f'[{{"lora_name": "{fleet.adapters[0]}", "lora_path": "{folder}", "pinned": true}}]'
        pinning = fleet.add(lora_paths=entry)
        pinning.wait_until_ready()
        time.sleep(3)  # rounds of the stewards, until all know of the pin
        sent = fleet.send(100, random.Random(12), adapters=fleet.adapters[:1])
        fleet.wait_for_answers()
        workers = {result["result"]["lora_worker"]["worker"] for result in fleet.results(sent) if result}
        assert workers == {"w2@test"}


def test_a_share_is_served_again_after_a_kill_and_served_by_who_joins(
    server: EmbeddedServer, tmp_path: Path, say: Say
) -> None:
    with Fleet(server, tmp_path, 2, 12) as fleet:
        chance = random.Random(13)
        time.sleep(2)
        victim_id = next(worker for worker in fleet.live if worker.startswith("w0@"))
        owned = [
            name for name in fleet.adapters if rank(KEYS.partitions[partition_of(name, 64)], fleet.live)[0] == victim_id
        ]
        fleet.kill(fleet.workers[0])
        started_at = time.monotonic()
        fleet.send(12, chance, adapters=owned)
        fleet.wait_for_answers()
        say(f"after a kill its share was served again within {time.monotonic() - started_at:.1f} s")

        joining = fleet.add()
        joining.wait_until_ready()
        started_at = time.monotonic()

        def served() -> bool:
            sent = fleet.send(len(fleet.adapters), chance, max_tokens=2, adapters=fleet.adapters)
            wait_for(lambda: all(fleet.results(sent)), "the requests are answered")
            return any(r["result"]["lora_worker"]["worker"] == "w2@test" for r in fleet.results(sent) if r)

        wait_for(served, "the worker that joined serves")
        say(f"a worker that joined served its share {time.monotonic() - started_at:.1f} s after it was ready")

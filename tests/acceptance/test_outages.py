"""Redis goes away and comes back, or cuts connections, under load."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from redis import Redis
from support.fleet import Fleet
from support.worker_process import wait_for

from lora_worker.embedded import EmbeddedServer

from .conftest import Say

LEASE_SECONDS = 3
TRANSPORTS = ["atomic", pytest.param("stock", marks=pytest.mark.slow)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("away_seconds", [0.5, 2.5 * LEASE_SECONDS])
def test_a_restart_of_redis_loses_nothing_reaps_nobody_and_runs_nothing_twice(
    server: EmbeddedServer, tmp_path: Path, say: Say, away_seconds: float, transport: str
) -> None:
    """Also one that outlasts the leases, and rows that end while Redis is away: their answers wait.

    Stock claims may lose the one message that is on its way to each worker when Redis ends, and no other.
    """
    chance = random.Random(5)
    with Fleet(server, tmp_path, 3, 12, transport=transport) as fleet:
        fleet.send(800, chance, max_tokens=400)
        wait_for(lambda: fleet.unanswered < len(fleet.sent), "the first rows have ended")
        before = set(fleet.live)
        server.stop()
        time.sleep(away_seconds)
        server.start()
        with fleet.counted_starts() as starts:
            fleet.wait_until_nothing_is_left()
        lost = fleet.unanswered
        assert lost <= (len(fleet.workers) if transport == "stock" else 0)
        fleet.check_answers(fleet.answered)
        fleet.check_nothing_is_left()
        assert set(fleet.live) == before
        assert not any("is dead" in worker.log for worker in fleet.workers)
        twice = {task_id: count for task_id, count in starts.items() if count > 1}
        finished = [worker.log.count(" succeeded in ") for worker in fleet.workers]
        say(f"{away_seconds} s away: lost {lost}, reaped 0; {sum(finished)} ends of {len(fleet.sent)} requests")
        assert not twice
        assert sum(finished) == len(fleet.sent) - lost


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_connections_that_are_cut_run_nothing_again(
    server: EmbeddedServer, tmp_path: Path, say: Say, transport: str
) -> None:
    chance = random.Random(6)
    with Fleet(server, tmp_path, 2, 8, transport=transport) as fleet, Redis(port=server.port) as connection:
        fleet.send(400, chance, max_tokens=200)
        wait_for(lambda: fleet.unanswered < len(fleet.sent), "the first rows have ended")
        for _ in range(4):
            connection.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            time.sleep(0.5)
        fleet.wait_for_answers()
        fleet.check_answers()
        fleet.check_nothing_is_left()
        finished = [worker.log.count(" succeeded in ") for worker in fleet.workers]
        say(f"lost 0; {sum(finished)} ends of {len(fleet.sent)} requests")
        assert sum(finished) == len(fleet.sent)

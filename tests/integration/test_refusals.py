"""A Redis that answers, and refuses: workers go on asking, say so now and then, and lose nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from support.fleet import KEYS, Fleet
from support.worker_process import wait_for

from lora_worker.embedded import EmbeddedServer

REFUSES = "Redis refuses"


@pytest.fixture(autouse=True)
def emptied(server: EmbeddedServer) -> None:
    """Other tests leave workers behind that nobody will ever take off the books."""
    with Redis(port=server.port) as redis:
        redis.flushall()


def is_said(fleet: Fleet) -> bool:
    return all(REFUSES in worker.log for worker in fleet.workers)


def is_felt(fleet: Fleet) -> bool:
    return all(worker.log.count("The lease could not be renewed") > 4 for worker in fleet.workers)


def be_replica(redis: Redis, seen: Callable[[], None]) -> None:
    redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    seen()
    redis.execute_command("REPLICAOF", "NO", "ONE")


def be_busy(redis: Redis, seen: Callable[[], None]) -> None:
    redis.config_set("lua-time-limit", "100")

    def run_endlessly() -> None:
        port = redis.connection_pool.connection_kwargs["port"]
        with Redis(port=port) as other, pytest.raises(ResponseError, match="killed"):
            other.eval("while true do end", 0)

    thread = Thread(target=run_endlessly)
    thread.start()
    seen()
    redis.script_kill()
    thread.join()


# Stock claims may lose the message that is on its way when Redis begins to refuse.
@pytest.mark.parametrize("transport", ["atomic", pytest.param("stock", marks=pytest.mark.slow)])
@pytest.mark.parametrize("refuse", [be_replica, be_busy])
def test_while_redis_refuses_no_worker_ends_and_all_is_answered_afterwards(
    server: EmbeddedServer, tmp_path: Path, transport: str, refuse: Callable[[Redis, Callable[[], None]], None]
) -> None:
    chance = random.Random(5)
    options: dict[str, Any] = {
        "transport": transport,
        "max_running_requests": 4,
        "max_waiting_requests": 8,
        "lease_seconds": 15,
    }
    with Fleet(server, tmp_path, 2, 4, **options) as fleet, Redis(port=server.port) as redis:
        fleet.send(60, chance, max_tokens=40)
        wait_for(lambda: fleet.unanswered < 60, "rows run")
        refuse(redis, lambda: wait_for(lambda: is_felt(fleet), "each worker is refused, again and again") and None)
        fleet.wait_for_answers()
        fleet.check_answers()
        fleet.check_nothing_is_left()
        assert not any(worker.has_ended for worker in fleet.workers)
        assert all(worker.log.count(REFUSES) <= 2 for worker in fleet.workers)
        assert all("Frequent restarts" not in worker.log for worker in fleet.workers)


def test_an_account_that_may_not_claim_is_told_what_is_refused(server: EmbeddedServer, tmp_path: Path) -> None:
    with Fleet(server, tmp_path, 1, 1) as fleet, Redis(port=server.port) as redis:
        redis.acl_setuser("default", enabled=True, nopass=True, commands=["-rpop"])
        try:
            sent = fleet.client.generate(prompt="x", max_tokens=2)
            wait_for(lambda: is_said(fleet), "it says what is refused")
            assert "NOPERM" in fleet.workers[0].log or "permissions" in fleet.workers[0].log
        finally:
            redis.acl_setuser("default", enabled=True, nopass=True, commands=["+@all"], keys=["*"], channels=["*"])
        assert sent.get(timeout=60)
        assert redis.exists(*[KEYS.fleet])

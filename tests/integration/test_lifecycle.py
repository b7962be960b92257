"""Starts and ends of a worker process: Redis away, bad settings, shutdowns, and what they leave in the queue."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.worker_process import WorkerProcess, wait_for

from lora_worker.embedded import EmbeddedServer
from lora_worker.fleet.keys import Keys, lists_of

from .conftest import LONG
from .test_tasks import ENDLESS, SECONDS, running_rows, waiting_rows

KEYS = Keys("lora", 64)


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as started:
        yield started


@pytest.fixture
def own_worker(own_server: EmbeddedServer, worker_settings: dict[str, Any], tmp_path: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(own_server, tmp_path, {**worker_settings, "max_running_requests": 2}) as process:
        process.wait_until_ready()
        yield process


def messages_of(server: EmbeddedServer) -> int:
    """Generate messages that some worker can still take."""
    with Redis(port=server.port) as connection:
        return sum(connection.llen(name) for queue in KEYS.queues for name in lists_of(queue))


def unacknowledged(connection: Redis) -> int:
    """Messages that some worker has claimed and not acknowledged."""
    return sum(connection.hlen(key) for key in connection.keys(KEYS.unacked("*")))


def test_redis_away_at_the_start_is_said_and_waited_for(
    own_server: EmbeddedServer, worker_settings: dict[str, Any], tmp_path: Path
) -> None:
    own_server.stop()
    with WorkerProcess(own_server, tmp_path, worker_settings) as worker:
        wait_for(lambda: "Cannot connect to redis://" in worker.log, "the worker says what it waits for")
        own_server.start()
        worker.wait_until_ready()
        answer = worker.client().generate(prompt="w1", max_tokens=1).get(timeout=SECONDS)
        assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "/nowhere"}, ["/nowhere", "config.json"]),
        ({"modle": "/nowhere"}, ["LORA_WORKER_MODLE", "LORA_WORKER_MODEL"]),
        ({"max_loras_per_batch": 0}, ["max_loras_per_batch", "'0'"]),
        ({"lora_paths": '{"lora_name": "x", "lora_path": "/nowhere", "pinned": true}'}, ["'x'", "/nowhere"]),
    ],
)
def test_a_wrong_setting_stops_the_start_with_one_sentence(
    own_server: EmbeddedServer,
    worker_settings: dict[str, Any],
    tmp_path: Path,
    settings: dict[str, Any],
    words: list[str],
) -> None:
    with WorkerProcess(own_server, tmp_path, {**worker_settings, **settings}) as worker:
        assert worker.wait_until_ended() == 1
        (line,) = [line for line in worker.log.splitlines() if "lora-worker cannot start: " in line]
        for word in words:
            assert word in line
        assert "Traceback" not in worker.log


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_other_pools_are_refused(
    own_server: EmbeddedServer, worker_settings: dict[str, Any], tmp_path: Path, pool: str
) -> None:
    with WorkerProcess(own_server, tmp_path, worker_settings, "-P", pool) as worker:
        assert worker.wait_until_ended() == 1
        assert "cannot run the engine; start the worker without -P" in worker.log


def test_a_warm_shutdown_ends_in_time_and_gives_back_what_it_cannot_finish(own_worker: WorkerProcess) -> None:
    client = own_worker.client()
    short = client.generate(prompt="w1", max_tokens=30, temperature=0, ignore_eos=True)
    assert short.get(timeout=SECONDS)
    endless = client.generate(**ENDLESS)
    finishing = client.generate(prompt="w1", max_tokens=200, temperature=0, ignore_eos=True)
    wait_for(lambda: running_rows(client) == 2 or finishing.ready(), "two rows run")
    waiting = [client.generate(prompt="w1", max_tokens=1) for _ in range(3)]
    wait_for(lambda: waiting_rows(client) == 3 or finishing.ready(), "three rows wait")
    own_worker.send_signal(signal.SIGTERM)
    assert own_worker.wait_until_ended() == 0
    unfinished = [result for result in (endless, finishing, *waiting) if result.state == "PENDING"]
    assert endless in unfinished
    assert messages_of(own_worker.server) == len(unfinished)


def test_a_cold_shutdown_gives_everything_back(own_worker: WorkerProcess) -> None:
    client = own_worker.client()
    results = [client.generate(**ENDLESS) for _ in range(4)]
    wait_for(lambda: running_rows(client) == 2 and waiting_rows(client) == 2, "two rows run and two wait")
    own_worker.send_signal(signal.SIGQUIT)
    own_worker.wait_until_ended()
    assert [result.state for result in results] == ["PENDING"] * 4
    assert messages_of(own_worker.server) == 4


def test_a_message_stays_unacknowledged_until_its_result_is_stored(own_worker: WorkerProcess) -> None:
    client = own_worker.client()
    row = client.generate(**{**ENDLESS, "max_tokens": LONG - 10})
    with Redis(port=own_worker.server.port) as connection:
        wait_for(lambda: running_rows(client) == 1, "the row runs")
        assert unacknowledged(connection) == 1
        client.app.control.revoke(row.id, terminate=True)
        wait_for(lambda: row.state == "REVOKED", "the row is revoked")
        wait_for(lambda: unacknowledged(connection) == 0, "the message is acknowledged")


def test_rows_go_on_through_a_restart_of_redis(own_worker: WorkerProcess) -> None:
    client = own_worker.client()
    row = client.generate(prompt="w1", max_tokens=2000, temperature=0, ignore_eos=True)
    wait_for(lambda: running_rows(client) == 1, "the row runs")
    own_worker.server.stop()
    own_worker.server.start()
    # Another client: one whose Redis went away gives up listening.
    again = own_worker.client().app.AsyncResult(row.id)
    wait_for(lambda: again.ready(), "the row has its answer")
    assert again.result["usage"]["completion_tokens"] == 2000
    # It is said a moment after the result is stored.
    wait_for(lambda: f"[{row.id}] succeeded" in own_worker.log, "the worker says so")
    assert own_worker.log.count(f"[{row.id}] succeeded") == 1

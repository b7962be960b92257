"""A worker stores an answer only while the message is its own, by one step in Redis, whatever its memory says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from support.paced import PacedWorkerProcess, write_paced_adapter
from support.worker_process import wait_for

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.fleet.keys import Keys
from lora_worker.testing.adapters import digest_of
from lora_worker.testing.rows import answer_text

SECONDS = 60
KEYS = Keys("lora", 64)
TOKENS = 100  # a second, by the engine's pace


@pytest.fixture(params=["atomic", "stock"])
def worker(
    request: pytest.FixtureRequest, server: EmbeddedServer, connection: Redis, tmp_path: Path
) -> Iterator[PacedWorkerProcess]:
    connection.flushdb()
    write_paced_adapter(tmp_path / "adapters" / "a", "a")
    settings = {"adapter_roots": tmp_path / "adapters", "max_running_requests": 4, "transport": request.param}
    with PacedWorkerProcess(server, tmp_path, settings) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
def own_client(server: EmbeddedServer) -> Iterator[Client]:
    made = Client(server.url)
    yield made
    made.close()


def take_from_worker(connection: Redis) -> tuple[str, str]:
    """Take the one message in hand off the worker's books, as a peer does that restores it; its list, and itself."""
    (key,) = connection.keys(KEYS.unacked("*"))
    ((tag, record),) = connection.hgetall(key).items()
    assert connection.hdel(key, tag) == 1
    name, _, message = str(record).partition("\n")
    return name, message


def test_no_answer_is_stored_for_a_message_that_a_peer_has_restored(
    worker: PacedWorkerProcess, own_client: Client, connection: Redis
) -> None:
    answer = own_client.generate(prompt="x", max_tokens=TOKENS)
    wait_for(lambda: connection.keys(KEYS.started("*")), "its row runs")
    name, message = take_from_worker(connection)
    wait_for(lambda: "another worker's by now" in worker.log, "its row has ended")
    assert not connection.exists(f"celery-task-meta-{answer.id}")
    assert "succeeded" not in worker.log
    connection.rpush(name, message)
    assert answer.get(timeout=SECONDS)["choices"][0]["text"] == answer_text(None, "x")
    wait_for(lambda: not connection.keys(KEYS.unacked("*")), "it is acknowledged")


def test_a_copy_that_comes_back_while_the_row_runs_is_answered_by_a_row_of_its_own(
    worker: PacedWorkerProcess, own_client: Client, connection: Redis, tmp_path: Path
) -> None:
    own_client.load_lora_adapter("a", "a").get(timeout=SECONDS)
    wait_for(lambda: not connection.keys(KEYS.unacked("*")), "it is acknowledged")
    answer = own_client.generate(prompt="x", model="a", max_tokens=2 * TOKENS)
    wait_for(lambda: connection.keys(KEYS.started("*")), "its row runs")
    name, message = take_from_worker(connection)
    write_paced_adapter(tmp_path / "adapters" / "a", "new")
    own_client.load_lora_adapter("a", "a", replace=True)
    wait_for(lambda: connection.zcard(KEYS.registry_changes) and is_registered(connection, tmp_path), "it is replaced")
    connection.rpush(name, message)
    new = digest_of(tmp_path / "adapters" / "a")
    assert answer.get(timeout=SECONDS)["choices"][0]["text"] == answer_text(new, "x")
    assert "A copy of the running task" in worker.log


def is_registered(connection: Redis, tmp_path: Path) -> bool:
    return digest_of(tmp_path / "adapters" / "a") in str(connection.hget(KEYS.registry, "a"))


def test_rows_that_run_are_answered_though_redis_has_lost_its_data(
    worker: PacedWorkerProcess, own_client: Client, connection: Redis
) -> None:
    answers = [own_client.generate(prompt=f"{i}", max_tokens=(i + 1) * TOKENS // 4) for i in range(4)]
    wait_for(lambda: sum(map(connection.scard, connection.keys(KEYS.started("*")))) == 4, "all run")
    connection.flushdb()
    for i, answer in enumerate(answers):
        assert answer.get(timeout=SECONDS)["choices"][0]["text"] == answer_text(None, f"{i}")
    assert not worker.has_ended

"""A Redis with no memory left: clients are refused, workers drain it, and nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu.exceptions import OperationalError
from redis import Redis
from support.paced import PacedWorkerProcess, write_paced_adapter
from support.worker_process import wait_for

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.testing.adapters import digest_of
from lora_worker.testing.rows import answer_text

TASKS = 600
PROMPT = "word " * 200


@pytest.fixture
def full_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as started:
        yield started


def test_workers_start_on_a_full_redis_and_drain_it_though_one_is_killed(
    full_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACED_TOKENS_PER_SECOND", "1000")
    folder = write_paced_adapter(tmp_path / "adapters" / "a", "a")
    client = Client(full_server.url)
    results = [client.generate(model="a", prompt=f"{PROMPT}{i}", max_tokens=20) for i in range(TASKS)]
    settings = {"adapter_roots": folder.parent, "lora_paths": "a", "lease_seconds": 2, "max_running_requests": 8}
    with Redis(port=full_server.port) as connection:
        connection.config_set("maxmemory-policy", "noeviction")
        connection.config_set("maxmemory", connection.info("memory")["used_memory"])
        with pytest.raises(OperationalError, match="memory"):
            client.generate(model="a", prompt=PROMPT)
        with started(full_server, tmp_path / "one", settings) as one, started(full_server, tmp_path / "two", settings):
            wait_for(lambda: done(connection) > TASKS / 4, "some are answered")
            one.send_signal(signal.SIGKILL)
            wait_for(lambda: done(connection) == TASKS, "all are answered", seconds=120)
        assert connection.llen("lora") == 0
        connection.config_set("maxmemory", 0)
    digest = digest_of(folder)
    for i, result in enumerate(results):
        assert result.get(timeout=20)["choices"][0]["text"] == answer_text(digest, f"{PROMPT}{i}")
    client.close()


def started(server: EmbeddedServer, folder: Path, settings: dict[str, Any]) -> PacedWorkerProcess:
    folder.mkdir()
    return PacedWorkerProcess(server, folder, settings, "-n", f"{folder.name}@here")


def done(connection: Redis) -> int:
    return len(list(connection.scan_iter("celery-task-meta-*", count=1000)))

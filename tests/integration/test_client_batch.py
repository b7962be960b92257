"""`Client.batch` with producers, rows and answers of all kinds; a paced engine stands in for the model."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from redis import Redis
from support.paced import PacedWorkerProcess
from support.worker_process import WAIT_SECONDS, wait_for

from lora_worker.batch import flight as flight_module
from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.errors import BatchError

ROW = {"prompt": "p", "max_tokens": 1}


@pytest.fixture(scope="module")
def client(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with PacedWorkerProcess(server, tmp_path_factory.mktemp("worker"), {}) as worker:
        worker.wait_until_ready()
        made = worker.client()
        yield made
        made.close()


def test_rows_that_follow_from_earlier_results_are_sent_when_they_come(client: Client) -> None:
    results: SimpleQueue[Any] = SimpleQueue()

    def rows() -> Iterator[dict[str, Any]]:
        yield ROW
        for _ in range(3):
            results.get(timeout=WAIT_SECONDS)
            yield ROW

    seen = []
    for result in client.batch(rows()):
        seen.append(result.index)
        results.put(result)
    assert seen == [0, 1, 2, 3]


def test_a_row_that_json_can_t_carry_fails_alone(client: Client) -> None:
    rows = [ROW, {**ROW, "metadata": {1, 2}}, {**ROW, "metadata": {(1, 2): 3}}, ROW]
    results = sorted(client.batch(rows), key=lambda result: result.index)
    assert [result.error and result.error.code for result in results] == [None, "invalid_json", "invalid_json", None]
    assert results[1].error is not None
    assert "row 1 (from 0)" in results[1].error.message


def test_an_error_of_the_producer_is_the_caller_s(client: Client) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield ROW
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(client.batch(rows()))


def test_no_room_at_all_is_refused(client: Client) -> None:
    with pytest.raises(BatchError, match="max_in_flight is 0"):
        client.batch([ROW], max_in_flight=0)


def test_answers_that_have_expired_before_anybody_took_them_are_made_again(
    client: Client, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.delete(*connection.keys("celery-task-meta-*") or ["none"])
    results = client.batch([ROW, *([{**ROW, "max_tokens": 100}] * 2)])
    assert next(results).index == 0
    wait_for(lambda: len(connection.keys("celery-task-meta-*")) == 3, "all rows are answered")
    connection.delete(*connection.keys("celery-task-meta-*"))
    monkeypatch.setattr(flight_module, "LOOK_SECONDS", -1.0)
    monkeypatch.setattr(flight_module, "STALL_SECONDS", -1.0)
    assert sorted(result.index for result in results) == [1, 2]

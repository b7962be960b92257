"""Batch files whose client, Redis or person interferes; a paced engine stands in for the model."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.batch_command import BatchCommand, read_rows, request, write_lines
from support.paced import PacedWorkerProcess, write_paced_adapter
from support.worker_process import WorkerProcess, wait_for

from lora_worker.batch.flight import FREED_SECONDS
from lora_worker.embedded import EmbeddedServer

from .test_tasks import figures

NAMES = [f"a{i}" for i in range(6)]
LINES = 900
TOKENS = 8


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as started:
        yield started


@pytest.fixture
def paced_worker(
    own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PacedWorkerProcess]:
    monkeypatch.setenv("PACED_LOAD_SECONDS", "0.01")
    roots = {name: write_paced_adapter(tmp_path / "adapters" / name, name) for name in NAMES}
    paths = ",".join(f"{name}={folder}" for name, folder in roots.items())
    (tmp_path / "worker").mkdir()
    settings = {"lora_paths": paths, "max_running_requests": 16, "drain_seconds": 1, "lease_seconds": 2}
    with PacedWorkerProcess(own_server, tmp_path / "worker", settings) as worker:
        worker.wait_until_ready()
        yield worker


@pytest.fixture(autouse=True)
def lines(tmp_path: Path) -> list[dict[str, Any]]:
    made = [request(f"c{i}", f"p{i}", model=NAMES[(i * 7) % 6], max_tokens=TOKENS) for i in range(LINES)]
    write_lines(tmp_path / "in.jsonl", made)
    return made


def check_complete(folder: Path, *, rows: int = LINES) -> None:
    """Every line has its row, once, in order."""
    found = read_rows(folder / "out.jsonl")
    assert [row["custom_id"] for row in found] == [f"c{i}" for i in range(rows)]
    assert all(row["error"] is None for row in found)


def taken_answers(server: EmbeddedServer) -> set[str]:
    """The keys of answers that a batch has taken, and that Redis is about to remove."""
    with Redis(port=server.port, decode_responses=True) as connection:
        keys = list(connection.scan_iter("celery-task-meta-*", count=1000))
        return {key for key in keys if 0 < int(connection.ttl(key)) <= FREED_SECONDS}


def start(server: EmbeddedServer, folder: Path, *arguments: str, answers: int = 1) -> BatchCommand:
    """A batch that has taken so many answers."""
    before = taken_answers(server)
    batch = BatchCommand(server, folder, "--max-in-flight", "200", *arguments)
    wait_for(lambda: len(taken_answers(server) - before) >= answers, "answers are taken")
    assert batch.process.poll() is None, f"the batch has ended before anything happened:\n{batch.said}"
    return batch


def is_idle(connection: Redis) -> bool:
    """Whether no task of a batch waits in a queue or is in a worker's hands."""
    return not connection.keys("lora*\x06*") and not connection.keys("lora:unacked:*")


def generated_rows(worker: WorkerProcess) -> int:
    client = worker.client()
    try:
        return int(figures(client)["generated_tokens"]) // TOKENS
    finally:
        client.close()


def test_a_batch_goes_on_after_its_client_was_killed_and_generates_no_row_twice(
    paced_worker: PacedWorkerProcess, tmp_path: Path
) -> None:
    server = paced_worker.server
    for order, kills in (("input", (1, 50, 100)), ("completion", (50,))):
        for answers in kills:
            start(server, tmp_path, "--order", order, answers=answers).kill()
            with (tmp_path / "out.jsonl").open("ab") as file:
                file.write(b'{"id": "batch_req_torn')
        ended = BatchCommand(server, tmp_path, "--order", order).end()
        assert (ended.code, ended.output) == (0, f"{LINES:,} lines: {LINES:,} answered, 0 failed.\n"), ended.errors
        if order == "input":
            check_complete(tmp_path)
            assert generated_rows(paced_worker) == LINES
        found = read_rows(tmp_path / "out.jsonl")
        assert sorted(row["custom_id"] for row in found) == sorted(f"c{i}" for i in range(LINES))
        for name in ("out.jsonl", "out.jsonl.batch"):
            (tmp_path / name).unlink()
    assert generated_rows(paced_worker) == 2 * LINES


def test_answers_that_came_while_nobody_asked_are_collected(paced_worker: PacedWorkerProcess, tmp_path: Path) -> None:
    server = paced_worker.server
    start(server, tmp_path).kill()
    with Redis(port=server.port) as connection:
        wait_for(lambda: is_idle(connection), "all of it has ended")
        waiting = len(connection.keys("celery-task-meta-*"))
    assert waiting >= 100
    before = generated_rows(paced_worker)
    assert BatchCommand(server, tmp_path, "--max-in-flight", "200").end().code == 0
    check_complete(tmp_path)
    assert generated_rows(paced_worker) == LINES
    assert before < LINES


def test_rows_of_a_killed_worker_come_back(paced_worker: PacedWorkerProcess, tmp_path: Path) -> None:
    batch = start(paced_worker.server, tmp_path)
    paced_worker.send_signal(signal.SIGKILL)
    paced_worker.wait_until_ended()
    paced_worker.start()
    assert batch.end().code == 0
    check_complete(tmp_path)


def test_a_restart_of_redis_is_waited_out(paced_worker: PacedWorkerProcess, tmp_path: Path) -> None:
    server = paced_worker.server
    batch = start(server, tmp_path)
    server.stop()
    wait_for(lambda: "the batch waits for it" in batch.said, "the outage is said")
    server.start()
    assert batch.end().code == 0
    assert "Redis answers again" in batch.said
    check_complete(tmp_path)


def test_what_redis_has_lost_is_sent_again(paced_worker: PacedWorkerProcess, tmp_path: Path) -> None:
    server = paced_worker.server
    batch = start(server, tmp_path)
    # The worker answers what it has in hand all the same; that must not be all that is in flight.
    paced_worker.send_signal(signal.SIGSTOP)
    with Redis(port=server.port) as connection:
        connection.flushall()
    wait_for(lambda: "they are sent again" in batch.said, "the client has noticed")
    paced_worker.send_signal(signal.SIGCONT)
    assert batch.end().code == 0
    assert "they are sent again" in batch.said
    check_complete(tmp_path)


def test_ctrl_c_once_collects_what_is_in_flight_and_twice_revokes_it(
    paced_worker: PacedWorkerProcess, tmp_path: Path
) -> None:
    server = paced_worker.server
    batch = start(server, tmp_path)
    batch.interrupt()
    ended = batch.end()
    assert ended.code == 130
    assert "No more lines are sent" in ended.errors
    assert f"of {LINES:,} lines are done, 0 of them failed" in ended.output
    done = generated_rows(paced_worker)
    assert 0 < done < LINES

    batch = start(server, tmp_path)
    batch.interrupt()
    wait_for(lambda: "No more lines are sent" in batch.said, "the first interrupt is seen")
    batch.interrupt()
    ended = batch.end()
    assert ended.code == 130
    assert "rows are revoked" in ended.errors
    with Redis(port=server.port) as connection:
        wait_for(lambda: is_idle(connection), "nothing is left to do")
    assert generated_rows(paced_worker) < LINES

    assert BatchCommand(server, tmp_path).end().code == 0
    check_complete(tmp_path)


def test_lines_wait_for_a_worker_where_none_runs(own_server: EmbeddedServer, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [request(f"c{i}", "p") for i in range(5)])
    batch = BatchCommand(own_server, tmp_path)
    wait_for(lambda: "No worker answers; the lines wait in Redis" in batch.said, "it is said that no worker answers")
    (tmp_path / "worker").mkdir()
    with PacedWorkerProcess(own_server, tmp_path / "worker", {}):
        assert batch.end().code == 0
    check_complete(tmp_path, rows=5)


@pytest.mark.parametrize("refusal", ["commands", "password"])
def test_what_redis_will_always_refuse_is_not_waited_for(
    own_server: EmbeddedServer, tmp_path: Path, refusal: str
) -> None:
    batch = BatchCommand(own_server, tmp_path)
    wait_for(lambda: "No worker answers; the lines wait in Redis" in batch.said, "the batch runs")
    with Redis(port=own_server.port) as connection:
        wait_for(lambda: connection.keys("lora:batch:*"), "lines are sent")
        if refusal == "commands":
            connection.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-mget"])
        else:
            connection.acl_setuser("default", enabled=True, passwords=["+other"], reset_passwords=True)
            connection.client_kill_filter(_type="normal", skipme=True)
    ended = batch.end()
    assert ended.code == 1
    assert "Redis refuses what the batch asks of it (" in ended.errors
    assert "docs/redis.md" in ended.errors
    assert "Traceback" not in ended.errors


def test_a_full_redis_is_waited_out(paced_worker: PacedWorkerProcess, tmp_path: Path) -> None:
    server = paced_worker.server
    batch = start(server, tmp_path)
    with Redis(port=server.port) as connection:
        connection.config_set("maxmemory", 1)
        wait_for(lambda: "the batch waits for it" in batch.said, "it is said that Redis is full")
        connection.config_set("maxmemory", 0)
    assert batch.end().code == 0
    check_complete(tmp_path)

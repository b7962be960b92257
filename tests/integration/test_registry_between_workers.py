"""Two real workers on one Redis, with the paced engine: loads and replaces while requests are answered; revocations."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from redis import Redis
from support.paced import PacedWorkerProcess, write_paced_adapter
from support.worker_process import wait_for

from lora_worker import errors
from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.testing.adapters import digest_of
from lora_worker.testing.rows import answer_text

SECONDS = 60
LEASE_SECONDS = 2
PACE = {"PACED_TOKENS_PER_SECOND": "200", "PACED_LOAD_SECONDS": "0.02"}

StartWorker = Callable[..., PacedWorkerProcess]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        write_paced_adapter(tmp_path / "adapters" / name, name)
    return tmp_path / "adapters"


@pytest.fixture
def start_worker(
    server: EmbeddedServer, root: Path, tmp_path: Path, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartWorker]:
    connection.flushdb()
    for name, value in PACE.items():
        monkeypatch.setenv(name, value)
    made: list[PacedWorkerProcess] = []

    def start(name: str, **settings: Any) -> PacedWorkerProcess:
        folder = tmp_path / f"{name}-{len(made)}"
        folder.mkdir()
        common = {"adapter_roots": root, "lease_seconds": LEASE_SECONDS, "max_running_requests": 4}
        worker = PacedWorkerProcess(server, folder, {**common, **settings}, "-n", f"{name}@here")
        made.append(worker)
        worker.__enter__()
        worker.wait_until_ready()
        return worker

    yield start
    for worker in made:
        worker.__exit__(None, None, None)


@pytest.fixture
def own_client(server: EmbeddedServer) -> Iterator[Client]:
    made = Client(server.url)
    yield made
    made.close()


def test_no_row_is_answered_by_old_content_after_a_replace_has_returned(
    start_worker: StartWorker, own_client: Client, root: Path
) -> None:
    workers = [start_worker(name) for name in ("first", "second")]
    own_client.load_lora_adapter("a", "a").get(timeout=SECONDS)
    own_client.load_lora_adapter("b", "b").get(timeout=SECONDS)
    other = answer_text(digest_of(root / "b"), "x")
    seen: set[str] = set()
    for version in range(6):
        before = [own_client.generate(model="a", prompt="x", max_tokens=8) for _ in range(20)]
        old = answer_text(digest_of(root / "a"), "x")
        write_paced_adapter(root / "a", f"version {version}")
        new = answer_text(digest_of(root / "a"), "x")
        others = [own_client.generate(model="b", prompt="x", max_tokens=8) for _ in range(20)]
        own_client.load_lora_adapter("a", "a", replace=True).get(timeout=SECONDS)
        after = [own_client.generate(model="a", prompt="x", max_tokens=8) for _ in range(20)]
        answers = [result.get(timeout=SECONDS) for result in after]
        assert {answer["choices"][0]["text"] for answer in answers} == {new}
        seen |= {answer["lora_worker"]["worker"] for answer in answers}
        assert {result.get(timeout=SECONDS)["choices"][0]["text"] for result in others} == {other}
        assert {answered(result) for result in before} <= {old, new, "refused"}
    assert seen == {"first@here", "second@here"}, [worker.log for worker in workers]


def answered(result: Any) -> str:
    """The text; a row that wanted the old content when its files were changed already is refused."""
    try:
        return str(result.get(timeout=SECONDS)["choices"][0]["text"])
    except errors.InvalidAdapterError:
        return "refused"


def test_an_unload_returns_when_no_worker_runs_it_and_from_then_on_it_is_unknown(
    start_worker: StartWorker, own_client: Client
) -> None:
    for name in ("first", "second"):
        start_worker(name)
    own_client.load_lora_adapter("a", "a").get(timeout=SECONDS)
    rows = [own_client.generate(model="a", prompt="x", max_tokens=1200) for _ in range(8)]
    wait_for(lambda: sum(held(own_client, "a")) == 8, "both workers are full of it")
    unloaded = own_client.unload_lora_adapter("a")
    assert unloaded.get(timeout=SECONDS)["loaded_adapters"] == {}
    assert all(row.ready() for row in rows)
    for row in [own_client.generate(model="a", prompt="x") for _ in range(8)]:
        with pytest.raises(errors.UnknownAdapterError):
            row.get(timeout=SECONDS)


def test_calls_that_wait_for_rows_hold_up_no_other_call(
    start_worker: StartWorker, own_client: Client, root: Path
) -> None:
    names = [f"n{i}" for i in range(20)]
    for name in names:
        write_paced_adapter(root / name, name)
    start_worker("first", max_running_requests=20, max_loras_per_batch=20)
    for name in names:
        own_client.load_lora_adapter(name, name).get(timeout=SECONDS)
    rows = [own_client.generate(model=name, prompt="x", max_tokens=100_000) for name in names]
    wait_for(lambda: all(sum(held(own_client, name)) for name in names), "all run")
    unloads = [own_client.unload_lora_adapter(name) for name in names]
    wait_for(lambda: not own_client.list_lora_adapters().get(timeout=SECONDS), "all are off the registry")
    assert not any(unload.ready() for unload in unloads)
    own_client.cancel(*[row.id for row in rows])
    assert all(unload.get(timeout=SECONDS)["success"] for unload in unloads)
    for row in rows:
        with pytest.raises(TaskRevokedError):
            row.get(timeout=SECONDS)


def held(client: Client, name: str) -> list[int]:
    listed = client.list_lora_adapters().get(timeout=SECONDS)
    return [here["held"] for here in listed[name]["workers"].values()]


def test_a_worker_that_is_killed_holds_up_a_replace_no_longer_than_its_lease(
    start_worker: StartWorker, own_client: Client, root: Path
) -> None:
    first, second = start_worker("first"), start_worker("second")
    own_client.load_lora_adapter("a", "a").get(timeout=SECONDS)
    own_client.generate(model="a", prompt="x").get(timeout=SECONDS)
    wait_for(lambda: len(held(own_client, "a")) == 2, "both are in the fleet")
    second.send_signal(signal.SIGKILL)
    write_paced_adapter(root / "a", "new")
    assert own_client.load_lora_adapter("a", "a", replace=True).get(timeout=SECONDS)["success"]
    assert held(own_client, "a") == [0]
    assert "dead; restored" in first.log


def test_a_request_for_a_name_that_its_worker_keeps_out_of_says_that_the_files_differ(
    start_worker: StartWorker, own_client: Client, root: Path, tmp_path: Path
) -> None:
    first = start_worker("first", lora_paths=f"a={root / 'a'}")
    write_paced_adapter(tmp_path / "own" / "a", "other")
    start_worker("second", lora_paths=f"a={tmp_path / 'own' / 'a'}", adapter_roots="[]")
    first.send_signal(signal.SIGTERM)
    first.wait_until_ended()
    with pytest.raises(errors.InvalidAdapterError, match="on this worker are not those that are registered"):
        own_client.generate(model="a", prompt="x").get(timeout=SECONDS)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_revocation_that_a_worker_did_not_hear_ends_the_row_all_the_same(
    start_worker: StartWorker, own_client: Client, connection: Redis, *, is_running: bool
) -> None:
    start_worker("first", max_running_requests=1)
    first = own_client.generate(prompt="x", max_tokens=100_000)
    wait_for(lambda: connection.keys("lora:started:*"), "it runs")
    second = own_client.generate(prompt="x", max_tokens=100_000)
    revoked, other = (first, second) if is_running else (second, first)
    connection.zadd("lora:revoked", {revoked.id: connection.time()[0]})
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=SECONDS)
    own_client.cancel(other.id)
    with pytest.raises(TaskRevokedError):
        other.get(timeout=SECONDS)


def test_a_stopped_worker_that_comes_back_answers_nothing_with_old_content(
    start_worker: StartWorker, own_client: Client, root: Path
) -> None:
    first, second = start_worker("first"), start_worker("second")
    own_client.load_lora_adapter("a", "a").get(timeout=SECONDS)
    rows = [own_client.generate(model="a", prompt="x", max_tokens=1200) for _ in range(8)]
    wait_for(lambda: sorted(held(own_client, "a")) == [4, 4], "both workers are full of it")
    second.send_signal(signal.SIGSTOP)
    write_paced_adapter(root / "a", "new")
    assert own_client.load_lora_adapter("a", "a", replace=True).get(timeout=SECONDS)["success"]
    done = {row.id for row in rows if row.ready()}
    assert len(done) == 4
    second.send_signal(signal.SIGCONT)
    new = answer_text(digest_of(root / "a"), "x")
    for row in rows:
        answer = row.get(timeout=SECONDS)
        assert row.id in done or answer["choices"][0]["text"] == new
    wait_for(lambda: "another worker's by now" in second.log, "the second knows")
    assert first.process is not None


@pytest.mark.parametrize("by_client", [True, False])
def test_a_queued_task_that_is_revoked_does_not_run_on_workers_that_start_later(
    start_worker: StartWorker, own_client: Client, connection: Redis, *, by_client: bool
) -> None:
    worker = start_worker("first")
    if by_client:
        kill(worker)
        own_client.cancel("revoked-0", "revoked-1")
    else:
        own_client.app.control.revoke(["revoked-0", "revoked-1"])
        wait_for(lambda: connection.zcard("lora:revoked") == 2, "it is written down")
        kill(worker)
    revoked = [own_client.generate(prompt="x", task_id=f"revoked-{i}") for i in range(2)]
    wanted = own_client.generate(prompt="x")
    later = start_worker("second")
    for result in revoked:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=SECONDS)
    assert wanted.get(timeout=SECONDS)["choices"]
    wait_for(lambda: not any(map(connection.hlen, connection.keys("lora:unacked:*"))), "all are acknowledged")
    assert later.log.count("succeeded") == 1


def kill(worker: PacedWorkerProcess) -> None:
    worker.send_signal(signal.SIGKILL)
    worker.wait_until_ended()

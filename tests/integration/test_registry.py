"""The fleet's registry on a real Redis, between workers of one process: what is registered, and who let go of what."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.paced import write_paced_adapter
from support.worker_process import wait_for

from lora_worker import errors
from lora_worker.embedded import EmbeddedServer
from lora_worker.fleet.connection import connect
from lora_worker.fleet.keys import Keys
from lora_worker.fleet.registry.registry import FleetRegistry
from lora_worker.fleet.registry.store import KEPT_CHANGES, RegistryStore
from lora_worker.settings import Settings
from lora_worker.testing.adapters import digest_of
from lora_worker.testing.engine import PacedEngine
from lora_worker.testing.rows import answer_text

KEYS = Keys("fleet", 4)
ENDLESS = 10**6
SECONDS = 20


class Worker:
    """An engine and its registry. Every change is reported at once, as a member of the fleet does, and the rest by
    `report`, as a member does once a second."""

    def __init__(self, server: EmbeddedServer, name: str, root: Path, **settings: Any) -> None:
        self.id = f"{name}:1"
        self.rows: set[Row] = set()
        self.redis = connect(server.url, timeout_seconds=5)
        made = Settings(model="paced", adapter_roots=[root], max_loras_per_batch=3, **settings)
        self.engine = PacedEngine(made, worker_name=name)
        self.registry = FleetRegistry(
            RegistryStore(self.redis, KEYS),
            self.engine.registered,
            made,
            worker_name=name,
            worker_id=self.id,
            rows=lambda: list(self.rows),
            changed=self.report,
        )
        self.beat()
        self.registry.start()
        wait_for(lambda: self.registry.reconciler.describe() and self.has_joined, "the worker has joined")

    @property
    def has_joined(self) -> bool:
        probe = threading.Event()
        self.registry.reconciler.admit(None, probe.set)
        return probe.wait(SECONDS)

    def report(self) -> None:
        self.redis.hset(KEYS.worker(self.id), "report", json.dumps(self.registry.describe()))

    def beat(self) -> None:
        self.redis.zadd(KEYS.workers, {self.id: 2**40})
        self.claim()

    def claim(self) -> None:
        """What comes with every claim and beat."""
        self.registry.reconciler.on_generation(int(self.redis.get(KEYS.generation) or 0))

    def row(self, name: str, *, max_tokens: int = 1) -> Row:
        return Row(self, name, max_tokens)

    def stop(self) -> None:
        self.engine.check_integrity()
        self.engine.close()
        self.registry.stop()
        self.redis.close()


class Row:
    def __init__(self, worker: Worker, name: str, max_tokens: int) -> None:
        self._done: Future[Callable[[], dict[str, Any]]] = Future()
        self._worker = worker
        self.id = ""
        self.adapter: str | None = name
        self.begun_at: int | None = None
        self.started = threading.Event()
        body = {"model": name, "prompt": "x", "max_tokens": max_tokens}

        def submit() -> None:
            worker.rows.add(self)
            self.id = worker.engine.submit(body, self._end, may_start=self._begin, on_started=self.started.set)

        worker.registry.reconciler.admit(name, submit)

    def _begin(self) -> bool:
        self.begun_at = self._worker.registry.reconciler.generation
        return True

    def _end(self, outcome: Callable[[], dict[str, Any]]) -> None:
        self._done.set_result(outcome)
        self._worker.rows.discard(self)
        self._worker.registry.reconciler.leaving.note_ended(self)

    @property
    def is_done(self) -> bool:
        return self._done.done()

    def text(self) -> str:
        answer = self._done.result(SECONDS)()
        return str(answer["choices"][0]["text"])

    def cancel(self) -> None:
        self._worker.engine.cancel(self.id)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        write_paced_adapter(tmp_path / name, name)
    return tmp_path


@pytest.fixture
def make_worker(server: EmbeddedServer, root: Path, connection: Redis) -> Iterator[Callable[..., Worker]]:
    connection.flushdb()
    made: list[Worker] = []

    def make(name: str, **settings: Any) -> Worker:
        made.append(Worker(server, name, settings.pop("root", root), **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.stop()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def old_and_new(root: Path) -> tuple[str, str]:
    """Change the files of the adapter a; the answers that the old and the new ones give."""
    old = answer_text(digest_of(root / "a"), "x")
    write_paced_adapter(root / "a", "new")
    return old, answer_text(digest_of(root / "a"), "x")


def test_a_loaded_adapter_is_known_to_others_and_to_those_that_start_later(
    make_worker: Callable[..., Worker], root: Path
) -> None:
    first, second = make_worker("first"), make_worker("second")
    assert first.registry.load_lora_adapter("a", "a")["loaded_adapters"] == {"a": str(root / "a")}
    third = make_worker("third")
    # No beat or claim has told the second: the name is looked up before it is refused.
    for worker in (first, second, third):
        assert worker.row("a").text() == answer_text(digest_of(root / "a"), "x")
    with pytest.raises(errors.UnknownAdapterError, match="'nobody': loaded adapters are a"):
        second.row("nobody").text()


def test_a_row_that_was_claimed_with_a_newer_registry_waits_until_it_is_applied(
    make_worker: Callable[..., Worker], root: Path
) -> None:
    first, second = make_worker("first"), make_worker("second")
    first.registry.load_lora_adapter("a", "a")
    assert second.row("a").text()
    _, new = old_and_new(root)
    with ThreadPoolExecutor(1) as threads:
        replacing = threads.submit(first.registry.load_lora_adapter, "a", "a", replace=True)
        wait_for(lambda: first.registry.reconciler.entries["a"].digest == digest_of(root / "a"), "it is registered")
        second.claim()
        assert second.row("a").text() == new
        replacing.result(SECONDS)


def test_a_row_that_cannot_be_given_to_the_engine_holds_up_no_other(
    make_worker: Callable[..., Worker], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_worker("first"), make_worker("second")
    first.registry.load_lora_adapter("a", "a")
    second.registry.reconciler.admit("nobody", lambda: [][0])  # waits until the name has been looked up
    assert second.row("a").text() == answer_text(digest_of(root / "a"), "x")
    assert "could not be given to the engine" in caplog.text
    assert second.row("a").text()


def test_replace_returns_when_no_worker_can_answer_with_the_old_content(
    make_worker: Callable[..., Worker], root: Path, background: ThreadPoolExecutor
) -> None:
    first, second = make_worker("first"), make_worker("second")
    first.registry.load_lora_adapter("a", "a")
    rows = [worker.row("a", max_tokens=ENDLESS) for worker in (first, second)]
    assert all(row.started.wait(SECONDS) for row in rows)
    old, new = old_and_new(root)
    with pytest.raises(errors.AdapterConflictError, match="replace=True"):
        first.registry.load_lora_adapter("a", "a")
    replacing = background.submit(first.registry.load_lora_adapter, "a", "a", replace=True)
    wait_for(lambda: first.row("a").text() == new, "the first worker answers with the new content")
    second.claim()
    wait_for(lambda: second.row("a").text() == new, "so does the second")
    rows[0].cancel()
    wait_for(lambda: not first.registry.describe()["leaving"], "the first has let go")
    assert not replacing.done()
    assert second.registry.describe()["leaving"] == ["a"]
    rows[1].cancel()
    assert replacing.result(SECONDS)["success"]
    assert old != new


def test_unload_waits_for_rows_on_other_workers_and_says_whom_it_waited_for(
    make_worker: Callable[..., Worker],
) -> None:
    first, second = make_worker("first"), make_worker("second")
    first.registry.load_lora_adapter("a", "a")
    row = second.row("a", max_tokens=ENDLESS)
    assert row.started.wait(SECONDS)
    with pytest.raises(errors.AdapterTimeoutError, match=r"'a' still run after 0\.2 s.* on second;"):
        first.registry.unload_lora_adapter("a", timeout_seconds=0.2)
    second.claim()
    with pytest.raises(errors.UnknownAdapterError):
        second.row("a").text()
    assert not row.is_done
    row.cancel()
    assert "was not loaded" in first.registry.unload_lora_adapter("a")["message"]


def test_a_worker_that_dies_is_waited_for_until_it_is_off_the_books(
    make_worker: Callable[..., Worker], connection: Redis, root: Path, background: ThreadPoolExecutor
) -> None:
    first = make_worker("first")
    first.registry.load_lora_adapter("a", "a")
    dead = "dead:1"
    connection.zadd(KEYS.workers, {dead: 1})  # its lease has ended, and its messages are not restored yet
    connection.hset(KEYS.worker(dead), "report", json.dumps({"generation": 1, "leaving": []}))
    old_and_new(root)
    replacing = background.submit(first.registry.load_lora_adapter, "a", "a", replace=True)
    wait_for(lambda: first.registry.reconciler.entries["a"].digest == digest_of(root / "a"), "it is registered")
    assert not replacing.done()
    connection.zrem(KEYS.workers, dead)
    assert replacing.result(SECONDS)["success"]


def test_a_waiting_call_ends_when_its_worker_stops(
    make_worker: Callable[..., Worker], connection: Redis, background: ThreadPoolExecutor
) -> None:
    first = make_worker("first")
    first.registry.load_lora_adapter("a", "a")
    connection.zadd(KEYS.workers, {"silent:1": 2**40})
    unloading = background.submit(first.registry.unload_lora_adapter, "a")
    wait_for(lambda: not first.registry.reconciler.entries, "it is off the registry")
    first.engine.close()
    first.registry.stop()
    with pytest.raises(errors.EngineStoppedError):
        unloading.result(SECONDS)


def test_list_shows_every_worker_by_its_own_report(make_worker: Callable[..., Worker], root: Path) -> None:
    first, second = make_worker("first"), make_worker("second")
    first.registry.load_lora_adapter("a", "a")
    assert second.row("a").text()

    def listed() -> dict[str, Any]:
        second.report()
        found: dict[str, Any] = first.registry.list_lora_adapters()["a"]
        return found

    wait_for(lambda: listed()["workers"]["second"]["resident"], "the second reports where it has the adapter")
    assert not listed()["workers"]["first"]["resident"]
    assert listed()["digest"] == digest_of(root / "a")


def test_a_worker_whose_files_differ_says_so_and_refuses_that_adapter_alone(
    make_worker: Callable[..., Worker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "own"
    write_paced_adapter(own / "a", "other content")
    write_paced_adapter(own / "b", "b")
    first, second = make_worker("first"), make_worker("second", root=own)
    for name in ("a", "b"):
        first.registry.load_lora_adapter(name, name)
    second.claim()
    with pytest.raises(errors.InvalidAdapterError, match=r"'a'.*digest"):
        second.row("a").text()
    assert second.row("b").text()

    def said() -> str:
        second.report()
        return str(first.registry.list_lora_adapters()["a"]["workers"]["second"]["error"])

    wait_for(lambda: "digest" in said(), "the list says why")
    assert first.registry.list_lora_adapters()["a"]["workers"]["first"]["error"] is None
    assert caplog.text == ""


def test_adapters_of_the_settings_are_registered_and_the_pins_stay_the_workers_own(
    make_worker: Callable[..., Worker],
) -> None:
    first = make_worker("first", lora_paths=[{"lora_name": "a", "pinned": True}, "b"])
    second = make_worker("second", lora_paths=["b"])
    assert second.row("a").text()
    assert first.registry.describe()["pinned"] == ["a"]
    assert second.registry.describe()["pinned"] == []
    listed = second.registry.list_lora_adapters()
    assert listed["a"]["pinned"]
    assert not listed["b"]["pinned"]
    with pytest.raises(errors.AdapterConflictError, match="settings of first; unload with force=True"):
        second.registry.unload_lora_adapter("a")
    assert "go on pinning" in second.registry.unpin_lora_adapter("a")["message"]


def test_a_start_with_other_files_than_the_fleets_is_said_and_alone_they_replace_them(
    make_worker: Callable[..., Worker], root: Path, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_worker("first", lora_paths=["a"])
    old, new = old_and_new(root)
    second = make_worker("second", lora_paths=["a", "b"])
    assert "are not those that are registered" in caplog.text
    assert "are not those" in first.registry.list_lora_adapters()["a"]["workers"]["second"]["error"]
    with pytest.raises(errors.InvalidAdapterError, match="digest"):
        second.row("a").text()
    assert second.row("b").text()
    connection.zrem(KEYS.workers, first.id, second.id)
    assert make_worker("third", lora_paths=["a"]).row("a").text() == new != old


def test_a_worker_that_was_killed_and_starts_with_other_files_is_alone_when_its_old_lease_has_ended(
    make_worker: Callable[..., Worker], root: Path, connection: Redis
) -> None:
    first = make_worker("first", lora_paths=["a"])
    old, new = old_and_new(root)
    connection.zadd(KEYS.workers, {first.id: connection.time()[0] + 2})
    again = make_worker("again", root=root / "b", lora_paths=[f"a={root / 'a'}"])
    with pytest.raises(errors.InvalidAdapterError):
        again.row("a").text()
    wait_for(lambda: not again.registry.describe()["refused"], "the old lease has ended")
    assert again.row("a").text() == new != old


def test_what_a_task_has_loaded_is_not_replaced_by_the_settings_of_a_worker_that_starts(
    make_worker: Callable[..., Worker], root: Path, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_worker("first", lora_paths=["a"])
    first.registry.load_lora_adapter("a", "b", replace=True)
    connection.zrem(KEYS.workers, first.id)
    second = make_worker("second", lora_paths=["a"])
    assert second.row("a").text() == answer_text(digest_of(root / "b"), "x")
    assert "'a' is served as a task has loaded it" in caplog.text
    second.registry.unload_lora_adapter("a")
    connection.zrem(KEYS.workers, second.id)
    assert make_worker("third", lora_paths=["a"]).row("a").text() == answer_text(digest_of(root / "a"), "x")


def test_a_pin_is_the_fleets_and_one_that_some_worker_has_no_slot_for_is_refused(
    make_worker: Callable[..., Worker],
) -> None:
    first = make_worker("first")
    second = make_worker("second", lora_paths=[{"lora_name": "c", "pinned": True}])
    for name in ("a", "b"):
        first.registry.load_lora_adapter(name, name)
    first.registry.pin_lora_adapter("a")
    second.claim()
    wait_for(lambda: second.registry.describe()["pinned"] == ["a", "c"], "the second pins both")
    with pytest.raises(errors.AdapterConflictError, match=r"on second, pinning .* one must stay unpinned"):
        first.registry.pin_lora_adapter("b")
    with pytest.raises(errors.AdapterConflictError, match="unpin it first"):
        second.registry.unload_lora_adapter("a")
    second.registry.unpin_lora_adapter("a")
    assert "was not pinned" in second.registry.unpin_lora_adapter("a")["message"]
    with pytest.raises(errors.UnknownAdapterError, match="'nobody': loaded adapters are a, b, c"):
        first.registry.pin_lora_adapter("nobody")


def test_a_registry_that_redis_has_lost_is_registered_again(
    make_worker: Callable[..., Worker], connection: Redis, root: Path
) -> None:
    first = make_worker("first")
    first.registry.load_lora_adapter("a", "a")
    first.registry.pin_lora_adapter("a")
    before = int(connection.get(KEYS.generation) or 0)
    connection.flushdb()
    first.beat()
    wait_for(lambda: int(connection.get(KEYS.generation) or 0) > before, "it is registered again")
    later = make_worker("later")
    assert later.row("a").text() == answer_text(digest_of(root / "a"), "x")
    assert later.registry.describe()["pinned"] == ["a"]


def test_a_registry_that_is_lost_while_a_worker_joins_is_registered_again_whole(
    make_worker: Callable[..., Worker], connection: Redis, root: Path
) -> None:
    first = make_worker("first", lora_paths=["a"])
    for name in ("b", "c"):
        first.registry.load_lora_adapter(name, name)
    first.registry.load_lora_adapter("a", "b", replace=True)
    connection.flushdb()
    joining = make_worker("joining", lora_paths=["a"])  # registers what its settings name before the first looks
    first.beat()
    wait_for(lambda: set(joining.registry.list_lora_adapters()) == {"a", "b", "c"}, "all is registered again")
    assert set(first.registry.list_lora_adapters()) == {"a", "b", "c"}
    joining.claim()
    b = answer_text(digest_of(root / "b"), "x")
    wait_for(lambda: [worker.row("a").text() for worker in (first, joining)] == [b, b], "as it was loaded last")


def test_names_that_come_and_go_leave_a_bounded_number_behind_and_are_missed_by_nobody(
    make_worker: Callable[..., Worker], connection: Redis
) -> None:
    first = make_worker("first")
    first.registry.load_lora_adapter("a", "a")
    first.registry.load_lora_adapter("b", "b")
    store = RegistryStore(first.redis, KEYS)
    known = store.changes_since(0)
    first.registry.unload_lora_adapter("a")
    reference = known.entries["b"]
    names = [f"n{i}" for i in range(2 * KEPT_CHANGES)]
    store.change(names, lambda _: {name: replace(reference, name=name) for name in names})
    last = store.change(names, lambda _: dict.fromkeys(names))
    assert connection.zcard(KEYS.registry_changes) <= 2 * KEPT_CHANGES
    missed = store.changes_since(known.generation)
    assert missed.is_whole
    assert (missed.generation, missed.entries) == (last, {"b": reference})
    changed = store.change(["a"], lambda _: {"a": replace(reference, name="a")})
    assert store.changes_since(last)[:3] == (changed, {"a": replace(reference, name="a")}, set())


def test_a_number_is_not_used_again_where_redis_has_come_back_with_older_data(
    make_worker: Callable[..., Worker], connection: Redis
) -> None:
    first = make_worker("first")
    first.registry.load_lora_adapter("a", "a")
    before = int(connection.get(KEYS.generation) or 0)
    connection.set(KEYS.generation, before - 100)
    first.registry.load_lora_adapter("b", "b")
    assert int(connection.get(KEYS.generation) or 0) > before


def test_many_loads_at_once_are_all_registered(
    make_worker: Callable[..., Worker], root: Path, background: ThreadPoolExecutor
) -> None:
    workers = [make_worker("first"), make_worker("second")]
    names = [f"n{i}" for i in range(40)]
    for name in names:
        write_paced_adapter(root / name, name)
    loads = [background.submit(workers[i % 2].registry.load_lora_adapter, n, n) for i, n in enumerate(names)]
    assert all(load.result(SECONDS)["success"] for load in loads)
    assert set(workers[0].registry.list_lora_adapters()) == set(names)

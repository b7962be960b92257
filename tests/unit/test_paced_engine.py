"""The stand-in for the model keeps the promises that the tests of the queue rest on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.paced import write_paced_adapter

from lora_worker import errors
from lora_worker.settings import Settings
from lora_worker.testing.adapters import digest_of
from lora_worker.testing.engine import PacedEngine
from lora_worker.testing.rows import answer_text

ENDLESS = 10**6


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        write_paced_adapter(tmp_path / name, name)
    return tmp_path


@pytest.fixture
def engine(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PacedEngine]:
    monkeypatch.setenv("PACED_TOKENS_PER_SECOND", "1000")
    monkeypatch.setenv("PACED_LOAD_SECONDS", "0.01")
    settings = Settings(
        model="paced", adapter_roots=[root], lora_paths=["a", "b", "c"], max_loras_per_batch=2, max_running_requests=3
    )
    made = PacedEngine(settings, worker_name="w")
    yield made
    made.check_integrity()
    made.close()


class Row:
    """A row in the background."""

    def __init__(self, engine: PacedEngine, *, priority: int = 0, limit: float | None = None, **body: Any) -> None:
        self._done: Future[Callable[[], dict[str, Any]]] = Future()
        self.started = threading.Event()
        self.id = engine.submit(
            body, self._done.set_result, priority=priority, time_limit_seconds=limit, on_started=self.started.set
        )

    def answer(self) -> dict[str, Any]:
        return self._done.result(20)()


def test_an_answer_tells_content_and_prompt(engine: PacedEngine, root: Path) -> None:
    base, adapted = Row(engine, prompt="x y"), Row(engine, model="a", prompt="x y", max_tokens=3)
    assert base.answer()["choices"][0]["text"] == answer_text(None, "x y")
    answer = adapted.answer()
    digest = digest_of(root / "a")
    assert answer["choices"][0]["text"] == answer_text(digest, "x y") != answer_text(None, "x y")
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert (answer["lora_worker"]["adapter"], answer["lora_worker"]["digest"]) == ("a", digest)
    assert answer["lora_worker"]["worker"] == "w"


def test_a_load_is_counted_once_for_the_rows_it_serves_and_the_least_used_leaves(engine: PacedEngine) -> None:
    for names in (["a", "a", "b"], ["a"], ["c"], ["a"]):
        for row in [Row(engine, model=name, prompt="x") for name in names]:
            row.answer()
    pool = engine.info()["pool"]
    assert (pool["hits"], pool["loads"], pool["evictions"]) == (3, 3, 1)
    assert set(pool["slots"].values()) == {"a", "c"}


def test_rows_beyond_the_limit_wait_and_the_highest_priority_goes_first(engine: PacedEngine) -> None:
    running = [Row(engine, prompt="x", max_tokens=ENDLESS) for _ in range(3)]
    assert all(row.started.wait(20) for row in running)
    low, high = Row(engine, prompt="x", max_tokens=ENDLESS, priority=9), Row(engine, prompt="x", max_tokens=ENDLESS)
    engine.cancel(running[0].id)
    with pytest.raises(errors.RequestWithdrawnError):
        running[0].answer()
    assert high.started.wait(20)
    assert not low.started.is_set()
    assert engine.info()["running"] == 3


def test_a_row_ends_at_its_time_limit(engine: PacedEngine) -> None:
    with pytest.raises(errors.TimeLimitError):
        Row(engine, prompt="x", max_tokens=ENDLESS, limit=0.05).answer()


def test_rows_keep_the_replaced_content_and_waiting_ones_of_a_name_that_goes_fail(
    engine: PacedEngine, root: Path
) -> None:
    old_digest = digest_of(root / "a")
    old = Row(engine, model="a", prompt="x", max_tokens=100)
    assert old.started.wait(20)
    write_paced_adapter(root / "a", "new")
    engine.registered.apply({"a": engine.registered.read("a", "a", pinned=False)})
    new = Row(engine, model="a", prompt="x", max_tokens=100)
    assert new.started.wait(20)
    waiting = Row(engine, model="c", prompt="x", max_tokens=100)
    engine.registered.apply({"a": None, "c": None})
    assert old.answer()["choices"][0]["text"] == answer_text(old_digest, "x")
    assert new.answer()["choices"][0]["text"] == answer_text(digest_of(root / "a"), "x")
    with pytest.raises(errors.UnknownAdapterError, match="unloaded before"):
        waiting.answer()
    with pytest.raises(errors.UnknownAdapterError, match="unknown adapter 'a'"):
        Row(engine, model="a", prompt="x").answer()


def test_a_folder_that_has_changed_is_refused_when_it_is_read(engine: PacedEngine, root: Path) -> None:
    write_paced_adapter(root / "b", "changed")
    with pytest.raises(errors.InvalidAdapterError, match="have changed"):
        Row(engine, model="b", prompt="x").answer()
    assert "have changed" in engine.registered.here()["b"]["error"]

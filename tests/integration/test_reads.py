"""Reads beside generation: a source that is slow or hangs delays its own requests, and no read is for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.rows import Row
from support.tiny_models import save_adapter
from support.worker_process import wait_for

from lora_worker.adapters import readers
from lora_worker.adapters.plan import AdapterPlanner, LoadedAdapter
from lora_worker.engine import Engine
from lora_worker.errors import InvalidAdapterError


class Sources:
    """Those of the adapters in `hanging` give nothing until `may_read` is set."""

    def __init__(self) -> None:
        self.hanging: set[str] = set()
        self.may_read = threading.Event()
        self.reading: list[str] = []
        self.read: list[str] = []

    def wait(self, name: str) -> None:
        if name in self.hanging:
            self.reading.append(name)
            self.may_read.wait(60)
            self.read.append(name)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    made, load = Sources(), AdapterPlanner.load

    def slow(planner: AdapterPlanner, name: str, folder: Path) -> LoadedAdapter:
        made.wait(name)
        return load(planner, name, folder)

    monkeypatch.setattr(AdapterPlanner, "load", slow)
    yield made
    made.may_read.set()


@pytest.fixture
def away(make_engine: Callable[..., Engine], paths: dict[str, Path]) -> Engine:
    """An engine whose adapters another worker has registered: none is in memory."""
    engine = make_engine(adapter_roots=[next(iter(paths.values())).parent])
    engine.registered.apply(
        {name: engine.registered.read(name, str(path), pinned=False) for name, path in paths.items()}
    )
    return engine


def short(engine: Engine, name: str) -> Row:
    return Row(engine, model=name, prompt=[1], max_tokens=2)


def test_sources_that_hang_delay_their_own_requests_only(
    away: Engine, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are read at once."""
    monkeypatch.setattr(readers, "READS_AT_ONCE", 2)
    monkeypatch.setattr(readers, "STALLED_SECONDS", 0.0)
    sources.hanging = {"attention", "everything", "narrow"}
    held_up = [short(away, name) for name in sorted(sources.hanging)]
    wait_for(lambda: len(sources.reading) == 3, "all of them are being read")
    assert short(away, "mlp").tokens()
    assert not any(row.started.is_set() for row in held_up)
    sources.may_read.set()
    assert all(row.answer() for row in held_up)
    reads = away.info()["pool"]["reads_from_files"]
    assert reads["count"] == 4
    assert reads["max_seconds"] > 0


@pytest.mark.parametrize(
    "limits",
    [
        {"READS_AT_ONCE": 2, "STALLED_SECONDS": float("inf")},
        {"READS_AT_ONCE": 9, "STALLED_SECONDS": 0.0, "MAX_THREADS": 2},
    ],
)
def test_reads_are_bounded_whether_or_not_they_hang(
    limits: dict[str, float], away: Engine, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(readers, name, value)
    sources.hanging = {"attention", "everything", "narrow", "mlp"}
    rows = [short(away, name) for name in sorted(sources.hanging)]
    wait_for(lambda: len(sources.reading) == 2, "two of them are being read")
    assert Row(away, prompt=[1]).tokens(), "steps enough to start another"
    assert len(sources.reading) == 2
    sources.may_read.set()
    assert all(row.answer() for row in rows)


def test_failed_reads_are_remembered_for_a_moment_only(
    away: Engine, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: AdapterPlanner, name: str, folder: Path) -> LoadedAdapter:
        raise InvalidAdapterError(f"{folder} of {name} is away")

    monkeypatch.setattr(AdapterPlanner, "load", fails)
    monkeypatch.setattr(readers, "READ_AGAIN_SECONDS", 0.0)
    for name in paths:
        with pytest.raises(InvalidAdapterError, match="is away"):
            short(away, name).answer()
        away.registered.apply({name: None})
    assert len(away._core.adapters._readers._read_after) <= 1


def test_an_engine_closes_while_a_source_hangs(away: Engine, sources: Sources) -> None:
    sources.hanging = {"narrow"}
    short(away, "narrow")
    wait_for(lambda: bool(sources.reading), "it is being read")
    away.close()
    assert not sources.read


def test_a_slow_source_delays_no_other_where_host_memory_is_full(
    make_engine: Callable[..., Engine], paths: dict[str, Path], sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "STALLED_SECONDS", 0.0)
    engine = make_engine(lora_paths=[f"{name}={path}" for name, path in paths.items()], max_loaded_loras=1)
    sources.hanging = {"narrow"}
    held_up = short(engine, "narrow")
    wait_for(lambda: bool(sources.reading), "it is being read")
    for name in ("mlp", "attention", "mlp"):
        assert short(engine, name).tokens()
    assert not held_up.started.is_set()
    sources.may_read.set()
    assert held_up.answer()


def test_nothing_is_read_that_would_drive_out_what_comes_before_it(
    make_engine: Callable[..., Engine], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """One slot, which a long row has, room for two in host memory, and five adapters that wait."""
    names = [f"adapter-{i}" for i in range(6)]
    for i, name in enumerate(names):
        save_adapter(tiny_model("llama"), tmp_path / name, seed=i, r=2, target_modules=["q_proj"])
    entries = [f"{name}={tmp_path / name}" for name in names]
    engine = make_engine(lora_paths=entries, max_loras_per_batch=1, max_loaded_loras=2)
    long = Row(engine, model=names[0], prompt=[1])
    assert long.started.wait(60)
    before = engine.info()["pool"]["reads_from_files"]["count"]
    waiting = [short(engine, name) for name in names[1:]]
    for row in (long, *waiting):
        assert row.answer()
    # Each once, but for the one that is there already.
    assert engine.info()["pool"]["reads_from_files"]["count"] - before == len(waiting) - 1

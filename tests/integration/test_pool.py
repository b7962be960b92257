"""Adapters that come, go and change while rows run, with fewer slots than adapters: nobody gets another's adapter."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.oracle import Oracle
from support.rows import Row, expected
from support.tiny_models import save_adapter
from support.worker_process import wait_for

from lora_worker import errors
from lora_worker.engine import Engine, thread


def test_rows_that_run_keep_the_replaced_weights_and_later_ones_get_the_new(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tiny_model: Callable[[str], Path]
) -> None:
    oracle = Oracle(tiny_model("llama"), paths, torch.float64)
    engine = make_engine(lora_paths=[f"a={paths['attention']}"], max_loras_per_batch=2)
    old = Row(engine, model="a", prompt=[1, 2])
    assert old.started.wait(60)
    with pytest.raises(errors.AdapterConflictError, match="replace=True"):
        engine.load_lora_adapter("a", str(paths["everything"]))
    engine.load_lora_adapter("a", str(paths["everything"]), replace=True)
    new = Row(engine, model="a", prompt=[1, 2])
    assert not old.is_done
    assert new.tokens() == expected(oracle, "everything", [1, 2])
    assert old.tokens() == expected(oracle, "attention", [1, 2])
    engine.check_integrity()
    assert engine.info()["pool"]["cached_adapters"] == 1


def test_unload_lets_running_rows_finish_and_fails_waiting_ones(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tiny_model: Callable[[str], Path]
) -> None:
    engine = make_engine(lora_paths=[f"a={paths['attention']}"], max_running_requests=1)
    running, waiting = (Row(engine, model="a", prompt=[1, 2]) for _ in range(2))
    assert running.started.wait(60)
    wait_for(lambda: engine.info()["waiting"] == 1, "the other row waits")
    assert engine.unload_lora_adapter("a")["loaded_adapters"] == {}
    assert running.is_done
    oracle = Oracle(tiny_model("llama"), paths, torch.float64)
    assert running.tokens() == expected(oracle, "attention", [1, 2])
    with pytest.raises(errors.UnknownAdapterError, match="unloaded before"):
        waiting.answer()
    pool = engine.info()["pool"]
    assert pool["slots"] == {}
    assert pool["cached_bytes"] == 0


def test_as_many_loads_and_unloads_as_one_likes_leave_all_slots_free(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    engine = make_engine(max_loras_per_batch=2)
    for _ in range(3):
        for name, path in paths.items():
            engine.load_lora_adapter(name, str(path))
            engine.generate([{"model": name, "prompt": [1], "max_tokens": 2}])
            engine.unload_lora_adapter(name)
            engine.check_integrity()
    assert engine.info()["pool"]["slots"] == {}
    assert engine.info()["pool"]["cached_adapters"] == 0


def test_a_pinned_adapter_is_never_evicted_and_one_slot_stays_unpinned(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    entries = [{"lora_name": name, "lora_path": str(path)} for name, path in paths.items()]
    engine = make_engine(lora_paths=entries, max_loras_per_batch=2)
    engine.pin_lora_adapter("mlp")
    for _ in range(3):
        for name in paths:
            engine.generate([{"model": name, "prompt": [1], "max_tokens": 2}])
            assert engine.list_lora_adapters()["mlp"]["workers"][engine.worker_name]["resident"]
    with pytest.raises(errors.AdapterConflictError, match="one must stay unpinned"):
        engine.pin_lora_adapter("narrow")
    with pytest.raises(errors.AdapterConflictError, match="force=True"):
        engine.unload_lora_adapter("mlp")
    assert "was not pinned" in engine.unpin_lora_adapter("narrow")["message"]
    engine.unpin_lora_adapter("mlp")
    engine.pin_lora_adapter("narrow")
    with pytest.raises(errors.UnknownAdapterError, match="nobody"):
        engine.pin_lora_adapter("nobody")


def test_an_evicted_adapter_is_read_again_and_a_changed_folder_is_noticed(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model("llama")
    changing = save_adapter(base, tmp_path / "changing", seed=50, r=2, target_modules=["q_proj"])
    engine = make_engine(
        lora_paths=[f"changing={changing}", f"other={paths['mlp']}"], max_loaded_loras=1, max_loras_per_batch=1
    )
    body = {"prompt": [4, 5], "max_tokens": 8, "temperature": 0}
    first = engine.generate([{**body, "model": "changing"}])
    engine.generate([{**body, "model": "other"}])
    second = engine.generate([{**body, "model": "changing"}])
    assert first[0]["choices"] == second[0]["choices"]  # type: ignore[index]
    engine.generate([{**body, "model": "other"}])
    save_adapter(base, changing, seed=51, r=2, target_modules=["q_proj"])
    failed, other = engine.generate([{**body, "model": "changing"}, {**body, "model": "other"}], return_exceptions=True)
    assert isinstance(failed, errors.InvalidAdapterError)
    assert "have changed" in str(failed)
    assert isinstance(other, dict)
    engine.load_lora_adapter("changing", str(changing), replace=True)
    assert engine.generate([{**body, "model": "changing"}])


def test_a_row_that_waits_for_a_slot_too_long_lets_no_other_pass(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    """One slot, a stream of rows for one adapter that never lets it go by itself, and one row for another."""
    engine = make_engine(
        lora_paths=[f"a={paths['attention']}", f"b={paths['mlp']}"],
        max_loras_per_batch=1,
        max_running_requests=2,
        max_wait_seconds=0.3,
    )
    stream = [Row(engine, model="a", prompt=[i]) for i in range(1, 3)]
    assert stream[0].started.wait(60)
    other = Row(engine, model="b", prompt=[1])
    while not other.started.is_set():
        assert len(stream) < 200, "the stream starved the other row"
        if sum(not row.is_done for row in stream) < 4:
            stream.append(Row(engine, model="a", prompt=[3]))
        time.sleep(0.01)
    assert other.tokens()
    for row in stream:
        assert row.tokens()


def test_an_adapter_larger_than_the_host_cache_is_served(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    entries = [f"{name}={path}" for name, path in paths.items()]
    engine = make_engine(lora_paths=entries, max_loras_per_batch=1, max_loaded_lora_bytes=100)
    answers = engine.generate([{"model": name, "prompt": [1], "max_tokens": 3} for name in paths for _ in range(2)])
    assert len(answers) == 2 * len(paths)


def test_a_pinned_adapter_can_be_replaced_when_no_more_could_be_pinned(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    pinned = {"lora_name": "a", "lora_path": str(paths["attention"]), "pinned": True}
    engine = make_engine(lora_paths=[pinned], max_loras_per_batch=2)
    engine.load_lora_adapter("a", str(paths["mlp"]), replace=True)
    assert engine.list_lora_adapters()["a"]["pinned"]
    assert engine.generate([{"model": "a", "prompt": [1], "max_tokens": 2}])
    engine.check_integrity()


def test_after_an_unload_the_name_is_unknown_until_it_is_loaded_again(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    engine = make_engine(lora_paths=[f"{name}={path}" for name, path in paths.items()])
    body = {"model": "mlp", "prompt": [1], "max_tokens": 2}
    engine.generate([body])
    engine.unload_lora_adapter("mlp")
    with pytest.raises(errors.UnknownAdapterError, match=r"'mlp': loaded adapters are attention, everything, narrow"):
        engine.generate([body])
    engine.load_lora_adapter("mlp", str(paths["mlp"]))
    assert engine.generate([body])


def test_one_slot_serves_an_adapter_and_the_base_in_one_batch_and_the_base_takes_none(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tiny_model: Callable[[str], Path]
) -> None:
    oracle = Oracle(tiny_model("llama"), paths, torch.float64)
    engine = make_engine(lora_paths=[f"{name}={path}" for name, path in paths.items()], max_loras_per_batch=1)
    rows = [(name, Row(engine, prompt=[2, 3], model=name)) for name in (None, *paths, None)]
    for name, row in rows:
        assert row.tokens() == expected(oracle, name, [2, 3])
    pool = engine.info()["pool"]
    assert pool["loads"] == len(paths)
    assert len(pool["slots"]) == 1


@pytest.mark.gpu
def test_adapters_copied_beside_the_steps_of_a_card_are_whole_when_their_rows_start(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tiny_model: Callable[[str], Path]
) -> None:
    oracle = Oracle(tiny_model("llama"), paths, torch.float64)
    entries = [f"{name}={path}" for name, path in paths.items()]
    engine = make_engine(device="cuda", lora_paths=entries, max_loras_per_batch=2, max_wait_seconds=0.01)
    rows = [(name, Row(engine, prompt=[i, 3], model=name, max_tokens=20)) for i in range(10) for name in (None, *paths)]
    for i, (name, row) in enumerate(rows):
        assert row.tokens() == expected(oracle, name, [i // (1 + len(paths)), 3], 20)
    assert engine.info()["pool"]["evictions"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_row_that_waits_for_its_adapter_alone_starts_when_the_adapter_is_there(
    device: str, make_engine: Callable[..., Engine], paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's look at the clock is so rare here that a row which depended on it would never start."""
    monkeypatch.setattr(thread, "IDLE_LOOK_SECONDS", 3600.0)
    entries = [f"{name}={path}" for name, path in paths.items()]
    engine = make_engine(device=device, lora_paths=entries, max_loras_per_batch=1, max_loaded_loras=1)
    for name in [*paths, *paths]:
        assert Row(engine, model=name, prompt=[1], max_tokens=2).answer()


def test_slots_and_one_adapter_in_a_cycle_cost_one_load_an_adapter(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    entries = [f"{name}={path}" for name, path in paths.items()]
    engine = make_engine(lora_paths=entries, max_loras_per_batch=len(paths) - 1, max_running_requests=4)
    blocker = Row(engine, prompt=[1])
    rows = [Row(engine, model=name, prompt=[i], max_tokens=4) for i in range(20) for name in paths]
    for row in [blocker, *rows]:
        row.answer()
    pool = engine.info()["pool"]
    assert pool["loads"] == len(paths)
    assert pool["hits"] == len(rows) - len(paths)


def test_what_comes_next_is_read_ahead_while_no_row_is_free(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    engine = make_engine(
        lora_paths=[f"{name}={path}" for name, path in paths.items()], max_loaded_loras=3, max_running_requests=1
    )
    here = {name: status["workers"][engine.worker_name] for name, status in engine.list_lora_adapters().items()}
    away = next(name for name, status in here.items() if not status["cached"])
    running = Row(engine, prompt=[1], max_tokens=250)
    waiting = Row(engine, model=away, prompt=[1], max_tokens=1)

    def is_cached() -> bool:
        return bool(engine.list_lora_adapters()[away]["workers"][engine.worker_name]["cached"])

    wait_for(is_cached, "the adapter of the waiting row is in host memory")
    assert not running.is_done
    running.answer()
    waiting.answer()


def test_every_end_of_a_row_lets_go_of_its_adapter_once(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    """Cancelled, withdrawn, timed out, failed in a step, unloaded while it waited, and answered."""
    engine = make_engine(lora_paths=[f"a={paths['attention']}"], max_loras_per_batch=1, max_running_requests=3)
    cancelled = Row(engine, model="a", prompt=[1])
    timed_out = Row(engine, {"time_limit_seconds": 1e-4}, model="a", prompt=[2])
    withdrawn = Row(engine, {"may_start": lambda: False}, model="a", prompt=[3])
    answered = Row(engine, model="a", prompt=[4], max_tokens=3)
    assert cancelled.started.wait(60)
    engine.cancel(cancelled.id)
    for row, error in (
        (cancelled, errors.RequestWithdrawnError),
        (timed_out, errors.TimeLimitError),
        (withdrawn, errors.RequestWithdrawnError),
    ):
        with pytest.raises(error):
            row.answer()
    assert answered.tokens()
    failing = Row(engine, model="a", prompt=[5])
    assert failing.started.wait(60)
    engine._thread.call(lambda: engine._thread._fail_running(RuntimeError("a card fell off")))
    with pytest.raises(errors.GenerationError, match="a card fell off"):
        failing.answer()
    engine.check_integrity()
    assert engine.list_lora_adapters()["a"]["workers"][engine.worker_name]["held"] == 0
    engine.unload_lora_adapter("a", timeout_seconds=10)
    assert engine.info()["pool"]["slots"] == {}


def test_an_unload_that_takes_too_long_says_so_and_happens_all_the_same(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    engine = make_engine(lora_paths=[f"a={paths['attention']}"])
    row = Row(engine, model="a", prompt=[1], max_tokens=250)
    assert row.started.wait(60)
    with pytest.raises(errors.AdapterTimeoutError, match="its memory comes back when they end"):
        engine.unload_lora_adapter("a", timeout_seconds=0.001)
    assert row.tokens()
    wait_for(lambda: engine.info()["pool"]["slots"] == {}, "the slot is free")
    assert engine.info()["pool"]["cached_bytes"] == 0


def test_small_adapters_take_small_room_beside_a_wide_one(
    make_engine: Callable[..., Engine], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model("llama")
    wide = save_adapter(base, tmp_path / "wide", seed=1, r=64, target_modules="all-linear")
    small = save_adapter(base, tmp_path / "small", seed=2, r=8, target_modules="all-linear")
    folders = {f"small{i}": tmp_path / f"small{i}" for i in range(7)} | {"wide": wide}
    for i in range(7):
        save_adapter(base, folders[f"small{i}"], seed=10 + i, r=8, target_modules="all-linear")
    small_pages, wide_pages = 7, 8
    engine = make_engine(
        lora_paths=[f"{name}={path}" for name, path in folders.items()],
        max_loras_per_batch=16,
        lora_pool_ranks=8 * (small_pages + wide_pages),
    )
    oracle = Oracle(base, folders, torch.float64)
    rows = {name: Row(engine, model=name, prompt=[5, 6], max_tokens=30) for name in folders}
    for name, row in rows.items():
        assert row.tokens() == expected(oracle, name, [5, 6], 30)
    pool = engine.info()["pool"]
    assert len(pool["slots"]) == 8, "all fit at once"
    here = {name: status["workers"][engine.worker_name] for name, status in engine.list_lora_adapters().items()}
    assert here["wide"]["used_bytes"] == 8 * here["small0"]["used_bytes"]
    assert here["small0"]["wasted_bytes"] == 0
    assert pool["used_bytes"] == sum(status["used_bytes"] for status in here.values())
    # One more does not fit, so one that nobody uses leaves.
    shutil.copytree(small, tmp_path / "more")
    engine.load_lora_adapter("more", str(tmp_path / "more"))
    assert Row(engine, model="more", prompt=[1], max_tokens=3).tokens()
    assert engine.info()["pool"]["evictions"] == 1


def test_pins_leave_room_for_an_adapter_of_the_greatest_rank(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    engine = make_engine(
        lora_paths=[f"{name}={path}" for name, path in paths.items()], max_lora_rank=16, lora_pool_ranks=24
    )
    first, second = list(paths)[:2]
    engine.pin_lora_adapter(first)
    with pytest.raises(errors.AdapterConflictError, match="raise lora_pool_ranks"):
        engine.pin_lora_adapter(second)


def test_waits_and_loads_are_told_by_tier_and_adapter(
    make_engine: Callable[..., Engine], paths: dict[str, Path]
) -> None:
    engine = make_engine(lora_paths=[f"{name}={path}" for name, path in paths.items()], max_loras_per_batch=1)
    engine.generate([{"model": name, "prompt": [1], "max_tokens": 1} for name in paths for _ in range(2)])
    pool = engine.info()["pool"]
    assert pool["copies_to_slots"]["count"] == pool["loads"] == len(paths)
    assert pool["evictions"] == len(paths) - 1
    assert pool["waits"]["all"]["count"] == 2 * len(paths)
    assert set(pool["waits"]["longest"]) == set(paths)

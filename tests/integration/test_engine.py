"""The engine's doors: adapters that come, go and change while rows run, and rows that end early."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import Oracle
from support.tiny_models import ids_of, save_adapter, text_of
from support.worker_process import wait_for

from lora_worker import errors
from lora_worker.engine import Engine
from lora_worker.settings import Settings

TOKENS = 200


@pytest.fixture
def paths(tiny_adapters: Callable[[str], dict[str, Path]]) -> dict[str, Path]:
    return tiny_adapters("llama")


@pytest.fixture
def make_engine(tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engine = Engine(Settings(model=tiny_model("llama"), dtype="float64", device="cpu", **settings))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


class Row:
    """A row in the background."""

    def __init__(self, engine: Engine, **body: Any) -> None:
        self._done: Future[Callable[[], dict[str, Any]]] = Future()
        self.started = threading.Event()
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, **body}
        self.id = engine.submit(greedy, self._done.set_result, on_started=self.started.set)

    @property
    def is_done(self) -> bool:
        return self._done.done()

    def answer(self) -> dict[str, Any]:
        return self._done.result(60)()

    def tokens(self) -> list[int]:
        return ids_of(self.answer()["choices"][0]["text"])


def expected(oracle: Oracle, adapter: str | None, prompt: list[int], count: int = TOKENS) -> list[int]:
    return [token for token in oracle.generate(adapter, prompt, count, ignore_eos=True).tokens if token != 127]


def test_it_starts_with_no_adapters_and_serves_the_base(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    assert engine.list_lora_adapters() == {}
    (answer,) = engine.generate([{"prompt": "w1 w2", "max_tokens": 3}])
    assert isinstance(answer, dict)
    assert answer["lora_worker"]["adapter"] is None
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5} or (
        answer["choices"][0]["finish_reason"] == "stop"
    )


def test_the_base_is_asked_for_by_its_name_or_by_none(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(served_model_name="tiny")
    body = {"prompt": "w1 w2", "max_tokens": 3, "temperature": 0}
    named, unnamed = engine.generate([{**body, "model": "tiny"}, body])
    assert isinstance(named, dict)
    assert isinstance(unnamed, dict)
    assert named["choices"] == unnamed["choices"]
    assert named["model"] == unnamed["model"] == "tiny"


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


def test_loading_the_same_content_again_succeeds(make_engine: Callable[..., Engine], paths: dict[str, Path]) -> None:
    engine = make_engine(lora_paths=[f"a={paths['attention']}"])
    assert engine.load_lora_adapter("a", str(paths["attention"]))["success"]
    assert list(engine.loaded_adapters()) == ["a"]


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


def test_a_pinned_adapter_of_the_settings_that_cannot_be_loaded_stops_the_start(
    make_engine: Callable[..., Engine], paths: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"lora_name": "bad", "lora_path": "/nowhere"}
    with pytest.raises(errors.InvalidAdapterError, match=r"'bad'.*/nowhere"):
        make_engine(lora_paths=[{**bad, "pinned": True}])
    engine = make_engine(lora_paths=[bad, f"good={paths['mlp']}"])
    assert list(engine.loaded_adapters()) == ["good"]
    assert "'bad' of lora_paths is left out" in caplog.text


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


def test_generate_returns_in_order_and_raises_the_first_error(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    good, bad = {"prompt": "w1", "max_tokens": 1}, {"prompt": "w1", "max_tokens": 0}
    with pytest.raises(errors.InvalidRequestError, match="max_tokens"):
        engine.generate([good, bad])
    first, second, third = engine.generate([good, bad, good], return_exceptions=True)
    assert isinstance(first, dict)
    assert isinstance(second, errors.InvalidRequestError)
    assert isinstance(third, dict)


def test_stop_strings_end_the_text_before_their_first_character(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    body = {"prompt": "w1 w2", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    (whole,) = engine.generate([body])
    assert isinstance(whole, dict)
    text = whole["choices"][0]["text"]
    words = text.split()
    # Over the border of two tokens, within one, and one that never comes.
    for stop in (f"{words[3]} {words[4][:2]}", words[5], "never"):
        (answer,) = engine.generate([{**body, "stop": [stop, "never either"]}])
        assert isinstance(answer, dict)
        choice = answer["choices"][0]
        assert choice["text"].strip() == text.split(stop)[0].strip()
        assert choice["finish_reason"] == ("stop" if stop in text else "length")


def test_a_chat_is_the_template_filled_in(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    # The tiny template writes role and content, and any word may be a role.
    messages = [{"role": "w7", "content": "w8 w9"}]
    chat, completion = engine.generate(
        [
            {"messages": messages, "max_tokens": 5, "temperature": 0},
            {"prompt": text_of([7, 8, 9]), "max_tokens": 5, "temperature": 0},
        ]
    )
    assert isinstance(chat, dict)
    assert isinstance(completion, dict)
    assert chat["choices"][0]["message"]["content"].strip() == completion["choices"][0]["text"].strip()
    assert chat["usage"] == completion["usage"]


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


def test_priorities_go_first(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running_requests=1)
    order: list[str] = []
    Row(engine, prompt=[1])
    done = {name: threading.Event() for name in ("low", "high")}
    for name, priority in (("low", 9), ("high", 0)):
        engine.submit(
            {"prompt": [1], "max_tokens": 1},
            lambda _, name=name: done[name].set(),  # type: ignore[misc]
            priority=priority,
            on_started=lambda name=name: order.append(name),  # type: ignore[misc]
        )
    assert all(event.wait(60) for event in done.values())
    assert order == ["high", "low"]


def test_closing_fails_what_has_not_ended(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running_requests=1)
    rows = [Row(engine, prompt=[1]) for _ in range(3)]
    assert rows[0].started.wait(60)
    engine.close()
    for row in rows:
        with pytest.raises(errors.EngineStoppedError):
            row.answer()
    with pytest.raises(errors.EngineStoppedError):
        Row(engine, prompt=[1]).answer()


def test_anything_in_any_order_keeps_every_count_and_every_answer(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tiny_model: Callable[[str], Path]
) -> None:
    """Loads, unloads, pins, cancels and time limits between rows, and integrity checked after each."""
    oracle = Oracle(tiny_model("llama"), paths, torch.float64)
    prompts = [[i, 2 * i + 1] for i in range(3)]
    solo = {(n, p[0]): expected(oracle, n, p, 40) for n in (None, *paths) for p in prompts}
    engine = make_engine(max_loras_per_batch=2, max_running_requests=6, max_loaded_loras=2, max_total_tokens=256)
    chance = random.Random(4)
    rows: list[tuple[Row, str | None, int]] = []
    for _ in range(400):
        name = chance.choice(list(paths))
        action = chance.random()
        if action < 0.5:
            adapter = chance.choice([None, *paths])
            prompt = chance.choice(prompts)
            model = {} if adapter is None else {"model": adapter}
            rows.append((Row(engine, prompt=prompt, max_tokens=40, **model), adapter, prompt[0]))
        elif action < 0.7:
            engine.load_lora_adapter(name, str(paths[name]))
        elif action < 0.75:
            engine.unload_lora_adapter(name, force=True)
        elif action < 0.8:
            try:
                engine.pin_lora_adapter(name)
            except errors.AdapterError:
                engine.unpin_lora_adapter(name)
        elif action < 0.9 and rows:
            engine.cancel(chance.choice(rows)[0].id)
        engine.check_integrity()
    ended = {"answered": 0, "unknown": 0, "cancelled": 0}
    for row, adapter, first in rows:
        try:
            assert row.tokens() == solo[adapter, first]
            ended["answered"] += 1
        except errors.UnknownAdapterError:
            ended["unknown"] += 1
        except errors.RequestWithdrawnError:
            ended["cancelled"] += 1
    assert all(ended.values()), ended
    wait_for(lambda: engine.info()["running"] == 0, "all rows have ended")
    engine.check_integrity()


def test_a_request_id_in_use_is_refused_and_harms_nobody(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    first = Row(engine, prompt=[1])
    again: Future[Callable[[], dict[str, Any]]] = Future()
    engine.submit({"prompt": [1], "max_tokens": 1}, again.set_result, request_id=first.id)
    with pytest.raises(errors.InvalidRequestError, match=first.id):
        again.result(60)()
    assert first.answer()


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


def test_a_failed_replacement_leaves_the_old_one_in_service(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine(lora_paths=[f"a={paths['attention']}"])
    body = {"model": "a", "prompt": [1], "max_tokens": 8, "temperature": 0}
    before = engine.generate([body])
    with pytest.raises(errors.InvalidAdapterError):
        engine.load_lora_adapter("a", str(tmp_path), replace=True)
    after = engine.generate([body])
    assert before[0]["choices"] == after[0]["choices"]  # type: ignore[index]


def test_a_pin_of_an_adapter_whose_folder_is_gone_is_refused(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    gone = save_adapter(tiny_model("llama"), tmp_path / "gone", seed=5, r=2, target_modules=["q_proj"])
    engine = make_engine(lora_paths=[f"gone={gone}", f"other={paths['mlp']}"], max_loaded_loras=1)
    (gone / "adapter_config.json").unlink()
    with pytest.raises(errors.InvalidAdapterError, match="gone"):
        engine.pin_lora_adapter("gone")
    with pytest.raises(errors.InvalidAdapterError, match="gone"):
        engine.generate([{"model": "gone", "prompt": [1]}])
    assert engine.generate([{"model": "other", "prompt": [1], "max_tokens": 1}])


def test_fields_that_are_null_are_fields_that_are_absent(make_engine: Callable[..., Engine]) -> None:
    body = {"prompt": "w1", "messages": None, "seed": None, "stop": None, "max_tokens": 2, "temperature": 1e-40}
    (answer,) = make_engine().generate([body])
    assert isinstance(answer, dict)
    assert answer["object"] == "text_completion"
    assert "text" in answer["choices"][0]

"""The engine's doors: adapters that come, go and change while rows run, and rows that end early."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.rows import Row
from support.tiny_models import save_adapter, text_of

from lora_worker import errors
from lora_worker.engine import Engine


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


def test_loading_the_same_content_again_succeeds(make_engine: Callable[..., Engine], paths: dict[str, Path]) -> None:
    engine = make_engine(lora_paths=[f"a={paths['attention']}"])
    assert engine.load_lora_adapter("a", str(paths["attention"]))["success"]
    assert list(engine.loaded_adapters()) == ["a"]


def test_a_pinned_adapter_of_the_settings_that_cannot_be_loaded_stops_the_start(
    make_engine: Callable[..., Engine], paths: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"lora_name": "bad", "lora_path": "/nowhere"}
    with pytest.raises(errors.InvalidAdapterError, match=r"'bad'.*/nowhere"):
        make_engine(lora_paths=[{**bad, "pinned": True}])
    engine = make_engine(lora_paths=[bad, f"good={paths['mlp']}"])
    assert list(engine.loaded_adapters()) == ["good"]
    assert "'bad' of lora_paths is left out" in caplog.text


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


def test_a_request_id_in_use_is_refused_and_harms_nobody(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    first = Row(engine, prompt=[1])
    again: Future[Callable[[], dict[str, Any]]] = Future()
    engine.submit({"prompt": [1], "max_tokens": 1}, again.set_result, request_id=first.id)
    with pytest.raises(errors.InvalidRequestError, match=first.id):
        again.result(60)()
    assert first.answer()


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

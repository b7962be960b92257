"""A request with several choices is one request: it starts, ends, fails and holds its adapter as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion
from support.engines import engines
from support.worker_process import wait_for

from lora_worker import errors
from lora_worker.engine import Engine

NAME = "attention"
TOKENS = 200
SECONDS = 60


@pytest.fixture
def make_engine(
    tiny_model: Callable[[str], Path], tiny_adapters: Callable[[str], dict[str, Path]]
) -> Iterator[Callable[..., Engine]]:
    paths = [f"{NAME}={tiny_adapters('llama')[NAME]}"]
    with engines(tiny_model("llama"), lora_paths=paths) as make:
        yield make


class Request:
    """A request of several choices in the background; counts how often each of its doors is used."""

    def __init__(self, engine: Engine, *, wanted: bool = True, seconds: float | None = None, **body: Any) -> None:
        self.asked, self.ended = 0, 0
        self.started = threading.Semaphore(0)
        self._wanted = wanted
        self._done: Future[Callable[[], dict[str, Any]]] = Future()
        self.id = engine.submit(
            {"prompt": [1, 2], "ignore_eos": True, "max_tokens": TOKENS, "model": NAME, **body},
            self._end,
            time_limit_seconds=seconds,
            may_start=self._may_start,
            on_started=self.started.release,
        )

    def _may_start(self) -> bool:
        self.asked += 1
        return self._wanted

    def _end(self, outcome: Callable[[], dict[str, Any]]) -> None:
        self.ended += 1
        self._done.set_result(outcome)

    def answer(self) -> dict[str, Any]:
        return self._done.result(SECONDS)()


def expect_idle(engine: Engine) -> None:
    """No row is left, every slot is free of holds, and the adapter can go."""
    wait_for(lambda: engine.info()["running"] == engine.info()["waiting"] == 0, "all rows have ended")
    engine.check_integrity()
    assert engine.list_lora_adapters()[NAME]["workers"][engine.worker_name]["held"] == 0
    engine.unload_lora_adapter(NAME, timeout_seconds=1)
    assert engine.info()["pool"]["slots"] == {}


@pytest.mark.parametrize("rows", [2, 16])
def test_it_starts_once_and_answers_once(make_engine: Callable[..., Engine], rows: int) -> None:
    """With fewer rows than choices too: the others wait for room, each with its hold on the adapter."""
    engine = make_engine(max_running_requests=rows)
    request = Request(engine, n=5, seed=1)
    assert request.started.acquire(timeout=SECONDS)
    engine.check_integrity()
    answer = request.answer()
    assert len(answer["choices"]) == 5
    assert answer["usage"]["completion_tokens"] == 5 * TOKENS
    assert (request.asked, request.ended) == (1, 1)
    assert not request.started.acquire(blocking=False)
    expect_idle(engine)


@pytest.mark.parametrize("rows", [2, 16])
def test_cancel_ends_all_choices_and_no_other_request(make_engine: Callable[..., Engine], rows: int) -> None:
    engine = make_engine(max_running_requests=rows)
    doomed = Request(engine, n=5)
    waiting = Request(engine, n=3)
    assert doomed.started.acquire(timeout=SECONDS)
    engine.cancel(doomed.id)
    with pytest.raises(errors.RequestWithdrawnError):
        doomed.answer()
    assert len(waiting.answer()["choices"]) == 3
    assert (doomed.ended, waiting.ended) == (1, 1)
    expect_idle(engine)


def test_cancel_ends_choices_of_which_some_have_ended(make_engine: Callable[..., Engine]) -> None:
    """Rows run two at a time, so by then at least one has made all its tokens."""
    engine = make_engine(max_running_requests=2)
    request = Request(engine, n=7)
    wait_for(lambda: engine.info()["generated_tokens"] > 3 * TOKENS, "the first choices have ended")
    engine.cancel(request.id)
    with pytest.raises(errors.RequestWithdrawnError):
        request.answer()
    expect_idle(engine)


def test_a_request_that_is_no_longer_wanted_never_runs(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running_requests=2)
    request = Request(engine, wanted=False, n=5)
    with pytest.raises(errors.RequestWithdrawnError):
        request.answer()
    assert (request.asked, request.ended) == (1, 1)
    assert engine.info()["generated_tokens"] == 0
    expect_idle(engine)


def test_the_time_limit_is_of_the_request_and_counts_from_its_first_row(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running_requests=1)
    request = Request(engine, n=100, seconds=0.5)
    with pytest.raises(errors.TimeLimitError):
        request.answer()
    assert engine.info()["generated_tokens"] > 0
    assert request.ended == 1
    expect_idle(engine)


def test_choices_that_still_wait_keep_the_adapter_they_started_with(
    make_engine: Callable[..., Engine], tiny_adapters: Callable[[str], dict[str, Path]]
) -> None:
    """A replacement and an unload while the first of three choices runs alone concern later requests."""
    engine = make_engine(max_running_requests=1, max_loras_per_batch=2)
    body: dict[str, Any] = {"n": 3, "seed": 5}
    expected = Request(engine, **body).answer()
    request = Request(engine, **body)
    assert request.started.acquire(timeout=SECONDS)
    engine.load_lora_adapter(NAME, str(tiny_adapters("llama")["mlp"]), replace=True)
    engine.unload_lora_adapter(NAME)
    # The unload waits for rows of the name that run: all choices of the request are among them.
    answer = request.answer()
    assert answer["choices"] == expected["choices"]
    assert answer["lora_worker"]["digest"] == expected["lora_worker"]["digest"]
    wait_for(lambda: engine.info()["pool"]["slots"] == {}, "the slots are free")
    engine.check_integrity()


def test_an_id_in_use_fails_once(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    first = Request(engine, n=2)
    again: Future[Callable[[], dict[str, Any]]] = Future()
    engine.submit({"prompt": [1], "n": 3}, again.set_result, request_id=first.id)
    with pytest.raises(errors.InvalidRequestError, match=first.id):
        again.result(SECONDS)()
    assert first.answer()
    expect_idle(engine)


def test_closing_fails_a_request_once(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running_requests=2)
    running, waiting = Request(engine, n=4), Request(engine, n=4)
    assert running.started.acquire(timeout=SECONDS)
    engine.close()
    for request in (running, waiting):
        with pytest.raises(errors.EngineStoppedError):
            request.answer()
        assert request.ended == 1


def test_a_failed_step_fails_the_requests_that_ran_and_the_engine_goes_on(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_running_requests=2)
    request = Request(engine, n=5)
    assert request.started.acquire(timeout=SECONDS)
    with monkeypatch.context() as patch:
        patch.setattr(engine._core._runner, "run", lambda *_args, **_more: 1 / 0)
        with pytest.raises(errors.GenerationError, match="ZeroDivisionError"):
            request.answer()
    assert request.ended == 1
    assert Request(engine, n=2).answer()
    expect_idle(engine)


def test_a_broken_row_fails_its_request_once_and_no_other(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other choices are in the same step, behind the row that breaks the request."""
    engine = make_engine()
    other = Request(engine, model=None, temperature=0)
    runner = engine._core._runner
    run = runner.run

    def broken_run(chunks: Any, **more: Any) -> torch.Tensor:
        logits = run(chunks, **more)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        is_first_choice = [row.adapter is not None and row.index == 0 for row in sampling]
        return logits.masked_fill(torch.tensor(is_first_choice)[:, None], torch.nan)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", broken_run)
        with pytest.raises(errors.GenerationError, match="not finite"):
            Request(engine, n=4).answer()
    assert other.answer()["usage"]["completion_tokens"] == TOKENS
    assert Request(engine, n=2).answer()
    expect_idle(engine)


def test_answers_are_objects_of_openais_own_types(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    bodies: list[dict[str, Any]] = [
        {"prompt": "w1", "n": 2, "logprobs": 2, "max_tokens": 4},
        {"messages": [{"role": "w1", "content": "w2"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 4},
        {"messages": [{"role": "w1", "content": "w2"}], "max_tokens": 4},
    ]
    completion, *chats = engine.generate(bodies)
    assert Completion.model_validate(completion, strict=True).choices[0].logprobs is not None
    first, second = (ChatCompletion.model_validate(chat, strict=True) for chat in chats)
    logprobs = first.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * len(logprobs.content)
    assert second.choices[0].logprobs is None

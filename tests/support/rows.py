"""Rows of an engine in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lora_worker.engine import Engine
from support.oracle import Oracle
from support.tiny_models import EOS, ids_of

TOKENS = 200


class Row:
    """A row in the background."""

    def __init__(self, engine: Engine, options: dict[str, Any] | None = None, **body: Any) -> None:
        self._done: Future[Callable[[], dict[str, Any]]] = Future()
        self.started = threading.Event()
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, **body}
        self.id = engine.submit(greedy, self._done.set_result, on_started=self.started.set, **(options or {}))

    @property
    def is_done(self) -> bool:
        return self._done.done()

    def answer(self) -> dict[str, Any]:
        return self._done.result(60)()

    def tokens(self) -> list[int]:
        return ids_of(self.answer()["choices"][0]["text"])


def expected(oracle: Oracle, adapter: str | None, prompt: list[int], count: int = TOKENS) -> list[int]:
    return [token for token in oracle.generate(adapter, prompt, count, ignore_eos=True).tokens if token != EOS]

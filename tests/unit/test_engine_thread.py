"""The thread that runs the engine's steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lora_worker.engine import Engine
from lora_worker.settings import Settings


@pytest.fixture(autouse=True)
def integrity_after_every_step() -> None:
    """Here counts drift on purpose: the thread alone compares them."""


def test_a_count_that_has_drifted_is_told_once_a_change(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(Settings(model=tiny_model("llama"), device="cpu")) as engine:
        blocks = engine._core.scheduler.blocks

        def told_after(action: Callable[[], object]) -> int:
            caplog.clear()
            engine._thread.call(action)
            engine._thread.call(lambda: None)  # the thread has been idle, and looked, in between
            engine._thread.call(lambda: None)
            return sum("A count has drifted" in record.message for record in caplog.records)

        lost: list[int] = []
        assert told_after(lambda: lost.extend(blocks.take(1))) == 1
        assert told_after(lambda: None) == 0
        assert told_after(lambda: blocks.give_back(lost)) == 0
        assert told_after(lambda: blocks.take(1)) == 1

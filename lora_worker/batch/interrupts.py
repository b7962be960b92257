"""Ctrl-C once, twice, and a third time."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Counts Ctrl-C while the block runs; from the third on, Python does with it what it always does."""

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        self.count += 1
        if self.count == 2:
            signal.signal(signal.SIGINT, signal.default_int_handler)

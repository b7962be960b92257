"""What Celery's trace of a generate task is given to return or raise, when the engine has finished the row.

The trace runs on one thread, from the task's body to the storing of its result, and finds here what is its row's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from lora_worker.errors import EngineStoppedError, LoraWorkerError, RequestWithdrawnError, TimeLimitError, raiser

if TYPE_CHECKING:
    from lora_worker.engine.engine import Outcome
    from lora_worker.fleet.membership.member import Held


class ForeignMessageError(BaseException):
    """The row's message is another worker's by now. No Exception, of which Celery's trace makes a failed task."""


class _Finished(NamedTuple):
    """`held`: the message whose being this worker's the result depends on, None where that can't be asked any more."""

    answer: Callable[[], Any]
    run_seconds: float
    held: Callable[[], Held | None]


class _OfThread(threading.local):
    finished: _Finished | None = None


_here = _OfThread()


@contextmanager
def finished(answer: Callable[[], Any], run_seconds: float, held: Callable[[], Held | None]) -> Iterator[None]:
    """While the block runs Celery's trace of the task, on this thread."""
    _here.finished = _Finished(answer, run_seconds, held)
    try:
        yield
    finally:
        _here.finished = None


def finished_answer() -> dict[str, Any]:
    """The body of every generate task: the answer that the engine has ready, or its error."""
    assert _here.finished is not None, "a generate task runs outside of its worker's pool"
    answer: dict[str, Any] = _here.finished.answer()
    return answer


def held_message() -> Held | None:
    """The message that the result which this thread is about to store depends on; None where it depends on none."""
    return _here.finished.held() if _here.finished else None


def run_seconds() -> float | None:
    """How long the row of the task that this thread is finishing ran."""
    return _here.finished.run_seconds if _here.finished else None


def result_of(outcome: Outcome, soft_limit: float | None, hard_limit: float | None) -> Callable[[], Any] | None:
    """What the trace is to return or raise; None where the task ends without one."""
    try:
        answer = outcome()
    except (RequestWithdrawnError, EngineStoppedError):
        return None
    except TimeLimitError:
        if soft_limit and soft_limit <= (hard_limit or soft_limit):
            return raiser(SoftTimeLimitExceeded(soft_limit))
        return raiser(TimeLimitExceeded(hard_limit))
    except LoraWorkerError as error:
        return raiser(error)
    return lambda: answer

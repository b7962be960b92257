"""What Celery's trace of a generate task is given to return or raise, when the engine has finished the row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from lora_worker.errors import EngineStoppedError, LoraWorkerError, RequestWithdrawnError, TimeLimitError, raiser

if TYPE_CHECKING:
    from lora_worker.engine.engine import Outcome


class _Finished(NamedTuple):
    """What the trace of a generate task returns or raises, and how long its row ran."""

    answer: Callable[[], Any]
    run_seconds: float


# By task id, while the trace runs.
_finished: dict[str, _Finished] = {}


@contextmanager
def finished(task_id: str, answer: Callable[[], Any], run_seconds: float) -> Iterator[None]:
    """While the block runs Celery's trace of the task."""
    _finished[task_id] = _Finished(answer, run_seconds)
    try:
        yield
    finally:
        del _finished[task_id]


def finished_answer(task_id: str) -> dict[str, Any]:
    """The body of every generate task: the answer that the engine has ready, or its error."""
    answer: dict[str, Any] = _finished[task_id].answer()
    return answer


def run_seconds(task_id: str) -> float | None:
    """How long the row of a task that is being finished ran."""
    return _finished[task_id].run_seconds if task_id in _finished else None


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

"""What the tasks have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery import Task
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from lora_worker.errors import LoraWorkerError
from lora_worker.fleet.engine_pool import current_engine

if TYPE_CHECKING:
    from lora_worker.engine import Engine


class LoraTask(Task):
    """A task whose arguments are nobody else's business, on this worker's engine."""

    # Errors that a request or an adapter causes are logged as one line, without a traceback.
    throws = (LoraWorkerError, SoftTimeLimitExceeded, TimeLimitExceeded)
    Request = "lora_worker.fleet.privacy:PrivateRequest"
    # Whether the engine runs it, or a thread of the pool.
    runs_in_engine = False

    @property
    def engine(self) -> Engine:
        return current_engine()


class EngineTask(LoraTask):
    """The pool gives its message to the engine and runs the body when the answer is there."""

    runs_in_engine = True

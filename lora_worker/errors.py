"""Every error that lora-worker raises, in one tree.

Each takes one sentence: what was wrong with what, and what would be right. Celery carries an exception to a client as
its class name and arguments and rebuilds it as `cls(*args)`, so one string as the only argument is what survives that
journey, also to a client that has never heard of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LoraWorkerError(Exception):
    """Base of all errors of lora-worker."""


class SettingsError(LoraWorkerError):
    """A setting is wrong, unknown or missing; the program does not start."""


class UnsupportedModelError(LoraWorkerError):
    """The base model cannot be loaded, or cannot be served exactly by this engine."""


class InvalidRequestError(LoraWorkerError):
    """A generate request has a field that is unknown, missing, contradictory or out of range."""


class PromptTooLongError(InvalidRequestError):
    """Prompt and requested tokens together do not fit the model's length."""


class AdapterError(LoraWorkerError):
    """Base of what concerns one adapter."""


class UnknownAdapterError(AdapterError):
    """The name is no registered adapter and not the base model's name."""


class InvalidAdapterError(AdapterError):
    """The adapter cannot be read, or cannot be served exactly on this base model."""


class AdapterConflictError(AdapterError):
    """The name is registered with other content, or the adapter's state forbids the operation."""


class AdapterTimeoutError(AdapterError):
    """An operation on an adapter did not finish within its time; it may be called again."""


class GenerationError(LoraWorkerError):
    """A row failed while it was generated, through no fault of the request's form."""


class PoisonedRequestError(GenerationError):
    """Workers died whenever the request ran, the last time with nothing beside it; it is not run again."""


class TimeLimitError(GenerationError):
    """A row ran longer than its time limit, counted from admission."""


class RequestWithdrawnError(GenerationError):
    """A row was cancelled, revoked, or expired before it was admitted."""


class EngineStoppedError(LoraWorkerError):
    """The engine is stopping or has stopped and takes no further work."""


class EmbeddedServerError(LoraWorkerError):
    """The embedded Redis-compatible server could not be found or started."""


class LocalWorkerError(LoraWorkerError):
    """A worker of the command's own has ended; the end of its log follows."""


class DemoError(LoraWorkerError):
    """The demo cannot run as things are; the sentence names the remedy."""


class BatchError(LoraWorkerError):
    """A batch cannot be begun, read, written or continued."""


def raiser(error: Exception) -> Callable[[], Any]:
    """A function that raises the error."""

    def raise_error() -> Any:
        raise error

    return raise_error

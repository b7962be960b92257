"""What the tasks have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from celery import Task
from celery.exceptions import Reject, SoftTimeLimitExceeded, TimeLimitExceeded
from pydantic import ConfigDict, ValidationError, validate_call
from redis.exceptions import RedisError

from lora_worker.errors import AdapterError, EngineStoppedError, InvalidRequestError, LoraWorkerError
from lora_worker.fleet.connection import REDIS_ERRORS
from lora_worker.fleet.pool.engine_pool import current_registry
from lora_worker.fleet.registry.registry import FleetRegistry

T = TypeVar("T")


class LoraTask(Task):
    """A task whose arguments are nobody else's business, in a worker."""

    # Errors that a request or an adapter causes are logged as one line, without a traceback.
    throws = (LoraWorkerError, SoftTimeLimitExceeded, TimeLimitExceeded)
    Request = "lora_worker.fleet.pool.request:FleetRequest"
    # Whether the engine runs it, or a thread of the pool.
    runs_in_engine = False

    @property
    def registry(self) -> FleetRegistry:
        return current_registry()


def checked(function: Callable[..., T]) -> Callable[..., T]:
    """A task body whose arguments are held against its annotations; InvalidRequestError says which is wrong."""
    validated = validate_call(config=ConfigDict(arbitrary_types_allowed=True, strict=True))(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> T:
        try:
            return validated(*args, **kwargs)
        except EngineStoppedError as error:
            # The worker is stopping; another one, or this one later, does it.
            raise Reject(str(error), requeue=True) from None
        except REDIS_ERRORS as error:
            raise Reject(f"Redis is away ({error})", requeue=True) from None
        except RedisError as error:
            raise AdapterError(f"Redis refuses the change of the registry ({error})") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidRequestError(f"the argument {first['loc'][0]!r} is wrong: {first['msg']}") from None

    return run


class EngineTask(LoraTask):
    """The pool gives its message to the engine and runs the body when the answer is there."""

    runs_in_engine = True

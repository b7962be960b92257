"""What Redis raises: while it is away, full or busy, which passes, and what it will always refuse, which doesn't."""

from __future__ import annotations

import re

from kombu.exceptions import OperationalError
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

_PASSING = (
    *(RedisConnectionError, RedisTimeoutError, OperationalError, ConnectionError),
    *(OutOfMemoryError, ReadOnlyError, MasterDownError),
)
# Those that redis-py has no class for, or that a script met.
_PASSING_WORDS = re.compile(r"\b(OOM|LOADING|READONLY|BUSY|MASTERDOWN|MISCONF|NOREPLICAS)\b")


def is_passing(error: Exception) -> bool:
    """Whether it is worth waiting until what was asked of Redis can be asked again."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return False  # of redis-py's classes a kind of ConnectionError
    return isinstance(error, _PASSING) or _PASSING_WORDS.search(str(error)) is not None

"""What commands ask of Redis and of the workers on it; a Redis that is away is a RedisError, and soon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from celery.exceptions import TimeoutError as ResultTimeoutError
from celery.result import AsyncResult
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from lora_worker.client import Client
from lora_worker.errors import LoraWorkerError
from lora_worker.fleet.backlog import Backlog, read_backlog
from lora_worker.fleet.connection import connect
from lora_worker.fleet.keys import Keys
from lora_worker.fleet.living import living_workers
from lora_worker.settings import Settings

TIMEOUT_SECONDS = 3.0
# How long a command waits before it looks whether anybody is there to answer.
ANSWER_SECONDS = 60.0


def open_client() -> Client:
    """A client, where Redis answers; Celery would try for many seconds, and end otherwise for each call."""
    with _redis() as (redis, _):
        redis.ping()
    return Client()


def read_workers() -> list[str]:
    """The node names of the fleet's living workers."""
    with _redis() as (redis, keys):
        return living_workers(redis, keys)


def count_backlog() -> Backlog:
    with _redis() as (redis, keys):
        return read_backlog(redis, keys)


def await_answer(result: AsyncResult) -> Any:
    """What the workers answer, however long they take; LoraWorkerError where none lives."""
    while True:
        try:
            return result.get(timeout=ANSWER_SECONDS)
        except ResultTimeoutError:
            workers = read_workers()
        except RuntimeError as error:
            # Celery's word for a connection that broke and could not be made again.
            if not isinstance(error.__cause__, OSError | RedisConnectionError):
                raise
            raise RedisConnectionError(str(error.__cause__)) from None
        if not workers:
            raise LoraWorkerError(
                f"no worker answered within {ANSWER_SECONDS:.0f} s, and none lives now; start one, or see "
                f"`lora-worker status`"
            )
        click.echo(f"The task {result.id} has not answered yet; {len(workers)} workers live.", err=True)


@contextmanager
def _redis() -> Iterator[tuple[Redis, Keys]]:
    settings = Settings()
    with connect(settings.redis_url, timeout_seconds=TIMEOUT_SECONDS) as redis:
        yield redis, Keys(settings.queue_prefix, settings.partitions)

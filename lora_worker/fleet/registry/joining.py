"""Joins the registry, and what is revoked, to the fleet's member."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from lora_worker.fleet.connection import connect
from lora_worker.fleet.membership.member import FleetMember
from lora_worker.fleet.registry.leaving import Row
from lora_worker.fleet.registry.reconciler import Registered
from lora_worker.fleet.registry.registry import FleetRegistry
from lora_worker.fleet.registry.store import RegistryStore
from lora_worker.fleet.revocations import Revocations, listen

TIMEOUT_SECONDS = 5.0
RETRIES = 3


def join_registry(
    member: FleetMember,
    registered: Registered,
    *,
    worker_name: str,
    rows: Callable[[], Iterable[Row]],
    cancel: Callable[[str], None],
) -> FleetRegistry:
    """The registry of a worker that is about to join; `start` it when it has. `cancel` ends the row of a task."""
    settings = member.settings
    redis = connect(settings.redis_url, timeout_seconds=TIMEOUT_SECONDS)
    # Whatever is asked on this connection may be asked twice.
    redis.set_retry(Retry(ExponentialBackoff(cap=1.0), RETRIES))
    remember = settings.result_expires_seconds
    revocations = Revocations(redis, member.keys, remember_seconds=remember, cancel=cancel)
    registry = FleetRegistry(
        RegistryStore(redis, member.keys),
        registered,
        settings,
        worker_name=worker_name,
        worker_id=member.worker_id,
        rows=rows,
        on_join=revocations.sync,
        changed=member.report_now,
    )
    listen(revocations.heard)
    member.steward.on_round.append(revocations.sync)
    member.on_generation = registry.reconciler.on_generation
    member.descriptions.append(registry.describe)
    return registry

"""What a worker checks and sets before it starts; the handlers of Celery's signals."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, NamedTuple

from celery.signals import celeryd_init, worker_init
from kombu.entity import Exchange, Queue
from kombu.transport import TRANSPORT_ALIASES
from redis.exceptions import RedisError

from lora_worker.errors import LoraWorkerError, SettingsError
from lora_worker.fleet.configuration import POOL
from lora_worker.fleet.membership.member import FleetMember, set_member
from lora_worker.fleet.pool.results import run_seconds
from lora_worker.fleet.privacy import hide_from_logs
from lora_worker.fleet.transport.atomic import check_contract
from lora_worker.settings import Settings

logger = logging.getLogger(__name__)

TRANSPORTS = {
    "atomic": "lora_worker.fleet.transport.atomic:Transport",
    "stock": "lora_worker.fleet.transport.stock:Transport",
}
OWN_FIRST = "lora_worker.fleet.transport.stock:OwnFirst"
# Tasks with an ETA raise Celery's prefetch count, up to so many beyond what the worker claims.
MOST_ETA_TASKS = 1000


@celeryd_init.connect
def check_settings(sender: str = "", instance: Any = None, conf: Any = None, options: Any = None, **_: Any) -> None:
    """Before a worker of this app starts: its settings, its pool, its size, its Redis, its logs."""
    settings = getattr(instance.app, "lora_settings", None)
    if settings is None:
        return  # a worker of another app in this process
    try:
        size = size_of(settings, (options or {}).get("pool"))
        if settings.transport == "atomic":
            check_contract()
        member = FleetMember(settings, sender)
        with suppress(RedisError):  # away: that is said and waited for later, and the check made up for
            member.check()
            member.check_name()
    except LoraWorkerError as error:
        # Celery swallows any other exception here, and the worker would get ready all the same.
        raise SystemExit(f"lora-worker cannot start: {error}") from None
    except Exception as error:
        logger.exception("The worker's settings could not be checked.")
        raise SystemExit(f"lora-worker cannot start: {type(error).__name__}: {error}") from None
    instance.app.lora_row_limit = size.rows
    conf.worker_concurrency = size.rows + size.ahead
    conf.worker_eta_task_limit = size.rows + size.ahead + MOST_ETA_TASKS
    hide_from_logs(run_seconds)
    set_member(member)
    conf.broker_transport_options = {**conf.broker_transport_options, **worker_options(member)}
    if settings.transport == "stock":
        conf.task_queues = [Queue(name, exchange=Exchange(""), routing_key=name) for name in member.queues]
    # Under Redis's own names, so that logs and `inspect` go on showing redis:// URLs; in this process alone.
    transport = TRANSPORTS[settings.transport]
    TRANSPORT_ALIASES.update(redis=transport, rediss=transport)


@worker_init.connect
def leave_out_gossip(sender: Any = None, **_: Any) -> None:
    """Gossip and mingle serve features that are not used here, cost start-up time and leave keys behind in Redis."""
    if hasattr(sender.app, "lora_settings"):
        # Celery has command-line flags for them, and no setting.
        sender.options.update(without_gossip=True, without_mingle=True)


class Size(NamedTuple):
    """How many messages the worker may hold: rows that run, and requests claimed ahead of them."""

    rows: int
    ahead: int


def size_of(settings: Settings, pool_class: Any) -> Size:
    """Checks the pool and the model too; raises SettingsError."""
    if pool_class is not None and f"{pool_class.__module__}:{pool_class.__qualname__}" != POOL:
        name = pool_class.__module__.rpartition(".")[2]
        raise SettingsError(f"the pool {name!r} cannot run the engine; start the worker without -P")
    if settings.model is None:
        raise SettingsError("no model is set; set LORA_WORKER_MODEL to the folder of a transformers model")
    device = _device_type(settings.device)
    return Size(settings.running_limit(device), settings.waiting_limit(device))


def worker_options(member: FleetMember) -> dict[str, Any]:
    """Options of the connection that claims."""
    return {
        "unacked_key": member.keys.unacked(member.worker_id),
        # Its name and not the class, since `inspect` shows these options.
        "queue_order_strategy": OWN_FIRST if member.settings.transport == "stock" else "round_robin",
    }


def _device_type(name: str) -> str:
    """'cpu' or 'cuda'; torch is asked, and imported, only where the setting leaves it open."""
    if name == "cpu":
        return name
    from lora_worker.models.loading import choose_device

    return choose_device(name).type

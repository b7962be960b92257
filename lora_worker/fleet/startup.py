"""What a worker checks and sets before it starts; the handlers of Celery's signals."""

from __future__ import annotations

from typing import Any

from celery.signals import celeryd_init, worker_init
from kombu.transport import TRANSPORT_ALIASES

from lora_worker.errors import LoraWorkerError, SettingsError
from lora_worker.fleet.configuration import POOL
from lora_worker.fleet.privacy import hide_from_logs
from lora_worker.fleet.task_row import run_seconds
from lora_worker.settings import Settings

TRANSPORT = "lora_worker.fleet.transport:Transport"


@celeryd_init.connect
def check_settings(instance: Any = None, conf: Any = None, options: Any = None, **_: Any) -> None:
    """Before a worker of this app starts: its settings, its pool, its size, its logs."""
    settings = getattr(instance.app, "lora_settings", None)
    if settings is None:
        return  # a worker of another app in this process
    try:
        conf.worker_concurrency = claims(settings, (options or {}).get("pool"))
    except LoraWorkerError as error:
        # Celery swallows any other exception here, and the worker would get ready all the same.
        raise SystemExit(f"lora-worker cannot start: {error}") from None
    hide_from_logs(run_seconds)
    # Under Redis's own names, so that logs and `inspect` go on showing redis:// URLs; in this process alone.
    TRANSPORT_ALIASES.update(redis=TRANSPORT, rediss=TRANSPORT)


@worker_init.connect
def leave_out_gossip(sender: Any = None, **_: Any) -> None:
    """Gossip and mingle serve features that are not used here, cost start-up time and leave keys behind in Redis."""
    if hasattr(sender.app, "lora_settings"):
        # Celery has command-line flags for them, and no setting.
        sender.options.update(without_gossip=True, without_mingle=True)


def claims(settings: Settings, pool_class: Any) -> int:
    """How many messages the worker may hold: rows that run and requests claimed ahead of them."""
    if pool_class is not None and f"{pool_class.__module__}:{pool_class.__qualname__}" != POOL:
        name = pool_class.__module__.rpartition(".")[2]
        raise SettingsError(f"the pool {name!r} cannot run the engine; start the worker without -P")
    if settings.model is None:
        raise SettingsError("no model is set; set LORA_WORKER_MODEL to the folder of a transformers model")
    device = _device_type(settings.device)
    return settings.running_limit(device) + settings.waiting_limit(device)


def _device_type(name: str) -> str:
    """'cpu' or 'cuda'; torch is asked, and imported, only where the setting leaves it open."""
    if name == "cpu":
        return name
    from lora_worker.models.loading import choose_device

    return choose_device(name).type

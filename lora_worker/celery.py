"""The Celery app, where `celery -A lora_worker` looks for it."""

from __future__ import annotations

import sys
from pathlib import Path

from celery import Celery

from lora_worker.errors import SettingsError
from lora_worker.fleet import startup as _startup  # noqa: F401 - connects its handlers to Celery's signals
from lora_worker.fleet.configuration import worker_configuration
from lora_worker.fleet.pool.engine_pool import MakeEngine, start_engine
from lora_worker.settings import Settings

RESULT_BACKEND = "lora_worker.fleet.transport.full_redis:ResultBackend"


def make_app(settings: Settings, *, make_engine: MakeEngine = start_engine) -> Celery:
    """The app of these settings. Needs no more than `redis_url`, so Flower and `inspect` need no model.

    `make_engine` starts what a worker of this app generates with.
    """
    made = Celery("lora_worker", set_as_current=False)
    made.conf.update(worker_configuration(settings))
    made.loader.override_backends = {"redis": RESULT_BACKEND, "rediss": RESULT_BACKEND}
    made.lora_settings = settings
    made.make_lora_engine = make_engine
    return made


def _settings() -> Settings:
    try:
        return Settings()
    except SettingsError as error:
        # Celery's command would print a traceback of any other exception; who imports the app wants the exception.
        if "celery" in Path(sys.argv[0]).parts[-2:]:
            raise SystemExit(f"lora-worker cannot start: {error}") from None
        raise


app = make_app(_settings())

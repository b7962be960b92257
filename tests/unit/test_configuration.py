"""What connections to Redis are made with."""

from __future__ import annotations

import pytest
from celery import Celery

from lora_worker.celery import make_app
from lora_worker.client import Client
from lora_worker.fleet.configuration import CONNECT_SECONDS, HEALTH_CHECK_SECONDS, SOCKET_SECONDS
from lora_worker.settings import Settings

URL = "redis://127.0.0.1:6399/0"


@pytest.mark.parametrize("app", [make_app(Settings(redis_url=URL)), Client(URL).app], ids=["worker", "client"])
def test_no_connection_waits_longer_than_its_timeout_for_a_redis_that_is_gone_silently(app: Celery) -> None:
    options = app.backend.client.connection_pool.connection_kwargs
    assert options["socket_timeout"] == SOCKET_SECONDS == app.conf.broker_transport_options["socket_timeout"]
    assert options["socket_connect_timeout"] == CONNECT_SECONDS
    assert options["health_check_interval"] == HEALTH_CHECK_SECONDS
    assert options["socket_keepalive"]

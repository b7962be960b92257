"""Celery's own configuration, with the reason beside what is not its default."""

from __future__ import annotations

from typing import Any

from lora_worker.fleet.keys import PRIORITY_STEPS
from lora_worker.settings import Settings

POOL = "lora_worker.fleet.pool.engine_pool:EnginePool"


# Without a timeout a publish, and with Celery's of two minutes a result, hangs on a connection that is broken silently.
CONNECT_SECONDS, SOCKET_SECONDS, HEALTH_CHECK_SECONDS = 5, 30, 25


def connection_options() -> dict[str, Any]:
    """Options of every connection to Redis by which messages go, worker's and client's."""
    return {
        "priority_steps": list(PRIORITY_STEPS),
        "socket_keepalive": True,
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": SOCKET_SECONDS,
        "health_check_interval": HEALTH_CHECK_SECONDS,
    }


def common_configuration(settings: Settings) -> dict[str, Any]:
    """What a client and a worker must agree on."""
    return {
        "broker_url": settings.redis_url,
        "result_backend": settings.redis_url,
        "broker_transport_options": connection_options(),
        "redis_socket_keepalive": True,
        "redis_socket_connect_timeout": CONNECT_SECONDS,
        "redis_socket_timeout": SOCKET_SECONDS,
        "redis_backend_health_check_interval": HEALTH_CHECK_SECONDS,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        "task_default_queue": settings.queue_prefix,
        "result_expires": settings.result_expires_seconds,
    }


def worker_configuration(settings: Settings) -> dict[str, Any]:
    """The worker's; it consumes the queues of its prefix, never the queue named 'celery'."""
    return {
        **common_configuration(settings),
        "worker_pool": POOL,
        "include": ["lora_worker.tasks.generation", "lora_worker.tasks.adapters"],
        # Nothing is acknowledged before its result is stored; a failed generation is a result and not run again.
        "task_acks_late": True,
        "task_acks_on_failure": True,
        "task_acks_on_timeout": True,
        # The backend's look before it stores is not tried again otherwise, and the result is lost with Redis away.
        "result_backend_always_retry": True,
        "worker_prefetch_multiplier": 1,
        # Rows go on when the connection breaks, and the worker counts by itself what it has in hand.
        "worker_enable_prefetch_count_reduction": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # An error that Redis answers with (it has become a replica, its disk is full, a script holds it up) passes.
        "broker_channel_error_retry": True,
        "worker_disable_rate_limits": True,
        "worker_send_task_events": True,
        # STARTED would be written by the trace, which runs when the row has ended.
        "task_track_started": False,
        "worker_hijack_root_logger": True,
        "worker_redirect_stdouts": False,
    }

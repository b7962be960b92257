"""The generate task."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from lora_worker.fleet.pool.results import finished_answer
from lora_worker.fleet.task import EngineTask
from lora_worker.messages import GENERATE


@shared_task(name=GENERATE, base=EngineTask, bind=True)
def generate(_: EngineTask, *_args: Any, **_body: Any) -> dict[str, Any]:
    """Generate text: an OpenAI completions or chat body as keyword arguments, the OpenAI object as the result."""
    return finished_answer()

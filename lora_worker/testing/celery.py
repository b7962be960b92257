"""The app of workers with the paced engine, where `celery -A lora_worker.testing` looks for it."""

from __future__ import annotations

from lora_worker.celery import make_app
from lora_worker.settings import Settings
from lora_worker.testing.engine import PacedEngine

app = make_app(Settings(), make_engine=PacedEngine)

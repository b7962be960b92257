"""The client works where torch can't be imported."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys
for name in ("torch", "transformers", "peft"):
    sys.modules[name] = None  # any import of it raises ImportError
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_imports_no_torch() -> None:
    code = """
from lora_worker import Client
client = Client("redis://:pw@localhost:1/3", queue_prefix="mine")
print(client.app.conf.broker_url, client.app.conf.task_default_queue)
"""
    assert run(code).split() == ["redis://:pw@localhost:1/3", "mine"]


def test_the_app_and_the_commands_import_no_torch() -> None:
    """Flower and `inspect` run where there is neither a model nor torch."""
    code = """
import lora_worker.celery, lora_worker.cli
lora_worker.celery.app.loader.import_default_modules()
print(*sorted(name for name in lora_worker.celery.app.tasks if name.startswith("lora_worker.")))
"""
    assert run(code).split() == [
        "lora_worker.generate",
        "lora_worker.list_lora_adapters",
        "lora_worker.load_lora_adapter",
        "lora_worker.pin_lora_adapter",
        "lora_worker.unload_lora_adapter",
        "lora_worker.unpin_lora_adapter",
    ]

"""A Celery client in an environment of its own, with celery and redis and without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.worker_process import WorkerProcess

from lora_worker.embedded import EmbeddedServer

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
from celery import Celery

app = Celery("somebody-else", broker=sys.argv[1], backend=sys.argv[1])

def call(name, **kwargs):
    return app.send_task(f"lora_worker.{name}", kwargs=kwargs, queue="lora").get(timeout=60)

loaded = call("load_lora_adapter", lora_name="adapter-0", lora_path="adapter-0")
answer = call("generate", model="adapter-0", prompt="w1 w2", max_tokens=4, temperature=0)
unloaded = call("unload_lora_adapter", lora_name="adapter-0")
try:
    call("generate", model="adapter-0", prompt="w1 w2")
except Exception as error:
    failure = [type(error).__name__, str(error)]
print(json.dumps({"loaded": loaded, "answer": answer, "unloaded": unloaded, "failure": failure}))
"""


def test_it_loads_generates_and_unloads(
    server: EmbeddedServer, worker_settings: dict[str, Any], tmp_path: Path
) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    packages = [f"{name}=={version(name)}" for name in ("celery", "kombu", "redis")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    with WorkerProcess(server, tmp_path, worker_settings) as worker:
        worker.wait_until_ready()
        command = [str(python), "-I", "-c", PROGRAM, server.url]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "adapter-0" in found["loaded"]["loaded_adapters"]
    assert found["answer"]["lora_worker"]["digest"] == found["loaded"]["report"]["digest"]
    assert found["answer"]["usage"]["prompt_tokens"] == 2
    assert found["unloaded"]["loaded_adapters"] == {}
    assert found["failure"][0] == "UnknownAdapterError"
    assert "adapter-0" in found["failure"][1]

"""A Celery client in an environment of its own, with celery[redis] and without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from support.tiny_models import save_adapter
from support.worker_process import WorkerProcess

from lora_worker.embedded import EmbeddedServer

from .conftest import Say

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
    server: EmbeddedServer, tiny_model: Callable[[str], Path], tmp_path: Path, say: Say
) -> None:
    base = tiny_model("llama")
    save_adapter(base, tmp_path / "adapter-0", seed=1, r=4, target_modules=["q_proj", "v_proj"])
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = str(environment / "bin" / "python")
    packages = [f"celery[redis]=={version('celery')}", f"kombu=={version('kombu')}"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    settings = {"model": base, "adapter_roots": tmp_path, "device": "cpu"}
    with WorkerProcess(server, tmp_path, settings) as worker:
        worker.wait_until_ready()
        command = [python, "-I", "-c", PROGRAM, server.url]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        found = json.loads(ran.stdout)
    assert "adapter-0" in found["loaded"]["loaded_adapters"]
    assert found["answer"]["lora_worker"]["digest"] == found["loaded"]["report"]["digest"]
    assert found["answer"]["usage"]["prompt_tokens"] == 2
    assert found["unloaded"]["loaded_adapters"] == {}
    assert found["failure"][0] == "UnknownAdapterError"
    assert "adapter-0" in found["failure"][1]
    say(f"{', '.join(packages)}: loaded, generated, unloaded; then {found['failure'][0]}")

"""Flower as an operator starts it, and its pages."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from support.worker_process import WorkerProcess

CONFIG = Path(__file__).parents[2] / "config" / "flowerconfig.py"
PASSWORD = "lora:open-sesame"


def start_flower(worker: WorkerProcess, folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    shutil.copy(CONFIG, folder)
    command = [sys.executable, "-m", "celery", "-A", "lora_worker", "flower", "--conf=flowerconfig.py", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "LORA_WORKER_REDIS_URL": worker.server.url, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def fetch_page(port: int, path: str, *, password: str = PASSWORD) -> str | None:
    """A page of a running Flower; None where it does not answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    request.add_header("Authorization", f"Basic {base64.b64encode(password.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            text: str = response.read().decode()
            return text
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except OSError:
        return None

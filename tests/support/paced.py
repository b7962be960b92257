"""Workers with the paced engine, and adapters for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_worker.embedded import EmbeddedServer
from support.worker_process import WorkerProcess


def write_paced_adapter(folder: Path, content: str) -> Path:
    """An adapter without weights; other content gives another digest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "content": content}))
    return folder


class PacedWorkerProcess(WorkerProcess):
    """A real worker on a real Redis whose engine needs no model."""

    app = "lora_worker.testing"

    def __init__(self, server: EmbeddedServer, folder: Path, settings: dict[str, Any], *arguments: str) -> None:
        super().__init__(server, folder, {"model": "paced", "device": "cpu", **settings}, *arguments)

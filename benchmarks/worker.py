"""A worker process on an embedded Redis, as an operator starts it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.local_worker import local_worker
from lora_worker.settings_sources import PREFIX


@contextmanager
def running_worker(**settings: Any) -> Iterator[Client]:
    """A client of a worker that is ready; both end with the block."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(PREFIX)},
        **{f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()},
    }
    with (
        EmbeddedServer() as server,
        tempfile.TemporaryDirectory(prefix="lora-worker-bench-") as folder,
        local_worker("bench", server.url, environment, folder=Path(folder)),
        closing(Client(server.url)) as client,
    ):
        yield client

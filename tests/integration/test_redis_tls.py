"""Worker and client through TLS, with an authority that the system doesn't know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from support.paced import PacedWorkerProcess, write_paced_adapter
from support.tls import TlsProxy, make_certificates
from support.worker_process import wait_for

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer

SECONDS = 60
PREFIX = "through-tls"


class TlsServer:
    """Stands where tests name a server by its URL."""

    def __init__(self, proxy: TlsProxy, authority: Path | None) -> None:
        self.port = proxy.port
        query = f"?ssl_ca_certs={authority}" if authority else ""
        self.url = f"rediss://127.0.0.1:{proxy.port}/0{query}"


@pytest.fixture
def proxied(server: EmbeddedServer, tmp_path: Path) -> Iterator[tuple[TlsProxy, Path]]:
    authority, certificate = make_certificates(tmp_path)
    proxy = TlsProxy(certificate, server.port)
    yield proxy, authority
    proxy.close()


def test_tasks_results_and_control_go_through_tls(proxied: tuple[TlsProxy, Path], tmp_path: Path) -> None:
    secured = TlsServer(*proxied)
    folder = write_paced_adapter(tmp_path / "adapters" / "a", "a")
    settings = {"adapter_roots": folder.parent, "queue_prefix": PREFIX}
    client = Client(secured.url, queue_prefix=PREFIX)
    with PacedWorkerProcess(secured, tmp_path, settings) as worker:  # type: ignore[arg-type]
        worker.wait_until_ready()
        client.load_lora_adapter("a", "a").get(timeout=SECONDS)
        assert client.generate(model="a", prompt="x").get(timeout=SECONDS)["choices"]
        assert client.app.control.inspect(timeout=5).ping()
        assert "pong" in worker.celery("inspect", "ping").stdout
    client.close()
    plain = Celery("somebody-else", broker=secured.url, backend=f"{secured.url}&ssl_cert_reqs=CERT_REQUIRED")
    assert plain.backend.client.ping()
    plain.close()


def test_a_server_that_cannot_prove_who_it_is_is_not_talked_to(proxied: tuple[TlsProxy, Path], tmp_path: Path) -> None:
    unproven = TlsServer(proxied[0], None)
    with PacedWorkerProcess(unproven, tmp_path, {"queue_prefix": PREFIX}) as worker:  # type: ignore[arg-type]
        wait_for(lambda: "certificate verify failed" in worker.log, "the worker says why it does not connect")
        assert " ready." not in worker.log

"""TLS in front of a server that has none: a certificate authority of the test's own, and a proxy that ends TLS."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest


def make_certificates(folder: Path) -> tuple[Path, Path]:
    """The certificate of an authority, and the chain and key of a server on this machine that it has signed."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority"
    )
    openssl("req", *new_key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.crt", "-days", "2", *signed_by)
    server = folder / "server.pem"
    server.write_text((folder / "server.crt").read_text() + (folder / "server.key").read_text())
    return folder / "ca.pem", server


class TlsProxy:
    """Listens on `port` with TLS and passes everything on to a port of this machine."""

    def __init__(self, certificate: Path, target_port: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain, socket.create_connection(("127.0.0.1", self._target_port)) as target:
            client = self._context.wrap_socket(plain, server_side=True)
            with client:
                back = threading.Thread(target=_pump, args=(target, client), daemon=True)
                back.start()
                _pump(client, target)
                back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)

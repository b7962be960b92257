"""Adapters are loaded, replaced and unloaded while a fleet is busy: nobody is answered by what is gone."""

from __future__ import annotations

import random
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.fleet import SECONDS, Fleet
from support.paced import write_paced_adapter

from lora_worker import errors
from lora_worker.embedded import EmbeddedServer
from lora_worker.testing.adapters import digest_of
from lora_worker.testing.rows import answer_text

from .conftest import Say
from .test_affinity import ADAPTERS, ROWS, SLOTS, zipf


class Version(NamedTuple):
    """What an adapter was given, and when the call that gave it returned, in Unix time."""

    digest: str
    returned_at: float


class Request(NamedTuple):
    adapter: str
    prompt: str
    sent_at: float
    result: Any


class Operator:
    """Goes on replacing random adapters, and loading, using and unloading others, until it is told to stop."""

    def __init__(self, fleet: Fleet, roots: Path) -> None:
        self.replaces = self.loads = 0
        self.versions = {name: [Version(digest_of(fleet.folder_of(name)), 0.0)] for name in fleet.adapters}
        self.seconds: list[float] = []
        self._fleet = fleet
        self._roots = roots
        self._client = fleet.workers[0].client()
        self._chance = random.Random(3)
        self._failure: BaseException | None = None
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Operator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        self._thread.join()
        self._client.close()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._is_ended.is_set():
                self._replace(self._chance.choice(self._fleet.adapters[:10]))
                self._load_use_and_unload()
        except BaseException as error:
            self._failure = error

    def _replace(self, name: str) -> None:
        self.replaces += 1
        folder = write_paced_adapter(self._roots / f"{name}-{self.replaces}", f"{name} {self.replaces}")
        # It may be answered from now on, and must be from the call's return.
        self.versions[name].append(Version(digest_of(folder), float("inf")))
        started_at = time.monotonic()
        self._client.load_lora_adapter(name, folder.name, replace=True).get(timeout=SECONDS)
        self.seconds.append(time.monotonic() - started_at)
        self.versions[name][-1] = self.versions[name][-1]._replace(returned_at=time.time())

    def _load_use_and_unload(self) -> None:
        self.loads += 1
        name = f"passing-{self.loads}"
        folder = write_paced_adapter(self._roots / name, name)
        self._client.load_lora_adapter(name, name).get(timeout=SECONDS)
        rows = [self._client.generate(model=name, prompt="x", max_tokens=5) for _ in range(3)]
        for row in rows:
            assert row.get(timeout=SECONDS)["choices"][0]["text"] == answer_text(digest_of(folder), "x")
        self._client.unload_lora_adapter(name).get(timeout=SECONDS)
        with pytest.raises(errors.UnknownAdapterError):
            self._client.generate(model=name, prompt="x").get(timeout=SECONDS)


@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.slow)])
def test_no_row_is_answered_by_old_weights_after_the_call_returned(
    server: EmbeddedServer, tmp_path: Path, say: Say, count: int
) -> None:
    settings = {"max_running_requests": ROWS, "max_loras_per_batch": SLOTS, "adapter_roots": tmp_path / "adapters"}
    with Fleet(server, tmp_path, 3, ADAPTERS, **settings) as fleet:  # type: ignore[arg-type]
        requests = []
        with Operator(fleet, tmp_path / "adapters") as operator:
            for i, adapter in enumerate(zipf(fleet, count, random.Random(8))):
                assert adapter is not None
                result = fleet.client.generate(model=adapter, prompt=f"prompt {i}", max_tokens=30)
                requests.append(Request(adapter, f"prompt {i}", time.time(), result))
                time.sleep(0.01)
            for request in requests:
                request.result.get(timeout=SECONDS)
        for request in requests:
            check(request, operator.versions[request.adapter])
        seconds = sorted(operator.seconds)
        say(
            f"{count} requests, {operator.replaces} replaces, {operator.loads} loads and unloads: no answer by old "
            f"weights; a replace took {seconds[len(seconds) // 2]:.2f} s at the median, {seconds[-1]:.2f} s at most"
        )


def check(request: Request, versions: list[Version]) -> None:
    answer, done = request.result.result, request.result.date_done
    (number,) = [i for i, version in enumerate(versions) if version.digest == answer["lora_worker"]["digest"]]
    assert answer["choices"][0]["text"] == answer_text(versions[number].digest, request.prompt)
    done_at = (done if isinstance(done, datetime) else datetime.fromisoformat(done)).replace(tzinfo=UTC).timestamp()
    for later in versions[number + 1 :]:
        assert done_at <= later.returned_at, f"{request} was answered by old weights"

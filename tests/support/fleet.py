"""Several real workers with the paced engine on one Redis, what they are sent, and whether all of it was answered."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from celery import Celery
from celery.result import AsyncResult
from redis import Redis

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.fleet.backlog import read_backlog
from lora_worker.fleet.keys import Keys, lists_of
from lora_worker.testing.adapters import digest_of
from lora_worker.testing.rows import answer_text
from support.paced import PacedWorkerProcess, write_paced_adapter
from support.worker_process import wait_for

SECONDS = 240.0
KEYS = Keys("lora", 64)


class Sent(NamedTuple):
    """A request, and the answer it must get."""

    task_id: str
    adapter: str | None
    answer: str


class Fleet:
    """Starts `count` workers that know `adapters` adapters; ends those that still run.

    Requests are sent by our client, or, where not `is_routed`, by a Celery app that knows the inbox alone.
    """

    def __init__(
        self,
        server: EmbeddedServer,
        folder: Path,
        count: int,
        adapters: int,
        *,
        is_routed: bool = True,
        **settings: Any,
    ) -> None:
        self.server = server
        self.plain = Celery("somebody-else", broker=server.url, backend=server.url)
        self._is_routed = is_routed
        self.adapters = [f"adapter-{i:02d}" for i in range(adapters)]
        self._folder = folder
        self._digests = {
            name: digest_of(write_paced_adapter(folder / "adapters" / name, name)) for name in self.adapters
        }
        paths = ",".join(f"{name}={folder / 'adapters' / name}" for name in self.adapters)
        self._settings = {"lora_paths": paths, "lease_seconds": 3, "max_running_requests": 16, **settings}
        self._count = count
        self.workers: list[PacedWorkerProcess] = []
        self.sent: list[Sent] = []

    def __enter__(self) -> Self:
        self._redis = Redis(port=self.server.port, decode_responses=True)
        self.client = Client(self.server.url)
        for _ in range(self._count):
            self.add()
        for worker in self.workers:
            worker.wait_until_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.__exit__(kind, value, trace)
        self.client.close()
        self.plain.close()
        self._redis.close()

    def add(self, **settings: Any) -> PacedWorkerProcess:
        """Start another worker; it is not ready yet."""
        name = f"w{len(self.workers)}"
        folder = self._folder / name
        folder.mkdir()
        worker = PacedWorkerProcess(self.server, folder, {**self._settings, **settings}, "-n", f"{name}@test")
        worker.__enter__()
        self.workers.append(worker)
        return worker

    def kill(self, worker: PacedWorkerProcess) -> None:
        """kill -9."""
        worker.send_signal(signal.SIGKILL)
        worker.wait_until_ended()

    def send(
        self,
        count: int,
        chance: random.Random,
        *,
        adapters: Sequence[str | None] = (),
        max_tokens: int = 40,
        **options: Any,
    ) -> list[Sent]:
        """Send requests; the adapters are drawn from all, and the base, where none are given."""
        made = []
        for _ in range(count):
            adapter = chance.choice(adapters or [*self.adapters, None])
            prompt = f"prompt {len(self.sent)}"
            model = {"model": adapter} if adapter else {}
            tokens = chance.randint(max_tokens // 2, max_tokens)
            result = self._send({"prompt": prompt, "max_tokens": tokens, **model}, options)
            made.append(Sent(result.id, adapter, answer_text(self._digests[adapter] if adapter else None, prompt)))
            self.sent.append(made[-1])
        return made

    def folder_of(self, adapter: str) -> Path:
        return self._folder / "adapters" / adapter

    def results(self, sent: Sequence[Sent]) -> list[dict[str, Any] | None]:
        """What is stored for each, without waiting."""
        found = []
        for first in range(0, len(sent), 500):
            keys = [f"celery-task-meta-{request.task_id}" for request in sent[first : first + 500]]
            found += self._redis.mget(keys)
        return [json.loads(result) if result else None for result in found]

    @property
    def unanswered(self) -> int:
        return sum(result is None for result in self.results(self.sent))

    def wait_for_answers(self, seconds: float = SECONDS) -> None:
        wait_for(lambda: self.unanswered == 0, "every request is answered", seconds)

    @property
    def answered(self) -> list[Sent]:
        return [sent for sent, result in zip(self.sent, self.results(self.sent), strict=True) if result]

    def wait_until_nothing_is_left(self, seconds: float = SECONDS) -> None:
        """In queues or in anybody's hands."""
        wait_for(lambda: sum(read_backlog(self._redis, KEYS)) == 0, "nothing is left", seconds)

    def check_answers(self, sent: Sequence[Sent] | None = None) -> None:
        """Lost 0, failed 0, wrong 0, and nothing is left in Redis."""
        requests = self.sent if sent is None else sent
        results = self.results(requests)
        lost = sum(result is None for result in results)
        failed = [result for result in results if result and result["status"] != "SUCCESS"]
        wrong = sum(
            result["result"]["choices"][0]["text"] != request.answer
            for request, result in zip(requests, results, strict=True)
            if result and result["status"] == "SUCCESS"
        )
        assert (lost, failed, wrong) == (0, [], 0)

    def check_nothing_is_left(self) -> None:
        """No message in a queue or in anybody's hands."""
        wait_for(lambda: not self._redis.keys(KEYS.unacked("*")), "everything is acknowledged")
        assert self.waiting == 0
        assert not self._redis.keys(KEYS.started("*"))
        assert not self._redis.keys(KEYS.direct("*"))

    @property
    def waiting(self) -> int:
        """Messages in the queues."""
        return sum(self._redis.llen(name) for queue in KEYS.queues for name in lists_of(queue))

    @property
    def live(self) -> list[str]:
        """The ids of the workers that hold a lease or have held one."""
        found: Any = self._redis.zrange(KEYS.workers, 0, -1)
        return list(found)

    def _send(self, body: dict[str, Any], options: dict[str, Any]) -> AsyncResult:
        if self._is_routed:
            return self.client.generate(**body, **options)
        return self.plain.send_task("lora_worker.generate", kwargs=body, queue="lora", **options)

    @contextmanager
    def counted_starts(self) -> Iterator[Counter[str]]:
        """How often the row of each task has started, as the workers' events tell."""
        starts: Counter[str] = Counter()

        def count(event: dict[str, Any]) -> None:
            starts[event["uuid"]] += 1

        with self.client.app.connection() as connection:
            receiver = self.client.app.events.Receiver(connection, handlers={"task-started": count})
            thread = threading.Thread(target=lambda: receiver.capture(limit=None, timeout=None, wakeup=False))
            thread.start()
            try:
                yield starts
            finally:
                receiver.should_stop = True  # it looks once a second at the latest
                thread.join()

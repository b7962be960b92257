"""What does the queue cost: tasks per second through Redis at 64 and 512 rows, and the worker's own time for each?

    python -m benchmarks.queue [--seconds 15] [--out benchmarks/results/queue.json]

The paced engine generates nothing and keeps a row for as long as its tokens would take, so what is short of rows
divided by seconds a row, and all of the worker's processor time, is what the worker adds: claim, checks, results,
acknowledgements. The rival is a bare Celery worker of threads, one a row, that sleeps as long, with acknowledgements
after the result like ours. Each runs alone on a Redis of its own whose queue was filled before; the first and the last
rows are not counted.

Caveats. Ours sends the events that Flower shows, three a task; the rival sends none. The ideal rate assumes that a
row's place is filled the moment it ends. Client, Redis and worker share the machine's cores. `seconds_per_row` is small
to make the queue the bottleneck: a real row takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from redis import Redis

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer

TOKENS, TOKENS_PER_SECOND = 20, 100
SECONDS_PER_ROW = TOKENS / TOKENS_PER_SECOND
ADAPTERS = 6

RIVAL = f"""
import time
from celery import Celery
app = Celery("rival")
app.conf.update(broker_url={{url!r}}, result_backend={{url!r}}, task_acks_late=True, worker_prefetch_multiplier=1)
@app.task(name="sleep")
def sleep(**_): time.sleep({SECONDS_PER_ROW})
"""


class Figures(NamedTuple):
    """`rate`: tasks per second; `of_ideal`: rate over rows / seconds a row; `overhead_ms`: processor time a task."""

    rate: float
    of_ideal: float
    overhead_ms: float


def processor_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fill_ours(url: str, count: int) -> None:
    client = Client(url)
    for i in range(count):
        client.generate(prompt="x", model=f"adapter-{i % ADAPTERS}", max_tokens=TOKENS)
    client.close()


def fill_rival(url: str, count: int) -> None:
    app = Celery("rival", broker=url, backend=url)
    for _ in range(count):
        app.send_task("sleep", kwargs={"prompt": "x", "max_tokens": TOKENS})
    app.close()


def ours(folder: Path, url: str, rows: int) -> tuple[list[str], dict[str, str]]:
    for i in range(ADAPTERS):
        adapter = folder / f"adapter-{i}"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "content": i}))
    settings = {
        "REDIS_URL": url,
        "MODEL": "paced",
        "DEVICE": "cpu",
        "MAX_RUNNING_REQUESTS": str(rows),
        "ADAPTER_ROOTS": str(folder),
        "LORA_PATHS": ",".join(f"adapter-{i}" for i in range(ADAPTERS)),
    }
    environment = {f"LORA_WORKER_{name}": value for name, value in settings.items()}
    return ["-A", "lora_worker.testing", "worker"], environment | {"PACED_TOKENS_PER_SECOND": str(TOKENS_PER_SECOND)}


def rival(folder: Path, url: str, rows: int) -> tuple[list[str], dict[str, str]]:
    (folder / "rival.py").write_text(RIVAL.format(url=url))
    return ["-A", "rival", "worker", "-P", "threads", "-c", str(rows), "--without-gossip", "--without-mingle"], {}


def run(
    prepare: Callable[[Path, str, int], tuple[list[str], dict[str, str]]],
    fill: Callable[[str, int], None],
    rows: int,
    seconds: float,
) -> Figures:
    count = int(seconds * rows / SECONDS_PER_ROW)
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder, Redis(port=server.port) as redis:
        fill(server.url, count)
        arguments, environment = prepare(Path(folder), server.url, rows)
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", *arguments, "-l", "WARNING"],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            first, last = int(count * 0.2), int(count * 0.8)
            before = wait_for_results(redis, first, process)
            after = wait_for_results(redis, last, process)
            wait_for_results(redis, count, process)
        finally:
            process.kill()
            process.wait()
        rate = rate_of(redis, first, last)
    return Figures(
        round(rate, 1), round(rate * SECONDS_PER_ROW / rows, 3), round(1000 * (after - before) / (last - first), 3)
    )


def wait_for_results(redis: Redis, count: int, process: subprocess.Popen[bytes]) -> float:
    """The process's processor time when so many results are there."""
    while int(redis.dbsize()) < count:  # all but a few keys are results
        assert process.poll() is None, "the worker ended"
        time.sleep(0.05)
    return processor_seconds(process.pid)


def rate_of(redis: Redis, first: int, last: int) -> float:
    keys = list(redis.scan_iter("celery-task-meta-*", count=1000))
    ends = sorted(datetime.fromisoformat(json.loads(value)["date_done"]) for value in redis.mget(keys) if value)
    return (last - first) / (ends[last] - ends[first]).total_seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each run would take at the ideal rate")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seconds_per_row": SECONDS_PER_ROW,
    }
    for rows in (64, 512):
        mine = run(ours, fill_ours, rows, arguments.seconds)
        theirs = run(rival, fill_rival, rows, arguments.seconds)
        found[f"{rows} rows"] = {
            "ours": mine._asdict(),
            "celery threads": theirs._asdict(),
            "rate, ours / celery threads": round(mine.rate / theirs.rate, 2),
            "overhead, ours / celery threads": round(mine.overhead_ms / theirs.overhead_ms, 2),
        }
        print(json.dumps(found[f"{rows} rows"], indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

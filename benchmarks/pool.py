"""How does throughput hold with more adapters than slots?

    python -m benchmarks.pool [--requests 2000] [--adapters 16 64 256 1024] [--out benchmarks/results/pool.json]

One worker with 16 slots and 64 rows, all its adapters in host memory, answers a queue of requests through Redis, for
several numbers of known adapters and three ways of using them: uniform, Zipf 1, and in a cycle. What counts is the
throughput relative to as many adapters as slots, within this run. Loads stand beside those of plain caches that serve
the requests in the order they came (see benchmarks.simulation). `--out` writes the figures, and a plot beside them
(needs matplotlib).

Caveats. The model is a small random one, so that a run takes minutes; a step is short, which makes loads weigh more
than with a model of use. Adapters have rank 8 on q and v. Requests make 32 to 96 tokens each, from prompts of 8. While
a queue is filled, rows of the base model keep the worker busy; they are revoked when it is full, and the clock starts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from celery.result import AsyncResult

from benchmarks.simulation import ROWS, SLOTS, USES, Request, cache_loads, make_requests
from benchmarks.worker import running_worker
from benchmarks.workloads import random_model, similar_adapters
from lora_worker.client import Client

PROMPT_TOKENS = 8
ANSWER_SECONDS = 600.0
WAIT_SECONDS = 60.0


class Figures(NamedTuple):
    """Of one queue: loads are per 1,000 requests, waits in seconds since the claim."""

    tokens_per_second: float
    relative: float
    loads: float
    lru: float
    fifo: float
    optimum: float
    longest_wait: float


def pool_of(client: Client) -> dict[str, Any]:
    stats = client.app.control.inspect(timeout=10).stats()
    found: dict[str, Any] = next(iter(stats.values()))["pool"]["lora"]["pool"]
    return found


def fill(client: Client, requests: list[Request]) -> list[AsyncResult]:
    """Publish the requests while the rows are taken, then free the rows."""
    blockers = [client.generate(prompt=[1], max_tokens=100_000, ignore_eos=True) for _ in range(ROWS)]
    results = [
        client.generate(
            model=request.adapter,
            prompt=[(i * 7 + j) % 500 for j in range(PROMPT_TOKENS)],
            max_tokens=request.tokens,
            temperature=0,
            ignore_eos=True,
        )
        for i, request in enumerate(requests)
    ]
    client.app.control.revoke([blocker.id for blocker in blockers], terminate=True)
    return results


def measure(client: Client, requests: list[Request], baseline: float | None) -> Figures:
    before = pool_of(client)["loads"]
    results = fill(client, requests)
    started = time.monotonic()
    answers = [result.get(timeout=ANSWER_SECONDS) for result in results]
    seconds = time.monotonic() - started
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert tokens == sum(request.tokens for request in requests)
    rate = tokens / seconds
    names = [request.adapter for request in requests]
    lru, fifo, optimum = (cache_loads(names, policy) for policy in ("lru", "fifo", "optimum"))
    return Figures(
        rate,
        rate / (baseline or rate),
        1000 * (pool_of(client)["loads"] - before) / len(requests),
        lru,
        fifo,
        optimum,
        max(answer["lora_worker"]["queued_seconds"] for answer in answers),
    )


def plot(figures: dict[str, dict[int, Figures]], path: Path) -> None:
    from matplotlib import pyplot

    drawing, (throughput, loads) = pyplot.subplots(1, 2, figsize=(11, 4))
    for use, by_adapters in figures.items():
        counts = list(by_adapters)
        throughput.plot(counts, [f.relative for f in by_adapters.values()], marker="o", label=use)
        (line,) = loads.plot(counts, [f.loads for f in by_adapters.values()], marker="o", label=f"{use}, ours")
        loads.plot(
            counts, [f.lru for f in by_adapters.values()], "--", color=line.get_color(), label=f"{use}, plain LRU"
        )
    throughput.set(
        xlabel="known adapters", ylabel=f"throughput relative to {SLOTS} adapters", xscale="log", ylim=(0, 1.1)
    )
    loads.set(xlabel="known adapters", ylabel="loads per 1,000 requests", xscale="log")
    for axes in (throughput, loads):
        axes.legend()
        axes.grid(alpha=0.3)
    drawing.tight_layout()
    drawing.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--adapters", type=int, nargs="+", default=[16, 17, 64, 256, 1024])
    parser.add_argument("--uses", nargs="+", default=list(USES), choices=list(USES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, dict[int, Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="lora-worker-bench-") as folder:
        model = random_model(Path(folder) / "model")
        names = similar_adapters(model, Path(folder) / "adapters", count=max(arguments.adapters), rank=8)
        with running_worker(
            model=model,
            device=arguments.device,
            adapter_roots=Path(folder) / "adapters",
            lora_paths=",".join(names),
            max_loras_per_batch=SLOTS,
            max_lora_rank=8,
            max_running_requests=ROWS,
            max_waiting_requests=arguments.requests,
            max_loaded_loras=2 * len(names),
            max_wait_seconds=WAIT_SECONDS,
        ) as client:
            measure(client, make_requests(ROWS * 4, adapters=SLOTS, use="uniform"), None)  # warms up, not counted
            header = ("tokens/s", "relative", "loads", "LRU", "FIFO", "optimum", "wait s")
            print(f"{'adapters, use':18}" + "".join(f"{title:>9}" for title in header))
            for use in arguments.uses:
                by_adapters = figures.setdefault(use, {})
                baseline = None
                for count in arguments.adapters:
                    found = measure(client, make_requests(arguments.requests, adapters=count, use=use), baseline)
                    baseline = baseline or found.tokens_per_second
                    by_adapters[count] = found
                    print(f"{f'{count}, {use}':18}" + "".join(f"{value:9.2f}" for value in found), flush=True)
    if arguments.out:
        plain = {use: {count: f._asdict() for count, f in found.items()} for use, found in figures.items()}
        arguments.out.write_text(json.dumps(plain, indent=2) + "\n")
        plot(figures, arguments.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()

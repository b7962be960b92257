"""The scheduler without a model: how full are the rows, and how many loads does a policy make?

    python -m benchmarks.simulation [--requests 2000]

Runs the engine's own scheduler over a pool that only counts, one token a row and step, and compares it with plain
caches that serve the requests in the order they came: LRU, FIFO, and the offline optimum for that order (Belady's: the
adapter whose next use is farthest away leaves). A scheduler that may change the order can make fewer loads than that
optimum; the least possible is one load an adapter.

Caveats. Rows take 32 to 96 steps and prompts none. A load takes no time. All requests are there from the start, and the
scheduler sees as many as a worker claims ahead.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import NamedTuple

from lora_worker.adapters.reference import AdapterState
from lora_worker.engine.blocks import BlockManager
from lora_worker.engine.draining import Spared
from lora_worker.engine.scheduler import Scheduler
from lora_worker.engine.sequence import SamplingParams, Sequence

ROWS = 64
SLOTS = 16
AHEAD = 1024
SEED = 0

USES: dict[str, Callable[[int, int, random.Random], list[int]]] = {
    "uniform": lambda n, adapters, chance: [chance.randrange(adapters) for _ in range(n)],
    "Zipf 1": lambda n, adapters, chance: chance.choices(range(adapters), [1 / (i + 1) for i in range(adapters)], k=n),
    "cycle": lambda n, adapters, _: [i % adapters for i in range(n)],
}


class Request(NamedTuple):
    adapter: str
    tokens: int


class Simulated(NamedTuple):
    """Share of row-steps in use, loads per 1,000 requests, and the longest wait in steps."""

    used: float
    loads: float
    worst_wait: int


def make_requests(count: int, *, adapters: int, use: str, seed: int = SEED) -> list[Request]:
    """Requests of 32 to 96 tokens; the adapters are named adapter-0, adapter-1 and so on."""
    chance = random.Random(seed)
    names = USES[use](count, adapters, chance)
    return [Request(f"adapter-{name}", chance.randrange(32, 97)) for name in names]


class CountingPool:
    """Slots without weights, for the scheduler; every adapter takes one page."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.loads = 0
        self.held: OrderedDict[str, int] = OrderedDict()

    def state(self, name: str) -> AdapterState:
        return AdapterState.RESIDENT if name in self.held else AdapterState.CACHED

    def residents(self) -> list[str]:
        return list(self.held)

    def pages(self, _: str) -> int:
        return 1

    def names_of(self, digest: str) -> list[str]:
        return [digest]

    def room(self, spared: Spared, drained: Collection[str] = ()) -> int:
        idle = [name for name, held in self.held.items() if (not held or name in drained) and not spared(name)]
        return self.slots - len(self.held) + len(idle)

    def fetch(self, name: str, *, is_urgent: bool) -> None:  # noqa: ARG002 - the protocol's signature
        raise AssertionError(f"{name} is cached")

    def is_pinned(self, _: str) -> bool:
        return False

    def pinned_without_slot(self) -> list[str]:
        return []

    def hold(self, name: str, spared: Spared) -> bool:
        """Start a row, evicting the least recently used adapter that may go, where one must."""
        if name not in self.held:
            if len(self.held) == self.slots:
                victim = next((other for other, held in self.held.items() if not held and not spared(other)), None)
                if victim is None:
                    return False
                del self.held[victim]
            self.held[name] = 0
            self.loads += 1
        self.held[name] += 1
        self.held.move_to_end(name)
        return True


def simulate(requests: list[Request], *, max_wait_seconds: float = 1e9) -> Simulated:
    pool = CountingPool(SLOTS)
    scheduler = Scheduler(
        BlockManager(ROWS * 8, 16),
        pool,
        start=lambda row, spared: pool.hold(row.adapter_name or "", spared),
        stop=lambda _: None,
        max_running=ROWS,
        max_prefill_tokens=512,
        max_wait_seconds=max_wait_seconds,
    )
    coming = iter(requests)
    claimed: dict[str, int] = {}
    steps = used = worst = 0
    is_over = False
    while not is_over:
        while len(scheduler.waiting) < AHEAD and (request := next(coming, None)) is not None:
            identity = str(len(claimed))
            claimed[identity] = steps
            scheduler.add(
                Sequence(identity, [1], SamplingParams(0, 1, 0, 0), request.tokens, lambda _: None, request.adapter)
            )
        before = set(scheduler.running)
        scheduler.admit()
        for row in set(scheduler.running) - before:
            worst = max(worst, steps - claimed[row.request_id])
        steps += 1
        used += len(scheduler.running)
        for row in list(scheduler.running):
            row.tokens.append(1)
            if row.output_count == row.max_tokens:
                scheduler.remove(row)
                pool.held[row.adapter_name or ""] -= 1
        is_over = not scheduler.running and not scheduler.waiting
    return Simulated(used / (steps * ROWS), 1000 * pool.loads / len(requests), worst)


def cache_loads(names: list[str], policy: str) -> float:
    """Loads per 1,000 requests of a plain cache that serves them in their order: 'lru', 'fifo' or 'optimum'."""
    cached: OrderedDict[str, None] = OrderedDict()
    uses: dict[str, list[int]] = {}
    for i, name in reversed(list(enumerate(names))):
        uses.setdefault(name, []).append(i)
    loads = 0
    for name in names:
        uses[name].pop()
        if name in cached:
            if policy == "lru":
                cached.move_to_end(name)
            continue
        loads += 1
        if len(cached) == SLOTS:
            if policy == "optimum":
                del cached[max(cached, key=lambda other: uses[other][-1] if uses[other] else len(names))]
            else:
                cached.popitem(last=False)
        cached[name] = None
    return 1000 * loads / len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    count = parser.parse_args().requests
    print(
        f"{'adapters, use':18} {'rows used':>9} {'loads':>6} {'LRU':>6} {'FIFO':>6} {'optimum':>8} {'wait':>6} "
        f"{'ms a step':>9}"
    )
    for use in USES:
        for adapters in (16, 17, 64, 256, 1000):
            requests = make_requests(count, adapters=adapters, use=use)
            started = time.perf_counter()
            found = simulate(requests)
            seconds = time.perf_counter() - started
            names = [request.adapter for request in requests]
            lru, fifo, optimum = (cache_loads(names, policy) for policy in ("lru", "fifo", "optimum"))
            per_step = 1000 * seconds * ROWS * found.used / sum(request.tokens for request in requests)
            print(
                f"{f'{adapters}, {use}':18} {found.used:9.2f} {found.loads:6.0f} {lru:6.0f} {fifo:6.0f} {optimum:8.0f} "
                f"{found.worst_wait:6d} {per_step:9.2f}"
            )


if __name__ == "__main__":
    main()

"""What does a load cost the rows that run, and what does a resident adapter cost in memory?

    python -m benchmarks.residency [--seconds 60] [--device cpu] [--out benchmarks/results/residency.json]

Time: rows on 8 adapters decode; once a second a request comes for another adapter, which lies in host memory and has to
be copied into a slot, or, in alternate spans, for one that is in a slot already. The time between two tokens of the
rows that run is compared between the two. Memory: 64 adapters of rank 8 are made resident in a pool that also takes
rank 64.

Caveats. SmolLM2-135M in bf16; adapters of rank 16 (rank 8 for memory) on all seven projections with random weights. The
request itself costs a prompt of 4 tokens and one row, in both spans alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.workloads import random_adapters
from lora_worker.demo.model import prepare_model
from lora_worker.engine import Engine
from lora_worker.settings import Settings

ROWS = 32
BUSY = 8  # adapters of the rows that run
VISITORS = 24  # adapters that come by, through the slots that are left
SLOTS = 12
SPAN_SECONDS = 5.0
SMALL, SMALL_RANK, GREATEST_RANK = 64, 8, 64


class StepClock:
    """The seconds between the ends of consecutive steps of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: list[float] = []
        self._last = 0.0
        core = engine._core
        step = core.step

        def timed() -> bool:
            progressed = step()
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = now
            return progressed

        core.step = timed  # type: ignore[method-assign]


def settings(model: Path, device: str, adapters: dict[str, Path], **more: Any) -> Settings:
    paths = [{"lora_name": name, "lora_path": str(path)} for name, path in adapters.items()]
    return Settings(model=model, device=device, max_running_requests=ROWS + 4, lora_paths=paths, **more)


def time_between_tokens(model: Path, device: str, seconds: float) -> dict[str, float]:
    with random_adapters(model, count=BUSY + VISITORS, rank=16) as adapters:
        names = list(adapters)
        more = {"max_loras_per_batch": SLOTS, "max_lora_rank": 16}
        with Engine(settings(model, device, adapters, **more)) as engine:
            for i in range(ROWS):
                body = {"model": names[i % BUSY], "prompt": [5] * 20, "max_tokens": 7000, "ignore_eos": True}
                engine.submit(body, lambda _: None)
            engine.generate([{"model": name, "prompt": [5] * 4, "max_tokens": 1} for name in names])
            clock = StepClock(engine)
            found: dict[str, list[float]] = {"without loads": [], "with loads": []}
            visitor = 0
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for kind, times in found.items():
                    clock.seconds.clear()
                    span_end = time.monotonic() + SPAN_SECONDS
                    while time.monotonic() < span_end:
                        if kind == "with loads":
                            visitor += 1
                        name = names[BUSY + visitor % VISITORS]
                        engine.generate([{"model": name, "prompt": [5] * 4, "max_tokens": 1}])
                        time.sleep(1)
                    times += clock.seconds[1:]
            copies = engine.info()["pool"]["copies_to_slots"]
    figures = {"milliseconds a load": 1000 * copies["seconds"] / copies["count"]}
    for kind, times in found.items():
        figures[f"{kind}, median ms"] = 1000 * statistics.median(times)
        figures[f"{kind}, 95th ms"] = 1000 * statistics.quantiles(times, n=20)[-1]
    figures["median, with / without"] = figures["with loads, median ms"] / figures["without loads, median ms"]
    figures["95th, with / without"] = figures["with loads, 95th ms"] / figures["without loads, 95th ms"]
    return figures


def memory(model: Path, device: str) -> dict[str, float]:
    with random_adapters(model, count=SMALL, rank=SMALL_RANK) as adapters:
        more = {"max_loras_per_batch": SMALL, "max_lora_rank": GREATEST_RANK, "lora_pool_ranks": SMALL * SMALL_RANK}
        with Engine(settings(model, device, adapters, **more)) as engine:
            engine.generate([{"model": name, "prompt": [5] * 4, "max_tokens": 2} for name in adapters])
            pool = engine.info()["pool"]
            assert len(pool["slots"]) == SMALL, f"only {len(pool['slots'])} are resident"
    return {
        "pool MB": pool["pool_bytes"] / 1e6,
        "used MB": pool["used_bytes"] / 1e6,
        "wasted MB": pool["wasted_bytes"] / 1e6,
        "MB of as many slots of the greatest rank": pool["used_bytes"] * GREATEST_RANK / SMALL_RANK / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    model = prepare_model()
    figures = time_between_tokens(model, arguments.device, arguments.seconds) | memory(model, arguments.device)
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The demo itself: the same prompts under the base model and three adapters, through Redis and a real worker."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from celery.result import AsyncResult
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lora_worker.client import Client
from lora_worker.demo.model import find_gguf, prepare_model
from lora_worker.embedded import EmbeddedServer, find_server
from lora_worker.local_worker import LocalWorker, local_worker
from lora_worker.settings_sources import PREFIX

ADAPTERS = Path(__file__).parent / "adapters"
NAMES = (None, "pirate", "json", "sentiment")
PROMPTS = (
    "What is the capital of Spain?",
    "What do bees do all day?",
    "The waiter was friendly and the cake was delicious.",
    "The room was dirty and the food was awful.",
    "The library opens at ten.",
    "Tell me about the sea.",
    "What should I cook tonight?",
    "What color is a lemon?",
)
MAX_TOKENS = 32
SLOTS = 2
LOOK_SECONDS = 0.05


class Asked(NamedTuple):
    """A prompt, under whom, and the result to come."""

    prompt: str
    adapter: str | None
    result: AsyncResult


def run_demo() -> None:
    """Raises DemoError or EmbeddedServerError with the remedy where something is missing."""
    console = Console()
    find_gguf()
    find_server()
    with console.status("Unpacking the model (once, about 10 s) ..."):
        model = prepare_model()
    with EmbeddedServer() as server, _worker(server.url, model, console) as worker:
        client = Client(server.url)
        names = [name for name in NAMES for _ in PROMPTS]
        prompts = [prompt for _ in NAMES for prompt in PROMPTS]
        # In turn, so that three adapters contend for two slots.
        order = sorted(range(len(names)), key=lambda i: (i % len(PROMPTS), i))
        started = time.monotonic()
        asked = [Asked(prompts[i], names[i], _ask(client, names[i], prompts[i])) for i in order]
        answers = _collect(asked, worker, console)
        seconds = time.monotonic() - started
        _show(asked, answers, console)
        stats = client.app.control.inspect(timeout=5).stats() or {}
        _show_figures(answers, seconds, stats, console)
        client.close()


def _ask(client: Client, adapter: str | None, prompt: str) -> AsyncResult:
    model = {} if adapter is None else {"model": adapter}
    messages = [{"role": "user", "content": prompt}]
    return client.generate(messages=messages, temperature=0, max_tokens=MAX_TOKENS, **model)


@contextmanager
def _worker(redis_url: str, model: Path, console: Console) -> Iterator[LocalWorker]:
    """A worker process as an operator starts it, ready to answer; ends with the block."""
    # The demo is the same wherever it runs: no settings of the user's, no .env of the directory.
    others = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment = {
        **others,
        "LORA_WORKER_MODEL": str(model),
        "LORA_WORKER_LORA_PATHS": ",".join(f"{name}={ADAPTERS / name}" for name in NAMES if name),
        "LORA_WORKER_MAX_LORAS_PER_BATCH": str(SLOTS),
        "LORA_WORKER_MAX_MODEL_LEN": "1024",
        "LORA_WORKER_DRAIN_SECONDS": "2",
    }
    console.print("[dim]$ celery -A lora_worker worker[/dim]")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        with console.status("Starting the worker ..."):
            worker = started.enter_context(local_worker("demo", redis_url, environment, folder=Path(folder)))
        yield worker


def _collect(asked: list[Asked], worker: LocalWorker, console: Console) -> list[dict[str, Any]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("Requests answered", total=len(asked))
        while not progress.finished:
            progress.update(bar, completed=sum(item.result.ready() for item in asked))
            worker.check()
            time.sleep(LOOK_SECONDS)
    return [item.result.get() for item in asked]


def _show(asked: list[Asked], answers: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="The same prompts under the base model and three adapters", show_lines=False)
    table.add_column("model")
    table.add_column("answer", overflow="fold")
    for prompt in PROMPTS:
        table.add_section()
        table.add_row("[bold]prompt[/bold]", f"[bold]{escape(prompt)}[/bold]")
        for item, answer in zip(asked, answers, strict=True):
            if item.prompt == prompt:
                text = answer["choices"][0]["message"]["content"]
                table.add_row(item.adapter or "(base)", escape(" ".join(text.split())))
    console.print(table)


def _show_figures(answers: list[dict[str, Any]], seconds: float, stats: dict[str, Any], console: Console) -> None:
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    console.print(
        f"{len(answers)} requests through Redis in {seconds:.1f} s: {tokens} tokens, {tokens / seconds:.0f} tokens/s."
    )
    for worker, info in stats.items():
        pool = info["pool"]["lora"]["pool"]
        console.print(
            f"{worker}: {pool['max_loras_per_batch']} slots for {len(NAMES) - 1} adapters, policy {pool['policy']}; "
            f"{pool['hits']} hits, {pool['loads']} loads, {pool['evictions']} evictions."
        )

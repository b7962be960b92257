"""The command `lora-worker`: the demo, the settings, and what an operator asks of a running worker."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click
from celery.result import AsyncResult
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lora_worker.cli_batch import batch
from lora_worker.cli_redis import await_answer, count_backlog, open_client, read_workers
from lora_worker.errors import InvalidAdapterError, LoraWorkerError, SettingsError
from lora_worker.fleet.connection import REDIS_ERRORS
from lora_worker.settings import Settings, explain, mask_url

INSPECT_SECONDS = 3.0


@click.group()
@click.version_option(package_name="lora-worker")
def cli() -> None:
    """A Celery worker that serves many LoRA adapters over one base model."""


@cli.command()
def demo() -> None:
    """Show the same prompts under a small base model and three adapters."""
    from lora_worker.demo.run import run_demo

    run_demo()


@cli.command()
def settings() -> None:
    """Print every setting, its value and where it came from."""
    table = _table("setting", "value", "source")
    for row in explain(Settings()):
        table.add_row(*row)
    Console().print(table)


@cli.command()
def status() -> None:
    """Show the workers that answer, their slots, and how much waits."""
    client = open_client()
    workers = read_workers()
    inspect = client.app.control.inspect(destination=workers, timeout=INSPECT_SECONDS)
    stats = (inspect.stats() or {}) if workers else {}
    table = _table("worker", "model", "running", "waiting", "slots", "pinned", "hits", "loads", "evictions")
    for worker, info in sorted(stats.items()):
        engine = info["pool"].get("lora", {})
        pool = engine.get("pool", {})
        slots = ", ".join(f"{slot}: {name}" for slot, name in pool.get("slots", {}).items())
        figures = (engine.get("model"), engine.get("running"), engine.get("waiting"))
        counts = (", ".join(pool.get("pinned", [])), pool.get("hits"), pool.get("loads"), pool.get("evictions"))
        table.add_row(worker, *(str(value) for value in (*figures, slots, *counts)))
    Console().print(table if stats else "No worker answers.")
    backlog = count_backlog()
    Console().print(
        f"{backlog.waiting} messages wait: {backlog.partitions} for adapters, {backlog.base} for the base, "
        f"{backlog.manage} to manage adapters, {backlog.inbox} in the inbox, {backlog.handed_over} handed over; "
        f"workers have {backlog.in_hand} in hand."
    )
    if not stats:
        sys.exit(1)


cli.add_command(batch)


@cli.command(name="check-adapter")
@click.argument("path")
@click.option("--model", help="Folder of the base model; the setting where it is left out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def check_adapter_command(path: str, *, model: str | None, as_json: bool) -> None:
    """Say what a worker would serve of the adapter in the folder PATH, or why it would refuse it (exit code 1)."""
    from lora_worker.adapters.check import check_adapter

    found = Settings(**({"model": model} if model else {}))
    if found.model is None:
        raise SettingsError("no base model is named; give --model, or set LORA_WORKER_MODEL")
    try:
        report = asdict(check_adapter(path, found))
    except InvalidAdapterError as error:
        click.echo(json.dumps({"served": False, "reason": str(error)}, indent=2) if as_json else f"refused: {error}")
        sys.exit(1)
    if as_json:
        click.echo(json.dumps({"served": True, **report}, indent=2))
        return
    table = _table("field", "value")
    for field, value in {"served": "yes, exactly as PEFT does", **report}.items():
        shown = ", ".join(str(item) for item in value) or "none" if isinstance(value, list) else str(value)
        table.add_row(field, Text(shown))
    Console().print(table)


@cli.group()
def adapters() -> None:
    """Load, unload, pin, unpin or list the adapters of all workers."""


@adapters.command()
@click.argument("name")
@click.argument("path")
@click.option("--pinned", is_flag=True, help="Keep it in a slot from now on.")
@click.option("--replace", is_flag=True, help="Replace an adapter of the same name.")
def load(name: str, path: str, *, pinned: bool, replace: bool) -> None:
    """Load the adapter in the folder PATH, under the workers' adapter_roots, as NAME."""
    _print_answer(open_client().load_lora_adapter(name, path, pinned=pinned, replace=replace))


@adapters.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Also if it is pinned.")
@click.option("--timeout", "timeout_seconds", type=float, help="Seconds to wait for its running rows.")
def unload(name: str, *, force: bool, timeout_seconds: float | None) -> None:
    """Unload the adapter NAME when its running rows have ended."""
    _print_answer(open_client().unload_lora_adapter(name, force=force, timeout_seconds=timeout_seconds))


@adapters.command()
@click.argument("name")
def pin(name: str) -> None:
    """Keep the adapter NAME in a slot."""
    _print_answer(open_client().pin_lora_adapter(name))


@adapters.command()
@click.argument("name")
def unpin(name: str) -> None:
    """Let the adapter NAME be evicted again."""
    _print_answer(open_client().unpin_lora_adapter(name))


@adapters.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_adapters(*, as_json: bool) -> None:
    """List the loaded adapters and where their weights are."""
    found = await_answer(open_client().list_lora_adapters())
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = _table("adapter", "rank", "bytes", "pinned", "worker", "cached", "slot", "held", "source")
    for name, adapter in sorted(found.items()):
        for worker, here in adapter["workers"].items():
            row = (adapter["rank"], adapter["bytes"], adapter["pinned"], worker, here["cached"])
            slot = "-" if here["slot"] is None else here["slot"]
            table.add_row(name, *(str(value) for value in (*row, slot, here["held"], adapter["source"])))
    Console().print(table)
    for name, adapter in sorted(found.items()):
        for worker, here in adapter["workers"].items():
            if here["error"]:
                Console().print(Text(f"{worker} refuses {name}: {here['error']}"))


def main() -> None:
    """Run the command; an error of ours is one sentence on standard error and exit code 1."""
    try:
        cli()
    except LoraWorkerError as error:
        _fail(str(error))
    except REDIS_ERRORS as error:
        _fail(f"Redis at {mask_url(Settings().redis_url)} does not answer ({error}); start it, or set redis_url")


def _fail(sentence: str) -> None:
    click.echo(f"lora-worker: {sentence}", err=True)
    sys.exit(1)


def _print_answer(result: AsyncResult) -> None:
    click.echo(json.dumps(await_answer(result), indent=2))


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table

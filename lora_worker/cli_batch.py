"""The command `lora-worker batch`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import click
from rich.console import Console

from lora_worker.batch.batch import check_batch, run_batch
from lora_worker.batch.options import ORDERS, BatchOptions
from lora_worker.batch.summary import Summary
from lora_worker.cli_redis import open_client
from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.errors import SettingsError
from lora_worker.local_worker import LocalWorker, local_worker
from lora_worker.settings import Settings

EXIT_ERROR_ROWS = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


@click.command()
@click.argument("source", metavar="IN")
@click.option("-o", "--output", required=True, metavar="OUT", type=click.Path(path_type=Path), help="File of the rows.")
@click.option("--errors", metavar="ERR", type=click.Path(path_type=Path), help="Another file for the error rows.")
@click.option("--model", metavar="NAME", help="The adapter of lines that name no model.")
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    default=ORDERS[0],
    show_default=True,
    help="Write rows in the order of the input, or as they are completed.",
)
@click.option(
    "--max-in-flight",
    metavar="N",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="The most lines that are sent and not answered.",
)
@click.option("--retry-errors", is_flag=True, help="Send the error rows of an earlier run again.")
@click.option("--local", is_flag=True, help="Start a Redis and a worker for the duration, by the settings.")
@click.option("--dry-run", is_flag=True, help="Check and count the lines; send and write nothing.")
def batch(source: str, *, output: Path, local: bool, dry_run: bool, **options: object) -> None:
    """Run the requests of the file IN (.jsonl or .jsonl.gz, - for the standard input) through the workers.

    A line is a request in OpenAI's batch form, or a bare {"prompt": ...} or {"messages": ...}. Every line ends as one
    row of OUT, in OpenAI's batch output form (gzip where OUT ends with .gz). The same command goes on with what is left
    after it was stopped or killed. Ctrl-C stops sending and collects what is in flight; a second one revokes it.

    Exit code 0: all lines were answered; 3: all lines have a row, some of them an error; 1: failed; 130: interrupted.
    """
    asked = BatchOptions(source=source, output=output, **options)  # type: ignore[arg-type]
    with _ended_by_sigterm():
        try:
            summary = check_batch(asked) if dry_run else _run(asked, is_local=local)
        except KeyboardInterrupt:
            click.echo("Interrupted; the same command goes on later.", err=True)
            sys.exit(EXIT_INTERRUPTED)
    for sentence in summary.sentences(is_dry_run=dry_run):
        click.echo(sentence)
    if not dry_run and not summary.is_complete:
        sys.exit(EXIT_INTERRUPTED)
    if summary.failed:
        sys.exit(EXIT_ERROR_ROWS)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end what was started, too. What is in flight stays there for the next time."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: BatchOptions, *, is_local: bool) -> Summary:
    console = Console(stderr=True)
    with ExitStack() as opened:
        workers: list[LocalWorker] = []

        def connect() -> Client:
            client = Client(_start_locally(opened, workers, console)) if is_local else open_client()
            return opened.enter_context(closing(client))

        def check() -> None:
            for worker in workers:
                worker.check()

        return run_batch(options, connect, console, check=check)


def _start_locally(opened: ExitStack, workers: list[LocalWorker], console: Console) -> str:
    if Settings().model is None:
        raise SettingsError("no model is set for --local; set LORA_WORKER_MODEL to the folder of a transformers model")
    console.print("Starting a Redis and a worker ...")
    server = opened.enter_context(EmbeddedServer(ends_with_parent=True))
    workers.append(opened.enter_context(local_worker("local", server.url, os.environ)))
    return server.url

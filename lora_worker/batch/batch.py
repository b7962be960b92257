"""A batch file from its first look to its summary."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Protocol

from celery import Celery
from kombu.entity import Queue
from rich.console import Console

from lora_worker.batch.flight import Flight
from lora_worker.batch.manifest import Manifest
from lora_worker.batch.options import BatchOptions, check_paths, refuse_to_overwrite
from lora_worker.batch.output import Output, OutputFile, read_rows
from lora_worker.batch.progress import Progress
from lora_worker.batch.roster import Roster, ask_workers
from lora_worker.batch.runner import Runner
from lora_worker.batch.scan import Scan, take_turns
from lora_worker.batch.source import Source, open_source
from lora_worker.batch.store import Store
from lora_worker.batch.summary import Summary, summarize
from lora_worker.batch.tally import Tally
from lora_worker.batch.window import Window
from lora_worker.batch.writer import Writer
from lora_worker.errors import BatchError
from lora_worker.messages import GENERATE, LIST_LORA_ADAPTERS


class Sender(Protocol):
    """What a batch asks of the client."""

    app: Celery

    def flight(self, job: str) -> Flight: ...

    def queue_of(self, model: str | None, task: str = GENERATE) -> Queue: ...


def check_batch(options: BatchOptions) -> Summary:
    """Read and count the lines; nothing is sent or written."""
    with open_source(options.source, spool_folder=options.folder) as source, closing(Store(None)) as store:
        with store.transaction():
            _index(store, source, options)
        return summarize(store)


def run_batch(
    options: BatchOptions, connect: Callable[[], Sender], console: Console, *, check: Callable[[], None]
) -> Summary:
    """Run a batch, or what is left of it.

    `connect` is called where there is something to send, and `check` again and again while it is awaited, to raise
    where that is in vain. Raises BatchError where the files don't allow it, or Redis doesn't.
    """
    check_paths(options)
    with open_source(options.source, spool_folder=options.folder) as source, closing(Store(options.state)) as store:
        with console.status("Reading the input ..."):
            _begin_or_go_on(store, source, options)
        if options.retry_errors:
            _reopen_errors(store, options)
        tally = _tally(store)
        with _open_output(store, options) as output, Progress(tally, console) as progress:
            writer = Writer(store, output, in_input_order=options.order == "input")
            if tally.done < tally.total:
                if tally.done:
                    progress.say(f"{tally.done:,} of {tally.total:,} lines have a row already.")
                _run(store, source, writer, options, tally, progress, connect(), check)
            writer.write()
        summary = summarize(store)
        if summary.is_complete:
            store.shrink()
        return summary


def _run(
    store: Store,
    source: Source,
    writer: Writer,
    options: BatchOptions,
    tally: Tally,
    progress: Progress,
    sender: Sender,
    check: Callable[[], None],
) -> None:
    with closing(sender.flight(store.job)) as flight:
        roster = _ask(sender, flight, progress)
        if store.get("lanes") != str(roster.lane_count):
            with store.transaction():
                store.set_turns(take_turns(store.models(), roster.lane_count), roster.lane_count)
                store.set(lanes=str(roster.lane_count))
        window = Window(
            store,
            source,
            flight,
            tally,
            roster=roster,
            default_model=options.model,
            max_in_flight=options.max_in_flight,
        )
        Runner(window, writer, progress, living=flight.living, check=check).run()


def _ask(sender: Sender, flight: Flight, progress: Progress) -> Roster:
    roster = ask_workers(sender.app, flight.living(), sender.queue_of(None, LIST_LORA_ADAPTERS))
    if not roster.workers:
        progress.say("No worker answers; the lines wait in Redis until one does.")
    return roster


def _begin_or_go_on(store: Store, source: Source, options: BatchOptions) -> None:
    now = Manifest(
        input_sha256=source.fingerprint(),
        input_bytes=str(source.size_bytes),
        model=options.model or "",
        order=options.order,
        errors=os.path.relpath(options.errors, options.output.parent) if options.errors else "",
    )
    before = store.manifest
    if before is None:
        refuse_to_overwrite(options)
        with store.transaction():
            store.set(job=str(uuid.uuid4()), **now._asdict())
            _index(store, source, options)
    elif before != now:
        raise BatchError(
            f"{options.output} belongs to another batch: {'; '.join(before.differences(now))}. Give another output, or "
            f"remove it and {options.state.name} to begin again"
        )


def _index(store: Store, source: Source, options: BatchOptions) -> None:
    Scan(store, job=store.get("job") or "none", default_model=options.model).run(source)


def _reopen_errors(store: Store, options: BatchOptions) -> None:
    """Take the rows that stay out of the files into the state, and let the others wait again."""
    # Opening cuts off what a kill tore.
    _open_output(store, options).close()
    with store.transaction():
        store.reopen_errors()
        for file in options.written:
            store.put_back(read_rows(file))
        store.set_lengths(0, 0)


def _tally(store: Store) -> Tally:
    failed = sum(store.errors().values())
    return Tally(store.models(), total=store.count(), done=store.count_done(), failed=failed)


def _open_output(store: Store, options: BatchOptions) -> Output:
    output_bytes, errors_bytes = store.lengths_bytes
    rows = OutputFile(options.output, output_bytes)
    return Output(rows, OutputFile(options.errors, errors_bytes) if options.errors else None)

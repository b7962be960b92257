"""What `lora-worker batch` was asked for, and whether its files allow it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lora_worker.batch.source import STANDARD_INPUT
from lora_worker.errors import BatchError

STATE_SUFFIX = ".batch"
ORDERS = ("input", "completion")


class BatchOptions(NamedTuple):
    """What `lora-worker batch` was asked for; `source` is a path, or - for the standard input."""

    source: str
    output: Path
    errors: Path | None = None
    model: str | None = None
    order: str = "input"
    max_in_flight: int = 4096
    retry_errors: bool = False

    @property
    def state(self) -> Path:
        return self.output.with_name(self.output.name + STATE_SUFFIX)

    @property
    def folder(self) -> Path:
        """Where temporary files go, since the output will need as much room there."""
        return self.output.resolve().parent

    @property
    def written(self) -> list[Path]:
        return [self.output, *([self.errors] if self.errors else [])]


def check_paths(options: BatchOptions) -> None:
    """Raise BatchError where the files can't be those of a batch."""
    read = [] if options.source == STANDARD_INPUT else [Path(options.source)]
    places = [file.resolve() for file in (*options.written, options.state, *read)]
    if len(set(places)) < len(places):
        raise BatchError(f"input, output, error file and the state {options.state.name} must be different files")
    for file in options.written:
        if not file.resolve().parent.is_dir():
            raise BatchError(f"the folder of the output {file} does not exist; make it first")
    if not options.state.exists():
        refuse_to_overwrite(options)
    if options.retry_errors and not options.state.exists():
        raise BatchError(f"there is no earlier run to {options.output}, so it has no error rows to try again")


def refuse_to_overwrite(options: BatchOptions) -> None:
    """Raise BatchError where an output holds something that no batch is known to have written."""
    for file in options.written:
        if file.exists() and file.stat().st_size:
            raise BatchError(
                f"{file} is there, but not {options.state.name}, which would say how far it is; give another output, "
                f"or remove it"
            )

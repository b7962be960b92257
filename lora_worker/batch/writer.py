"""From the state to the output: rows in the order of the input, or as they come."""

from __future__ import annotations

import time

from lora_worker.batch.output import Output
from lora_worker.batch.store import Store

WRITE_SECONDS = 1.0
WRITE_BYTES = 4 * 1024 * 1024


class Writer:
    """Appends finished rows to the output.

    The state learns of it when the rows are on the disk, so that after a kill in between they are cut off and written
    again.
    """

    def __init__(self, store: Store, output: Output, *, in_input_order: bool) -> None:
        self._store = store
        self._output = output
        self._in_input_order = in_input_order
        self._last = store.last_written()
        self._wrote_at = time.monotonic()

    def write_now_and_then(self) -> None:
        if time.monotonic() - self._wrote_at > WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Append what may be written by now."""
        while rows := self._store.unwritten(
            after=self._last if self._in_input_order else None, limit_bytes=WRITE_BYTES
        ):
            self._output.append(rows)
            with self._store.transaction():
                self._store.mark_written(row.number for row in rows)
                self._store.set_lengths(*self._output.lengths_bytes)
            self._last = rows[-1].number
        self._wrote_at = time.monotonic()

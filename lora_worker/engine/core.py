"""The engine's heart: one `step` shows it all. Owned by one thread."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from itertools import chain

from lora_worker.adapters.manager import AdapterManager
from lora_worker.adapters.registry import unloaded_adapter
from lora_worker.engine.draining import Spared
from lora_worker.engine.model_runner import ModelRunner
from lora_worker.engine.sampler import Sampler
from lora_worker.engine.scheduler import Scheduler
from lora_worker.engine.sequence import Finished, Sequence, TokenLogprobs
from lora_worker.engine.stopping import StopWatch
from lora_worker.errors import (
    AdapterError,
    GenerationError,
    InvalidRequestError,
    LoraWorkerError,
    RequestWithdrawnError,
    TimeLimitError,
    UnknownAdapterError,
)

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler, model runner, sampler and adapters, joined by `step`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        adapters: AdapterManager,
        sampler: Sampler,
        stop_watch: StopWatch,
    ) -> None:
        self.scheduler = scheduler
        self.adapters = adapters
        self.steps = 0
        self.generated_tokens = 0
        self._runner = runner
        self._sampler = sampler
        self._stop_watch = stop_watch
        # By request, the scheduler's rows that have not ended.
        self._rows: dict[str, list[Sequence]] = {}
        self._joining: list[Sequence] = []
        self._drains: list[tuple[set[Sequence], Future[None]]] = []

    @property
    def has_rows(self) -> bool:
        return bool(self._rows)

    @property
    def rows(self) -> list[Sequence]:
        return list(chain.from_iterable(self._rows.values()))

    def add(self, sequence: Sequence) -> None:
        """Take a request in by its first row; its other rows join when that one starts."""
        error: LoraWorkerError | None = None
        if sequence.request_id in self._rows:
            error = InvalidRequestError(f"a request with the id {sequence.request_id!r} is running; give each its own")
        elif sequence.adapter_name is not None:
            error = self._unknown(sequence.adapter_name)
        if error is not None:
            for row in sequence.choices:
                row.on_finished(Finished(row, error=error))
            return
        self._rows[sequence.request_id] = [sequence]
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """Take a request out, running or waiting; nothing happens where it has ended already."""
        if request_id in self._rows:
            self.fail(self._rows[request_id][0], RequestWithdrawnError(f"the request {request_id} was cancelled"))

    def fail(self, sequence: Sequence, error: LoraWorkerError) -> None:
        """Fail a row and with it its whole request; nothing happens to rows that have ended already."""
        for row in sequence.choices:
            if not row.is_finished:
                self._finish(Finished(row, error=error))

    def fail_waiting(self, names: set[str], error: AdapterError) -> None:
        """Fail the rows of these adapters that have not started."""
        for sequence in self.rows:
            if sequence.adapter_name in names and sequence.started_at is None:
                self.fail(sequence, error)

    def unload(self, name: str, *, force: bool) -> bool:
        """Hide the adapter's name and fail the rows that wait for it; returns whether it was known."""
        if self.adapters.unregister(name, force=force) is None:
            return False
        self.fail_waiting({name}, unloaded_adapter(name))
        return True

    def drained(self, name: str) -> Future[None]:
        """A future that ends with the last row that uses the adapter now; later rows of the name are not waited for."""
        rows = {s for s in self.rows if s.adapter is not None and s.adapter.name == name}
        future: Future[None] = Future()
        if rows:
            self._drains.append((rows, future))
        else:
            future.set_result(None)
        return future

    def step(self) -> bool:
        """Admit, run, sample, update; returns whether there may be more to do at once."""
        self._end_late_rows()
        self.adapters.prepare_pinned()
        self.scheduler.admit()
        self._join()
        chunks, new_blocks = self.scheduler.schedule()
        if not chunks:
            # With nothing to compute beside it, the next copy into a slot is waited for: its rows start at once.
            return self.adapters.pool.wait_for_a_copy()
        chunks.sort(key=lambda chunk: (len(chunk.sequence.pages), chunk.sequence.pages))
        logits = self._runner.run(chunks, new_blocks=new_blocks)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        sampled = self._sampler.sample(logits, sampling)
        for chunk in chunks:
            chunk.sequence.computed += chunk.length
        for sequence, token, is_broken, logprobs in zip(sampling, *sampled, strict=True):
            if sequence.is_finished:
                continue  # its request has just failed by another of its rows
            try:
                self._update(sequence, token, logprobs, is_broken=is_broken)
            except Exception as error:
                logger.exception("The request %s could not go on.", sequence.request_id)
                self.fail(sequence, GenerationError(f"the row could not go on: {type(error).__name__}"))
        self.steps += 1
        return True

    def start(self, sequence: Sequence, spared: Spared) -> bool:
        """Start a row if its adapter is or can be brought in a slot. What goes wrong here fails this row alone."""
        try:
            return self._try_to_start(sequence, spared)
        except AdapterError as error:
            self.fail(sequence, error)
        except Exception as error:
            logger.exception("The request %s could not be started.", sequence.request_id)
            self.fail(sequence, GenerationError(f"the request could not be started: {type(error).__name__}"))
        return False

    def stop(self, sequence: Sequence) -> None:
        """The scheduler lets go of a row that had an adapter."""
        assert sequence.adapter is not None
        self.adapters.release(sequence.adapter.digest)

    def _try_to_start(self, sequence: Sequence, spared: Spared) -> bool:
        reference = self.adapters.registry.get(sequence.adapter_name) if sequence.adapter_name else None
        was_resident = reference is not None and reference.digest in self.adapters.pool
        if reference is not None and not self.adapters.prepare(reference, spared):
            return False
        if sequence.may_start is not None and not sequence.may_start():
            self.fail(sequence, RequestWithdrawnError(f"the request {sequence.request_id} was withdrawn in time"))
            return False
        started_at = time.monotonic()
        for row in sequence.choices:
            if reference is not None:
                row.slot, row.pages = self.adapters.hold(reference.digest)
                row.adapter = reference
            row.started_at = started_at
        if reference is not None:
            self.adapters.counters.hits += was_resident
            self.adapters.waits.add(reference.name, sequence.queued_seconds)
        self._joining += sequence.siblings
        if sequence.on_started is not None:
            sequence.on_started()
        return True

    def _unknown(self, name: str) -> UnknownAdapterError | None:
        """The error for a row whose adapter was unloaded while the row was read."""
        try:
            self.adapters.registry.get(name)
        except UnknownAdapterError as error:
            return error
        return None

    def _join(self) -> None:
        """Let the other rows of requests that have just started wait for room, each with its hold on the adapter."""
        for sequence in self._joining:
            if not sequence.is_finished:
                self._rows[sequence.request_id].append(sequence)
                self.scheduler.add(sequence)
        self._joining = []

    def check_integrity(self) -> None:
        """Raise AssertionError, with the numbers, where a count has drifted."""
        self.scheduler.check_integrity()
        self.adapters.check_integrity(self.scheduler.held())
        scheduled = {(s.request_id, s.index) for s in self.scheduler.rows()}
        known = {(s.request_id, s.index) for s in self.rows}
        assert scheduled == known, f"rows lost: {scheduled ^ known}"
        names = {s.adapter_name for s in self.scheduler.waiting if s.adapter_name is not None and s.started_at is None}
        unknown = [name for name in names if name not in self.adapters.registry]
        assert not unknown, f"rows wait for adapters that nobody knows: {unknown}"

    def _update(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, *, is_broken: bool) -> None:
        if is_broken:
            name = sequence.adapter_name or "the base model"
            self.fail(sequence, GenerationError(f"{name} gave logits that are not finite after the prompt's tokens"))
            return
        sequence.tokens.append(token)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        self.generated_tokens += 1
        end = self._stop_watch.check(sequence)
        if end is not None:
            self._finish(Finished(sequence, end.reason, end.stopped_text))

    def _end_late_rows(self) -> None:
        now = time.monotonic()
        for sequence in self.rows:
            if sequence.is_over_time(now):
                limit = sequence.time_limit_seconds
                self.fail(sequence, TimeLimitError(f"the request ran longer than its time limit of {limit} s"))

    def _finish(self, finished: Finished) -> None:
        sequence = finished.sequence
        sequence.is_finished = True
        self.scheduler.remove(sequence)
        if all(row.is_finished for row in sequence.siblings):
            del self._rows[sequence.request_id]
        elif sequence in self._rows[sequence.request_id]:
            self._rows[sequence.request_id].remove(sequence)
        self._sampler.forget(sequence)
        self._stop_watch.forget(sequence)
        self._end_drains(sequence)
        sequence.on_finished(finished)

    def _end_drains(self, sequence: Sequence) -> None:
        for rows, future in self._drains:
            rows.discard(sequence)
            if not rows and not future.done():
                future.set_result(None)
        self._drains = [(rows, future) for rows, future in self._drains if rows]

"""What is read from the reports of the workers about their adapters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lora_worker.adapters.reference import AdapterReference
from lora_worker.messages import AdapterOnWorker, AdapterStatus

NOWHERE = AdapterOnWorker(cached=False, resident=False, slot=None, held=0, last_used=None)


def worker_name_of(worker_id: str, report: dict[str, Any]) -> str:
    """The name by which answers and operators know the worker."""
    return str(report.get("worker", worker_id))


def has_let_go(report: dict[str, Any], name: str, generation: int) -> bool:
    """Whether no row of that worker can run with what the name stood for before that generation."""
    return report.get("generation", 0) >= generation and name not in report.get("leaving", [])


def status_of(reference: AdapterReference, reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One adapter as `list_lora_adapters` shows it."""
    reports = [report for report in reports if "worker" in report]
    return AdapterStatus(
        source=reference.source,
        digest=reference.digest,
        rank=reference.rank,
        bytes=reference.nbytes,
        pinned=reference.pinned or any(reference.name in report["own_pins"] for report in reports),
        report=asdict(reference.report),
        workers={report["worker"]: _on_worker(reference.name, report) for report in reports},
    ).model_dump()


def _on_worker(name: str, report: dict[str, Any]) -> AdapterOnWorker:
    found = AdapterOnWorker.model_validate(report["adapters"].get(name, NOWHERE.model_dump()))
    return found.model_copy(update={"error": found.error or report["refused"].get(name)})

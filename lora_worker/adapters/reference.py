"""What the worker knows of an adapter without holding its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from lora_worker.errors import InvalidAdapterError
from lora_worker.settings import ADAPTER_NAME, ADAPTER_NAME_RULE


class AdapterState(Enum):
    """Where an adapter's weights are."""

    RESIDENT = auto()  # in a slot: its rows can start
    CACHED = auto()  # in host memory: it needs a slot
    AWAY = auto()  # neither, or on their way into either


@dataclass(frozen=True)
class LoadReport:
    """What a load found; returned by the load task and kept with the adapter."""

    lora_name: str
    source: str
    digest: str
    ranks: list[int]
    scalings: list[float]
    modules: int
    bytes: int
    ignored_fields: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class AdapterReference:
    """A registered adapter: its name, and the identity (content digest) and origin of what the name stands for.

    `source` is the folder it was read from. One that another worker registered has a `lora_path` too, by which its
    files are looked for under this worker's own adapter roots; `by_settings`: by that worker's settings, and not by a
    task.
    """

    name: str
    source: str
    digest: str
    rank: int
    has_bias: bool
    nbytes: int
    pinned: bool
    report: LoadReport
    lora_path: str | None = None
    by_settings: bool = False

    def check_digest(self, found: str) -> None:
        """Raise InvalidAdapterError where the adapter's files hold other content now."""
        if found != self.digest:
            raise InvalidAdapterError(
                f"the files of the adapter {self.name!r} in {self.source} have changed since it was loaded "
                f"(digest {self.digest[:12]}, now {found[:12]}); load it again with replace=True"
            )


def check_name(name: Any) -> str:
    """Return the name if it is one an adapter may have; InvalidAdapterError otherwise."""
    if not isinstance(name, str) or not ADAPTER_NAME.fullmatch(name):
        raise InvalidAdapterError(f"{str(name)[:80]!r} is no adapter name; a name is {ADAPTER_NAME_RULE}")
    return name

"""A generate task's message as the pool and the fleet read it, before anything of it is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lora_worker.fleet.pool.request import FleetRequest

# What the transport puts into a message's headers: how often it was restored, how often its row was running when its
# worker died, and whether it came before others as the share of the lower priorities.
RESTORED, DEATHS, PROMOTED = "lora_restored", "lora_deaths", "lora_promoted"
MOST = 2**53


class GenerateMessage(NamedTuple):
    """`adapter`: the model it names; `is_suspect`: whether a worker died that had it in hand."""

    body: dict[str, Any]
    adapter: str | None
    priority: int
    soft_limit: float | None
    hard_limit: float | None
    is_suspect: bool
    deaths: int


def read_message(
    request: FleetRequest, message: dict[str, Any], *, base_name: str, soft_limit: Any, hard_limit: Any
) -> GenerateMessage:
    """Nothing here raises: a wrong field is the engine's to refuse, and a wrong header says nothing."""
    body = _body_of(message)
    model = body.get("model")
    return GenerateMessage(
        body,
        model if isinstance(model, str) and model != base_name else None,
        _priority_of(message),
        _number(soft_limit),
        _number(hard_limit),
        bool(request.header(RESTORED)),
        int(_number(request.header(DEATHS)) or 0),
    )


def _body_of(message: dict[str, Any]) -> dict[str, Any]:
    """The body; positional arguments are kept under a name that the check refuses."""
    keyword = message["kwargs"] if isinstance(message["kwargs"], dict) else {}
    return {**keyword, **({"positional arguments": True} if message["args"] else {})}


def _priority_of(message: dict[str, Any]) -> int:
    """A message's priority in the engine: the highest for the lower ones' share, which would never start there."""
    if message.get(PROMOTED):
        return 0
    return int(_number((message.get("delivery_info") or {}).get("priority")) or 0)


def _number(value: Any) -> float | None:
    """A number of a message's headers; what is none, or endless, was written by no Celery, and says nothing."""
    return value if isinstance(value, int | float) and abs(value) < MOST else None

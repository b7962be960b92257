"""A Celery request that is acknowledged through the worker's ledger, whatever has become of its connection."""

from __future__ import annotations

from typing import Any

from celery.worker import state

from lora_worker.errors import InvalidRequestError
from lora_worker.fleet.membership.member import current_member
from lora_worker.fleet.privacy import PrivateRequest


class FleetRequest(PrivateRequest):
    """The request class of all tasks."""

    acknowledged: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not _is_word(self.id) or not _is_word(self.name):
            raise InvalidRequestError("the id and the name of a task must be strings, and not empty")

    @property
    def tag(self) -> str:
        """The message's, under which Redis has it until it is acknowledged."""
        return str(self.message.delivery_tag)

    def acknowledge(self) -> None:
        member = current_member()
        if member is None:
            super().acknowledge()
        elif not self.acknowledged:
            # Celery's way leads over its loop and the connection that the message came by, and may not be there.
            member.unacknowledged.acknowledge(self.tag)
            self.acknowledged = True

    def give_back(self) -> None:
        """The message goes to the front of the queue it came from."""
        member = current_member()
        if member is not None:
            member.unacknowledged.give_back(self.tag)
        self.let_go()

    def let_go(self) -> None:
        """Celery is to forget it: the message is another worker's, or somebody's later."""
        self.acknowledged = True
        state.task_ready(self)

    def header(self, name: str) -> Any:
        return self.request_dict.get(name)


def _is_word(value: Any) -> bool:
    """Whether it can be part of a key in Redis; of halves of surrogate pairs, which JSON can carry, no UTF-8 exists."""
    return isinstance(value, str) and value != "" and value.isprintable()

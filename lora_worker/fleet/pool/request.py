"""A Celery request that is acknowledged through the worker's ledger, whatever has become of its connection."""

from __future__ import annotations

from typing import Any

from celery.exceptions import InvalidTaskError
from celery.worker import state

from lora_worker.fleet.membership.member import current_member
from lora_worker.fleet.privacy import PrivateRequest


class FleetRequest(PrivateRequest):
    """The request class of all tasks."""

    acknowledged: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.id, str) or not self.id:
            raise InvalidTaskError("the id of a task must be a string that is not empty")

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

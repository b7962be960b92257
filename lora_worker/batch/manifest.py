"""What a batch is a batch of: the same command goes on with it, any other is refused with what differs."""

from __future__ import annotations

from typing import NamedTuple

FORMAT = 1


class Manifest(NamedTuple):
    """The input and the options that decide what the output is; all as text."""

    input_sha256: str
    input_bytes: str
    model: str
    order: str
    errors: str
    format: str = str(FORMAT)

    def differences(self, other: Manifest) -> list[str]:
        """What `other` has that this one has not, in words."""
        found = []
        if (self.input_sha256, self.input_bytes) != (other.input_sha256, other.input_bytes):
            found.append(f"the input had {self.input_bytes} bytes of other content and now has {other.input_bytes}")
        for option, field in (("--model", "model"), ("--order", "order"), ("--errors", "errors")):
            before, now = getattr(self, field), getattr(other, field)
            if before != now:
                found.append(f"{option} was {before or 'not given'} and is now {now or 'not given'}")
        if self.format != other.format:
            found.append(f"its form was {self.format} and is now {other.format}, of another version of lora-worker")
        return found

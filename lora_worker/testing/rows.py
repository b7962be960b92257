"""The paced engine's rows, and what they are answered."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lora_worker.adapters.reference import AdapterReference
from lora_worker.messages import DEFAULT_COMPLETION_TOKENS, GenerateRequest

# A prompt with these words kills the worker when its first token is due.
POISON = "kill the worker"

Outcome = Callable[[], dict[str, Any]]


def answer_text(digest: str | None, prompt: str | list[int]) -> str:
    """What a prompt is answered: it depends on the adapter's content (None: the bare base) and on nothing else."""
    return hashlib.sha256(f"{digest} {json.dumps(prompt)}".encode()).hexdigest()


@dataclass(eq=False)
class Row:
    """A request; the fields are those of the real engine's `submit`. Times are on the monotonic clock."""

    request_id: str
    request: GenerateRequest
    adapter_name: str | None
    done: Callable[[Outcome], None]
    priority: int
    time_limit_seconds: float | None
    may_start: Callable[[], bool] | None
    on_started: Callable[[], None] | None
    model: str = ""
    worker: str = ""
    arrived_at: float = field(default_factory=time.monotonic)
    adapter: AdapterReference | None = None
    started_at: float = 0.0
    ends_at: float = 0.0

    @property
    def prompt(self) -> str | list[int]:
        if self.request.prompt is not None:
            return self.request.prompt
        contents = (message.content or "" for message in self.request.messages or [])
        return " ".join(c if isinstance(c, str) else "".join(part.text for part in c) for c in contents)

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else ""

    @property
    def tokens(self) -> int:
        return self.request.token_limit or DEFAULT_COMPLETION_TOKENS

    @property
    def is_over_time(self) -> bool:
        """Whether the row is ended by its time limit."""
        limit = self.time_limit_seconds
        return limit is not None and self.ends_at >= self.started_at + limit

    def answer(self) -> dict[str, Any]:
        """The OpenAI object, as the real engine's."""
        digest = self.adapter.digest if self.adapter else None
        text = answer_text(digest, self.prompt)
        is_chat = self.request.is_chat
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        prompt_tokens = len(self.prompt if isinstance(self.prompt, list) else self.prompt.split())
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": self.tokens,
                "total_tokens": prompt_tokens + self.tokens,
            },
            "lora_worker": {
                "adapter": self.adapter_name,
                "digest": digest,
                "worker": self.worker,
                "queued_seconds": round(self.started_at - self.arrived_at, 4),
                "run_seconds": round(self.ends_at - self.started_at, 4),
            },
        }

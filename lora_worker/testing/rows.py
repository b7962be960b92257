"""The paced engine's rows, and what they are answered."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from lora_worker.engine.sequence import SamplingParams, Sequence
from lora_worker.messages import DEFAULT_COMPLETION_TOKENS, GenerateRequest

# A prompt with these words kills the worker when its first token is due.
POISON = "kill the worker"

Outcome = Callable[[], dict[str, Any]]


def answer_text(digest: str | None, prompt: str | list[int]) -> str:
    """What a prompt is answered: it depends on the adapter's content (None: the bare base) and on nothing else."""
    return hashlib.sha256(f"{digest} {json.dumps(prompt)}".encode()).hexdigest()


class Row(Sequence):
    """The real engine's row, with a request that no tokenizer has read. Times are on the monotonic clock."""

    def __init__(
        self, request_id: str, request: GenerateRequest, done: Callable[[Outcome], None], **fields: Any
    ) -> None:
        super().__init__(
            request_id,
            [0],
            SamplingParams(temperature=0, top_p=1, top_k=0, seed=0),
            request.token_limit or DEFAULT_COMPLETION_TOKENS,
            lambda _: None,
            is_chat=request.is_chat,
            **fields,
        )
        self.request = request
        self.done = done
        self.model = ""
        self.worker = ""
        self.ends_at = 0.0

    @property
    def asked(self) -> str | list[int]:
        """The prompt, or the messages' text."""
        if self.request.prompt is not None:
            return self.request.prompt
        contents = (message.content or "" for message in self.request.messages or [])
        return " ".join(c if isinstance(c, str) else "".join(part.text for part in c) for c in contents)

    @property
    def text(self) -> str:
        return self.asked if isinstance(self.asked, str) else ""

    def answer(self) -> dict[str, Any]:
        """The OpenAI object, as the real engine's."""
        digest = self.adapter.digest if self.adapter else None
        text = answer_text(digest, self.asked)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        prompt_tokens = len(self.asked if isinstance(self.asked, list) else self.asked.split())
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": self.max_tokens,
                "total_tokens": prompt_tokens + self.max_tokens,
            },
            "lora_worker": {
                "adapter": self.adapter_name,
                "digest": digest,
                "worker": self.worker,
                "queued_seconds": round(self.queued_seconds, 4),
                "run_seconds": round(self.ends_at - (self.started_at or self.ends_at), 4),
            },
        }

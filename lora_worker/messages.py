"""The wire contract: task names, and the bodies of a generate request, checked before anything else sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from lora_worker.errors import InvalidRequestError

GENERATE = "lora_worker.generate"
LOAD_LORA_ADAPTER = "lora_worker.load_lora_adapter"
UNLOAD_LORA_ADAPTER = "lora_worker.unload_lora_adapter"
PIN_LORA_ADAPTER = "lora_worker.pin_lora_adapter"
UNPIN_LORA_ADAPTER = "lora_worker.unpin_lora_adapter"
LIST_LORA_ADAPTERS = "lora_worker.list_lora_adapters"

# OpenAI's own default for a completion; a chat's answer is bounded by the model's length alone.
DEFAULT_COMPLETION_TOKENS = 16
MAX_STOP_STRINGS = 16

# A value of these is the user's text and is never repeated in an error, which ends in logs and result stores.
_PRIVATE_FIELDS = {"prompt", "messages", "stop"}


class ChatMessage(BaseModel):
    """One message of a chat; what else it carries is passed to the model's chat template."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: str | None = None


class GenerateRequest(BaseModel):
    """The body of a generate task: OpenAI's completions fields with `prompt`, or its chat fields with `messages`.

    `top_k` (0: all), `ignore_eos` are vLLM's and SGLang's additions. `temperature` 0 is greedy.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str | list[Annotated[StrictInt, Field(ge=0)]] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=0)] = 0
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the model's length leaves."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return asked if asked is not None or self.is_chat else DEFAULT_COMPLETION_TOKENS

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @model_validator(mode="after")
    def _check_together(self) -> GenerateRequest:
        if (self.prompt is None) == (self.messages is None):
            found = "neither is given" if self.prompt is None else "both are given"
            raise ValueError(f"a request has either prompt or messages, but {found}")
        if self.max_completion_tokens is not None and not self.is_chat:
            raise ValueError("max_completion_tokens belongs to a chat; with a prompt it is max_tokens")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are both given; give one of them")
        if any(not string for string in self.stop_strings):
            raise ValueError("stop holds an empty string; every stop string needs at least one character")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(f"stop holds {len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS} are taken")
        return self


class AdapterOnWorker(BaseModel):
    """What one worker does with one adapter; `held` counts the running rows, `last_used` is Unix time.

    `error` says why this worker refuses the adapter, where it does.
    """

    cached: bool
    resident: bool
    slot: int | None
    held: int
    last_used: float | None
    error: str | None = None


class AdapterStatus(BaseModel):
    """One adapter as `list_lora_adapters` shows it. `workers` is keyed by the worker's name."""

    source: str
    digest: str
    rank: int
    bytes: int
    pinned: bool
    report: dict[str, Any]
    workers: dict[str, AdapterOnWorker]


FinishReason = Literal["stop", "length"]


def parse_generate(body: Mapping[str, Any]) -> GenerateRequest:
    """Check a body; raises InvalidRequestError with one sentence that names the field and what would be right."""
    try:
        return GenerateRequest.model_validate(body)
    except ValidationError as error:
        raise InvalidRequestError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"{field!r} is no field of a generate request; the fields are {', '.join(GenerateRequest.model_fields)}"
    message = first["msg"].removeprefix("Value error, ")
    if not field:
        return message
    if field in _PRIVATE_FIELDS:
        expected = {
            "prompt": "a string or a list of token ids, each an integer of at least 0",
            "messages": "a non-empty list of objects with role and content",
            "stop": "a string or a list of strings",
        }[field]
        return f"the field {field} must be {expected}"
    return f"the field {field} has the wrong value {str(first['input'])[:80]!r}: {message}"

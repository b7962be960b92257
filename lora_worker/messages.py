"""The wire contract: task names, and the bodies of a generate request, checked before anything else sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    model_validator,
)

from lora_worker.errors import InvalidRequestError
from lora_worker.openai_fields import CHAT_ALONE, SERVED, refusal

GENERATE = "lora_worker.generate"
LOAD_LORA_ADAPTER = "lora_worker.load_lora_adapter"
UNLOAD_LORA_ADAPTER = "lora_worker.unload_lora_adapter"
PIN_LORA_ADAPTER = "lora_worker.pin_lora_adapter"
UNPIN_LORA_ADAPTER = "lora_worker.unpin_lora_adapter"
LIST_LORA_ADAPTERS = "lora_worker.list_lora_adapters"

# OpenAI's own default for a completion; a chat's answer is bounded by the model's length alone.
DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
# They are gone through at every step, beside which everybody's rows wait.
MAX_TOKEN_IDS = 1024

# What a field must be, where no value is repeated: it is the user's text, which must not end in logs and result
# stores, or it is too long to help.
_EXPECTED = {
    "prompt": "a string or a list of token ids, each an integer of at least 0; one prompt a request",
    "messages": "a non-empty list of objects with a role and, as content, a string or a list of text parts",
    "stop": "a string or a list of strings",
    "stop_token_ids": f"a list of at most {MAX_TOKEN_IDS} token ids, each an integer of at least 0",
    "logit_bias": f"an object from at most {MAX_TOKEN_IDS} token ids to numbers from -100 to 100",
    "logprobs": f"an integer from 0 to {MAX_LOGPROBS} with a prompt, and true or false in a chat",
    "tools": "a non-empty list of objects with type 'function' and a function with a name, not strict",
    "tool_choice": "'auto' or 'none', since nothing can make the model call a function",
}

# Strict, so that no text or boolean runs as the number it could mean; an integer is a StrictFloat, too.
TokenId = Annotated[StrictInt, Field(ge=0)]
BiasedId = Annotated[int, Field(ge=0)]  # JSON has it as a string
Bias = Annotated[StrictFloat, Field(ge=-100, le=100)]
Penalty = Annotated[StrictFloat, Field(ge=-2, le=2, allow_inf_nan=False)]


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a chat; what else it carries is passed to the model's chat template."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    tool_calls: list[dict[str, Any]] | None = None


def _refuse_strict(strict: bool) -> bool:  # noqa: FBT001 - the signature of a validator
    if strict:
        raise ValueError("a strict function promises arguments that fit its schema, which needs a grammar")
    return strict


class ToolFunction(BaseModel):
    """A function that a model may call; what else it carries is passed to the model's chat template."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    strict: Annotated[StrictBool, AfterValidator(_refuse_strict)] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["function"]
    function: ToolFunction


class GenerateRequest(BaseModel):
    """The body of a generate task: OpenAI's completions fields with `prompt`, or its chat fields with `messages`.

    `lora_worker.openai_fields` says what each field means.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str | list[TokenId] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] = 0
    temperature: Annotated[StrictFloat, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=0)] = 0
    min_p: Annotated[StrictFloat, Field(ge=0, le=1)] = 0.0
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)] = []
    ignore_eos: StrictBool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[StrictFloat, Field(ge=0.01, le=100)] = 1.0
    logit_bias: Annotated[dict[BiasedId, Bias], Field(max_length=MAX_TOKEN_IDS)] = {}
    logprobs: StrictBool | Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1)] | None = None
    tool_choice: Literal["auto", "none"] | None = None

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

    @property
    def alternatives(self) -> int | None:
        """How many alternatives each token's log probability comes with; None: no log probabilities."""
        if self.is_chat:
            return self.top_logprobs or 0 if self.logprobs else None
        return self.logprobs

    @model_validator(mode="after")
    def _check_together(self) -> GenerateRequest:
        if (self.prompt is None) == (self.messages is None):
            found = "neither is given" if self.prompt is None else "both are given"
            raise ValueError(f"a request has either prompt or messages, but {found}")
        for name, instead in CHAT_ALONE.items():
            if getattr(self, name) is not None and not self.is_chat:
                raise ValueError(f"{name} belongs to a chat; {instead}")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are both given; give one of them")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than the {self.token_limit} of max_tokens")
        if any(not string for string in self.stop_strings):
            raise ValueError("stop holds an empty string; every stop string needs at least one character")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(f"stop holds {len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS} are taken")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> GenerateRequest:
        if self.logprobs is not None and isinstance(self.logprobs, bool) != self.is_chat:
            raise ValueError(f"the field logprobs must be {_EXPECTED['logprobs']}")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _check_messages(self) -> GenerateRequest:
        for place, message in enumerate(self.messages or []):
            if message.content is None and not message.tool_calls:
                raise ValueError(f"message {place} (from 0) has no content; give it a string or a list of text parts")
        return self


class AdapterOnWorker(BaseModel):
    """What one worker does with one adapter; `held` counts the running rows, `last_used` is Unix time.

    `used_bytes` are its weights in the pool, `wasted_bytes` what its pages hold besides. `error` says why this worker
    refuses the adapter, where it does.
    """

    cached: bool
    resident: bool
    slot: int | None
    held: int
    last_used: float | None
    used_bytes: int = 0
    wasted_bytes: int = 0
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
    """Check a body; raises InvalidRequestError with one sentence that names the field and what would be right.

    A field that is null is a field that is absent.
    """
    for name, value in body.items():
        sentence = None if name in SERVED else refusal(name, value)
        if sentence is not None:
            raise InvalidRequestError(sentence)
    fields = {name: body[name] for name in SERVED if body.get(name) is not None}
    try:
        return GenerateRequest.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    field, *within = first["loc"]
    if field not in _EXPECTED:
        return f"the field {field} has the wrong value {str(first['input'])[:80]!r}: {message}"
    place = f"; message {within[0]} (from 0) is not" if field == "messages" and within else ""
    return f"the field {field} must be {_EXPECTED[str(field)]}{place}"

"""One choice of a request on its way through the engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from lora_worker.adapters.reference import AdapterReference
from lora_worker.errors import LoraWorkerError
from lora_worker.messages import FinishReason

# The base model's rows carry this instead of a slot.
BASE_SLOT = -1

# A text is decoded after so many of the prompt's last tokens, since some tokenizers drop a leading space.
PREFIX_TOKENS = 6

_arrivals = itertools.count()


class SamplingParams(NamedTuple):
    """How a row's tokens are drawn; `temperature` 0 is greedy, `top_k` 0 keeps all tokens.

    `logit_bias` is pairs of a token id and what is added to its logit.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


class TokenLogprobs(NamedTuple):
    """A generated token's log probability, and the likeliest tokens in its place as (token id, log probability)."""

    logprob: float
    top: list[tuple[int, float]]


class Finished(NamedTuple):
    """A row's end: either a reason with its tokens and, where stop strings were watched, its text; or an error."""

    sequence: Sequence
    reason: FinishReason | None = None
    stopped_text: str | None = None
    error: LoraWorkerError | None = None


@dataclass(eq=False)
class Sequence:
    """A row: tokens so far, how many of them have their keys and values in the cache, and where.

    A request with several choices has a row for each; its first one is asked to start (`may_start`, once), and the
    others start with it. `on_finished` is called once a row, on the engine thread, and must not block.

    `stop_token_ids` are all tokens that end the row, the end-of-sequence tokens among them; none does, nor a stop
    string, within the first `min_tokens`. `top_logprobs`: how many alternatives a log probability comes with; None: no
    log probabilities.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    on_finished: Callable[[Finished], None]
    adapter_name: str | None = None
    is_chat: bool = False
    stop_strings: list[str] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    top_logprobs: int | None = None
    index: int = 0
    siblings: list[Sequence] = field(default_factory=list)
    priority: int = 0
    time_limit_seconds: float | None = None
    may_start: Callable[[], bool] | None = None
    on_started: Callable[[], None] | None = None

    tokens: list[int] = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    needs_processors: bool = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    adapter: AdapterReference | None = None
    slot: int = BASE_SLOT
    pages: tuple[int, ...] = ()
    arrival: int = field(init=False)
    arrived_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    is_finished: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.arrival = next(_arrivals)
        holds_back = bool(self.min_tokens and self.stop_token_ids)
        self.needs_processors = holds_back or self.params.has_penalties or bool(self.params.logit_bias)

    @property
    def choices(self) -> list[Sequence]:
        """The rows of the request, this one first."""
        return [self, *self.siblings]

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.tokens) - self.computed

    @property
    def queue_order(self) -> tuple[int, int]:
        """Priority first (0 is the highest), then arrival; a paused row keeps its place."""
        return self.priority, self.arrival

    @property
    def queued_seconds(self) -> float:
        return (self.started_at or time.monotonic()) - self.arrived_at

    def is_over_time(self, now: float) -> bool:
        limit = self.time_limit_seconds
        return limit is not None and self.started_at is not None and now - self.started_at > limit

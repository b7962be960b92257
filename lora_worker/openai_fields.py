"""What each field of OpenAI's completions and chat bodies means here: served, without effect, or refused by name.

A field that is in none of the tables is refused too, so that a field of some future API is refused and never dropped.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

# Names that OpenAI doesn't have are those of vLLM and SGLang, and mean the same here.
SERVED = {
    "model": "an adapter's name, the base model's, or absent for the base",
    "prompt": "a string, or a list of token ids; one prompt a request",
    "messages": "filled into the model's chat template; content is a string or a list of text parts",
    "n": "1 to 128 choices; each is a row of its own with a seed of its own, and the prompt is counted once in `usage`",
    "max_tokens": "at most so many tokens a choice; without it 16 with a prompt, and what the model's length leaves "
    "in a chat",
    "max_completion_tokens": "a chat's newer name for `max_tokens`",
    "min_tokens": "of vLLM and SGLang: the first so many tokens end no choice, be it by end of sequence, stop token "
    "id or stop string",
    "temperature": "0 to 100; 0 takes the most likely token",
    "top_p": "the fewest most likely tokens that together reach it",
    "top_k": "of vLLM and SGLang: the so many most likely tokens; 0 is all",
    "min_p": "of vLLM and SGLang: tokens at least so likely, relative to the most likely one",
    "seed": "the same seed draws the same tokens, alone and beside any other requests",
    "stop": "up to 16 strings; the text ends before the first that comes",
    "stop_token_ids": "of vLLM and SGLang: up to 1024 tokens that end a choice; the text is without the one that did",
    "ignore_eos": "of vLLM and SGLang: the end-of-sequence token ends nothing",
    "presence_penalty": "-2 to 2, by OpenAI's formula over the tokens generated so far",
    "frequency_penalty": "-2 to 2, by OpenAI's formula over the tokens generated so far",
    "repetition_penalty": "of vLLM and SGLang, as in transformers: over the tokens of prompt and answer",
    "logit_bias": "from up to 1024 token ids (strings or integers) to -100 to 100, added to the logits",
    "logprobs": "with a prompt the number of alternatives, 0 to 20; in a chat true or false",
    "top_logprobs": "a chat's number of alternatives, 0 to 20; needs `logprobs`",
    "tools": "functions, filled into the model's chat template, which must use them; what the model answers is text, "
    "a call of a function included",
    "tool_choice": '`"auto"`, or `"none"`: then the template gets no tools',
}

# The answer is the same with and without them; their values are not looked at.
WITHOUT_EFFECT = {
    "user": "says who asks",
    "safety_identifier": "says who asks",
    "metadata": "labels for OpenAI's own store",
    "prompt_cache_key": "a hint for OpenAI's cache",
    "prompt_cache_options": "a hint for OpenAI's cache",
    "prompt_cache_retention": "a hint for OpenAI's cache",
}


class Refusal(NamedTuple):
    """Why a field is refused and what would be right; a value of `harmless` asks for nothing and is accepted."""

    reason: str
    harmless: tuple[Any, ...] = ()


REFUSED = {
    "audio": Refusal("answers are text; leave it out"),
    "best_of": Refusal("choices are not ranked; ask for n choices with logprobs and pick among them", (1,)),
    "echo": Refusal("an answer does not repeat its prompt; put the two together where the answer is read", (False,)),
    "function_call": Refusal("OpenAI replaced it; use tools and tool_choice", ("auto", "none")),
    "functions": Refusal("OpenAI replaced it; use tools"),
    "modalities": Refusal("answers are text; leave it out", (["text"],)),
    "moderation": Refusal("nothing is moderated here; check texts before and after"),
    "parallel_tool_calls": Refusal(
        "nothing bounds the calls a model writes; ask for one call in the messages", (True,)
    ),
    "prediction": Refusal("a predicted answer speeds nothing up here; leave it out"),
    "reasoning_effort": Refusal("models have no switch for it in common; ask for it in the messages"),
    "response_format": Refusal("no grammar guides an answer; ask for the format in the prompt", ({"type": "text"},)),
    "service_tier": Refusal(
        "there are no tiers; give the task a priority, of which 0 is the highest", ("auto", "default")
    ),
    "store": Refusal("an answer is kept as the task's result and nowhere else; leave it out", (False,)),
    "stream": Refusal("a task's result comes whole; leave it out", (False,)),
    "stream_options": Refusal("a task's result comes whole; leave it out"),
    "suffix": Refusal("text is generated after a prompt, not between two; write both into the prompt", ("",)),
    "verbosity": Refusal("models have no switch for it in common; ask for it in the messages"),
    "web_search_options": Refusal("nothing is searched here; put what was found into the messages"),
}

# Fields of a chat, and what stands in their place beside a prompt.
CHAT_ALONE = {
    "max_completion_tokens": "with a prompt it is max_tokens",
    "top_logprobs": "with a prompt, logprobs is the number of alternatives",
    "tools": "with a prompt, write them into it",
    "tool_choice": "with a prompt there are no tools",
}


def refusal(name: str, value: Any) -> str | None:
    """The sentence that refuses a field which is not served, or None where its value asks for nothing."""
    if name in WITHOUT_EFFECT:
        return None
    if name not in REFUSED:
        return f"{name[:80]!r} is no field of a generate request; the fields are {', '.join(SERVED)}"
    reason, harmless = REFUSED[name]
    # In Python true is 1, and false 0.
    is_harmless = any(type(value) is type(item) and value == item for item in harmless)
    return None if value is None or is_harmless else f"{name!r} is not served: {reason}"


def decisions_table() -> str:
    """Every field with its decision in Markdown, as `docs/requests.md` has it."""
    rows = [(name, "served", meaning) for name, meaning in SERVED.items()]
    rows += [(name, "without effect", meaning) for name, meaning in WITHOUT_EFFECT.items()]
    rows += [(name, _decision(refused), refused.reason) for name, refused in REFUSED.items()]
    lines = [f"| `{name}` | {decision} | {meaning} |" for name, decision, meaning in rows]
    return "\n".join(["| field | decision | what it means, or what would be right |", "|---|---|---|", *lines])


def _decision(refused: Refusal) -> str:
    accepted = " or ".join(f"`{json.dumps(value)}`" for value in refused.harmless)
    return f"refused, unless {accepted}" if accepted else "refused"

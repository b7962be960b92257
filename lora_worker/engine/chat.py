"""A chat becomes a prompt: messages and tools are filled into the model's own chat template."""

from __future__ import annotations

import copy
import json
import uuid
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from lora_worker.errors import InvalidRequestError
from lora_worker.messages import ChatMessage, GenerateRequest

Messages = list[dict[str, Any]]
Tools = list[Any] | None


class ChatTemplate:
    """The model's chat template. What a template would drop in silence is refused."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def ids(self, request: GenerateRequest) -> list[int]:
        """The token ids of a chat; InvalidRequestError where the template does not take it."""
        if not self._tokenizer.chat_template:
            raise InvalidRequestError("the served model has no chat template; give a prompt instead of messages")
        messages = [_for_template(message, i) for i, message in enumerate(request.messages or [])]
        tools = None
        if request.tools and request.tool_choice != "none":
            tools = [tool.model_dump(exclude_unset=True) for tool in request.tools]
        if any(isinstance(message["content"], list) for message in messages) and not self._takes_parts:
            raise InvalidRequestError(
                "the model's chat template takes a message's content as a string alone; join the text parts into one"
            )
        text = self._fill(messages, tools)
        self._check_nothing_is_dropped(text, messages, tools)
        self._check_parts(messages, tools)
        # The template writes the special tokens itself.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _check_nothing_is_dropped(self, text: str, messages: Messages, tools: Tools) -> None:
        if tools and self._is_same(text, messages, None):
            raise InvalidRequestError("the model's chat template takes no tools; write them into the messages")
        bare = [{name: value for name, value in m.items() if name != "tool_calls"} for m in messages]
        if bare != messages and self._is_same(text, bare, tools):
            raise InvalidRequestError("the model's chat template takes no tool_calls; write them into the content")

    def _check_parts(self, messages: Messages, tools: Tools) -> None:
        """Refuse messages of which the template leaves out a part, or which it writes as the list it is.

        It is filled with other texts, which tell where they are from; the parts' own may stand there trimmed, quoted or
        twice.
        """
        mark = uuid.uuid4().hex
        places = [
            (i, j) for i, m in enumerate(messages) if isinstance(m["content"], list) for j in range(len(m["content"]))
        ]
        if not places:
            return
        marked = copy.deepcopy(messages)
        for i, j in places:
            marked[i]["content"][j] |= {"text": f"{mark}x{i}x{j}x", mark: f"{mark}f"}
        filled = self._fill(marked, tools)
        lost = [f"leaves out part {j} of message {i} (from 0)" for i, j in places if f"{mark}x{i}x{j}x" not in filled]
        if not lost and f"{mark}f" in filled:
            lost = ["writes the parts of a message with all their fields"]
        if lost:
            raise InvalidRequestError(f"the model's chat template {lost[0]}; join the text parts of a message into one")

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes a list of text parts as it writes the text."""
        whole = self._fill([{"role": "user", "content": "probe"}], None)
        return self._is_same(whole, [{"role": "user", "content": [{"type": "text", "text": "probe"}]}], None)

    def _is_same(self, text: str, messages: Messages, tools: Tools) -> bool:
        try:
            return self._fill(messages, tools) == text
        except InvalidRequestError:
            return False

    def _fill(self, messages: Messages, tools: Tools) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            )
        except TemplateError as error:
            raise InvalidRequestError(f"the model's chat template refuses the messages: {error}") from None
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            # A template that meets what it wasn't written for. The error may hold the text, and is not repeated.
            raise InvalidRequestError(
                f"the model's chat template cannot be filled with these messages ({type(error).__name__}); "
                f"give what the model's documentation shows"
            ) from None


def _for_template(message: ChatMessage, place: int) -> dict[str, Any]:
    """The message as templates expect it: one text part is its string, arguments of tool calls are objects."""
    given = message.model_dump(exclude_unset=True, exclude={"content", "tool_calls"})
    content: Any = message.content or ""
    if isinstance(content, list):
        content = content[0].text if len(content) == 1 else [part.model_dump() for part in content]
    found = {name: value for name, value in given.items() if value is not None} | {"content": content}
    if message.tool_calls:
        found["tool_calls"] = [_with_arguments(call, place) for call in message.tool_calls]
    return found


def _with_arguments(call: dict[str, Any], place: int) -> dict[str, Any]:
    """OpenAI's arguments are a string of JSON, which a template would quote once more."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise InvalidRequestError(
            f"message {place} (from 0) has a tool call whose arguments are not JSON; give a string of JSON"
        ) from None
    return call | {"function": function | {"arguments": arguments}}

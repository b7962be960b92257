"""One line of a batch file: OpenAI's batch form, or a bare `{"prompt": …}` or `{"messages": …}`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, NoReturn

from lora_worker.errors import InvalidRequestError
from lora_worker.messages import parse_generate

# A prompt for a model of a million tokens has its place in this; what is longer is never held in memory whole.
MAX_LINE_BYTES = 8 * 1024 * 1024
MAX_CUSTOM_ID_CHARACTERS = 512

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_ENVELOPE = ("custom_id", "method", "url", "body")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line that can be sent; `body` is that of a generate request."""

    custom_id: str
    body: dict[str, Any]

    @property
    def model(self) -> str | None:
        model: str | None = self.body.get("model")
        return model


class BadLine(NamedTuple):
    """A line that can't; `code` is the kind of error, and `custom_id` is known where the line could be read so far."""

    code: str
    message: str
    custom_id: str | None = None


class _RefusedError(Exception):
    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = message


def read_line(raw: bytes | None, number: int, *, default_model: str | None = None) -> Line | BadLine:
    """Read the line `number` (from 1) of a file; None stands for one that is longer than MAX_LINE_BYTES.

    `default_model` is the adapter of lines that name none. A message never repeats a prompt.
    """
    try:
        found = _read_object(raw)
    except _RefusedError as refused:
        return BadLine(refused.code, f"line {number} {refused.message}")
    return check_line(found, number, default_model=default_model)


def check_line(found: Any, number: int, *, default_model: str | None = None) -> Line | BadLine:
    """The same from what JSON has already been read of."""
    custom_id = None
    try:
        if not isinstance(found, dict):
            _refuse("not_an_object", f"is a JSON {_json_type(found)}, not an object")
        custom_id = _custom_id(found, number)
        body = _body(found)
        if default_model is not None and body.get("model") is None:
            body = {**body, "model": default_model}
        parse_generate(body)
        return Line(custom_id, body)
    except InvalidRequestError as error:
        return BadLine("invalid_request", f"line {number}: {error}", custom_id)
    except _RefusedError as refused:
        return BadLine(refused.code, f"line {number} {refused.message}", custom_id)


def is_blank(raw: bytes | None) -> bool:
    return raw is not None and not raw.removeprefix(_BYTE_ORDER_MARK).strip()


def _read_object(raw: bytes | None) -> Any:
    if raw is None:
        _refuse("line_too_long", f"is longer than {MAX_LINE_BYTES} bytes, the most a line may have")
    try:
        # Editors on Windows begin a file with a mark, and files that were joined carry it inside.
        text = raw.removeprefix(_BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        _refuse("invalid_utf8", f"is no valid UTF-8 at byte {error.start + 1}")
    if not text.strip():
        _refuse("blank_line", "is blank")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        _refuse("invalid_json", f"is no valid JSON at column {error.colno}: {error.msg}")
    except RecursionError:
        _refuse("invalid_json", "is nested too deeply")
    except ValueError as error:
        _refuse("invalid_json", f"is no valid JSON: {error}")


def _custom_id(found: dict[str, Any], number: int) -> str:
    if "custom_id" not in found:
        if _is_envelope(found):
            _refuse("missing_field", "has no custom_id; every request in OpenAI's form needs one")
        return f"line-{number}"
    custom_id = found["custom_id"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        _refuse("invalid_custom_id", f"has a custom_id that is no string of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters")
    if not _is_encodable(custom_id):
        _refuse("invalid_custom_id", "has a custom_id with half of a surrogate pair in it")
    return custom_id


def _body(found: dict[str, Any]) -> dict[str, Any]:
    if not _is_envelope(found):
        if "prompt" not in found and "messages" not in found:
            _refuse(
                "missing_field", f"has neither a body nor prompt or messages; the fields are {', '.join(_ENVELOPE)}"
            )
        body = {name: value for name, value in found.items() if name != "custom_id"}
    else:
        body = _body_of_envelope(found)
    model = body.get("model")
    if isinstance(model, str) and not _is_encodable(model):
        _refuse("invalid_request", "has a model with half of a surrogate pair in it")
    return body


def _body_of_envelope(found: dict[str, Any]) -> dict[str, Any]:
    for name in _ENVELOPE:
        if name not in found:
            _refuse("missing_field", f"has no {name}; the fields are {', '.join(_ENVELOPE)}")
    for name in found:
        if name not in _ENVELOPE:
            _refuse("unknown_field", f"has the field {name[:80]!r}; the fields are {', '.join(_ENVELOPE)}")
    if found["method"] != "POST":
        _refuse("wrong_method", f"has the method {str(found['method'])[:80]!r}; it must be 'POST'")
    url, body = found["url"], found["body"]
    if url not in (CHAT_URL, COMPLETIONS_URL):
        _refuse("wrong_url", f"has the url {str(url)[:80]!r}; served are {CHAT_URL!r} and {COMPLETIONS_URL!r}")
    if not isinstance(body, dict):
        _refuse("invalid_request", f"has a body that is a JSON {_json_type(body)}, not an object")
    wanted, other = ("messages", "prompt") if url == CHAT_URL else ("prompt", "messages")
    if body.get(other) is not None or body.get(wanted) is None:
        _refuse("wrong_url", f"has the url {url!r}, which takes {wanted}, but its body has {_which(body)}")
    return body


def _is_envelope(found: dict[str, Any]) -> bool:
    return any(name in found for name in ("method", "url", "body"))


def _which(body: dict[str, Any]) -> str:
    given = [name for name in ("prompt", "messages") if body.get(name) is not None]
    return " and ".join(given) or "neither prompt nor messages"


def _json_type(value: Any) -> str:
    names = {list: "array", dict: "object", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refuse(code: str, message: str) -> NoReturn:
    raise _RefusedError(code, message)

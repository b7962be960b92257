"""Where settings come from beside arguments and the environment, and what to say of a name that is no setting."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from pydantic_settings import PydanticBaseSettingsSource

from lora_worker.errors import SettingsError

PREFIX = "LORA_WORKER_"
CONFIG_VARIABLE = "LORA_WORKER_CONFIG"


class DotEnvSource(PydanticBaseSettingsSource):
    """Our own keys of `.env`; other programs' keys in that file are none of our business."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002 - fixed signature
        return dotenv_entries().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(dotenv_entries())


class TomlSource(PydanticBaseSettingsSource):
    """The file that `LORA_WORKER_CONFIG` names; an unknown key in it stops the start."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002 - fixed signature
        return read_toml().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return read_toml()


def dotenv_entries() -> dict[str, str]:
    entries = dotenv_values(".env")
    return {
        key[len(PREFIX) :].lower(): value
        for key, value in entries.items()
        if key.upper().startswith(PREFIX) and key.upper() != CONFIG_VARIABLE and value is not None
    }


def toml_path() -> str | None:
    """The file that `LORA_WORKER_CONFIG` names, in the environment or in `.env`."""
    return os.environ.get(CONFIG_VARIABLE) or dotenv_values(".env").get(CONFIG_VARIABLE)


def read_toml() -> dict[str, Any]:
    path = toml_path()
    if not path:
        return {}
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise SettingsError(f"{CONFIG_VARIABLE} names {path}, which does not exist; name a TOML file") from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"the settings file {path} cannot be read as TOML: {error}") from None


def refuse_unknown_variables(names: Iterable[str]) -> None:
    """SettingsError where the environment has a variable of ours that is no setting; `names` are the settings'."""
    variables = [variable_of(name) for name in names]
    for variable in sorted(key.upper() for key in os.environ):
        if variable.startswith(PREFIX) and variable not in (*variables, CONFIG_VARIABLE):
            hint = nearest(variable, variables)
            raise SettingsError(f"the environment variable {variable} is no setting of lora-worker{hint}")


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return (PREFIX + name).upper()


def nearest(name: str, known: Iterable[str]) -> str:
    """What to add to a sentence about an unknown name."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else "; `lora-worker settings` lists the settings"

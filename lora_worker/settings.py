"""The settings: one class, four sources (arguments, environment, `.env`, the TOML file of `LORA_WORKER_CONFIG`)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from lora_worker.errors import SettingsError
from lora_worker.settings_sources import (
    PREFIX,
    DotEnvSource,
    TomlSource,
    dotenv_entries,
    nearest,
    read_toml,
    refuse_unknown_variables,
    toml_path,
    variable_of,
)

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ADAPTER_NAME_RULE = "1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit"

REDIS_URL_RULE = (
    "a URL of the form redis://[:PASSWORD@]HOST:PORT/DB (rediss:// for TLS) is expected, with / ? # and @ in the "
    "password written as %2F %3F %23 and %40"
)


def _path_to_str(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


# In Python a path may be given as a Path; the settings keep text, since a hub's id is no path.
PathText = Annotated[str, BeforeValidator(_path_to_str)]


class LoraPath(BaseModel):
    """One entry of `lora_paths`; without a `lora_path`, the folder of that name under an adapter root."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_name: str
    lora_path: PathText | None = None
    pinned: bool = False

    @field_validator("lora_name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not ADAPTER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no adapter name; a name is {ADAPTER_NAME_RULE}")
        return name


class Settings(BaseSettings):
    """All settings. Every field may be given as `LORA_WORKER_<NAME>`; `config/worker.toml` explains each.

    Raises SettingsError with one sentence for a wrong value, an unknown name or a missing file.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_file=".env", extra="forbid", frozen=True)

    model: PathText | None = None
    served_model_name: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:\d+)$")] = "auto"
    redis_url: str = "redis://localhost:6379/0"
    queue_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] = "lora"
    partitions: Annotated[int, Field(ge=1, le=1024)] = 64
    transport: Literal["atomic", "stock"] = "atomic"
    lease_seconds: Annotated[float, Field(ge=1)] = 15.0
    max_redeliveries: Annotated[int, Field(ge=0)] = 3
    lora_paths: Annotated[list[LoraPath], NoDecode] = []
    adapter_roots: Annotated[list[Path], NoDecode] = []
    allow_hub: bool = False
    max_loras_per_batch: Annotated[int, Field(ge=1, le=4096)] = 8
    max_loaded_loras: Annotated[int, Field(ge=1)] = 1024
    max_loaded_lora_bytes: ByteSize = ByteSize(8 * 1024**3)
    max_lora_rank: Annotated[int, Field(ge=1, le=1024)] = 64
    lora_pool_ranks: Annotated[int | None, Field(ge=1)] = None
    lora_target_modules: Annotated[list[str], NoDecode] = ["all-linear"]
    lora_eviction_policy: Literal["lru", "fifo"] = "lru"
    max_running_requests: Annotated[int | None, Field(ge=1, le=4096)] = None
    max_waiting_requests: Annotated[int | None, Field(ge=0)] = None
    max_wait_seconds: Annotated[float, Field(gt=0)] = 10.0
    max_model_len: Annotated[int | None, Field(ge=2)] = None
    max_prefill_tokens: Annotated[int | None, Field(ge=1)] = None
    max_total_tokens: Annotated[int | None, Field(ge=1)] = None
    drain_seconds: Annotated[float, Field(ge=0)] = 25.0
    result_expires_seconds: Annotated[int, Field(ge=1)] = 86400

    def __init__(self, **values: Any) -> None:
        refuse_unknown_variables(type(self).model_fields)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(_sentence(error, given=values)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the names are pydantic-settings' own
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - likewise
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, DotEnvSource(settings_cls), TomlSource(settings_cls)

    @field_validator("lora_paths", mode="before")
    @classmethod
    def _read_lora_paths(cls, value: Any) -> Any:
        entries = _as_list(value)
        return [_read_lora_path(entry) for entry in entries] if isinstance(entries, list) else entries

    @field_validator("adapter_roots", "lora_target_modules", mode="before")
    @classmethod
    def _read_list(cls, value: Any) -> Any:
        return _as_list(value)

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            has_host = parts.hostname is not None and (parts.port is None or parts.port > 0)
        except ValueError as error:
            # Its own words may hold a part of the password.
            raise ValueError(REDIS_URL_RULE) from error
        if "sentinel" in parts.scheme:
            raise ValueError(
                "failing over through Redis Sentinel is not supported; name one Redis server, or an address that "
                "follows its primary"
            )
        database = parts.path.removeprefix("/")
        is_torn = "@" in url and "@" not in parts.netloc
        if parts.scheme not in ("redis", "rediss") or not has_host or is_torn or not (database or "0").isdecimal():
            raise ValueError(REDIS_URL_RULE)
        if parts.scheme == "rediss" and "ssl_cert_reqs=" not in parts.query:
            # Celery refuses a URL that doesn't say so, and nobody who asks for TLS means less.
            query = f"{parts.query}&ssl_cert_reqs=CERT_REQUIRED".removeprefix("&")
            return urlunsplit(parts._replace(query=query))
        return url

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        names = [entry.lora_name for entry in self.lora_paths]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"lora_paths names {name!r} more than once; each name may stand there once")
        pinned = sum(entry.pinned for entry in self.lora_paths)
        if pinned >= self.max_loras_per_batch:
            raise ValueError(
                f"lora_paths pins {pinned} adapters, but max_loras_per_batch is {self.max_loras_per_batch} and one "
                f"slot must stay unpinned; raise max_loras_per_batch to at least {pinned + 1}"
            )
        if self.lora_pool_ranks is not None and self.lora_pool_ranks < self.max_lora_rank:
            raise ValueError(
                f"lora_pool_ranks is {self.lora_pool_ranks}, but one adapter may have the rank max_lora_rank "
                f"{self.max_lora_rank}; raise lora_pool_ranks to at least that"
            )
        return self

    def running_limit(self, device_type: str) -> int:
        """How many rows run at once on a device of this type ('cpu' or 'cuda')."""
        return self.max_running_requests or (256 if device_type == "cuda" else 64)

    def waiting_limit(self, device_type: str) -> int:
        """How many requests are claimed ahead of the rows that run."""
        waiting = self.max_waiting_requests
        return 16 * self.running_limit(device_type) if waiting is None else waiting

    def prefill_limit(self, device_type: str) -> int:
        """How many prompt tokens one step may carry."""
        return self.max_prefill_tokens or (8192 if device_type == "cuda" else 512)

    @property
    def base_name(self) -> str:
        """The name under which a request asks for the bare base model."""
        return self.served_model_name or Path(self.model or "base").name


class Explained(NamedTuple):
    """One setting as `lora-worker settings` prints it."""

    name: str
    value: str
    source: str


def explain(settings: Settings) -> list[Explained]:
    """Every setting with its value (secrets masked) and the source that gave it."""
    environment = {key.upper() for key in os.environ}
    dotenv = dotenv_entries()
    toml = read_toml()
    rows = []
    for name in Settings.model_fields:
        variable = variable_of(name)
        if variable in environment:
            source = f"environment {variable}"
        elif name in dotenv:
            source = ".env"
        elif name in toml:
            source = f"file {toml_path()}"
        else:
            source = "default"
        rows.append(Explained(name, _shown(name, getattr(settings, name)), source))
    return rows


def mask_url(url: str) -> str:
    """The URL with whatever may be a user's name and password in it shown as ***; it need not be a valid one."""
    return re.sub(r"//.*@", "//***@", url, flags=re.DOTALL)


def _shown(name: str, value: Any) -> str:
    if name == "redis_url":
        return mask_url(value)
    if name == "lora_paths":
        return json.dumps([entry.model_dump(exclude_none=True) for entry in value])
    if isinstance(value, list):
        return json.dumps([str(item) for item in value])
    if isinstance(value, ByteSize):
        return value.human_readable()
    return "not set" if value is None else str(value)


def _as_list(value: Any) -> Any:
    """A list as it comes from TOML, from JSON in a variable, or as words between commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith(("[", "{")):
        try:
            loaded = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no valid JSON: {error}") from None
        return loaded if isinstance(loaded, list) else [loaded]
    return [part.strip() for part in value.split(",") if part.strip()]


def _read_lora_path(entry: Any) -> Any:
    if not isinstance(entry, str):
        return entry
    if entry.lstrip().startswith("{"):
        return json.loads(entry)
    name, separator, path = entry.partition("=")
    return {"lora_name": name.strip(), "lora_path": path.strip() if separator else None}


def _sentence(error: ValidationError, given: dict[str, Any]) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{name} is no setting of lora-worker{nearest(name, Settings.model_fields)}"
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        return message
    field = str(first["loc"][0])
    where = "" if field in given or variable_of(field) not in os.environ else f" ({variable_of(field)})"
    value = mask_url(str(first["input"])) if field == "redis_url" else str(first["input"])
    return f"the setting {name}{where} has the wrong value {value[:200]!r}: {message}"

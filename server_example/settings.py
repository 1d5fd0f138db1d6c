"""The server's options: command line first, then `SERVER_EXAMPLE_*` variables, then the defaults here."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, StringConstraints, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from server_example.options import EngineOptions, LoadFormat
from server_example.pages import PAGE_TOKENS

_ENGINE = EngineOptions()

Origin = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\"]+)$")]

#: No memory holds more pages or requests, and torch takes no size beyond 64 bits.
_MOST = 2**31 - 1

#: The trained model that comes with the example.
SHAKESPEARE = Path(__file__).parent / "shakespeare"


class Settings(BaseSettings):
    """Serve a model. Each option is also a variable of the environment, such as SERVER_EXAMPLE_MAX_BATCH."""

    model_config = SettingsConfigDict(
        env_prefix="SERVER_EXAMPLE_",
        env_ignore_empty=True,
        cli_prog_name="moe-fp8 serve",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_parse_none_str="\0",  # no argument is this text, so that "None" is a text, as in the environment
        extra="forbid",
        protected_namespaces=(),
    )

    model: Path = Field(
        SHAKESPEARE, description="folder with a DeepSeek-V3.2 checkpoint; without it, the small trained model"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="0: any free port")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: a Hopper GPU if there is one, else the reference backend"
    )
    max_batch: int = Field(_ENGINE.max_batch, ge=1, le=_MOST, description="requests decoded together")
    max_context: int = Field(_ENGINE.max_context, ge=2, description="tokens of a request, prompt included")
    cache_pages: int = Field(
        _ENGINE.cache_pages,
        ge=2,
        le=_MOST,
        description=f"cache pages of {PAGE_TOKENS} tokens; one is for padding",
    )
    prefill_chunk: int = Field(_ENGINE.prefill_chunk, ge=1, description="tokens prefilled at once")
    max_waiting: int = Field(
        _ENGINE.max_waiting, ge=1, description="requests in the queue, each choice counted"
    )
    load_format: LoadFormat = Field(_ENGINE.load_format, description="dummy: random weights, for timing")
    num_hidden_layers: int | None = Field(
        None, ge=1, description="number of layers; default: as many as the checkpoint has"
    )
    decode: Literal["graph", "eager"] = Field(_ENGINE.decode, description="eager: no graphs, to compare")
    api_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="key that /v1 asks for; default: none; better set by environment, since ps shows options",
    )
    max_body_bytes: int | None = Field(
        None,
        ge=1,
        description="largest body in bytes; default: enough for a full queue of full contexts, at most 2 MiB",
    )
    receive_seconds: float = Field(
        30.0, gt=0, description="seconds for a request to arrive, and for a client to take more"
    )
    request_seconds: float = Field(0.0, ge=0, description="seconds for a request to finish; 0: no limit")
    drain_seconds: float = Field(30.0, ge=0, description="seconds for running requests after SIGTERM")
    engine_seconds: float = Field(
        10.0,
        gt=0,
        le=86400,
        description="seconds in which the engine must answer a call, and end its last step; at most 86400",
    )
    cors_origins: Annotated[list[Origin], NoDecode] = Field(
        [], description="origins such as https://a.example that browsers may call from, separated by commas"
    )

    @field_validator("api_key")
    @classmethod
    def _sendable(cls, value: SecretStr | None) -> SecretStr | None:
        key = "" if value is None else value.get_secret_value()
        if not key.isascii() or not key.isprintable() or key != key.strip():
            raise ValueError("expected printable ASCII without a space at either end, as a header has it")
        return value

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        return (
            [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        )

    @property
    def body_bytes(self) -> int:
        """The largest body. Each one is parsed at once, which holds up every stream."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        # About 6 bytes are a token of a text, or the number of one, and 64 KiB are for all other fields.
        return min((64 << 10) + 6 * self.max_context * self.max_waiting, 2 << 20)

    def engine_options(self) -> EngineOptions:
        return EngineOptions(**{option.name: getattr(self, option.name) for option in fields(EngineOptions)})

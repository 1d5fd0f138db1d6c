"""The engine's options, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_fp8.errors import ConfigError

LoadFormat = Literal["safetensors", "dummy"]


@dataclass(frozen=True)
class EngineOptions:
    """`max_context` is capped by the model's limit; `cache_pages` includes the dummy page.

    `load_format` dummy gives random weights, and `num_hidden_layers` replaces the checkpoint's number: with
    both, a few layers of full size fit on a GPU for timing. `decode` eager launches each op instead of
    replaying graphs, to compare.
    """

    max_batch: int = 8
    max_context: int = 1024
    cache_pages: int = 129
    prefill_chunk: int = 256
    max_waiting: int = 64
    load_format: LoadFormat = "safetensors"
    num_hidden_layers: int | None = None
    decode: Literal["graph", "eager"] = "graph"

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_context", 2), ("prefill_chunk", 1), ("max_waiting", 1)):
            if getattr(self, name) < least:
                raise ConfigError(name, f"an integer >= {least}", getattr(self, name))
        if self.cache_pages < 2:
            raise ConfigError(
                "cache_pages", "at least 2: one for requests, one for padding", self.cache_pages
            )

"""Rotary embedding with YaRN scaling (arXiv:2309.00071, section 3), as DeepSeek's configs describe it."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator


def _magnitude(factor: float, weight: float) -> float:
    """The growth of attention logits that a context `factor` times as long asks for (section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


class Yarn(BaseModel):
    """The fields of `rope_scaling`. An unknown field is refused, because it may change the arithmetic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["yarn"]
    factor: float = Field(ge=1)
    original_max_position_embeddings: int = Field(gt=0)
    beta_fast: float = Field(32.0, gt=0)
    beta_slow: float = Field(1.0, gt=0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def rotation_scale(self) -> float:
        """What the cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)
        return _magnitude(self.factor, 1.0)

    @property
    def softmax_scale(self) -> float:
        """What the scale of the attention's softmax is multiplied by; the indexer has no such factor."""
        return _magnitude(self.factor, self.mscale_all_dim or 0.0) ** 2

    def frequencies(self, frequency: torch.Tensor, theta: float) -> torch.Tensor:
        """`frequency` [dim/2] with long waves stretched by `factor`, short waves kept, and a ramp between.

        A wave is short if it turns more than `beta_fast` times within the original context, and long if it
        turns less than `beta_slow` times.
        """
        pairs = frequency.shape[0]

        def place(turns: float) -> float:
            length = self.original_max_position_embeddings / (2 * math.pi * turns)
            return pairs * math.log(length) / math.log(theta)

        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The upper bound counts elements and not pairs in every implementation, so it is kept.
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        steps = torch.arange(pairs, dtype=torch.float64) - low
        stretched = (steps / max(high - low, 1e-3)).clamp(0, 1)
        return frequency * (1 - stretched) + frequency / self.factor * stretched


class RopeConfig(BaseModel):
    """`rope_scaling` None: plain rotary embedding."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_theta: float = Field(10000.0, gt=1)
    rope_scaling: Yarn | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, raw: Any) -> Any:
        """Takes `rope_theta` beside `rope_scaling` (the hub) or inside `rope_parameters` (transformers)."""
        given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if not isinstance(given, dict):
            return {"rope_scaling": given}
        scaling = dict(given)
        theta = scaling.pop("rope_theta", None) or raw.get("rope_theta")
        # Older configs say `type`, and some say both.
        kind = scaling.pop("type", "default")
        scaling.setdefault("rope_type", kind)
        found: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
        if scaling["rope_type"] != "default":
            found["rope_scaling"] = scaling
        return found


class Rope:
    """Rotary embedding; its table is made in float64, so that every device holds the same bits."""

    def __init__(self, dim: int, config: RopeConfig, positions: int, device: torch.device) -> None:
        """`positions`: how many the table holds, from 0 on."""
        frequency = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        scale = 1.0
        if (yarn := config.rope_scaling) is not None:
            frequency = yarn.frequencies(frequency, config.rope_theta)
            scale = yarn.rotation_scale
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
        self.cos = (angle.cos() * scale).float().to(device)
        self.sin = (angle.sin() * scale).float().to(device)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
        """x [T, heads, dim], positions int64 [T]. Pairs are (2i, 2i+1), or (i, i + dim/2) if not interleaved.

        DeepSeek-V3.2 rotates the attention heads interleaved and the indexer heads in halves.
        """
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = x.float()
        if interleaved:
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)

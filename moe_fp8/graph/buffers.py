"""Fixed device memory from which a captured graph reads its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_fp8.errors import ArgumentError


@dataclass(frozen=True)
class BufferSpec:
    """One input: the shape of a row (without the batch dimension), the dtype, and the value of padded rows.

    `pad` must make a padded row harmless to the step: for example context length 0, token 0, or page 0 if
    page 0 belongs to no request.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    pad: int | float = 0


class StaticBuffers:
    """Tensors `[capacity, *row_shape]` whose addresses never change.

    A graph captured over `view(bucket)` reads the values that `load` last copied there. All rows start as
    padding. Not thread-safe.
    """

    def __init__(self, specs: Mapping[str, BufferSpec], capacity: int, device: torch.device | str) -> None:
        if not specs or capacity < 1:
            got = f"{len(specs)} buffers of {capacity} rows"
            raise ArgumentError("StaticBuffers", "specs, capacity", "at least one buffer and one row", got)
        self.specs = dict(specs)
        self.capacity = capacity
        self.device = torch.device(device)
        self._tensors = {
            name: torch.full((capacity, *spec.row_shape), spec.pad, dtype=spec.dtype, device=self.device)
            for name, spec in self.specs.items()
        }

    def view(self, bucket: int) -> dict[str, torch.Tensor]:
        """The first `bucket` (at most `capacity`) rows of every buffer: contiguous, at a fixed address."""
        return {name: tensor[:bucket] for name, tensor in self._tensors.items()}

    def clear(self) -> None:
        """Fill every row with padding again, ordered with the current stream."""
        for name, tensor in self._tensors.items():
            tensor.fill_(self.specs[name].pad)

    def check(self, inputs: Mapping[str, torch.Tensor]) -> int:
        """Check `inputs` as `load` does and return their number of rows. Raises `ArgumentError`."""
        if inputs.keys() != self.specs.keys():
            raise ArgumentError(
                "StaticBuffers.load", "inputs", f"the names {sorted(self.specs)}", sorted(inputs)
            )
        first = next(iter(inputs.values()))
        rows = first.shape[0] if first.dim() else 0
        for name, value in inputs.items():
            spec = self.specs[name]
            if value.dtype != spec.dtype or value.shape != (rows, *spec.row_shape):
                shape = ", ".join(map(str, (rows, *spec.row_shape)))
                raise ArgumentError(
                    "StaticBuffers.load",
                    name,
                    f"{spec.dtype} of shape [{shape}]",
                    f"{value.dtype} of shape {list(value.shape)}",
                )
        return rows

    def load(self, inputs: Mapping[str, torch.Tensor], bucket: int) -> int:
        """Copy the rows in, pad up to `bucket` rows, and return the number of copied rows.

        `inputs` has exactly the names of the specs. Each tensor is `[rows, *row_shape]` in its spec's dtype,
        on any device; `rows` is the same for all, and `rows` <= `bucket` <= `capacity`. A copy from the host
        is ordered with the current stream, and the host tensor may be reused at once. Do not call `load`
        inside a capture. Raises `ArgumentError` for a missing or unknown name, a wrong shape or dtype, and a
        `bucket` out of range.
        """
        rows = self.check(inputs)
        if not rows <= bucket <= self.capacity:
            raise ArgumentError("StaticBuffers.load", "bucket", f"{rows} to {self.capacity} rows", bucket)
        for name, value in inputs.items():
            buffer = self._tensors[name]
            buffer[:rows].copy_(value)
            if rows < bucket:
                buffer[rows:bucket].fill_(self.specs[name].pad)
        return rows

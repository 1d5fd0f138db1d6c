"""Fixed device memory from which a captured graph reads its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_fp8.errors import ArgumentError
from moe_fp8.ops.arguments import integer, same_storage

#: The dtypes that torch can fill a tensor with.
_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex64,
    torch.complex128,
)  # fmt: skip


@dataclass(frozen=True)
class BufferSpec:
    """One input: the shape of a row, the dtype, the value of padded rows, and the rows of a request.

    `row_shape` has no batch dimension. `pad` must make a padded request harmless to the step: for example
    context length 0, token 0, or page 0 if page 0 belongs to no request. `rows` are the rows of a request,
    next to each other: next_n for the tokens of a step that takes several tokens of a request, else 1.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    pad: int | float = 0
    rows: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.row_shape, (tuple, list)):
            raise ArgumentError("BufferSpec", "row_shape", "a tuple of sizes", self.row_shape)
        sizes = tuple(integer("BufferSpec", "row_shape", size, 0) for size in self.row_shape)
        object.__setattr__(self, "row_shape", sizes)
        if not isinstance(self.dtype, torch.dtype):
            raise ArgumentError("BufferSpec", "dtype", "a torch dtype", self.dtype)
        if self.dtype not in _DTYPES:
            raise ArgumentError("BufferSpec", "dtype", f"one of {', '.join(map(str, _DTYPES))}", self.dtype)
        if not _holds(self.dtype, self.pad):
            raise ArgumentError("BufferSpec", "pad", f"a number that {self.dtype} holds", self.pad)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            object.__setattr__(self, "pad", _fillable(self.pad))
        object.__setattr__(self, "rows", integer("BufferSpec", "rows", self.rows, 1))

    def shape(self, requests: int) -> tuple[int, ...]:
        """The shape of the input for so many requests."""
        return (requests * self.rows, *self.row_shape)


def _holds(dtype: torch.dtype, pad: float) -> bool:
    """Whether a tensor of `dtype` holds `pad`, but for the rounding of floats."""
    try:
        finite = math.isfinite(pad)
    except (OverflowError, TypeError):  # an integer beyond all floats, or no number
        return False
    if dtype is torch.bool:
        return pad in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        floats = torch.finfo(dtype)
        if finite and dtype.is_complex:
            return abs(pad) <= floats.max
        if finite:
            try:
                # (One number alone passes always.)
                held = torch.full((2,), _fillable(pad), dtype=dtype)[0].double().item()
            except RuntimeError:
                return False
            # (float8_e8m0fnu has no sign, and its least number stands for zero.)
            return abs(pad) <= floats.max and abs(held - pad) <= abs(pad) / 2 + floats.tiny
        # (float8_e4m3fn has no infinity.)
        return math.isnan(pad) or dtype.is_complex or bool(torch.tensor(pad).to(dtype).float().isinf())
    info = torch.iinfo(dtype)
    return info.min <= pad <= info.max and pad == int(pad)


def _fillable(pad: float) -> float:
    """`pad` as a number that torch fills floats with: an integer of at most 64 bits, or a float."""
    return float(pad) if abs(pad) >= 2**63 else pad


class StaticBuffers:
    """Tensors `[capacity * rows, *row_shape]` whose addresses never change; `capacity` counts requests.

    A graph captured over `view(bucket)` reads the values that `load` last copied there. All rows start as
    padding. Buffers that were made in inference mode are usable outside of it. Not thread-safe.
    """

    def __init__(self, specs: Mapping[str, BufferSpec], capacity: int, device: torch.device | str) -> None:
        if not isinstance(specs, Mapping):
            raise ArgumentError("StaticBuffers", "specs", "a mapping of names to specs", type(specs).__name__)
        if not specs:
            raise ArgumentError("StaticBuffers", "specs", "at least one buffer", specs)
        for name, spec in specs.items():
            if not isinstance(spec, BufferSpec):
                raise ArgumentError("StaticBuffers", f"specs: {name}", "a BufferSpec", type(spec).__name__)
        self.specs = dict(specs)
        self.capacity = integer("StaticBuffers", "capacity", capacity, 1)
        self.device = torch.device(device)
        with torch.inference_mode(False):
            self._tensors = {
                name: torch.full(spec.shape(self.capacity), spec.pad, dtype=spec.dtype, device=self.device)
                for name, spec in self.specs.items()
            }

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def view(self, bucket: int) -> dict[str, torch.Tensor]:
        """The rows of the first `bucket` (at most `capacity`) requests: contiguous, at a fixed address.

        Raises `ArgumentError` for a bucket out of range.
        """
        bucket = integer("StaticBuffers.view", "bucket", bucket, 0)
        if bucket > self.capacity:
            raise ArgumentError("StaticBuffers.view", "bucket", f"at most {self.capacity}", bucket)
        return {name: tensor[: bucket * self.specs[name].rows] for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def clear(self) -> None:
        """Fill every row with padding again, ordered with the current stream."""
        for name, tensor in self._tensors.items():
            tensor.fill_(self.specs[name].pad)

    def check(self, inputs: Mapping[str, torch.Tensor]) -> int:
        """Check `inputs` as `load` does and return their number of requests. Raises `ArgumentError`."""
        if not isinstance(inputs, Mapping) or inputs.keys() != self.specs.keys():
            got = sorted(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
            names = f"a mapping of the names {sorted(self.specs)}"
            raise ArgumentError("StaticBuffers.load", "inputs", names, got)
        for name, value in inputs.items():
            if not isinstance(value, torch.Tensor):
                raise ArgumentError("StaticBuffers.load", name, "a tensor", type(value).__name__)
            if value.layout is not torch.strided or value.is_meta:
                found = f"layout {value.layout} on {value.device}"
                raise ArgumentError("StaticBuffers.load", name, "a dense tensor with memory", found)
        name, first = next(iter(inputs.items()))
        requests = first.shape[0] // self.specs[name].rows if first.dim() else 0
        for name, value in inputs.items():
            spec = self.specs[name]
            if value.dtype != spec.dtype or value.shape != spec.shape(requests):
                raise ArgumentError(
                    "StaticBuffers.load",
                    name,
                    f"{spec.dtype} of shape {list(spec.shape(requests))}",
                    f"{value.dtype} of shape {list(value.shape)}",
                )
        return requests

    @torch.no_grad()
    def load(self, inputs: Mapping[str, torch.Tensor], bucket: int) -> int:
        """Copy the requests in, pad up to `bucket` requests, and return the number of copied requests.

        `inputs` has exactly the names of the specs. Each tensor is `[requests * rows, *row_shape]` with its
        spec's rows, shape and dtype, on any device; `requests` is the same for all, and
        `requests` <= `bucket` <= `capacity`. The copies are ordered with the current stream, and `load` does
        not wait for them. A host tensor may be reused at once: it is copied to pinned memory first. A tensor
        may be a view of any of these buffers: all of these are read before a buffer is written. Do not call
        `load` inside a capture. Raises `ArgumentError` for a missing or unknown name, for a value that is no
        tensor, for a wrong shape or dtype, and for a `bucket` out of range.
        """
        requests = self.check(inputs)
        bucket = integer("StaticBuffers.load", "bucket", bucket)
        if not requests <= bucket <= self.capacity:
            raise ArgumentError(
                "StaticBuffers.load", "bucket", f"{requests} to {self.capacity} requests", bucket
            )
        staged = {name: self._staged(value) for name, value in inputs.items()}
        for name, value in staged.items():
            buffer, spec = self._tensors[name], self.specs[name]
            copied = requests * spec.rows
            buffer[:copied].copy_(value, non_blocking=self.device.type == "cuda")
            if requests < bucket:
                buffer[copied : bucket * spec.rows].fill_(spec.pad)
        return requests

    def _staged(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, or its copy if it may change before the buffer has it.

        A tensor in host memory is copied to pinned memory if the buffers are on a GPU. torch does not give
        the pinned memory to anyone else before the device has read it. A view of a buffer is copied too.
        """
        if self.device.type == "cuda" and value.device.type == "cpu":
            # Rows one after the other: torch would copy others once more, to memory that is not pinned, and
            # such a copy may wait for the device.
            rows = torch.contiguous_format
            return torch.empty_like(value, device="cpu", pin_memory=True, memory_format=rows).copy_(value)
        shared = any(same_storage(value, tensor) for tensor in self._tensors.values())
        return value.clone() if shared else value

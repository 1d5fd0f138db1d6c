"""The parameter block of a launch, and the places in it that hold the addresses of tensors.

A family's CUDA side gives tensors, not addresses. So a later call whose tensors differ only in their
addresses can take a copy of the block, with its own addresses in these places (`launch.move`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.jit.driver import ParamBlock
from moe_fp8.jit.tensor_map import MapDtype, encode_tiled
from moe_fp8.params import ParamStruct
from moe_fp8.specs import KernelSpec


class Tiled(NamedTuple):
    """A tensor map to be made of `tensor`, from `offset` bytes behind its address on.

    The other fields are those of `encode_tiled`.
    """

    tensor: Tensor
    dtype: MapDtype
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128
    l2_promotion: int = 256
    offset: int = 0


class Prepared(NamedTuple):
    """The result of a family's CUDA side: the kernel, its grid, its parameters, and their struct.

    `offsets`: for each word of the block (8 bytes) whose address lies behind its tensor's, the word and the
    bytes between.
    """

    spec: KernelSpec
    grid: int
    block: ParamBlock
    params: ParamStruct
    offsets: tuple[tuple[int, int], ...] = ()


def _address(spec: KernelSpec, tensor: Tensor) -> int:
    """The tensor's address. Raises ArgumentError for a tensor whose memory was given up, as FSDP does."""
    address = tensor.data_ptr()
    if address == 0 and tensor.numel():
        got = f"shape {list(tensor.shape)} of a storage that is empty"
        raise ArgumentError(spec.name, "a tensor", "memory for all elements", got, "bring its memory back")
    return address


def prepared(params: ParamStruct, spec: KernelSpec, grid: int, *values: Any) -> Prepared:
    """Pack `values`, one for each field of `params`: a `Tiled`, a tensor for a pointer, or a number.

    None stands for a null pointer, or for a map that the kernel does not read.
    """
    fields: list[Any] = list(values)
    offsets: list[tuple[int, int]] = []
    for number, word in params.maps:
        tiled = values[number]
        if tiled is None:
            fields[number] = b""
        else:
            tensor, *described, offset = tiled
            fields[number] = encode_tiled(_address(spec, tensor) + offset, *described)
            if offset:
                offsets.append((word, offset))
    for number, _ in params.pointers:
        tensor = values[number]
        fields[number] = 0 if tensor is None else _address(spec, tensor)
    block = ParamBlock(-(-params.size // 64) * 64)
    params.pack_into(block.words, 0, *fields)
    return Prepared(spec, grid, block, params, tuple(offsets))

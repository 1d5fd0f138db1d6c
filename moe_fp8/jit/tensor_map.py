"""TMA descriptors (tensor maps), which describe a tensor in global memory to bulk tensor copies."""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import cache, lru_cache
from typing import Literal

from moe_fp8.errors import ArgumentError, DriverError
from moe_fp8.jit import driver

#: Bytes of an encoded tensor map.
TENSOR_MAP_BYTES = 128

MapDtype = Literal["uint8", "bfloat16", "float32"]

# Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion; FP8 is moved as bytes.
_DTYPES: dict[str, tuple[int, int]] = {
    "uint8": (0, 1),
    "float32": (7, 4),
    "bfloat16": (9, 2),
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}

_MAX_RANK = 5


class _Scratch:
    """The arrays that the driver reads, the aligned map that it writes, and the arguments of the call.

    The arguments are C objects that are made once and then set for each call, which halves the cost of
    ctypes.
    """

    __slots__ = ("address", "arguments", "arrays", "dtype", "l2", "map", "pin", "rank", "swizzle")

    def __init__(self) -> None:
        # map 128 | dims 5 x u64 | strides 5 x u64 | box 5 x u32 | element strides 5 x u32
        storage = bytearray(64 + TENSOR_MAP_BYTES + 16 * _MAX_RANK + 8 * _MAX_RANK)
        self.pin = (ctypes.c_char * len(storage)).from_buffer(storage)
        offset = -ctypes.addressof(self.pin) % 64
        base = ctypes.addressof(self.pin) + offset
        self.map = memoryview(storage)[offset : offset + TENSOR_MAP_BYTES]
        self.arrays = memoryview(storage)[offset + TENSOR_MAP_BYTES :]
        struct.pack_into("5I", self.arrays, 20 * _MAX_RANK, *(1,) * _MAX_RANK)
        arrays = base + TENSOR_MAP_BYTES
        offsets = (0, 8 * _MAX_RANK, 16 * _MAX_RANK, 20 * _MAX_RANK)
        self.dtype, self.rank, self.address = ctypes.c_int(), ctypes.c_uint32(), ctypes.c_void_p()
        self.swizzle, self.l2, zero = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(0)
        self.arguments = (
            ctypes.c_void_p(base),
            self.dtype,
            self.rank,
            self.address,
            *(ctypes.c_void_p(arrays + at) for at in offsets),
            zero,
            self.swizzle,
            self.l2,
            zero,
        )


class _Local(threading.local):
    """A thread's scratch. A call takes it out until it has its map.

    A finalizer or a signal handler may make another call meanwhile.
    """

    def __init__(self) -> None:
        self.scratch: _Scratch | None = None


_local = _Local()
_pack_2d = struct.Struct("QQ24xQ32xII").pack_into


# The result depends only on the arguments, and weights and caches keep their addresses.
@lru_cache(maxsize=8192)
def encode_tiled(
    ptr: int,
    dtype: MapDtype,
    dims: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
    l2_promotion: int = 256,
) -> bytes:
    """The 128 bytes of a tiled tensor map.

    `ptr`: device address, a multiple of 16. `dims`: elements, innermost first, rank 1 to 5.
    `strides_bytes`: strides of dimensions 1 and up, multiples of 16. `box`: elements copied along each
    dimension, at most 256; the innermost extent is at most `swizzle` bytes unless `swizzle` is 0.
    `swizzle`: 0, 32, 64 or 128 bytes. `l2_promotion`: 0, 64, 128 or 256 bytes. Elements out of range read
    as zero and are not written. The result is cached. The function works on the host only, so it may be
    called during capture. Raises ArgumentError that names the broken TMA rule, DriverError, ToolchainError.
    """
    scratch, _local.scratch = _local.scratch or _Scratch(), None
    rank = len(dims)
    try:
        scratch.dtype.value = _DTYPES[dtype][0]
        scratch.swizzle.value = _SWIZZLES[swizzle]
        scratch.l2.value = _L2_PROMOTIONS[l2_promotion]
        scratch.rank.value = rank
        scratch.address.value = ptr
        if rank == 2:
            _pack_2d(scratch.arrays, 0, dims[0], dims[1], strides_bytes[0], box[0], box[1])
        else:
            struct.pack_into(f"{rank}Q", scratch.arrays, 0, *dims)
            struct.pack_into(f"{rank - 1}Q", scratch.arrays, 8 * _MAX_RANK, *strides_bytes)
            struct.pack_into(f"{rank}I", scratch.arrays, 16 * _MAX_RANK, *box)
    except (KeyError, IndexError, TypeError, struct.error):
        _diagnose(ptr, dtype, dims, strides_bytes, box, swizzle, l2_promotion)
        raise
    status = driver.tensor_map_encoder()(*scratch.arguments)
    if status != 0:
        _diagnose(ptr, dtype, dims, strides_bytes, box, swizzle, l2_promotion)
        call = (
            f"cuTensorMapEncodeTiled(ptr={ptr:#x}, dtype={dtype}, dims={dims}, "
            f"strides_bytes={strides_bytes}, box={box}, swizzle={swizzle}, l2_promotion={l2_promotion})"
        )
        raise DriverError(call, int(status), driver.result_name(int(status)))
    encoded = bytes(scratch.map)
    _local.scratch = scratch
    return encoded


@cache
def starts_with_address() -> bool:
    """Whether a tensor map is its address, in its first eight bytes, and 120 bytes that do not depend on it.

    The driver does not promise this, so maps of two addresses are compared that differ in all bits from the
    fourth to the 46th.
    """
    addresses = 0x5555_5555_5550, 0x2AAA_AAAA_AAA0
    try:
        maps = [encode_tiled(address, "uint8", (128, 8), (128,), (128, 8)) for address in addresses]
    except DriverError:  # it may know that nothing is there
        return False
    leading = [int.from_bytes(encoded[:8], "little") for encoded in maps]
    return leading == list(addresses) and maps[0][8:] == maps[1][8:]


def _diagnose(
    ptr: int,
    dtype: str,
    dims: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    l2_promotion: int,
) -> None:
    """Raise ArgumentError for the first TMA rule that the arguments break; return if they break none."""
    if dtype not in _DTYPES:
        _refuse("dtype", f"one of {sorted(_DTYPES)}", dtype)
    if swizzle not in _SWIZZLES:
        _refuse("swizzle", f"one of {sorted(_SWIZZLES)} bytes", swizzle)
    if l2_promotion not in _L2_PROMOTIONS:
        _refuse("l2_promotion", f"one of {sorted(_L2_PROMOTIONS)} bytes", l2_promotion)
    rank = len(dims)
    if not 1 <= rank <= _MAX_RANK or len(box) != rank or len(strides_bytes) != rank - 1:
        _refuse("dims", "rank 1 to 5, a box of that rank and one stride fewer", (dims, strides_bytes, box))
    if ptr <= 0 or ptr % 16 != 0:
        _refuse("ptr", "a device address that is a multiple of 16", ptr)
    if any(not 1 <= dim <= 2**32 for dim in dims):
        _refuse("dims", "1 to 2^32 elements along each dimension", dims)
    if any(stride <= 0 or stride % 16 != 0 or stride >= 2**40 for stride in strides_bytes):
        _refuse("strides_bytes", "multiples of 16 below 2^40", strides_bytes)
    if any(not 1 <= extent <= 256 for extent in box):
        _refuse("box", "1 to 256 elements along each dimension", box)
    inner = box[0] * _DTYPES[dtype][1]
    if inner % 16 != 0 or (swizzle and inner > swizzle):
        _refuse("box", f"an innermost extent of a multiple of 16 bytes, at most {swizzle or 'any'}", inner)


def _refuse(argument: str, expected: str, got: object) -> None:
    raise ArgumentError("encode_tiled", argument, expected, got)

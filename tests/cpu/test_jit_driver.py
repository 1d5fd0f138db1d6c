"""The driver module's work around libcuda, tested with a fake libcuda."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from typing import Any

import cuda.bindings.driver as real
import pytest

from moe_fp8.errors import ArgumentError, DriverError, ToolchainError
from moe_fp8.jit import driver, tensor_map
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.driver import ParamBlock

_OK = real.CUresult.CUDA_SUCCESS
_ARTIFACT = Artifact("k" * 32, "tiny", b"\x7fELF", 1, 0, 0, 0, "13.0", 0.1)


class FakeDriver:
    """A fake with two devices. It keeps the rules of libcuda that the module relies on; enums are real."""

    def __init__(self) -> None:
        self.contexts = threading.local()
        self.smem_limits: dict[int, int] = {}
        self.functions = 0
        self.relaxed = False
        self.launches: list[tuple[int, int, int, int, bytes]] = []
        self.maps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def _current(self) -> int:
        return getattr(self.contexts, "current", 0)

    def cuCtxGetCurrent(self) -> Any:
        return _OK, self._current()

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.contexts.current = context
        return (_OK,)

    def cuCtxGetDevice(self) -> Any:
        if not self._current():
            return real.CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        return _OK, self._current() - 100

    def cuDeviceGet(self, index: int) -> Any:
        return _OK, index

    def cuDeviceGetCount(self) -> Any:
        return _OK, 2

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return _OK, 100 + device

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        kinds = real.CUstreamCaptureMode
        before = kinds.CU_STREAM_CAPTURE_MODE_RELAXED if self.relaxed else kinds.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.relaxed = mode == kinds.CU_STREAM_CAPTURE_MODE_RELAXED
        return _OK, before

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> Any:
        if not self.relaxed:
            return real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None
        return _OK, 7

    def cuLibraryGetKernel(self, library: int, name: bytes) -> Any:
        return (_OK, 8) if name == b"tiny" else (real.CUresult.CUDA_ERROR_NOT_FOUND, None)

    def cuKernelSetAttribute(self, attribute: Any, value: int, kernel: int, device: int) -> Any:
        assert attribute.name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        if value > 227 * 1024:
            return (real.CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.smem_limits[device] = value
        return (_OK,)

    def cuKernelGetFunction(self, kernel: int) -> Any:
        if not self.relaxed:
            return real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None
        self.functions += 1
        return _OK, 9

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> Any:
        gx, bx, smem, stream = config.gridDimX, config.blockDimX, config.sharedMemBytes, int(config.hStream)
        dimensions = (config.gridDimY, config.gridDimZ, config.blockDimY, config.blockDimZ)
        assert (int(function), dimensions, extra) == (8, (1, 1, 1, 1), 0)
        (attribute,) = config.attrs
        assert config.numAttrs == 1
        assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        if not self._current():
            return (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if gx == 0 or smem > self.smem_limits.get(self._current() - 100, 48 * 1024):
            return (real.CUresult.CUDA_ERROR_INVALID_VALUE,)
        address = ctypes.c_void_p.from_address(params).value
        assert address is not None
        self.launches.append((gx, bx, smem, stream, ctypes.string_at(address, 16)))
        return (_OK,)

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> Any:
        assert symbol == b"cuTensorMapEncodeTiled"
        # PYFUNCTYPE calls this function as C would, with arguments narrowed to their C types.
        integer, pointer = ctypes.c_int, ctypes.c_void_p
        prototype = ctypes.PYFUNCTYPE(
            integer, pointer, integer, ctypes.c_uint32, *[pointer] * 5, *[integer] * 4
        )
        self.callback = prototype(self.encode)
        return _OK, ctypes.cast(self.callback, pointer).value

    def encode(self, out: int, dtype: int, rank: int, *rest: int) -> int:
        self.maps += 1
        address, dims, strides, box, steps, interleave, swizzle, l2, fill = rest
        if out % 64 or address % 16 or (interleave, fill) != (0, 0):
            return 1
        box_values = struct.unpack(f"{rank}I", ctypes.string_at(box, 4 * rank))
        if max(box_values) > 256 or (swizzle == 3 and box_values[0] * {0: 1, 7: 4, 9: 2}[dtype] > 128):
            return 1
        assert struct.unpack(f"{rank}I", ctypes.string_at(steps, 4 * rank)) == (1,) * rank
        text = struct.pack("4IQ", dtype, rank, swizzle, l2, address)
        text += ctypes.string_at(dims, 8 * rank) + ctypes.string_at(strides, 8 * (rank - 1))
        text += ctypes.string_at(box, 4 * rank)
        ctypes.memmove(out, text.ljust(128, b"\0"), 128)
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    api = FakeDriver()
    monkeypatch.setattr(driver, "_driver", lambda: api)
    driver.tensor_map_encoder.cache_clear()
    tensor_map.encode_tiled.cache_clear()
    tensor_map.starts_with_address.cache_clear()
    yield api
    driver.tensor_map_encoder.cache_clear()
    tensor_map.encode_tiled.cache_clear()
    tensor_map.starts_with_address.cache_clear()


def test_load_prepares_and_launch_passes_everything(fake: FakeDriver) -> None:
    kernel = driver.load(_ARTIFACT, smem_bytes=200_000, num_threads=384)
    assert fake.smem_limits == {0: 200_000}
    assert fake.functions == 1
    assert not fake.relaxed
    block = ParamBlock(16)
    struct.pack_into("QQ", block.words, 0, 1, 2)
    kernel.launch(132, 0x7000, block)
    assert fake.launches == [(132, 384, 200_000, 0x7000, struct.pack("QQ", 1, 2))]


def test_small_smem_needs_no_attribute(fake: FakeDriver) -> None:
    driver.load(_ARTIFACT, 48 * 1024, 128).launch(1, 0, ParamBlock(16))
    assert fake.smem_limits == {}


def test_smem_beyond_the_default_needs_the_attribute(fake: FakeDriver) -> None:
    driver.load(_ARTIFACT, 48 * 1024 + 16, 128).launch(1, 0, ParamBlock(16))
    assert fake.smem_limits == {0: 48 * 1024 + 16} and len(fake.launches) == 1


def test_a_kernel_keeps_a_bounded_number_of_configurations(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_MAX_CONFIGS", 2)
    kernel = driver.load(_ARTIFACT, 0, 128)
    for stream in (1, 2, 0, 1, 4, 4):
        kernel.launch(1, stream, ParamBlock(16))
        assert len(kernel._configs) <= 2
    assert [launch[3] for launch in fake.launches] == [1, 2, 0, 1, 4, 4]


def test_a_second_device_is_prepared_at_its_first_launch(fake: FakeDriver) -> None:
    kernel = driver.load(_ARTIFACT, 100_000, 128)
    fake.cuCtxSetCurrent(101)
    kernel.launch(1, 0, ParamBlock(16))
    kernel.launch(1, 0, ParamBlock(16))
    kernel.prepare(1)
    kernel.prepare()
    assert fake.smem_limits == {0: 100_000, 1: 100_000}
    assert fake.functions == 2
    assert len(fake.launches) == 2


def test_a_thread_without_a_context_gets_one(fake: FakeDriver) -> None:
    kernel = driver.load(_ARTIFACT, 100_000, 128)
    thread = threading.Thread(target=kernel.launch, args=(1, 0, ParamBlock(16)))
    thread.start()
    thread.join()
    assert len(fake.launches) == 1


def test_the_current_device_is_described(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a context it is the first device, as for CUDA's runtime."""
    described: list[int] = []
    monkeypatch.setattr(driver, "_device_info", described.append)
    driver.device_info()
    fake.cuCtxSetCurrent(101)
    driver.device_info()
    driver.device_info(0)
    assert described == [0, 1, 0]


def test_failures_name_the_call(fake: FakeDriver) -> None:
    with pytest.raises(DriverError, match=r"cuLibraryGetKernel\(absent\).*NOT_FOUND") as caught:
        driver.load(Artifact("k", "absent", b"\x7fELF", 1, 0, 0, 0, "13.0", 0.1), 0, 128)
    assert caught.value.code == 500
    with pytest.raises(DriverError, match=r"cuKernelSetAttribute\(tiny, smem=240000\)"):
        driver.load(_ARTIFACT, 240_000, 128)
    assert not fake.relaxed
    with pytest.raises(DriverError, match=r"cuLaunchKernelEx\(tiny, grid=0, block=128, smem=0\)"):
        driver.load(_ARTIFACT, 0, 128).launch(0, 0, ParamBlock(16))


@pytest.mark.parametrize("size", [1, 8, 64, 100, 136, 4096])
def test_param_blocks_are_aligned_and_self_contained(size: int) -> None:
    blocks = [ParamBlock(size) for _ in range(20)]
    for block in blocks:
        struct.pack_into(f"{size}s", block.words, 0, filled := bytes(index % 251 for index in range(size)))
        assert block.address % 64 == 0
        assert block.kernel_params % 8 == 0
        assert ctypes.c_void_p.from_address(block.kernel_params).value == block.address
        for made in (block, block.copy()):
            assert made.address % 64 == 0
            assert ctypes.c_void_p.from_address(made.kernel_params).value == made.address
            assert ctypes.string_at(made.address, size) == filled


def test_no_driver_is_a_toolchain_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(flags: int) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(real, "cuInit", absent)
    driver._driver.cache_clear()
    try:
        assert driver.device_count() == 0
        with pytest.raises(ToolchainError, match="planning and compiling do not"):
            driver.device_info()
    finally:
        driver._driver.cache_clear()


def test_encode_a_matrix(fake: FakeDriver) -> None:
    encoded = tensor_map.encode_tiled(0x40000, "bfloat16", (7168, 2**32 - 1), (14336,), (64, 256))
    assert struct.unpack("4IQ3Q2I", encoded[:56]) == (
        9, 2, 3, 3, 0x40000, 7168, 2**32 - 1, 14336, 64, 256,
    )  # fmt: skip
    assert len(encoded) == tensor_map.TENSOR_MAP_BYTES


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_encode_any_rank(fake: FakeDriver, rank: int) -> None:
    dims, strides = tuple(range(32, 32 + rank)), tuple(2 ** (36 + axis) for axis in range(rank - 1))
    box = tuple(range(4, 4 + rank))
    # Data left from a larger rank must not show.
    tensor_map.encode_tiled(0x99990, "uint8", (9,) * 5, (16,) * 4, (9,) * 5, 0, 0)
    encoded = tensor_map.encode_tiled(2**46, "float32", dims, strides, box, 0, 128)
    expected = struct.pack("4IQ", 7, rank, 0, 2, 2**46) + struct.pack(f"{2 * rank - 1}Q", *dims, *strides)
    assert encoded == (expected + struct.pack(f"{rank}I", *box)).ljust(128, b"\0")


def test_an_encoding_within_an_encoding_has_memory_of_its_own(fake: FakeDriver) -> None:
    """A finalizer or a signal handler may encode a map while the driver encodes another one."""
    given: Any = ("uint8", (7168, 64), (7168,), (128, 64))
    encode, within = fake.encode, []

    def interrupted(out: int, dtype: int, rank: int, *rest: int) -> int:
        if not within:
            within.append(b"")
            within[0] = tensor_map.encode_tiled(0x2000, "float32", (64,) * 3, (256, 512), (4,) * 3)
        return encode(out, dtype, rank, *rest)

    fake.encode = interrupted  # type: ignore[method-assign]
    outer = tensor_map.encode_tiled(0x1000, *given)
    tensor_map.encode_tiled.cache_clear()
    assert outer == tensor_map.encode_tiled(0x1000, *given)
    assert within[0] == tensor_map.encode_tiled(0x2000, "float32", (64,) * 3, (256, 512), (4,) * 3)


def test_encoding_is_cached_by_value(fake: FakeDriver) -> None:
    arguments: Any = ("uint8", (7168, 64), (7168,), (128, 64))
    first = tensor_map.encode_tiled(0x1000, *arguments)
    other = tensor_map.encode_tiled(0x2000, *arguments)
    assert tensor_map.encode_tiled(0x1000, *arguments) == first != other
    assert fake.maps == 2


@pytest.mark.parametrize(
    "form",
    ["leads", "follows", "leads, with a checksum", "leads, its end twice", "leads, its half", "refused"],
)
def test_a_map_that_starts_with_its_address(
    form: str, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(out: int, dtype: int, rank: int, address: int, *rest: int) -> int:
        led = address & 0xFFFF_FFFF if "half" in form else address
        rest_of_it = {"leads, with a checksum": sum(address.to_bytes(8, "little"))}
        rest_of_it["leads, its end twice"] = address >> 40
        text = struct.pack("QQ", led, rest_of_it.get(form, 7))
        ctypes.memmove(out, (text if "leads" in form else text[::-1]).ljust(128, b"\0"), 128)
        return int(form == "refused")

    monkeypatch.setattr(fake, "encode", encode)
    assert tensor_map.starts_with_address() == (form == "leads")


#: A tensor map that the driver takes.
LEGAL: dict[str, Any] = {
    "ptr": 0x1000,
    "dtype": "uint8",
    "dims": (7168, 64),
    "strides_bytes": (7168,),
    "box": (128, 64),
}


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("ptr", {"ptr": 0x1008}),
        ("ptr", {"ptr": 0.5}),
        ("dtype", {"dtype": "float64"}),
        ("swizzle", {"swizzle": 100}),
        ("l2_promotion", {"l2_promotion": 1}),
        ("box", {"box": (128, 300)}),
        ("box", {"box": (144, 64)}),
        ("dims", {"dims": (7168,)}),
        ("dims", {"strides_bytes": ()}),
        ("strides_bytes", {"strides_bytes": (-16,)}),
    ],
)
def test_refusals_name_the_argument(fake: FakeDriver, argument: str, change: dict[str, Any]) -> None:
    tensor_map.encode_tiled(**LEGAL)
    with pytest.raises(ArgumentError) as caught:
        tensor_map.encode_tiled(**{**LEGAL, **change})
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "within", "beyond"),
    [
        ("ptr", 16, 0),
        ("dims", (1, 2**32), (1, 2**32 + 1)),
        ("dims", (1, 1), (0, 1)),
        ("strides_bytes", (16,), (0,)),
        ("strides_bytes", (2**40 - 16,), (2**40,)),
        ("box", (16, 1), (16, 0)),
        ("box", (128, 256), (128, 257)),
        ("box", (128, 64), (144, 64)),
    ],
)
def test_a_refusal_names_a_limit_that_is_passed_and_none_that_is_kept(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, argument: str, within: Any, beyond: Any
) -> None:
    monkeypatch.setattr(fake, "encode", lambda *arguments: 1)
    with pytest.raises(DriverError):
        tensor_map.encode_tiled(**{**LEGAL, argument: within})
    with pytest.raises(ArgumentError) as caught:
        tensor_map.encode_tiled(**{**LEGAL, argument: beyond})
    assert caught.value.argument == argument


def test_an_unexplained_refusal_is_a_driver_error(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "encode", lambda *arguments: 201)
    with pytest.raises(DriverError, match="INVALID_CONTEXT") as caught:
        tensor_map.encode_tiled(0x1000, "uint8", (7168, 64), (7168,), (128, 64))
    assert caught.value.code == 201


def test_enum_values_are_the_drivers() -> None:
    kinds = real.CUtensorMapDataType
    names = {
        "uint8": "UINT8",
        "float32": "FLOAT32",
        "bfloat16": "BFLOAT16",
    }
    assert {name: value for name, (value, _) in tensor_map._DTYPES.items()} == {
        name: int(kinds[f"CU_TENSOR_MAP_DATA_TYPE_{kind}"]) for name, kind in names.items()
    }
    for width, value in tensor_map._SWIZZLES.items():
        suffix = f"{width}B" if width else "NONE"
        assert value == int(real.CUtensorMapSwizzle[f"CU_TENSOR_MAP_SWIZZLE_{suffix}"])
    for width, value in tensor_map._L2_PROMOTIONS.items():
        suffix = f"L2_{width}B" if width else "NONE"
        assert value == int(real.CUtensorMapL2promotion[f"CU_TENSOR_MAP_L2_PROMOTION_{suffix}"])

"""An equal call repeats its launch, whose parameters are those that the kernel reads."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_fp8.errors import ConfigError
from moe_fp8.ops import registry
from moe_fp8.ops.keys import Call
from moe_fp8.ops.modes import Modes
from moe_fp8.settings import settings
from tests import cache_cases, moe_cases
from tests.cpu.cuda_side import import_cuda_side
from tests.cpu.op_arguments import I32, OPS
from tests.remembered import forget_launches

#: Where launches get their tensor maps.
PARAMETERS_ENCODE = "moe_fp8.ops.parameters.encode_tiled"


class _Kernel:
    """A kernel that records the arguments of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, bytes]] = []

    def prepare(self, device: int) -> None:
        assert device == -1

    def launch(self, grid: int, stream: int, params: Any, device: int) -> None:
        self.launches.append((grid, stream, ctypes.string_at(params.address, params.size)))


class _Cuda:
    """The CUDA side of the ops on CPU tensors (device -1), with one kernel that records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launch = import_cuda_side("moe_fp8.ops.launch", monkeypatch)
        self.gemm = import_cuda_side("moe_fp8.ops.gemm.cuda", monkeypatch)
        self.kernel = _Kernel()
        self.repeat = self.launch.repeat
        monkeypatch.setattr(self.launch, "_raw_stream", lambda device: 0x7000)
        monkeypatch.setattr(self.launch, "_exchange_device", lambda device: device)
        monkeypatch.setattr(self.launch, "num_sms", lambda device: 132)
        monkeypatch.setattr(self.launch, "table", lambda device: "")
        monkeypatch.setattr(self.launch, "get_kernel", lambda spec: self.kernel)
        forget_launches(self.launch, monkeypatch)

    def run(self, op: str, arguments: dict[str, Any], call: Call | None = None) -> None:
        """Do the op's work after its checks."""
        registered = registry.OPS[op]
        prepared = registry.resolve(registered.cuda)(*(arguments[name] for name in registered.arguments))
        if prepared is not None:
            form = call and self.launch.form_of(call)
            self.launch.launch(prepared, -1, call, form, Modes.changes)

    def quantize(self, call: Call | None = None, **arguments: Any) -> None:
        self.run("quantize_fp8", arguments, call)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Cuda]:
    side = _Cuda(monkeypatch)
    yield side
    side.gemm._gemm_plan.cache_clear()


def _call(arguments: dict[str, Any]) -> Call:
    tensors = arguments["x"], arguments["q"], arguments["scale"]
    return ("quantize", False, arguments["x"].shape, *(tensor.data_ptr() for tensor in tensors)), tensors


@pytest.mark.usefixtures("cuda")
def test_every_launch_is_prepared_from_the_schemas_arguments() -> None:
    assert set(registry.OPS) == set(OPS)
    for op in registry.OPS.values():
        inspect.signature(registry.resolve(op.cuda)).bind(*op.arguments)


@pytest.mark.usefixtures("either_comparison")
def test_a_known_call_is_launched_again(cuda: _Cuda) -> None:
    arguments = OPS["quantize_fp8"]()
    call = _call(arguments)
    assert not cuda.repeat(call)
    cuda.quantize(**arguments, call=call)
    assert cuda.repeat(_call(arguments))
    first, second = cuda.kernel.launches
    assert first == second
    assert first[2].startswith(arguments["x"].data_ptr().to_bytes(8, "little"))
    assert not cuda.repeat(_call({**arguments, "x": arguments["x"].clone()}))
    assert not cuda.repeat(_call({**arguments, "q": arguments["q"][:4]})), "the same address, another shape"
    assert len(cuda.kernel.launches) == 2


def test_batches_that_share_buffers_are_all_remembered(cuda: _Cuda) -> None:
    arguments = OPS["quantize_fp8"]()
    fewer = {**arguments, "x": arguments["x"][:4], "q": arguments["q"][:4]}
    for given in (arguments, fewer):
        cuda.quantize(**given, call=_call(given))
    assert cuda.repeat(_call(arguments)) and cuda.repeat(_call(fewer))


def test_a_launch_is_replaced_where_attributes_changed(cuda: _Cuda) -> None:
    arguments = OPS["quantize_fp8"]()
    other = {**arguments, "q": arguments["q"].view(torch.int8)}
    for given in (arguments, other):
        cuda.quantize(**given, call=_call(given))
        assert cuda.repeat(_call(given))
    assert not cuda.repeat(_call(arguments))
    assert len(cuda.launch._launches) == 1


@pytest.mark.parametrize("slot_dtype", [torch.int64, I32])
def test_a_launch_of_the_cache_op_packs_what_the_kernel_reads(cuda: _Cuda, slot_dtype: torch.dtype) -> None:
    case = cache_cases.cache_case(33, 64, 32, page_padding=16, row_padding=8, slot_dtype=slot_dtype)
    arguments = {"k": case.k, "kv_cache": case.kv_cache, "slot_mapping": case.slot_mapping}
    cuda.run("indexer_quantize_and_cache", {**arguments, "power_of_two": False})
    ((grid, _, params),) = cuda.kernel.launches
    assert grid == 3  # sixteen rows of 64 are the work of 128 threads
    addresses = (case.k.data_ptr(), case.storage.data_ptr(), case.slot_mapping.data_ptr())
    wide = int(slot_dtype is torch.int64)
    assert struct.unpack("<6q3i4x", params) == (*addresses, 72, 32 * 68 + 16, 4, 33, 5, wide)


@pytest.mark.parametrize("limit", [None, 7.0])
def test_a_launch_of_silu_mul_packs_what_the_kernel_reads(cuda: _Cuda, limit: float | None) -> None:
    arguments = {**OPS["silu_mul_quantize"](), "limit": limit}
    arguments["x"] = x = torch.zeros(2, 9, 640, dtype=torch.bfloat16)[:, :5, 64:576]
    cuda.run("silu_mul_quantize", arguments)
    flat = {"x": x[1], "masked_m": None, "q": arguments["q"][1], "scale": arguments["scale"][1]}
    cuda.run("silu_mul_quantize", {**arguments, **flat})
    (masked, _, masked_params), (rows, _, params) = cuda.kernel.launches
    assert (masked, rows) == (4, 2)  # tiles of up to sixteen rows and one tile of two groups
    addresses = [arguments[name].data_ptr() for name in ("x", "masked_m", "q", "scale")]
    rest = (640, 8, 5, 256)
    clamp = math.inf if limit is None else limit
    assert struct.unpack("<7q3if56x", masked_params) == (*addresses, 9 * 640, *rest, 2, clamp)
    addresses = [x[1].data_ptr(), 0, *(flat[name].data_ptr() for name in ("q", "scale"))]
    assert struct.unpack("<7q3if56x", params) == (*addresses, 0, *rest, 1, clamp)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("ids_dtype", [torch.int64, I32])
def test_a_launch_of_the_router_packs_what_the_kernel_reads(
    cuda: _Cuda, scoring: str, ids_dtype: torch.dtype
) -> None:
    softmax, wide = scoring == "softmax", ids_dtype is torch.int64
    outputs = {"weights": torch.zeros(9, 6)[:, :4], "ids": torch.zeros(9, 5, dtype=ids_dtype)[:, :4]}
    arguments = {**OPS["route_topk"](), "logits": torch.zeros(9, 70)[:, :64], **outputs, "scoring": scoring}
    if softmax:
        arguments["correction_bias"] = None
    cuda.run("route_topk", arguments)
    ((grid, _, params),) = cuda.kernel.launches
    assert grid == 3  # four warps, and a warp for each token
    tensors = (arguments[name] for name in ("logits", "correction_bias", "weights", "ids"))
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    sizes = (9, 64, 4, 8, 4, softmax, True, wide)
    assert struct.unpack("<7q8if36x", params) == (*addresses, 70, 6, 5, *sizes, 2.5)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_launch_of_permute_packs_what_the_kernel_reads(cuda: _Cuda, mapped: bool) -> None:
    arguments = {**OPS["moe_permute"](), "x": torch.zeros(3, 272).to(torch.float8_e4m3fn)[:, :256]}
    arguments |= {"x_scale": torch.rand(2, 5).T[:3], "a_scale": torch.zeros(2, 12).T[:6]}
    if not mapped:
        arguments["expert_map"] = None
    cuda.run("moe_permute", arguments)
    ((_, _, params),) = cuda.kernel.launches
    names = ("x", "x_scale", "topk_ids", "expert_map", "a", "a_scale", "offsets", "rows")
    addresses = (0 if (tensor := arguments[name]) is None else tensor.data_ptr() for name in names)
    assert struct.unpack_from("<8q", params) == tuple(addresses)
    # The map has eight experts, four of them of this rank.
    sizes = (3, 2, 256, 4, 8 if mapped else 4)
    assert struct.unpack_from("<5q5i", params, 64) == (272, 1, 5, 2, 12, *sizes)


def test_a_launch_of_combine_packs_what_the_kernel_reads(cuda: _Cuda) -> None:
    arguments = {**OPS["moe_combine"](), "y": torch.zeros(7, 72).bfloat16()[:, :64]}
    arguments |= {"weights": torch.rand(3, 5)[:, :2], "out": torch.zeros(3, 80).bfloat16()[:, :64]}
    cuda.run("moe_combine", arguments)
    ((_, _, params),) = cuda.kernel.launches
    addresses = (arguments[name].data_ptr() for name in ("y", "rows", "weights", "out"))
    assert struct.unpack_from("<7q4i", params) == (*addresses, 72, 5, 80, 3, 2, 64, 7)


@pytest.mark.parametrize("given", [True, False])
def test_a_launch_of_the_topk_packs_what_the_kernel_reads(cuda: _Cuda, given: bool) -> None:
    storage = torch.zeros(3, 40_001)
    arguments = {**OPS["_indexer_topk_chunk"](), "logits": storage[:, 1:]}
    if not given:
        arguments = {**arguments, "ks": None, "ke": None, "values": None, "carried": None}
    cuda.run("_indexer_topk_chunk", arguments)
    ((grid, _, params),) = cuda.kernel.launches
    assert grid == 3 * 8  # 2^16 columns, rounded up, are the work of eight CTAs
    tensors = (arguments[name] for name in ("logits", "ks", "ke", "out", "values", "carried"))
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    assert struct.unpack("<7q5i52x", params) == (*addresses, 40_001, 40_000, 4, 0, 0, 2 if given else 0)


def test_a_failed_launch_is_not_remembered(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(spec: object) -> Any:
        raise KeyError(spec)

    monkeypatch.setattr(cuda.launch, "get_kernel", missing)
    with pytest.raises(KeyError):
        cuda.quantize(**(arguments := OPS["quantize_fp8"]()), call=_call(arguments))
    assert not cuda.launch._launches


def test_remembered_launches_are_bounded(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.launch, "_MAX_KERNELS", 3)
    kept = [OPS["quantize_fp8"]() for _ in range(5)]
    for arguments in kept:
        cuda.quantize(**arguments, call=_call(arguments))
        assert cuda.repeat(_call(arguments))
        assert len(cuda.launch._launches) <= 3
    known = [cuda.repeat(_call(arguments)) for arguments in kept]
    assert known == [False, False, True, True, True], "the oldest went"


def test_what_is_remembered_anew_takes_no_more_room(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.launch, "_MAX_KERNELS", 3)
    kept = [OPS["quantize_fp8"]() for _ in range(3)]
    for arguments in [*kept, kept[0], kept[0], kept[0]]:
        cuda.quantize(**arguments, call=_call(arguments))
    assert [cuda.repeat(_call(arguments)) for arguments in kept] == [True, True, True]


def _plan(cuda: _Cuda, config: str | None = None) -> dict[str, int]:
    """The macros of the kernel for 8 rows, a problem for which a config may divide K."""
    cuda.gemm._gemm_plan.cache_clear()
    return dict(cuda.gemm._gemm_plan("dense", 8, 4096, 7168, 1, None, False, config, -1, 132).spec.defines)


def test_a_launch_has_the_callers_config(cuda: _Cuda) -> None:
    defines = _plan(cuda, "128x256/2p")
    assert (defines["BLOCK_M"], defines["BLOCK_N"]) == (128, 256)
    with pytest.raises(ConfigError):
        _plan(cuda, "128x512")


@pytest.mark.parametrize(
    ("op", "index", "promise"),
    [
        ("gemm_fp8", None, {"constant_weights": False}),
        ("gemm_fp8", None, {"constant_weights": True}),
        ("grouped_gemm_fp8_contiguous", "index", {"constant_weights": False}),
        ("grouped_gemm_fp8_contiguous", "index", {"constant_weights": True}),
        ("grouped_gemm_fp8_masked", "masked_m", {}),
    ],
)
def test_a_launch_of_a_gemm_packs_what_the_kernel_reads(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch, op: str, index: str | None, promise: dict[str, bool]
) -> None:
    maps = itertools.count(1)
    monkeypatch.setattr(PARAMETERS_ENCODE, lambda *described: bytes([next(maps)] * 128))
    arguments = {**OPS[op](), "config": "8x128", **promise}
    cuda.run(op, arguments)
    ((_, _, params),) = cuda.kernel.launches
    # Tiles of few tokens are stored from registers, so the map of the output stays empty.
    assert params[:512] == b"".join(bytes([number] * 128) for number in (1, 2, 3, 0))
    addresses = (arguments[name].data_ptr() if name else 0 for name in ("out", "b_scale", index))
    (*_, m, k), out, experts = arguments["a"].shape, arguments["out"], arguments["b"].shape[0] if index else 1
    sizes = (out.stride(-2), m, out.shape[-1], k, experts)
    assert struct.unpack("<4q5i", params[512:564]) == (*addresses, *sizes, any(promise.values()))
    assert not any(params[564:])
    cuda.run(op, arguments | {"out": out.float(), "accumulate": True})
    assert struct.unpack_from("<i", cuda.kernel.launches[1][2], 564) == (1,)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_launch_of_ragged_k_packs_what_the_kernel_reads(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch, accumulate: bool
) -> None:
    boxes = []

    def encode(pointer: int, dtype: str, dims: Any, strides: Any, box: Any, *_: int) -> bytes:
        boxes.append((pointer, dtype, dims, strides, box))
        return bytes([len(boxes)] * 128)

    monkeypatch.setattr(PARAMETERS_ENCODE, encode)
    arguments = {**OPS["k_grouped_gemm_fp8"](), "accumulate": accumulate}
    cuda.run("k_grouped_gemm_fp8", arguments)
    ((grid, _, params),) = cuda.kernel.launches
    assert grid == 6  # a pair of CTAs has the only tile of each expert
    # TMA stores the sums of narrow tiles, and loads even rows and odd rows of b apart.
    assert boxes[2:4] == [
        (arguments["b"].data_ptr(), "uint8", (384, 2, 32), (384, 768), (128, 1, 64)),
        (arguments["out"].data_ptr(), "float32", (64, 5, 3), (256, 1280), (32, 64, 1)),
    ]
    assert params[:512] == b"".join(bytes([number] * 128) for number in (1, 2, 3, 4))
    addresses = (arguments["out"].data_ptr(), 0, arguments["offsets"].data_ptr())
    assert struct.unpack("<4q5i", params[512:564]) == (*addresses, 64, 5, 64, 384, 3, 0)
    assert struct.unpack_from("<i", params, 564) == (accumulate,)
    assert params[576:704] == bytes([5] * 128) and not any(params[568:576]) and not any(params[704:])


@pytest.mark.parametrize("dtype, accumulate", [("bfloat16", False), ("float32", False), ("float32", True)])
def test_a_dense_launch_of_scales_of_rows_packs_one_expert(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch, dtype: str, accumulate: bool
) -> None:
    monkeypatch.setattr(PARAMETERS_ENCODE, lambda *described: b"")
    out = torch.zeros(3, 64, dtype=getattr(torch, dtype))
    options = {"out": out, "accumulate": accumulate, "constant_weights": True}
    cuda.run("gemm_fp8", {**OPS["gemm_fp8"](), "b_scale": torch.ones(2, 64).T, **options})
    ((grid, _, params),) = cuda.kernel.launches
    assert grid == 2
    assert struct.unpack("<4q6i", params[512:568]) == (
        out.data_ptr(), 0, 0, 64, 3, 64, 256, 1, 1, accumulate,
    )  # fmt: skip


def test_the_second_gemm_of_a_layer_reads_weights_early(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "grouped_gemm_fp8_contiguous"
    op, constant = registry.OPS[name], []

    def recorded(*arguments: Any) -> None:
        constant.append(dict(zip(op.arguments, arguments, strict=True))["constant_weights"])
        op.call(*arguments)

    monkeypatch.setitem(registry.OPS, name, op._replace(call=recorded))
    case = moe_cases.Layer(moe_cases.Case(9, 2, 3, 256), 128, "cpu")
    case.fused(*case.inputs())
    # `moe_permute` writes the offsets right before the first.
    assert constant == [False, True]


def test_a_launch_asks_the_devices_table(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch, put_table: Callable[..., None]
) -> None:
    put_table([{"layout": "dense", "n": 4096, "k": 7168, "num_experts": 1, "rows": 8, "config": "128x128"}])
    assert _plan(cuda)["BLOCK_M"] < 128
    monkeypatch.setattr(cuda.launch, "table", lambda device: "h200")
    assert _plan(cuda)["BLOCK_M"] == 128


def test_a_batch_invariant_launch_divides_no_k(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def divides(defines: dict[str, int]) -> bool:
        return defines["SPLIT_K"] == 1 or (defines["BLOCK_N"] == 64 and defines["BLOCK_M"] <= 32)

    assert divides(_plan(cuda))
    on = dataclasses.replace(settings(), batch_invariant=True)
    monkeypatch.setattr(cuda.gemm, "settings", lambda: on)
    assert not divides(_plan(cuda))

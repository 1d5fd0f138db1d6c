"""A call is told apart from all that the checks tell apart; the launch of an equal one is made again."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_fp8.errors import ConfigError
from moe_fp8.ops import keys, schemas
from moe_fp8.ops.keys import Call, key_of
from moe_fp8.settings import settings
from tests import cache_cases, cases

I32 = torch.int32


def _quantize() -> dict[str, Any]:
    q = torch.zeros(5, 256, dtype=torch.float8_e4m3fn)
    return {"x": torch.zeros(5, 256), "q": q, "scale": torch.zeros(5, 2), "power_of_two": False}


def _cache() -> dict[str, Any]:
    case = cache_cases.cache_case(5, slot_dtype=I32)
    arguments = {"k": case.k, "kv_cache": case.kv_cache, "slot_mapping": case.slot_mapping}
    return {**arguments, "power_of_two": False}


def _topk() -> dict[str, Any]:
    names = ("starts", "ends", "out", "values")
    tensors = (torch.zeros(3, dtype=I32), torch.full((3,), 9, dtype=I32), torch.zeros(3, 4, dtype=I32))
    arguments = dict(zip(names, (*tensors, torch.zeros(3, 4)), strict=True))
    named = {"first_column": 0, "carried": torch.zeros(3, 2, dtype=I32)}
    return {"logits": torch.zeros(3, 9), "k": 4, "by_value": False, **arguments, **named}


def _gemm() -> dict[str, Any]:
    case = cases.masked_case((3, 2), 4, 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    return {
        **arguments,
        "masked_m": case.index,
        "expected_m": None,
        "out": case.poisoned(),
        "config": None,
    }


def _dense() -> dict[str, Any]:
    case = cases.dense_case(3, 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    return {**arguments, "out": case.poisoned(), "config": None}


def _contiguous() -> dict[str, Any]:
    case = cases.contiguous_case("psum", (3, 2), 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    hint = {"index": case.index, "layout": "psum", "expected_m": None}
    return {**arguments, **hint, "out": case.poisoned(), "config": None}


def _mqa() -> dict[str, Any]:
    names = ("q", "k", "k_scale", "weights", "ks", "ke")
    arguments = dict(zip(names, cases.mqa_case(4, 9, 8).arguments(), strict=True))
    flags = {"compressed": False, "fill": True, "whole_queries": 0, "whole_keys": 0}
    return {**arguments, "out": torch.zeros(4, 9), **flags}


def _metadata() -> dict[str, Any]:
    context_lens = torch.tensor([3, 700], dtype=I32)
    return {"context_lens": context_lens, "block_size": 64, "next_n": 1, "out": torch.zeros(5, 2, dtype=I32)}


def _paged() -> dict[str, Any]:
    case = cases.paged_case([64, 128], 1, 8, 64)
    return {
        "q": case.q,
        "kv_cache": case.kv_cache,
        "weights": case.weights,
        "context_lens": case.context_lens,
        "block_table": case.block_table,
        "metadata": torch.zeros(4, 2, dtype=I32),
        "out": torch.zeros(2, 128),
    }


OPS: list[tuple[Callable[..., None], Callable[[], dict[str, Any]]]] = [
    (schemas._quantize_fp8, _quantize),
    (schemas._indexer_quantize_and_cache, _cache),
    (schemas._indexer_topk, _topk),
    (schemas._gemm_fp8, _dense),
    (schemas._grouped_gemm_fp8_contiguous, _contiguous),
    (schemas._grouped_gemm_fp8_masked, _gemm),
    (schemas._mqa_logits_fp8, _mqa),
    (schemas._paged_mqa_logits_metadata, _metadata),
    (schemas._paged_mqa_logits_fp8, _paged),
]


class _OnGpu(torch.Tensor):
    """Said to be on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class _Recorder:
    """In place of `moe_fp8.ops.cuda`: says of every call that it was launched again."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def repeat(self, call: Call) -> bool:
        self.calls.append(call)
        return True


@pytest.fixture(params=[True, False], ids=["guards", "python"])
def either_comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's guards and, as where torch has none, without."""
    if not request.param:
        monkeypatch.setattr(keys, "_TensorGuards", None)


def _variants(value: Any) -> dict[str, Any]:
    """`value` changed in one attribute each."""
    if not isinstance(value, torch.Tensor):
        return {"value": {False: True, True: False, None: 3, "psum": "offsets"}.get(value, 32)}
    other = {1: torch.int8, 2: torch.float16, 4: torch.uint32}
    return {
        "shape": value[:-1],
        "rank": value[None],
        "stride": value.as_strided(value.shape, (*value.stride()[:-1], 0)),
        "dtype": value.view(other[value.element_size()]),
        "type": value.as_subclass(torch.nn.Buffer),
        "address": torch.empty_strided(value.shape, value.stride(), dtype=value.dtype),
    }


@pytest.mark.parametrize("op, make", OPS, ids=[op.__name__[1:] for op, _ in OPS])
@pytest.mark.usefixtures("either_comparison")
def test_every_attribute_of_every_argument_is_told_apart(
    op: Callable[..., None], make: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = _Recorder()
    monkeypatch.setattr(schemas, "_cuda", lambda: recorder)

    def called(arguments: dict[str, Any]) -> Call:
        op(**arguments)
        return recorder.calls.pop()

    first = next(iter(arguments := make()))
    arguments[first] = arguments[first].as_subclass(_OnGpu)
    known, again = called(arguments), called(arguments)
    same = keys.attributes_like(known[1])
    assert key_of(again) == key_of(known) and same(*again[1]), "calls go by value"
    for name, value in arguments.items():
        for attribute, variant in _variants(value).items():
            if name == first:
                if attribute == "type":
                    continue
                variant = variant.as_subclass(_OnGpu)
            changed = called({**arguments, name: variant})
            assert key_of(changed) != key_of(known) or not same(*changed[1]), f"{name}: {attribute}"


@pytest.mark.parametrize("name", ["starts", "ends", "values", "carried"])
def test_which_tensors_are_given_is_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder()
    monkeypatch.setattr(schemas, "_cuda", lambda: recorder)
    tensor = torch.zeros(3, dtype=I32)
    none = dict.fromkeys(("starts", "ends", "values", "carried"))
    arguments = {**_topk(), **none, "logits": torch.zeros(3, 9).as_subclass(_OnGpu)}
    for given in none:
        schemas._indexer_topk(**{**arguments, given: tensor})
    assert len({key_of(call) for call in recorder.calls}) == len(none)


@pytest.mark.usefixtures("either_comparison")
def test_devices_are_told_apart_and_twins_are_not() -> None:
    tensor = torch.zeros(3)
    assert not keys.attributes_like((tensor,))(torch.zeros(3, device="meta"))
    assert keys.attributes_like((tensor, tensor))(tensor, tensor)
    assert not keys.attributes_like((tensor, tensor))(tensor, tensor[:2])


class _Kernel:
    """Records what a launch passes."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, bytes]] = []

    def launch(self, grid: int, stream: int, params: Any) -> None:
        self.launches.append((grid, stream, ctypes.string_at(params.address, params.size)))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`moe_fp8.ops.cuda` on CPU tensors (device -1), with one kernel that records, as `cuda.kernel`."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x7000, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    module = importlib.import_module("moe_fp8.ops.cuda")
    kernel = _Kernel()
    monkeypatch.setattr(module, "kernel", kernel, raising=False)
    monkeypatch.setattr(module.launch, "_raw_stream", lambda device: 0x7000)
    monkeypatch.setattr(module.launch, "_current_device", lambda: -1)
    monkeypatch.setattr(module.launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(module.launch, "table", lambda device: "")
    monkeypatch.setattr(module.launch, "get_kernel", lambda spec: kernel)
    monkeypatch.setattr(module.launch, "_launches", {})
    yield module
    module._gemm_plan.cache_clear()


def _call(arguments: dict[str, Any]) -> Call:
    return ("quantize", False), (arguments["x"], arguments["q"], arguments["scale"])


@pytest.mark.usefixtures("either_comparison")
def test_a_known_call_is_launched_again(cuda: Any) -> None:
    arguments = _quantize()
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


def test_batches_that_share_buffers_are_all_remembered(cuda: Any) -> None:
    arguments = _quantize()
    fewer = {**arguments, "x": arguments["x"][:4], "q": arguments["q"][:4]}
    for given in (arguments, fewer):
        cuda.quantize(**given, call=_call(given))
    assert cuda.repeat(_call(arguments)) and cuda.repeat(_call(fewer))


def test_a_launch_is_replaced_where_attributes_changed(cuda: Any) -> None:
    arguments = _quantize()
    other = {**arguments, "q": arguments["q"].view(torch.int8)}
    for given in (arguments, other):
        cuda.quantize(**given, call=_call(given))
        assert cuda.repeat(_call(given))
    assert not cuda.repeat(_call(arguments))
    assert len(cuda.launch._launches) == 1


@pytest.mark.parametrize("slot_dtype", [torch.int64, I32])
def test_a_launch_of_the_cache_op_packs_what_the_kernel_reads(cuda: Any, slot_dtype: torch.dtype) -> None:
    case = cache_cases.cache_case(33, 64, 32, page_padding=16, row_padding=8, slot_dtype=slot_dtype)
    cuda.indexer_quantize_and_cache(case.k, case.kv_cache, case.slot_mapping, False, None)
    ((grid, _, params),) = cuda.kernel.launches
    assert grid == 3  # sixteen rows of 64 are 128 threads' work
    addresses = (case.k.data_ptr(), case.storage.data_ptr(), case.slot_mapping.data_ptr())
    wide = int(slot_dtype is torch.int64)
    assert struct.unpack("<6q3i4x", params) == (*addresses, 72, 32 * 68 + 16, 4, 33, 5, wide)


@pytest.mark.parametrize("given", [True, False])
def test_a_launch_of_the_topk_packs_what_the_kernel_reads(cuda: Any, given: bool) -> None:
    storage = torch.zeros(3, 40_001)
    arguments = {**_topk(), "logits": storage[:, 1:]}
    if not given:
        arguments = {**arguments, "starts": None, "ends": None, "values": None, "carried": None}
    cuda.indexer_topk(**arguments)
    ((grid, _, params),) = cuda.kernel.launches
    assert grid == 3 * 8  # 2^16 columns, rounded up, are eight CTAs' work
    tensors = (arguments[name] for name in ("logits", "starts", "ends", "out", "values", "carried"))
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    assert struct.unpack("<7q5i52x", params) == (*addresses, 40_001, 40_000, 4, 0, 0, 2 if given else 0)


def test_a_failed_launch_is_not_remembered(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(spec: object) -> Any:
        raise KeyError(spec)

    monkeypatch.setattr(cuda.launch, "get_kernel", missing)
    with pytest.raises(KeyError):
        cuda.quantize(**(arguments := _quantize()), call=_call(arguments))
    assert not cuda.launch._launches


def test_remembered_launches_are_bounded(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.launch, "_MAX_LAUNCHES", 3)
    kept = [_quantize() for _ in range(5)]
    for arguments in kept:
        cuda.quantize(**arguments, call=_call(arguments))
        assert cuda.repeat(_call(arguments))
        assert len(cuda.launch._launches) <= 3


def _plan(cuda: Any, config: str | None = None) -> dict[str, int]:
    """The macros of the kernel for 8 rows, a problem that divides K where it may."""
    cuda._gemm_plan.cache_clear()
    return dict(cuda._gemm_plan("dense", 8, 4096, 7168, 1, None, False, config, -1)[0].defines)


def test_a_launch_has_the_callers_config(cuda: Any) -> None:
    defines = _plan(cuda, "128x256")
    assert (defines["BLOCK_M"], defines["BLOCK_N"]) == (128, 256)
    with pytest.raises(ConfigError):
        _plan(cuda, "128x512")


def test_a_launch_asks_the_devices_table(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, put_table: Callable[..., None]
) -> None:
    put_table([{"layout": "dense", "n": 4096, "k": 7168, "num_experts": 1, "rows": 8, "config": "128x256"}])
    assert _plan(cuda)["BLOCK_M"] < 128
    monkeypatch.setattr(cuda.launch, "table", lambda device: "h200")
    assert _plan(cuda)["BLOCK_M"] == 128


def test_a_batch_invariant_launch_divides_no_k(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def divides(defines: dict[str, int]) -> bool:
        return defines["SPLIT_K"] == 1 or defines["BLOCK_N"] == 64

    assert divides(_plan(cuda))
    on = dataclasses.replace(settings(), batch_invariant=True)
    monkeypatch.setattr(cuda, "settings", lambda: on)
    assert not divides(_plan(cuda))

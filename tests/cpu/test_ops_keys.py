"""Calls that differ in any checked attribute have different keys; an equal call repeats its launch."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_fp8.errors import ConfigError
from moe_fp8.ops import keys, registry
from moe_fp8.ops.keys import Call
from moe_fp8.settings import settings
from tests import cache_cases, cases
from tests.cpu.cuda_side import import_cuda_side

I32 = torch.int32


def _quantize() -> dict[str, Any]:
    q = torch.zeros(5, 256, dtype=torch.float8_e4m3fn)
    scale = torch.empty_strided((5, 2), (1, 8)).zero_()
    return {"x": torch.zeros(5, 256), "q": q, "scale": scale, "power_of_two": False}


def _silu_mul() -> dict[str, Any]:
    x = torch.zeros(2, 5, 512, dtype=torch.bfloat16)
    outputs = {
        "q": torch.zeros(2, 5, 256, dtype=torch.float8_e4m3fn),
        "scale": torch.zeros(2, 2, 8).mT[:, :5],
    }
    named = {"power_of_two": False, "limit": None, "rounded": False}
    return {"x": x, "masked_m": torch.zeros(2, dtype=I32), **outputs, **named}


def _permute() -> dict[str, Any]:
    return {
        "x": torch.zeros(3, 256, dtype=torch.float8_e4m3fn),
        "x_scale": torch.zeros(3, 2),
        "topk_ids": torch.zeros(3, 2, dtype=I32),
        "expert_map": torch.zeros(8, dtype=I32),
        "a": torch.zeros(6, 256, dtype=torch.float8_e4m3fn),
        "a_scale": torch.zeros(2, 8).T[:6],
        "offsets": torch.zeros(5, dtype=I32),
        "rows": torch.zeros(3, 2, dtype=I32),
        "power_of_two": False,
    }


def _combine() -> dict[str, Any]:
    bf16 = torch.bfloat16
    return {
        "y": torch.zeros(6, 64, dtype=bf16),
        "rows": torch.zeros(3, 2, dtype=I32),
        "weights": torch.zeros(3, 2),
        "out": torch.zeros(3, 64, dtype=bf16),
    }


def _route() -> dict[str, Any]:
    tensors = {"logits": torch.zeros(3, 64), "correction_bias": torch.zeros(64)}
    outputs = {"weights": torch.zeros(3, 4), "ids": torch.zeros(3, 4, dtype=I32)}
    groups = {"num_expert_group": 8, "topk_group": 4}
    named = {"scoring": "sigmoid", "renormalize": True, "scaling_factor": 2.5}
    return {**tensors, **outputs, **groups, **named}


def _cache() -> dict[str, Any]:
    case = cache_cases.cache_case(5, slot_dtype=I32)
    arguments = {"k": case.k, "kv_cache": case.kv_cache, "slot_mapping": case.slot_mapping}
    return {**arguments, "power_of_two": False}


def _topk() -> dict[str, Any]:
    names = ("ks", "ke", "out", "values")
    tensors = (torch.zeros(3, dtype=I32), torch.full((3,), 9, dtype=I32), torch.zeros(3, 4, dtype=I32))
    arguments = dict(zip(names, (*tensors, torch.zeros(3, 4)), strict=True))
    named = {"first_column": 0, "carried": torch.zeros(3, 2, dtype=I32)}
    return {"logits": torch.zeros(3, 9), "topk": 4, "sorted": False, **arguments, **named}


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
    return {**arguments, "out": case.poisoned(), "config": None, "constant_weights": False}


def _contiguous() -> dict[str, Any]:
    case = cases.contiguous_case("psum", (3, 2), 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    hint = {"index": case.index, "layout": "psum", "expected_m": None}
    return {**arguments, **hint, "out": case.poisoned(), "config": None, "constant_weights": False}


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


OPS: dict[str, Callable[[], dict[str, Any]]] = {
    "quantize_fp8": _quantize,
    "silu_mul_quantize": _silu_mul,
    "moe_permute": _permute,
    "moe_combine": _combine,
    "route_topk": _route,
    "indexer_quantize_and_cache": _cache,
    "indexer_topk": _topk,
    "_indexer_topk_chunk": _topk,
    "gemm_fp8": _dense,
    "grouped_gemm_fp8_contiguous": _contiguous,
    "grouped_gemm_fp8_masked": _gemm,
    "mqa_logits_fp8": _mqa,
    "_mqa_logits_fp8_chunk": _mqa,
    "paged_mqa_logits_metadata": _metadata,
    "paged_mqa_logits_fp8": _paged,
}


def run(op: str, arguments: dict[str, Any]) -> None:
    """Run the op as torch calls it, with its arguments given by name."""
    registered = registry.OPS[op]
    registered.run(*(arguments[name] for name in registered.arguments))


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class _Recorder:
    """A stand-in for `moe_fp8.ops.launch` that says it has repeated every call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def repeat(self, call: Call) -> bool:
        self.calls.append(call)
        return True


@pytest.fixture(params=[True, False], ids=["guards", "python"])
def either_comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: with torch's guards, and without them, because some versions of torch have none."""
    if not request.param:
        monkeypatch.setattr(keys, "_TensorGuards", None)


def _variants(value: Any) -> dict[str, Any]:
    """Variants of `value`, each with one changed attribute."""
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


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("either_comparison")
def test_every_attribute_of_every_argument_is_told_apart(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder()
    monkeypatch.setattr(registry._Launcher, "repeat", recorder.repeat)

    def called(arguments: dict[str, Any]) -> Call:
        run(op, arguments)
        return recorder.calls.pop()

    arguments = {name: OPS[op]()[name] for name in registry.OPS[op].arguments}
    first = next(iter(arguments))
    arguments[first] = arguments[first].as_subclass(_OnGpu)
    known, again = called(arguments), called(arguments)
    same = keys.attributes_like(known[1])
    assert again[0] == known[0] and same(*again[1]), "calls go by value"
    for name, value in arguments.items():
        for attribute, variant in _variants(value).items():
            if name == first:
                if attribute == "type":
                    continue
                variant = variant.as_subclass(_OnGpu)
            changed = called({**arguments, name: variant})
            assert changed[0] != known[0] or not same(*changed[1]), f"{name}: {attribute}"


@pytest.mark.parametrize("name", ["ks", "ke", "values", "carried"])
def test_which_tensors_are_given_is_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder()
    monkeypatch.setattr(registry._Launcher, "repeat", recorder.repeat)
    tensor = torch.zeros(3, dtype=I32)
    none = dict.fromkeys(("ks", "ke", "values", "carried"))
    arguments = {**_topk(), **none, "logits": torch.zeros(3, 9).as_subclass(_OnGpu)}
    for given in none:
        run("_indexer_topk_chunk", {**arguments, given: tensor})
    assert len({call[0] for call in recorder.calls}) == len(none)


@pytest.mark.usefixtures("either_comparison")
def test_devices_are_told_apart_and_twins_are_not() -> None:
    tensor = torch.zeros(3)
    assert not keys.attributes_like((tensor,))(torch.zeros(3, device="meta"))
    assert keys.attributes_like((tensor, tensor))(tensor, tensor)
    assert not keys.attributes_like((tensor, tensor))(tensor, tensor[:2])


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
        monkeypatch.setattr(self.launch, "_current_device", lambda: -1)
        monkeypatch.setattr(self.launch, "num_sms", lambda device: 132)
        monkeypatch.setattr(self.launch, "table", lambda device: "")
        monkeypatch.setattr(self.launch, "get_kernel", lambda spec: self.kernel)
        monkeypatch.setattr(self.launch, "_launches", {})

    def run(self, op: str, arguments: dict[str, Any], call: Call | None = None) -> None:
        """Do the op's work after its checks."""
        registered = registry.OPS[op]
        prepared = registry.resolve(registered.cuda)(*(arguments[name] for name in registered.arguments))
        if prepared is not None:
            self.launch.launch(*prepared, -1, call)

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


def test_batches_that_share_buffers_are_all_remembered(cuda: _Cuda) -> None:
    arguments = _quantize()
    fewer = {**arguments, "x": arguments["x"][:4], "q": arguments["q"][:4]}
    for given in (arguments, fewer):
        cuda.quantize(**given, call=_call(given))
    assert cuda.repeat(_call(arguments)) and cuda.repeat(_call(fewer))


def test_a_launch_is_replaced_where_attributes_changed(cuda: _Cuda) -> None:
    arguments = _quantize()
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
    arguments = {**_silu_mul(), "limit": limit}
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
    arguments = {**_route(), "logits": torch.zeros(9, 70)[:, :64], **outputs, "scoring": scoring}
    if softmax:
        arguments["correction_bias"] = None
    cuda.run("route_topk", arguments)
    ((grid, _, params),) = cuda.kernel.launches
    assert grid == 3  # four warps, and a warp for each token
    tensors = (arguments[name] for name in ("logits", "correction_bias", "weights", "ids"))
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    sizes = (9, 64, 4, 8, 4, softmax, True, wide)
    assert struct.unpack("<7q8if36x", params) == (*addresses, 70, 6, 5, *sizes, 2.5)


@pytest.mark.parametrize("given", [True, False])
def test_a_launch_of_the_topk_packs_what_the_kernel_reads(cuda: _Cuda, given: bool) -> None:
    storage = torch.zeros(3, 40_001)
    arguments = {**_topk(), "logits": storage[:, 1:]}
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
        cuda.quantize(**(arguments := _quantize()), call=_call(arguments))
    assert not cuda.launch._launches


def test_remembered_launches_are_bounded(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.launch, "_MAX_LAUNCHES", 3)
    kept = [_quantize() for _ in range(5)]
    for arguments in kept:
        cuda.quantize(**arguments, call=_call(arguments))
        assert cuda.repeat(_call(arguments))
        assert len(cuda.launch._launches) <= 3
    known = [cuda.repeat(_call(arguments)) for arguments in kept]
    assert known == [False, False, True, True, True], "the oldest went"


def _plan(cuda: _Cuda, config: str | None = None) -> dict[str, int]:
    """The macros of the kernel for 8 rows, a problem for which a config may divide K."""
    cuda.gemm._gemm_plan.cache_clear()
    return dict(cuda.gemm._gemm_plan("dense", 8, 4096, 7168, 1, None, False, config, -1, 132)[0].defines)


def test_a_launch_has_the_callers_config(cuda: _Cuda) -> None:
    defines = _plan(cuda, "128x256")
    assert (defines["BLOCK_M"], defines["BLOCK_N"]) == (128, 256)
    with pytest.raises(ConfigError):
        _plan(cuda, "128x512")


def test_a_launch_asks_the_devices_table(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch, put_table: Callable[..., None]
) -> None:
    put_table([{"layout": "dense", "n": 4096, "k": 7168, "num_experts": 1, "rows": 8, "config": "128x256"}])
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

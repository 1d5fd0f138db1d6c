"""Every bad argument is refused by name, and the message says what was expected and what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import moe_fp8
from moe_fp8 import ArgumentError, UnsupportedError
from moe_fp8.ops.gemm import checks
from moe_fp8.ops.indexer import checks as indexer_checks
from moe_fp8.ops.quantize import checks as quantize_checks
from moe_fp8.ops.registry import OPS as REGISTERED
from tests import cache_cases, cases
from tests.k_grouped_cases import k_grouped_case

I32 = torch.int32


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return torch.stack([tensor.float(), tensor.float()], -1).to(tensor.dtype)[..., 0]


def _dense() -> dict[str, Any]:
    case = cases.dense_case(4, 64, 256)
    out = case.poisoned()
    return {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale, "out": out}


def _dense_of_rows() -> dict[str, Any]:
    """b has scales of 1 x 128."""
    return _dense() | {"b_scale": torch.ones(2, 64).T}


def _contiguous() -> dict[str, Any]:
    case = cases.contiguous_case("offsets", (3, 2), 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    return {**arguments, "offsets": case.index, "out": case.poisoned()}


def _masked() -> dict[str, Any]:
    case = cases.masked_case((3, 2), 4, 64, 256)
    arguments = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    return {**arguments, "masked_m": case.index, "out": case.poisoned()}


def _k_grouped() -> dict[str, Any]:
    case = k_grouped_case((128, 0, 256), 8, 64)
    names = ("a", "a_scale", "b", "b_scale", "offsets")
    return {**dict(zip(names, case.operands(), strict=True)), "out": torch.zeros(case.out_shape())}


def _mqa() -> dict[str, Any]:
    case = cases.mqa_case(4, 9, 8)
    names = ("q", "k", "k_scale", "weights", "ks", "ke")
    return {**dict(zip(names, case.arguments(), strict=True)), "out": torch.zeros(4, 9)}


def _paged() -> dict[str, Any]:
    case = cases.paged_case([3, 70], 2, 8, 64)
    return {
        "q": case.q,
        "kv_cache": case.kv_cache,
        "weights": case.weights,
        "context_lens": case.context_lens,
        "block_table": case.block_table,
        "metadata": moe_fp8.paged_mqa_logits_metadata(case.context_lens, block_size=64, num_sms=3, next_n=2),
        "max_context_len": 80,
        "out": torch.zeros(4, 80),
    }


def _metadata() -> dict[str, Any]:
    return {"context_lens": torch.zeros(3, dtype=I32), "block_size": 64, "num_sms": 4}


def _quantize() -> dict[str, Any]:
    return {"x": torch.zeros(3, 256)}


def _silu_mul() -> dict[str, Any]:
    out = torch.zeros(2, 3, 128, dtype=torch.float8_e4m3fn), torch.zeros(2, 3, 1)
    x = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
    return {"x": x, "masked_m": torch.zeros(2, dtype=I32), "limit": 7.0, "out": out}


def _cache() -> dict[str, Any]:
    case = cache_cases.cache_case(3)
    return {"k": case.k, "kv_cache": case.kv_cache, "slot_mapping": case.slot_mapping}


OPS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "gemm_fp8": (moe_fp8.gemm_fp8, _dense),
    "grouped_gemm_fp8_contiguous": (moe_fp8.grouped_gemm_fp8_contiguous, _contiguous),
    "grouped_gemm_fp8_masked": (moe_fp8.grouped_gemm_fp8_masked, _masked),
    "gemm_fp8 of rows": (moe_fp8.gemm_fp8, _dense_of_rows),
    "k_grouped_gemm_fp8": (moe_fp8.k_grouped_gemm_fp8, _k_grouped),
    "mqa_logits_fp8": (moe_fp8.mqa_logits_fp8, _mqa),
    "paged_mqa_logits_fp8": (moe_fp8.paged_mqa_logits_fp8, _paged),
    "paged_mqa_logits_metadata": (moe_fp8.paged_mqa_logits_metadata, _metadata),
    "quantize_fp8": (moe_fp8.quantize_fp8, _quantize),
    "silu_mul_quantize": (moe_fp8.silu_mul_quantize, _silu_mul),
    "indexer_quantize_and_cache": (moe_fp8.indexer_quantize_and_cache, _cache),
}

GEMMS = ("gemm_fp8", "grouped_gemm_fp8_contiguous", "grouped_gemm_fp8_masked")

Change = Callable[[Any], Any]
CHANGES: list[tuple[str, str, Change]] = [
    *[
        (op, argument, change)
        for op in GEMMS
        for argument, change in (
            ("a", lambda a: a.float()),
            ("a", lambda a: a[..., 0]),
            ("a", _strided),
            ("a", lambda a: a[..., :64]),
            ("a_scale", lambda s: s.double()),
            ("a_scale", lambda s: s[..., :1]),
            ("b", lambda b: b.bfloat16()),
            ("b", lambda b: b[..., 0]),
            ("b", lambda b: b[..., :32, :]),
            ("b", lambda b: b[..., :128]),
            ("b", _strided),
            ("b_scale", lambda s: s.half()),
            ("b_scale", lambda s: s[..., :1]),
            ("b_scale", _strided),
            ("out", lambda out: out[..., :32]),
            ("out", lambda out: out.half()),
            ("out", lambda out: torch.stack([out, out], -1)[..., 0]),
        )
    ],
    ("grouped_gemm_fp8_contiguous", "offsets", lambda i: i.long()),
    ("grouped_gemm_fp8_contiguous", "offsets", lambda i: i[:-1]),
    ("grouped_gemm_fp8_contiguous", "offsets", lambda i: i[:, None]),
    ("grouped_gemm_fp8_masked", "masked_m", lambda i: i.long()),
    ("grouped_gemm_fp8_masked", "masked_m", lambda i: i[:-1]),
    ("grouped_gemm_fp8_masked", "b", lambda b: b[:1]),
    *[
        ("gemm_fp8 of rows", argument, change)
        for argument, change in (
            ("a", lambda a: a[:, :64]),
            ("b", lambda b: b[:, :128]),
            ("b", _strided),
            ("b_scale", lambda s: s.half()),
            ("b_scale", lambda s: s[:, :1]),
            ("b_scale", lambda s: s[:63]),
            ("b_scale", lambda s: s[:, 0]),
            ("b_scale", lambda s: s[None]),
            ("out", lambda out: out[..., :32]),
            ("out", lambda out: out.half()),
        )
    ],
    *[
        ("k_grouped_gemm_fp8", argument, change)
        for argument, change in (
            ("a", lambda a: a.float()),
            ("a", lambda a: a[0]),
            ("a", _strided),
            ("a", lambda a: a[:, :64]),
            ("a_scale", lambda s: s.double()),
            ("a_scale", lambda s: s[:, :2]),
            ("a_scale", lambda s: s[1:]),
            ("b", lambda b: b.bfloat16()),
            ("b", lambda b: b[0]),
            ("b", lambda b: b[:32]),
            ("b", lambda b: b[:, :128]),
            ("b", _strided),
            ("b_scale", lambda s: s.half()),
            ("b_scale", lambda s: s[:, :2]),
            ("b_scale", lambda s: s[:1]),
            ("offsets", lambda i: i.long()),
            ("offsets", lambda i: i[:-1]),
            ("offsets", lambda i: i[:, None]),
            ("offsets", lambda i: i[0]),
            ("offsets", _strided),
            ("out", lambda out: out[..., :32]),
            ("out", lambda out: out[:, 1:]),
            ("out", lambda out: out[0, 0]),
            ("out", lambda out: out.bfloat16()),
            ("out", _strided),
        )
    ],
    ("mqa_logits_fp8", "q", lambda q: q.bfloat16()),
    ("mqa_logits_fp8", "q", lambda q: q[0]),
    ("mqa_logits_fp8", "q", _strided),
    ("mqa_logits_fp8", "k", lambda k: k.float()),
    ("mqa_logits_fp8", "k", lambda k: k[:, :64]),
    ("mqa_logits_fp8", "k", lambda k: k[0]),
    ("mqa_logits_fp8", "k_scale", lambda s: s[1:]),
    ("mqa_logits_fp8", "k_scale", lambda s: s.half()),
    ("mqa_logits_fp8", "weights", lambda w: w.bfloat16()),
    ("mqa_logits_fp8", "weights", lambda w: w[:, 1:]),
    ("mqa_logits_fp8", "ks", lambda k: k.long()),
    ("mqa_logits_fp8", "ke", lambda k: k[1:]),
    ("mqa_logits_fp8", "out", lambda out: out[1:]),
    ("mqa_logits_fp8", "out", lambda out: out.half()),
    ("mqa_logits_fp8", "out", lambda out: out.T.contiguous().T),
    ("mqa_logits_fp8", "out", lambda out: out[:1].expand(4, 9)),
    ("paged_mqa_logits_fp8", "q", lambda q: q.float()),
    ("paged_mqa_logits_fp8", "q", lambda q: q[0]),
    ("paged_mqa_logits_fp8", "kv_cache", lambda c: c.int()),
    ("paged_mqa_logits_fp8", "kv_cache", lambda c: c[..., :128]),
    ("paged_mqa_logits_fp8", "kv_cache", lambda c: c[:, :, 0]),
    ("paged_mqa_logits_fp8", "kv_cache", lambda c: torch.stack([c, c], -1)[..., 0]),
    ("paged_mqa_logits_fp8", "weights", lambda w: w[1:]),
    ("paged_mqa_logits_fp8", "weights", lambda w: w.half()),
    ("paged_mqa_logits_fp8", "context_lens", lambda c: c.long()),
    ("paged_mqa_logits_fp8", "context_lens", lambda c: c[1:]),
    ("paged_mqa_logits_fp8", "context_lens", lambda c: c[:, None].expand(2, 3).contiguous()),
    ("paged_mqa_logits_fp8", "block_table", lambda t: t.long()),
    ("paged_mqa_logits_fp8", "block_table", lambda t: t[1:]),
    ("paged_mqa_logits_fp8", "block_table", lambda t: t.T.contiguous().T),
    ("paged_mqa_logits_fp8", "metadata", lambda m: m.long()),
    ("paged_mqa_logits_fp8", "metadata", lambda m: m[:, :1]),
    ("paged_mqa_logits_fp8", "metadata", lambda m: m[:1]),
    ("paged_mqa_logits_fp8", "out", lambda out: out[1:]),
    ("paged_mqa_logits_fp8", "out", lambda out: out.half()),
    ("paged_mqa_logits_metadata", "context_lens", lambda c: c.long()),
    ("paged_mqa_logits_metadata", "context_lens", lambda c: c[0]),
    ("paged_mqa_logits_metadata", "num_sms", lambda _: 0),
    ("quantize_fp8", "x", lambda x: x.double()),
    ("quantize_fp8", "x", lambda x: x[:, :100]),
    ("quantize_fp8", "x", lambda x: x[:, :0]),
    ("quantize_fp8", "x", lambda x: x[0]),
    ("quantize_fp8", "x", _strided),
    ("silu_mul_quantize", "x", lambda x: x.half()),
    ("silu_mul_quantize", "x", lambda x: x[0]),
    ("silu_mul_quantize", "x", lambda x: x[..., :128]),
    ("silu_mul_quantize", "x", lambda x: x[..., :0]),
    ("silu_mul_quantize", "x", _strided),
    ("silu_mul_quantize", "x", lambda x: torch.nn.functional.pad(x, (0, 4))[..., :256]),
    ("silu_mul_quantize", "x", lambda x: torch.nn.functional.pad(x, (4, 4))[..., 4:260]),
    ("silu_mul_quantize", "masked_m", lambda m: m.long()),
    ("silu_mul_quantize", "masked_m", lambda m: m[1:]),
    ("silu_mul_quantize", "masked_m", lambda m: m[:, None]),
    ("silu_mul_quantize", "limit", lambda _: 0.0),
    ("silu_mul_quantize", "limit", lambda _: -7.0),
    ("silu_mul_quantize", "limit", lambda _: float("nan")),
    ("silu_mul_quantize", "limit", lambda _: 1e39),
    ("indexer_quantize_and_cache", "k", lambda k: k.double()),
    ("indexer_quantize_and_cache", "k", lambda k: k[0]),
    ("indexer_quantize_and_cache", "k", _strided),
    ("indexer_quantize_and_cache", "k", lambda k: torch.nn.functional.pad(k, (0, 4))[:, :128]),
    ("indexer_quantize_and_cache", "k", lambda k: torch.nn.functional.pad(k, (4, 4))[:, 4:132]),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c.int()),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c[..., :68]),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c[:, :, 0]),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: torch.stack([c, c], -1)[..., 0]),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c[:1].expand(3, -1, -1, -1)),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c.reshape(-1)[8:-8440].view(2, 64, 1, 132)),
    ("indexer_quantize_and_cache", "slot_mapping", lambda s: s.short()),
    ("indexer_quantize_and_cache", "slot_mapping", lambda s: s[1:]),
    ("indexer_quantize_and_cache", "slot_mapping", lambda s: s[:, None]),
    ("indexer_quantize_and_cache", "slot_mapping", _strided),
]


@pytest.mark.parametrize("op", OPS)
def test_the_unchanged_arguments_are_accepted(op: str) -> None:
    function, make = OPS[op]
    function(**make())


@pytest.mark.parametrize(
    "op, argument, change",
    CHANGES,
    ids=[f"{op}-{argument}-{i}" for i, (op, argument, _) in enumerate(CHANGES)],
)
def test_a_bad_argument_is_named(op: str, argument: str, change: Change) -> None:
    function, make = OPS[op]
    arguments = make()
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ArgumentError) as caught:
        function(**arguments)
    error = caught.value
    name = op.partition(" ")[0]
    assert (error.op, error.argument) == (name, argument)
    assert f"{name}: {argument}: expected {error.expected}, got {error.got}" in str(error)


def _silu_mul_operands() -> dict[str, Any]:
    arguments = _silu_mul()
    q, scale = arguments.pop("out")
    return {**arguments, "q": q, "scale": scale, "power_of_two": False}


def _addend() -> dict[str, Any]:
    return {"op": "k_grouped_gemm_fp8", "c": torch.zeros(3, 8, 64), "out": torch.zeros(3, 8, 64)}


DEVICES = [
    *[(checks.gemm, _dense, name) for name in ("a_scale", "b", "b_scale", "out")],
    (checks.gemm, _dense_of_rows, "b_scale"),
    *[(checks.gemm_masked, _masked, name) for name in ("a_scale", "b", "masked_m", "out")],
    *[(checks.k_grouped_gemm, _k_grouped, name) for name in ("a_scale", "b", "b_scale", "offsets", "out")],
    (checks.addend, _addend, "c"),
    *[
        (indexer_checks.paged_mqa_logits, _paged, name)
        for name in ("kv_cache", "weights", "block_table", "metadata")
    ],
    *[(indexer_checks.mqa_logits, _mqa, name) for name in ("k", "k_scale", "weights", "ks", "ke", "out")],
    *[(quantize_checks.silu_mul_quantize, _silu_mul_operands, name) for name in ("masked_m", "q", "scale")],
    *[(indexer_checks.indexer_quantize_and_cache, _cache, name) for name in ("kv_cache", "slot_mapping")],
]


@pytest.mark.parametrize("check, make, argument", DEVICES)
def test_devices_must_agree(check: Callable[..., Any], make: Callable[[], Any], argument: str) -> None:
    arguments = make()
    arguments.pop("max_context_len", None)
    if check is indexer_checks.mqa_logits:
        arguments |= {"compressed": False, "fill": False}
    if check is checks.gemm_masked:
        arguments["expected_m"] = None
    check(**arguments)
    value = arguments[argument]
    with FakeTensorMode():
        # This is a CUDA tensor without CUDA: it has a device and no data.
        arguments[argument] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="cuda"
        )
    with pytest.raises(ArgumentError, match="expected device cpu, got cuda") as caught:
        check(**arguments)
    assert caught.value.argument == argument


@pytest.mark.parametrize("op", GEMMS)
def test_out_and_out_dtype(op: str) -> None:
    function, make = OPS[op]
    arguments = make()
    with pytest.raises(ArgumentError, match=r"out: expected dtype torch\.float32"):
        function(**arguments, out_dtype=torch.float32)
    del arguments["out"]
    assert function(**arguments, out_dtype=torch.float32).dtype is torch.float32
    with pytest.raises(ArgumentError, match="out_dtype"):
        function(**arguments, out_dtype=torch.float16)


@pytest.mark.parametrize(
    "op, argument",
    [
        *[(op, argument) for op in (*GEMMS, "k_grouped_gemm_fp8") for argument in ("a", "b")],
        ("k_grouped_gemm_fp8", "offsets"),
    ],
)
def test_ranks_are_checked_before_the_output_is_allocated(op: str, argument: str) -> None:
    function, make = OPS[op]
    arguments = make()
    del arguments["out"]
    value = arguments[argument]
    arguments[argument] = value[0] if value.dim() == 1 else value.reshape(-1)
    with pytest.raises(ArgumentError) as caught:
        function(**arguments)
    assert caught.value.argument == argument


def test_unaligned_addresses_are_refused() -> None:
    arguments = _dense()
    storage = torch.zeros(4 * 256 + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    arguments["a"] = storage[1:].view(4, 256)
    with pytest.raises(ArgumentError, match="a: expected a 16-byte aligned address"):
        moe_fp8.gemm_fp8(**arguments)


def test_exactly_one_layout() -> None:
    arguments = _contiguous()
    with pytest.raises(ArgumentError, match="exactly one of the three, got several"):
        moe_fp8.grouped_gemm_fp8_contiguous(**arguments, psum=arguments["offsets"][1:])
    with pytest.raises(ArgumentError, match="exactly one of the three, got several"):
        moe_fp8.grouped_gemm_fp8_contiguous(**arguments, m_indices=arguments["offsets"][1:])
    del arguments["offsets"]
    with pytest.raises(ArgumentError, match="exactly one of the three, got none"):
        moe_fp8.grouped_gemm_fp8_contiguous(**arguments)


def test_the_registered_op_checks_too() -> None:
    case = cases.contiguous_case("psum", (3, 2), 64, 128)
    with pytest.raises(ArgumentError, match="layout"):
        REGISTERED["grouped_gemm_fp8_contiguous"].call(
            case.a, case.a_scale, case.b, case.b_scale, case.index, "ends", None, case.poisoned()
        )
    x = torch.zeros(5, 256)
    q = torch.empty(5, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(ArgumentError, match="scale: expected shape"):
        REGISTERED["quantize_fp8"].call(x, q, torch.empty(5, 3), False)
    with pytest.raises(ArgumentError, match="q: expected dtype"):
        REGISTERED["quantize_fp8"].call(x, torch.empty(5, 256), torch.empty(5, 2), False)


@pytest.mark.parametrize(
    "at, change, message",
    [
        (0, lambda q: q.float(), "q: expected dtype"),
        (0, lambda q: q[..., :64], "q: expected shape"),
        (0, _strided, "q: expected a contiguous tensor"),
        (1, lambda scale: scale.double(), "scale: expected dtype"),
        (1, lambda scale: scale[:, :2], "scale: expected shape"),
    ],
)
def test_outputs_of_silu_mul(at: int, change: Change, message: str) -> None:
    arguments = _silu_mul()
    out = list(arguments["out"])
    out[at] = change(out[at])
    with pytest.raises(ArgumentError, match=message):
        moe_fp8.silu_mul_quantize(**{**arguments, "out": out})


def test_experts_of_silu_mul_come_with_their_counts() -> None:
    x = _silu_mul()["x"]
    with pytest.raises(ArgumentError, match=r"x: expected shape \[M, 2I\]"):
        moe_fp8.silu_mul_quantize(x)
    operands = torch.zeros(6, 128, dtype=torch.float8_e4m3fn), torch.zeros(6, 1)
    with pytest.raises(ArgumentError, match=r"or pass masked_m"):
        REGISTERED["silu_mul_quantize"].call(x, None, *operands, False, None)
    with pytest.raises(ArgumentError, match="as masked_m is given"):
        REGISTERED["silu_mul_quantize"].call(
            x.flatten(0, 1), torch.zeros(6, dtype=I32), *operands, False, None
        )


def test_schedules_off_their_alignment_are_refused() -> None:
    lengths = torch.zeros(3, dtype=I32)
    shifted = torch.zeros(2 * 5 + 1, dtype=I32)[1:].view(5, 2)
    with pytest.raises(ArgumentError, match="out: expected an 8-byte aligned address"):
        REGISTERED["paged_mqa_logits_metadata"].call(lengths, 64, 1, shifted)
    with pytest.raises(ArgumentError, match="metadata: expected an 8-byte aligned address"):
        moe_fp8.paged_mqa_logits_fp8(**{**_paged(), "metadata": shifted})


def test_shapes_no_kernel_serves() -> None:
    mqa = _mqa()
    with pytest.raises(UnsupportedError, match="heads"):
        moe_fp8.mqa_logits_fp8(**{**mqa, "q": mqa["q"][:, :4].contiguous()})
    with pytest.raises(UnsupportedError, match="block_size"):
        moe_fp8.paged_mqa_logits_metadata(torch.zeros(3, dtype=I32), block_size=16, num_sms=4)
    with pytest.raises(UnsupportedError, match="next_n"):
        moe_fp8.paged_mqa_logits_metadata(torch.zeros(3, dtype=I32), block_size=64, num_sms=4, next_n=9)
    cache = _cache()
    with pytest.raises(UnsupportedError, match="head dimension"):
        moe_fp8.indexer_quantize_and_cache(**{**cache, "k": cache["k"][:, :96]})
    with pytest.raises(UnsupportedError, match="block_size"):
        moe_fp8.indexer_quantize_and_cache(**{**cache, "kv_cache": cache["kv_cache"][:, :16]})


def test_widths_of_given_outputs() -> None:
    with pytest.raises(ArgumentError, match="max_seqlen_k"):
        moe_fp8.mqa_logits_fp8(**_mqa(), max_seqlen_k=8)
    with pytest.raises(ArgumentError, match="max_context_len"):
        moe_fp8.paged_mqa_logits_fp8(**{**_paged(), "max_context_len": 79})


@pytest.mark.parametrize("w", [torch.zeros(4), torch.zeros(4, 4, dtype=torch.int32), torch.zeros(0, 128)])
def test_quantize_blocks_refuses(w: torch.Tensor) -> None:
    with pytest.raises(ArgumentError) as caught:
        moe_fp8.quantize_fp8_blocks(w)
    assert caught.value.argument == "w"

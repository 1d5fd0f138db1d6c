"""Every bad argument is refused by name, and the message says what was expected and what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from moe_fp8 import ArgumentError
from moe_fp8.ops.gemm import checks
from moe_fp8.ops.indexer import checks as indexer_checks
from moe_fp8.ops.quantize import checks as quantize_checks
from tests.cpu import accepted_arguments as accepted
from tests.cpu.accepted_arguments import GEMMS, OPS, Change, strided

CHANGES: list[tuple[str, str, Change]] = [
    *[
        (op, argument, change)
        for op in GEMMS
        for argument, change in (
            ("a", lambda a: a.float()),
            ("a", lambda a: a[..., 0]),
            ("a", strided),
            ("a", lambda a: a[..., :64]),
            ("a_scale", lambda s: s.double()),
            ("a_scale", lambda s: s[..., :1]),
            ("b", lambda b: b.bfloat16()),
            ("b", lambda b: b[..., 0]),
            ("b", lambda b: b[..., :32, :]),
            ("b", lambda b: b[..., :128]),
            ("b", strided),
            ("b_scale", lambda s: s.half()),
            ("b_scale", lambda s: s[..., :1]),
            ("b_scale", strided),
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
            ("b", strided),
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
            ("a", strided),
            ("a", lambda a: a[:, :64]),
            ("a_scale", lambda s: s.double()),
            ("a_scale", lambda s: s[:, :2]),
            ("a_scale", lambda s: s[1:]),
            ("b", lambda b: b.bfloat16()),
            ("b", lambda b: b[0]),
            ("b", lambda b: b[:32]),
            ("b", lambda b: b[:, :128]),
            ("b", strided),
            ("b_scale", lambda s: s.half()),
            ("b_scale", lambda s: s[:, :2]),
            ("b_scale", lambda s: s[:1]),
            ("offsets", lambda i: i.long()),
            ("offsets", lambda i: i[:-1]),
            ("offsets", lambda i: i[:, None]),
            ("offsets", lambda i: i[0]),
            ("offsets", strided),
            ("out", lambda out: out[..., :32]),
            ("out", lambda out: out[:, 1:]),
            ("out", lambda out: out[0, 0]),
            ("out", lambda out: out.bfloat16()),
            ("out", strided),
        )
    ],
    ("mqa_logits_fp8", "q", lambda q: q.bfloat16()),
    ("mqa_logits_fp8", "q", lambda q: q[0]),
    ("mqa_logits_fp8", "q", strided),
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
    ("quantize_fp8", "x", strided),
    ("silu_mul_quantize", "x", lambda x: x.half()),
    ("silu_mul_quantize", "x", lambda x: x[0]),
    ("silu_mul_quantize", "x", lambda x: x[..., :128]),
    ("silu_mul_quantize", "x", lambda x: x[..., :0]),
    ("silu_mul_quantize", "x", strided),
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
    ("indexer_quantize_and_cache", "k", strided),
    ("indexer_quantize_and_cache", "k", lambda k: torch.nn.functional.pad(k, (0, 4))[:, :128]),
    ("indexer_quantize_and_cache", "k", lambda k: torch.nn.functional.pad(k, (4, 4))[:, 4:132]),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c.int()),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c[..., :68]),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c[:, :, 0]),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: torch.stack([c, c], -1)[..., 0]),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c[:1].expand(3, -1, -1, -1)),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c.reshape(-1)[8:-8440].view(2, 64, 1, 132)),
    ("indexer_quantize_and_cache", "kv_cache", lambda c: c.as_strided((2, 64, 1, 132), (8456, 132, 132, 1))),
    ("indexer_quantize_and_cache", "slot_mapping", lambda s: s.short()),
    ("indexer_quantize_and_cache", "slot_mapping", lambda s: s[1:]),
    ("indexer_quantize_and_cache", "slot_mapping", lambda s: s[:, None]),
    ("indexer_quantize_and_cache", "slot_mapping", strided),
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
    arguments = accepted.silu_mul()
    q, scale = arguments.pop("out")
    return {**arguments, "q": q, "scale": scale, "power_of_two": False}


def _addend() -> dict[str, Any]:
    return {"op": "k_grouped_gemm_fp8", "c": torch.zeros(3, 8, 64), "out": torch.zeros(3, 8, 64)}


DEVICES = [
    *[(checks.gemm, accepted.dense, name) for name in ("a_scale", "b", "b_scale", "out")],
    (checks.gemm, accepted.dense_of_rows, "b_scale"),
    *[(checks.gemm_masked, accepted.masked, name) for name in ("a_scale", "b", "masked_m", "out")],
    *[
        (checks.k_grouped_gemm, accepted.k_grouped, name)
        for name in ("a_scale", "b", "b_scale", "offsets", "out")
    ],
    (checks.addend, _addend, "c"),
    *[
        (indexer_checks.paged_mqa_logits, accepted.paged, name)
        for name in ("kv_cache", "weights", "block_table", "metadata")
    ],
    *[
        (indexer_checks.mqa_logits, accepted.mqa, name)
        for name in ("k", "k_scale", "weights", "ks", "ke", "out")
    ],
    *[(quantize_checks.silu_mul_quantize, _silu_mul_operands, name) for name in ("masked_m", "q", "scale")],
    *[
        (indexer_checks.indexer_quantize_and_cache, accepted.cache, name)
        for name in ("kv_cache", "slot_mapping")
    ],
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

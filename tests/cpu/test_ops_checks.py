"""Every bad argument is refused by name, and the message says what was expected and what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import moe_fp8
from moe_fp8 import ArgumentError
from moe_fp8.ops import registry
from moe_fp8.ops.gemm import checks
from moe_fp8.ops.indexer import checks as indexer_checks
from moe_fp8.ops.scales import is_mn_major, to_mn_major
from tests.cpu import accepted_arguments as accepted
from tests.cpu.accepted_arguments import GEMMS, OPS, Change, strided
from tests.cpu.op_arguments import OPS as LAUNCHED
from tests.cpu.op_arguments import run

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
    ("mqa_logits_fp8", "k_scale", lambda s: s[:-1]),
    ("mqa_logits_fp8", "k_scale", lambda s: s.half()),
    ("mqa_logits_fp8", "weights", lambda w: w.bfloat16()),
    ("mqa_logits_fp8", "weights", lambda w: w[:, 1:]),
    ("mqa_logits_fp8", "weights", lambda w: w[1:]),
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


@pytest.mark.parametrize("change", [lambda i: i.long(), lambda i: i[:-1], lambda i: i[:, None], strided])
@pytest.mark.parametrize("layout", ["m_indices", "psum"])
def test_a_bad_index_is_named_by_its_layout(layout: str, change: Change) -> None:
    arguments = accepted.contiguous()
    del arguments["offsets"]
    index = (
        torch.zeros(5, dtype=torch.int32)
        if layout == "m_indices"
        else torch.tensor([3, 5], dtype=torch.int32)
    )
    moe_fp8.grouped_gemm_fp8_contiguous(**arguments, **{layout: index})
    with pytest.raises(ArgumentError) as caught:
        moe_fp8.grouped_gemm_fp8_contiguous(**arguments, **{layout: change(index)})
    assert caught.value.argument == layout


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor without CUDA: it has a device and no data."""
    with FakeTensorMode():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def _refuse_devices(check: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """All tensors must be where the first one is."""
    check(*arguments.values())
    here = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    there = {name: _elsewhere(tensor) for name, tensor in here.items()}
    _, *others = here
    assert others
    for name in others:
        for rest, moved, message in ((here, there, "cpu, got cuda"), (there, here, "cuda:0, got cpu")):
            with pytest.raises(ArgumentError, match=f"expected device {message}") as caught:
                check(*(arguments | rest | {name: moved[name]}).values())
            assert caught.value.argument == (arguments["layout"] if name == "index" else name)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("op", LAUNCHED)
def test_devices_must_agree(op: str) -> None:
    registered, made = registry.OPS[op], LAUNCHED[op]()
    _refuse_devices(registered.check, {name: made[name] for name in registered.arguments})


def test_devices_of_rows_scales_and_addends_must_agree() -> None:
    _refuse_devices(checks.gemm, accepted.dense_of_rows())
    with pytest.raises(ArgumentError, match="c: expected device cpu, got cuda"):
        checks.addend("gemm_fp8", _elsewhere(torch.zeros(8, 64)), torch.zeros(8, 64))
    case = accepted.mqa()
    out = _elsewhere(torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="indexer_select: out: expected device cpu, got cuda"):
        indexer_checks.selection_out("indexer_select", 4, 2, case["q"], out)


def _unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, an element behind an aligned address."""
    moved = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return moved.copy_(tensor)


#: What the registered op refuses. The functions refuse other arguments before they call it.
OP_CHANGES: list[tuple[str, str, Change]] = [
    ("moe_permute", "x", lambda x: x[0]),
    ("moe_permute", "x", lambda x: x[None]),
    ("moe_permute", "x", lambda x: x[:, :0]),
    ("moe_permute", "x", _unaligned),
    ("moe_permute", "x_scale", lambda s: s.double()),
    ("moe_permute", "x_scale", lambda s: s[:2]),
    ("moe_permute", "topk_ids", lambda i: i[0]),
    ("moe_permute", "topk_ids", lambda i: i[..., None]),
    ("moe_permute", "topk_ids", lambda i: i[:, :0]),
    ("moe_permute", "topk_ids", lambda i: i.T.contiguous().T),
    ("moe_permute", "expert_map", lambda m: m[None]),
    ("moe_permute", "a", lambda a: a[0]),
    ("moe_permute", "a", lambda a: a[:5]),
    ("moe_permute", "a", lambda a: a[:, :128].contiguous()),
    ("moe_permute", "a", lambda a: a.view(torch.uint8)),
    ("moe_permute", "a", strided),
    ("moe_permute", "a", _unaligned),
    ("moe_permute", "a_scale", lambda s: s[:5]),
    ("moe_permute", "a_scale", lambda s: s[:, :1]),
    ("moe_permute", "a_scale", lambda s: s.double()),
    ("moe_permute", "a_scale", lambda s: s[:1].expand(6, 2)),
    ("moe_permute", "offsets", lambda o: o[:1]),
    ("moe_permute", "offsets", lambda o: o[:, None]),
    ("moe_permute", "offsets", lambda o: o.new_zeros(1026)),
    ("moe_permute", "offsets", lambda o: o.long()),
    ("moe_permute", "offsets", strided),
    ("moe_permute", "rows", lambda r: r[:2]),
    ("moe_permute", "rows", lambda r: r.long()),
    ("moe_permute", "rows", lambda r: r.T.contiguous().T),
    ("moe_combine", "y", lambda y: y[0]),
    ("moe_combine", "y", lambda y: y[:, :0]),
    ("moe_combine", "y", lambda y: y.half()),
    ("moe_combine", "y", strided),
    ("moe_combine", "y", _unaligned),
    ("moe_combine", "rows", lambda r: r[0]),
    ("moe_combine", "rows", lambda r: r[:, :0]),
    ("moe_combine", "rows", lambda r: r.new_zeros(3, 513)),
    ("moe_combine", "weights", lambda w: w[:2]),
    ("moe_combine", "weights", lambda w: w.T.contiguous().T),
    ("moe_combine", "out", lambda out: out[:, :32]),
    ("moe_combine", "out", lambda out: out.float()),
    ("moe_combine", "out", strided),
    ("moe_combine", "out", _unaligned),
    ("route_topk", "logits", lambda logits: logits[:, :0]),
    ("route_topk", "logits", lambda logits: logits[None]),
    ("route_topk", "scaling_factor", lambda _: float("nan")),
    ("route_topk", "scaling_factor", lambda _: -1e39),
    ("route_topk", "ids", lambda i: i[0]),
    ("route_topk", "ids", lambda i: i[..., None]),
    ("route_topk", "ids", lambda i: i[:, :0]),
    ("route_topk", "weights", lambda w: w[:2]),
    ("route_topk", "weights", lambda w: w[:1].expand(3, 4)),
    ("route_topk", "weights", lambda w: w.T.contiguous().T),
    ("route_topk", "ids", lambda i: i.T.contiguous().T),
    ("grouped_gemm_silu_mul_fp8", "a", lambda a: a[0]),
    ("grouped_gemm_silu_mul_fp8", "a", lambda a: a[:, :64]),
    ("grouped_gemm_silu_mul_fp8", "a", lambda a: a[:, :0]),
    ("grouped_gemm_silu_mul_fp8", "a", lambda a: a.view(torch.uint8)),
    ("grouped_gemm_silu_mul_fp8", "a", strided),
    ("grouped_gemm_silu_mul_fp8", "a", _unaligned),
    ("grouped_gemm_silu_mul_fp8", "a_scale", lambda s: s[:4]),
    ("grouped_gemm_silu_mul_fp8", "a_scale", lambda s: s.double()),
    ("grouped_gemm_silu_mul_fp8", "w13", lambda w: w[0]),
    ("grouped_gemm_silu_mul_fp8", "w13", lambda w: w[:, :128]),
    ("grouped_gemm_silu_mul_fp8", "w13", lambda w: w[..., :128].contiguous()),
    ("grouped_gemm_silu_mul_fp8", "w13", lambda w: w[:0]),
    ("grouped_gemm_silu_mul_fp8", "w13", lambda w: w.view(torch.uint8)),
    ("grouped_gemm_silu_mul_fp8", "w13", strided),
    ("grouped_gemm_silu_mul_fp8", "w13", _unaligned),
    ("grouped_gemm_silu_mul_fp8", "w13_scale", lambda s: s[:, :1]),
    ("grouped_gemm_silu_mul_fp8", "w13_scale", strided),
    ("grouped_gemm_silu_mul_fp8", "offsets", lambda o: o[1:]),
    ("grouped_gemm_silu_mul_fp8", "offsets", lambda o: o.long()),
    ("grouped_gemm_silu_mul_fp8", "limit", lambda _: 0.0),
    ("grouped_gemm_silu_mul_fp8", "limit", lambda _: float("nan")),
    ("grouped_gemm_silu_mul_fp8", "q", lambda q: q[:4]),
    ("grouped_gemm_silu_mul_fp8", "q", lambda q: q.view(torch.uint8)),
    ("grouped_gemm_silu_mul_fp8", "q", strided),
    ("grouped_gemm_silu_mul_fp8", "q", _unaligned),
    ("grouped_gemm_silu_mul_fp8", "scale", lambda s: s[:4]),
    ("grouped_gemm_silu_mul_fp8", "scale", lambda s: s.double()),
    ("grouped_gemm_silu_mul_fp8", "scale", lambda s: s[:1].expand(5, 1)),
    ("quantize_fp8", "x", lambda x: x[0]),
    ("quantize_fp8", "x", lambda x: x[None]),
    ("quantize_fp8", "x", _unaligned),
    ("quantize_fp8", "q", lambda q: q[:4]),
    ("quantize_fp8", "q", strided),
    ("quantize_fp8", "q", _unaligned),
    ("quantize_fp8", "scale", lambda s: s.double()),
    ("quantize_fp8", "scale", lambda s: s[:1].expand(5, 2)),
    ("silu_mul_quantize", "q", _unaligned),
    ("silu_mul_quantize", "scale", lambda s: s[:, :1].expand(2, 5, 2)),
    ("_indexer_topk_chunk", "first_column", lambda _: 2**31),
    ("_indexer_topk_chunk", "carried", lambda c: c[0]),
    ("_indexer_topk_chunk", "carried", lambda c: c[:2]),
    ("_indexer_topk_chunk", "carried", lambda c: c.new_zeros(3, 10)),
    ("_indexer_topk_chunk", "carried", lambda c: c.long()),
    ("_indexer_topk_chunk", "carried", lambda c: c.T.contiguous().T),
    ("_indexer_topk_chunk", "values", lambda v: v.T.contiguous().T),
    ("paged_mqa_logits_metadata", "context_lens", strided),
    ("paged_mqa_logits_metadata", "out", lambda out: out[:1]),
    ("paged_mqa_logits_metadata", "out", lambda out: out[0]),
    ("paged_mqa_logits_metadata", "out", lambda out: out[:, :1].contiguous()),
    ("paged_mqa_logits_fp8", "metadata", lambda m: m[:, :1].contiguous()),
    ("paged_mqa_logits_fp8", "metadata", lambda m: m[..., None]),
    ("paged_mqa_logits_fp8", "block_table", lambda t: t[..., None]),
    ("paged_mqa_logits_metadata", "out", lambda out: out.long()),
    ("paged_mqa_logits_metadata", "out", lambda out: out.T.contiguous().T),
    *[
        (op, "kv_cache", change)
        for op in ("paged_mqa_logits_fp8", "indexer_quantize_and_cache")
        for change in (
            _unaligned,
            lambda c: c[..., None],
            lambda c: torch.cat([c, c], 2),
            lambda c: c.expand(-1, -1, 2, -1),
            lambda c: torch.nn.functional.pad(c, (0, 12))[..., :-12],
        )
    ],
    *[
        (op, "out", change)
        for op in ("mqa_logits_fp8", "paged_mqa_logits_fp8")
        for change in (strided, lambda out: out[..., None], lambda out: out[0])
    ],
    ("mqa_logits_fp8", "out", lambda out: out[:, :8].contiguous()),
    ("mqa_logits_fp8", "out", lambda out: out.new_zeros(4, 10)),
    ("mqa_logits_fp8", "q", _unaligned),
    ("mqa_logits_fp8", "k", _unaligned),
    ("mqa_logits_fp8", "k_scale", _unaligned),
    ("mqa_logits_fp8", "weights", _unaligned),
    *[(op, argument, _unaligned) for op in (*GEMMS, "k_grouped_gemm_fp8") for argument in ("a", "b", "out")],
]


@pytest.mark.parametrize(
    "op, argument, change",
    OP_CHANGES,
    ids=[f"{op}-{argument}-{i}" for i, (op, argument, _) in enumerate(OP_CHANGES)],
)
def test_the_registered_op_names_a_bad_argument(op: str, argument: str, change: Change) -> None:
    arguments = LAUNCHED[op]()
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ArgumentError) as caught:
        run(op, arguments)
    assert (caught.value.op, caught.value.argument) == (op.removeprefix("_").removesuffix("_chunk"), argument)


#: An op, arguments that are cut to one element in a dimension, and the one that gets another stride there.
SINGLE: list[tuple[str, tuple[str, ...], int, str]] = [
    ("moe_permute", ("topk_ids", "rows"), 1, "topk_ids"),
    ("moe_combine", ("rows", "weights"), 1, "weights"),
    ("moe_combine", ("rows", "weights", "out"), 0, "out"),
    ("route_topk", ("weights", "ids"), 1, "ids"),
    ("route_topk", ("logits", "weights", "ids"), 0, "weights"),
    ("mqa_logits_fp8", ("q", "weights", "ks", "ke", "out"), 0, "out"),
    ("paged_mqa_logits_fp8", ("block_table",), 1, "block_table"),
    ("paged_mqa_logits_fp8", ("out",), 1, "out"),
    ("indexer_topk", ("logits",), 1, "logits"),
]


@pytest.mark.parametrize("op, cut, dim, argument", SINGLE)
def test_the_stride_of_a_single_element_does_not_matter(
    op: str, cut: tuple[str, ...], dim: int, argument: str
) -> None:
    arguments = LAUNCHED[op]()
    arguments |= {name: arguments[name].narrow(dim, 0, 1).contiguous() for name in cut}
    tensor = arguments[argument]
    strides = list(tensor.stride())
    strides[dim] = 8 if dim else 0
    arguments[argument] = tensor.as_strided(tensor.shape, strides)
    run(op, arguments)


@pytest.mark.parametrize("at", [1, 3], ids=["a_scale", "b_scale"])
def test_each_operand_of_ragged_k_gets_its_scales_converted(at: int) -> None:
    given = [*accepted.k_grouped().values(), False]
    for place in (1, 3):
        given[place] = to_mn_major(given[place])
    assert checks.k_grouped_gemm(*given) is None
    given[at] = given[at].contiguous()
    found = checks.k_grouped_gemm(*given)
    assert found is not None and is_mn_major(found[at]) and found[at].equal(given[at])
    assert all(
        one is other for place, (one, other) in enumerate(zip(found, given, strict=True)) if place != at
    )

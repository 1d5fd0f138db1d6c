"""Which strides every op serves, what a launch makes of them, and how it names those that it refuses."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import moe_fp8
from moe_fp8 import ArgumentError
from moe_fp8.jit import counters
from moe_fp8.ops import arguments, scales
from tests import cases
from tests.cpu.accepted_arguments import OPS
from tests.cpu.op_arguments import OPS as LAUNCHED
from tests.cpu.test_ops_remembered import _Cuda
from tests.stride_cases import apart, experts_apart, padded_scales

Change = Callable[[Any], Any]
GEMMS = ("gemm_fp8", "grouped_gemm_fp8_contiguous", "grouped_gemm_fp8_masked")


def _one_row_of_any_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The first row, said to be a single element away from the next."""
    return tensor[:1].as_strided((1, *tensor.shape[1:]), (1, *tensor.stride()[1:]))


SERVED: list[tuple[str, str, Change]] = [
    *[
        (op, argument, change)
        for op in GEMMS
        for argument, change in (
            ("a", lambda a: apart(a, 48)),
            ("b", lambda b: apart(b, 16)),
            ("out", lambda out: apart(out, 8)),
            ("a_scale", lambda s: padded_scales(s, 4)),
            ("a_scale", lambda s: padded_scales(s, 252)),
        )
    ],
    ("k_grouped_gemm_fp8", "a", lambda a: apart(a, 48)),
    ("k_grouped_gemm_fp8", "b", lambda b: apart(b, 16)),
    ("k_grouped_gemm_fp8", "out", lambda out: apart(out, 4)),
    ("k_grouped_gemm_fp8", "a_scale", lambda s: padded_scales(s, 4)),
    ("k_grouped_gemm_fp8", "b_scale", lambda s: padded_scales(s, 252)),
    ("mqa_logits_fp8", "q", lambda q: apart(q, 32)),
    ("mqa_logits_fp8", "k", lambda k: apart(k, 16)),
    ("mqa_logits_fp8", "weights", lambda w: apart(w, 4)),
    ("mqa_logits_fp8", "out", lambda out: apart(out, 1)),
    ("paged_mqa_logits_fp8", "q", lambda q: apart(q, 32)),
    ("paged_mqa_logits_fp8", "weights", lambda w: apart(w, 4)),
    ("paged_mqa_logits_fp8", "block_table", lambda t: torch.nn.functional.pad(t, (0, 1))[:, :-1]),
    ("paged_mqa_logits_fp8", "out", lambda out: apart(out, 3)),
    ("quantize_fp8", "x", lambda x: apart(x, 4)),
    ("quantize_fp8", "x", lambda x: apart(x.bfloat16(), 8)),
    ("quantize_fp8", "x", lambda x: x[:1].expand(3, 256)),
    ("quantize_fp8", "x", lambda x: x.reshape(-1).as_strided((3, 256), (128, 1))),
    ("quantize_fp8", "x", lambda x: torch.randn(768).as_strided((3, 256), (8, 1))),
    ("silu_mul_quantize", "x", lambda x: apart(x, 8)),
    ("silu_mul_quantize", "x", experts_apart),
    ("silu_mul_quantize", "x", lambda x: x[:1, :1].expand(2, 3, 256)),
    ("silu_mul_quantize", "out", lambda out: (out[0], padded_scales(out[1], 4))),
    ("indexer_quantize_and_cache", "k", lambda k: apart(k, 8)),
    ("indexer_quantize_and_cache", "k", lambda k: k[:1].expand(3, -1)),
]


def _values(result: Any) -> list[torch.Tensor]:
    outputs = result if isinstance(result, tuple) else (result,)
    return [output.view(torch.uint8) if output.element_size() == 1 else output for output in outputs]


@pytest.mark.parametrize(
    "op, argument, change", SERVED, ids=[f"{op}-{name}-{i}" for i, (op, name, _) in enumerate(SERVED)]
)
def test_a_stride_that_is_served_changes_no_value(op: str, argument: str, change: Change) -> None:
    function, make = OPS[op]
    given = make()
    changed = change(given[argument])
    if isinstance(changed, torch.Tensor) and argument != "out":
        given[argument] = changed.contiguous()
    plain = {name: value.clone() if name == "kv_cache" else value for name, value in given.items()}
    expected = function(**plain)
    before = counters().scale_conversions
    result = function(**{**given, argument: changed})
    assert counters().scale_conversions == before, "nothing is copied"
    if op == "indexer_quantize_and_cache":
        assert torch.equal(given["kv_cache"], plain["kv_cache"])
        return
    for got, wanted in zip(_values(result), _values(expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


REFUSED: list[tuple[str, str, Change, str]] = [
    *[
        (op, argument, change, message)
        for op in GEMMS
        for argument, change, message in (
            ("a", lambda a: apart(a, 8), "16 bytes"),
            ("a", lambda a: a[..., :1, :].expand(a.shape), "elements or more"),
            ("b", lambda b: apart(b, 8), "16 bytes"),
            ("out", lambda out: apart(out, 4), "16 bytes"),
            ("out", lambda out: out[..., :1, :].expand(out.shape), "elements or more"),
            ("b_scale", lambda s: torch.stack([s, s], -1)[..., 0], "contiguous"),
        )
    ],
    ("grouped_gemm_fp8_contiguous", "b", experts_apart, "over all leading dimensions"),
    ("grouped_gemm_fp8_masked", "a", experts_apart, "over all leading dimensions"),
    ("grouped_gemm_fp8_masked", "b", experts_apart, "over all leading dimensions"),
    ("grouped_gemm_fp8_masked", "out", experts_apart, "over all leading dimensions"),
    ("grouped_gemm_fp8_masked", "masked_m", lambda m: torch.stack([m, m], 1)[:, 0], "contiguous"),
    ("grouped_gemm_fp8_contiguous", "offsets", lambda i: torch.stack([i, i], 1)[:, 0], "contiguous"),
    ("k_grouped_gemm_fp8", "a", lambda a: apart(a, 8), "16 bytes"),
    ("k_grouped_gemm_fp8", "a", lambda a: a[:1].expand(a.shape), "elements or more"),
    ("k_grouped_gemm_fp8", "b", lambda b: apart(b, 8), "16 bytes"),
    ("k_grouped_gemm_fp8", "b", lambda b: b[:1].expand(b.shape), "elements or more"),
    ("k_grouped_gemm_fp8", "out", lambda out: apart(out, 2), "16 bytes"),
    ("k_grouped_gemm_fp8", "out", lambda out: out[:, :1].expand(out.shape), "elements or more"),
    ("k_grouped_gemm_fp8", "out", experts_apart, "over all leading dimensions"),
    ("k_grouped_gemm_fp8", "offsets", lambda i: torch.stack([i, i], 1)[:, 0], "contiguous"),
    ("mqa_logits_fp8", "q", experts_apart, "over all leading dimensions"),
    ("mqa_logits_fp8", "q", lambda q: apart(q, 8), "16 bytes"),
    ("mqa_logits_fp8", "k", lambda k: apart(k, 4), "16 bytes"),
    ("mqa_logits_fp8", "k", lambda k: k[:1].expand(k.shape), "elements or more"),
    ("mqa_logits_fp8", "k_scale", lambda s: torch.stack([s, s], 1)[:, 0], "contiguous"),
    ("mqa_logits_fp8", "weights", lambda w: apart(w, 1), "16 bytes"),
    ("mqa_logits_fp8", "weights", lambda w: w[:1].expand(w.shape), "elements or more"),
    ("mqa_logits_fp8", "ks", lambda k: k[:1].expand(k.shape), "contiguous"),
    ("mqa_logits_fp8", "ke", lambda k: torch.stack([k, k], 1)[:, 0], "contiguous"),
    ("paged_mqa_logits_fp8", "q", lambda q: experts_apart(q[:, 0])[:, None].expand(q.shape), "leading"),
    ("paged_mqa_logits_fp8", "weights", lambda w: apart(w, 2), "16 bytes"),
    ("paged_mqa_logits_fp8", "context_lens", lambda c: c[:1].expand(c.shape), "contiguous"),
    ("paged_mqa_logits_fp8", "metadata", lambda m: torch.stack([m, m], -1)[..., 0], "contiguous"),
    ("quantize_fp8", "x", lambda x: apart(x, 2), "16 bytes"),
    ("silu_mul_quantize", "x", lambda x: apart(x, 4), "16 bytes"),
    ("indexer_quantize_and_cache", "k", lambda k: apart(k, 4), "16 bytes"),
]


@pytest.mark.parametrize(
    "op, argument, change, message",
    REFUSED,
    ids=[f"{op}-{name}-{i}" for i, (op, name, *_) in enumerate(REFUSED)],
)
def test_a_stride_that_is_refused_is_named(op: str, argument: str, change: Change, message: str) -> None:
    function, make = OPS[op]
    given = make()
    given[argument] = change(given[argument])
    with pytest.raises(ArgumentError, match=message) as caught:
        function(**given)
    assert caught.value.argument == argument and "stride (" in str(caught.value)


def test_row_strides() -> None:
    rows = torch.zeros(3, 4, 16)
    assert arguments.row_stride(rows) == 16
    assert arguments.row_stride(apart(rows, 5)) == 21
    assert arguments.row_stride(rows[:, :3]) == 0, "experts further apart than their rows"
    assert arguments.row_stride(rows[:, 0]) == 64
    assert arguments.row_stride(rows[:, :1]) == 64, "one row each: the next one is the next expert's"
    assert arguments.row_stride(rows[..., ::2]) == 0, "elements of a row are neighbours"
    assert arguments.row_stride(rows[:1, :1].as_strided((1, 1, 16), (3, 5, 1))) == 16, "a single row"
    assert arguments.row_stride(rows[:1].expand(3, 4, 16)) == 0
    assert arguments.row_stride(rows[:0]) == 16


def test_pitches() -> None:
    assert scales.pitch(torch.rand(2, 64).T[:50]) == 64
    assert scales.pitch(torch.rand(2, 64).T[4:50]) == 64
    assert scales.pitch(torch.rand(2, 62).T[:50]) == 0, "groups start at multiples of 16 bytes"
    assert scales.pitch(torch.rand(2, 64).T[1:50]) == 0, "the address does too"
    assert scales.pitch(torch.rand(3, 2, 64).mT[:, :50]) == 64
    assert scales.pitch(torch.rand(3, 5, 64)[:, :2].mT[:, :50]) == 0, "no group between two experts' groups"
    assert scales.pitch(torch.rand(3, 1, 64).mT[:, :50]) == 64, "experts of one group"
    assert scales.pitch(torch.rand(1, 64).T[:50]) == 52, "a single group"
    assert scales.pitch(torch.rand(1, 2, 64).mT[:, :1]) == 64


class _Maps:
    """In place of the encoder: the strides of the tensor maps that a launch makes, in bytes."""

    def __init__(self) -> None:
        self.strides: dict[int, Any] = {}

    def encode(self, ptr: int, dtype: str, dims: Any, strides: Any, *_: Any, **__: Any) -> bytes:
        self.strides[ptr] = strides if len(strides) > 1 else strides[0]
        return bytes(128)


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_Cuda, _Maps]]:
    cuda, made = _Cuda(monkeypatch), _Maps()
    monkeypatch.setattr("moe_fp8.ops.parameters.encode_tiled", made.encode)
    yield cuda, made
    cuda.gemm._gemm_plan.cache_clear()


@pytest.mark.parametrize("op", GEMMS)
def test_a_launch_of_a_gemm_takes_the_strides(op: str, maps: tuple[_Cuda, _Maps]) -> None:
    cuda, made = maps
    given = LAUNCHED[op]()
    given = {**given, "a": apart(given["a"], 48), "b": apart(given["b"], 16), "out": apart(given["out"], 8)}
    given["a_scale"] = padded_scales(given["a_scale"], 12)
    given["config"] = "64x64" if op == "gemm_fp8" else "64x96"
    cuda.run(op, given)
    scale_stride = (given["a"].shape[-2] + 3) // 4 * 4 + 12
    wanted = {"a": 256 + 48, "b": 256 + 16, "a_scale": scale_stride * 4, "out": 72 * 2}
    assert made.strides == {given[name].data_ptr(): stride for name, stride in wanted.items()}
    ((_, _, params),) = cuda.kernel.launches
    assert struct.unpack_from("<q", params, 4 * 128 + 3 * 8) == (72,)


def test_a_launch_of_ragged_k_takes_the_strides(maps: tuple[_Cuda, _Maps]) -> None:
    cuda, made = maps
    given = LAUNCHED["k_grouped_gemm_fp8"]()
    given |= {"a": apart(given["a"], 48), "b": apart(given["b"], 16), "out": apart(given["out"], 8)}
    given |= {"a_scale": padded_scales(given["a_scale"], 12), "b_scale": padded_scales(given["b_scale"], 4)}
    cuda.run("k_grouped_gemm_fp8", given)
    wanted: dict[str, Any] = {"a": 384 + 48, "a_scale": (8 + 12) * 4, "b_scale": (64 + 4) * 4}
    wanted["b"] = 384 + 16, 2 * (384 + 16)  # from even rows to odd rows, and from each of these to the next
    wanted["out"] = 72 * 4, 5 * 72 * 4  # of rows, and of experts' outputs of five rows
    assert made.strides == {given[name].data_ptr(): stride for name, stride in wanted.items()}
    ((_, _, params),) = cuda.kernel.launches
    assert struct.unpack_from("<q", params, 4 * 128 + 3 * 8) == (72,)


def test_a_launch_of_the_logits_takes_the_strides(maps: tuple[_Cuda, _Maps]) -> None:
    cuda, made = maps
    given = LAUNCHED["mqa_logits_fp8"]()
    given |= {"q": apart(given["q"], 32), "k": apart(given["k"], 16), "weights": apart(given["weights"], 4)}
    given["out"] = apart(given["out"], 2)
    cuda.run("mqa_logits_fp8", given)
    strides = [made.strides[given[name].data_ptr()] for name in ("q", "k", "k_scale", "weights")]
    assert strides == [160, 144, 12 * 4, 12 * 4]
    assert struct.unpack_from("<q", cuda.kernel.launches[0][2], 4 * 128 + 3 * 8) == (11,)
    given = LAUNCHED["paged_mqa_logits_fp8"]()
    given |= {"q": apart(given["q"], 32), "weights": apart(given["weights"], 4)}
    cuda.run("paged_mqa_logits_fp8", given)
    assert made.strides[given["q"].data_ptr()] == 160
    assert made.strides[given["weights"].data_ptr()] == 12 * 4


def test_a_launch_of_the_quantizer_takes_the_strides(maps: tuple[_Cuda, _Maps]) -> None:
    cuda, _ = maps
    given = LAUNCHED["quantize_fp8"]()
    given |= {"x": apart(given["x"], 8), "scale": padded_scales(given["scale"], 4)}
    cuda.quantize(**given)
    assert struct.unpack_from("<5q", cuda.kernel.launches[0][2])[3:] == (264, 12)


def test_a_single_row_may_have_any_stride() -> None:
    case = cases.dense_case(1, 64, 256)
    expected = moe_fp8.gemm_fp8(case.a, case.a_scale, case.b, case.b_scale)
    a, out = _one_row_of_any_stride(case.a), _one_row_of_any_stride(case.poisoned())
    assert a.stride() == (1, 1)
    moe_fp8.gemm_fp8(a, case.a_scale, case.b, case.b_scale, out=out)
    assert torch.equal(out, expected)
    q, scale = moe_fp8.quantize_fp8(_one_row_of_any_stride(torch.randn(2, 256)))
    assert q.is_contiguous() and scales.is_mn_major(scale)

"""The ops around the experts, and the whole layer, on the CPU: the reference, and what the ops refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fp8 import (
    ArgumentError,
    fused_moe,
    grouped_gemm_fp8_contiguous,
    interleave_gate_up,
    moe_combine,
    moe_permute,
    moe_workspace_bytes,
    quantize_fp8_blocks,
    route_topk,
    silu_mul_quantize,
    to_mn_major,
)
from tests import cases, moe_cases


@pytest.mark.parametrize("case", moe_cases.CASES.values(), ids=moe_cases.CASES)
def test_rows_and_sums(case: moe_cases.Case) -> None:
    if case.tokens < 5000:
        moe_cases.check(case, "cpu")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", moe_cases.LAYERS)
def test_layer(name: str, interleaved: bool) -> None:
    moe_cases.check_layer(name, "cpu", 128, interleaved)


def test_a_shared_expert_is_one_more_expert() -> None:
    layer = moe_cases.Layer(moe_cases.Case(9, 3, 6, 256), 128, "cpu")
    x, *_ = layer.inputs()
    weights, ids = torch.full((9, 3), 1.0), torch.full((9, 3), 5, dtype=torch.int32)
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    route_topk(logits, 2, scaling_factor=2.5, out=(weights[:, :2], ids[:, :2]))
    assert (ids[:, 2] == 5).all() and (weights[:, 2] == 1).all()
    both = layer.expected(x, ids, weights)
    assert cases.relative_error(layer.fused(x, ids, weights), both) < moe_cases.LAYER_TOLERANCE
    routed = layer.expected(x, ids[:, :2], weights[:, :2])
    alone = layer.expected(x, ids[:, 2:], weights[:, 2:])
    torch.testing.assert_close(both, routed + alone)


def test_layer_without_tokens_or_experts() -> None:
    layer = moe_cases.Layer(moe_cases.Case(9, 2, 3, 256, missing=1.0), 128, "cpu")
    x, ids, weights = layer.inputs()
    assert not layer.fused(x, ids, weights).any()
    assert layer.fused(x[:0], ids[:0], weights[:0]).shape == (0, 256)
    for wrong in ((x[:0], ids, weights), (x, ids[:, :0], weights[:, :0]), (x, ids[:0], weights[:0])):
        with pytest.raises(ArgumentError, match="topk_ids"):
            layer.fused(*wrong)
    none = x[:0], ids[:0], weights[:0]
    for at, dtype in enumerate((torch.float16, torch.float32, torch.float16)):
        with pytest.raises(ArgumentError, match="dtype"):
            layer.fused(*(tensor.to(dtype) if at == i else tensor for i, tensor in enumerate(none)))


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("w13", {"w13": torch.zeros(3, 128, 256, dtype=torch.float8_e4m3fn)}),
        ("w13", {"w13": torch.zeros(3, 256, 384, dtype=torch.float8_e4m3fn)}),
        ("w13", {"w13": torch.zeros(256, 256, dtype=torch.float8_e4m3fn)}),
        ("w13", {"w13": torch.zeros(0, 256, 256, dtype=torch.float8_e4m3fn)}),
        ("w13", {"w13": torch.zeros(1, 256, 256, dtype=torch.float8_e4m3fn).expand(1025, -1, -1)}),
        ("w2", {"w2": torch.zeros(3, 256, 256, dtype=torch.float8_e4m3fn)}),
        ("w13_scale", {"w13_scale": torch.ones(3, 1, 2)}),
        ("w2_scale", {"w2_scale": torch.ones(2, 2, 1)}),
        ("workspace", {"workspace": torch.zeros(100, dtype=torch.uint8)}),
        ("workspace", {"workspace": torch.zeros(1 << 20)}),
        ("workspace", {"workspace": torch.zeros(1 << 20, dtype=torch.uint8)[::2]}),
        ("topk_ids", {"topk_ids": torch.zeros(9, dtype=torch.int32)}),
        ("x", {"x": torch.zeros(9, 256)}),
    ],
)
def test_layer_names_the_wrong_argument(argument: str, given: dict[str, Any]) -> None:
    layer = moe_cases.Layer(moe_cases.Case(9, 2, 3, 256), 128, "cpu")
    x, ids, weights = layer.inputs()
    arguments: dict[str, Any] = {"x": x, "topk_ids": ids, "topk_weights": weights}
    arguments |= {name: getattr(layer, name) for name in ("w13", "w13_scale", "w2", "w2_scale")}
    with pytest.raises(ArgumentError) as caught:
        fused_moe(**(arguments | given))
    assert caught.value.argument == argument
    assert argument == "x" or caught.value.op == "fused_moe"


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_workspace_has_all_its_bytes(interleaved: bool) -> None:
    layer = moe_cases.Layer(moe_cases.Case(9, 2, 3, 256), 128, "cpu")
    x, ids, weights = layer.inputs()
    tensors = x, ids, weights, layer.w13, layer.w13_scale, layer.w2, layer.w2_scale
    num_bytes = moe_workspace_bytes(
        num_tokens=9, topk=2, num_experts=3, hidden_size=256, intermediate_size=128, interleaved=interleaved
    )
    workspace = torch.zeros(num_bytes, dtype=torch.uint8)
    fused_moe(*tensors, interleaved=interleaved, workspace=workspace)
    with pytest.raises(ArgumentError, match=f"at least {num_bytes} bytes") as caught:
        fused_moe(*tensors, interleaved=interleaved, workspace=workspace[:-1])
    assert caught.value.argument == "workspace"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_interleaved_rows_alternate_and_are_all_there(dtype: torch.dtype) -> None:
    gate = torch.arange(2 * 24 * 16).view(2, 24, 16) % 200 - 100
    w13 = torch.cat((gate, -gate), 1).to(dtype)
    mixed = interleave_gate_up(w13)
    assert mixed.shape == w13.shape and mixed.dtype is dtype and mixed.is_contiguous()
    back = torch.empty_like(w13.float())
    for row in range(24):
        block, within = divmod(row, 8)
        back[:, row] = mixed.float()[:, 16 * block + within]
        back[:, 24 + row] = mixed.float()[:, 16 * block + 8 + within]
    assert torch.equal(back, w13.float())
    assert not torch.equal(mixed.float(), w13.float())


def test_interleaving_takes_the_numbers_of_a_view() -> None:
    w13, pairs = torch.randn(2, 32, 16), torch.randn(2, 32, 16, dtype=torch.complex64)
    assert torch.equal(interleave_gate_up(torch._neg_view(w13)), -interleave_gate_up(w13))
    assert torch.equal(interleave_gate_up(pairs.conj()), interleave_gate_up(pairs).conj())


@pytest.mark.parametrize("shape", [(48, 16), (2, 40, 16)])
def test_interleaving_names_wrong_weights(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        interleave_gate_up(torch.zeros(shape))
    assert (caught.value.op, caught.value.argument) == ("interleave_gate_up", "w13")


def test_no_tokens() -> None:
    x = torch.empty(0, 256, dtype=torch.bfloat16)
    permuted = moe_permute(x, torch.empty(0, 8, dtype=torch.int32), num_experts=4)
    assert permuted.offsets.tolist() == [0] * 5
    assert moe_combine(x, permuted.rows).shape == (0, 256)


X, IDS = torch.zeros(4, 256, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("x", {"x": X[:, :200]}),
        ("x", {"x": X[:, :192]}),
        ("x", {"x": X.half()}),
        ("x", {"x": X[0]}),
        ("x", {"x": torch.zeros(4, 260, dtype=torch.bfloat16)[:, :256]}),
        ("x_scale", {"x_scale": torch.ones(4, 2)}),
        ("x_scale", {"x": X.to(torch.float8_e4m3fn)}),
        ("x_scale", {"x": X.to(torch.float8_e4m3fn), "x_scale": torch.ones(4, 3)}),
        ("x_scale", {"x": X.to(torch.float8_e4m3fn), "x_scale": torch.ones(2, 4)}),
        ("topk_ids", {"topk_ids": IDS[:3]}),
        ("topk_ids", {"topk_ids": IDS.short()}),
        ("topk_ids", {"topk_ids": torch.zeros(4, 600, dtype=torch.int32)}),
        ("num_experts", {"num_experts": 0}),
        ("num_experts", {"num_experts": 2000}),
        ("expert_map", {"expert_map": torch.zeros(8, dtype=torch.int64)}),
        ("expert_map", {"expert_map": torch.zeros(16, dtype=torch.int32)[::2]}),
    ],
)
def test_permute_names_the_wrong_argument(argument: str, given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": X, "topk_ids": IDS, "num_experts": 8} | given
    with pytest.raises(ArgumentError) as caught:
        moe_permute(arguments.pop("x"), arguments.pop("topk_ids"), **arguments)
    assert caught.value.argument == argument


def test_without_tokens_the_strides_of_ids_and_weights_do_not_matter() -> None:
    ids, weights = torch.zeros(2, 5, dtype=torch.int32).t()[:0], torch.zeros(2, 5).t()[:0]
    assert ids.stride(1) == 5
    found = moe_permute(X[:0], ids, num_experts=8)
    assert not found.offsets.any()
    assert moe_combine(X, found.rows, weights).shape == (0, X.shape[1])


def test_permute_refuses_outputs_that_are_too_small() -> None:
    out = moe_permute(X, IDS, num_experts=8)
    with pytest.raises(ArgumentError, match="a: expected"):
        moe_permute(X, IDS, num_experts=8, out=out._replace(a=out.a[:7], a_scale=out.a_scale[:7]))
    with pytest.raises(ArgumentError, match="offsets"):
        moe_permute(X, IDS, num_experts=9, out=out)
    with pytest.raises(ArgumentError, match="a_scale"):
        moe_permute(X, IDS, num_experts=8, out=out._replace(a_scale=out.a_scale.double()))


def test_permute_writes_to_a_plain_tuple() -> None:
    x = torch.randn(4, 256, generator=cases.generator(0, "cpu")).bfloat16()
    given = tuple(torch.zeros_like(tensor) for tensor in moe_permute(X, IDS, num_experts=8))
    permuted = moe_permute(x, IDS, num_experts=8, out=given)
    assert permuted.a is given[0] and permuted.rows is given[3]
    for one, other in zip(permuted, moe_permute(x, IDS, num_experts=8), strict=True):
        assert torch.equal(one.float(), other.float())
    with pytest.raises(ArgumentError) as caught:
        moe_permute(x, IDS, num_experts=8, out=given[:3])
    assert (caught.value.op, caught.value.argument) == ("moe_permute", "out")


def test_the_default_dtype_rounds_no_scale() -> None:
    x = torch.randn(4, 256, generator=cases.generator(0, "cpu")).bfloat16()
    expected = moe_permute(x, IDS, num_experts=8)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = moe_permute(x, IDS, num_experts=8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.a_scale, expected.a_scale) and torch.equal(got.a.float(), expected.a.float())


Y, ROWS = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("y", {"y": Y[:, :60]}),
        ("y", {"y": Y.float()}),
        ("rows", {"rows": ROWS.long()}),
        ("rows", {"rows": ROWS.T}),
        ("weights", {"weights": torch.ones(4, 3)}),
        ("weights", {"weights": torch.ones(4, 2).half()}),
        ("out", {"out": Y[:3]}),
        ("out", {"out": Y[:1].expand(4, 64)}),
        ("out", {"out": torch.zeros_like(Y).as_strided((4, 64), (32, 1))}),
    ],
)
def test_combine_names_the_wrong_argument(argument: str, given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"y": Y, "rows": ROWS, "weights": None, "out": None} | given
    with pytest.raises(ArgumentError) as caught:
        moe_combine(arguments["y"], arguments["rows"], arguments["weights"], out=arguments["out"])
    assert caught.value.argument == argument


def test_a_compiled_layer_gives_the_same_bits() -> None:
    w13, w13_scale = quantize_fp8_blocks(torch.randn(4, 256, 512).bfloat16())
    w2, w2_scale = quantize_fp8_blocks(torch.randn(4, 512, 128).bfloat16())

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        a, a_scale, offsets, rows = moe_permute(x, ids, num_experts=4)
        y = grouped_gemm_fp8_contiguous(a, a_scale, w13, w13_scale, offsets=offsets)
        a, a_scale = silu_mul_quantize(y, rounded=True)
        y = grouped_gemm_fp8_contiguous(a, a_scale, w2, w2_scale, offsets=offsets)
        return moe_combine(y, rows, weights)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 64):
        given = torch.randn(tokens, 512).bfloat16(), torch.randint(0, 4, (tokens, 2)), torch.rand(tokens, 2)
        assert torch.equal(compiled(*given), layer(*given))


def test_functions_for_offline_use_and_flags_name_what_is_no_tensor_and_no_flag() -> None:
    for function in (interleave_gate_up, quantize_fp8_blocks, to_mn_major):
        with pytest.raises(ArgumentError, match="expected a tensor, got NoneType"):
            function(None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="power_of_two: expected True or False, got no"):
        quantize_fp8_blocks(torch.ones(8, 8), power_of_two="no")  # type: ignore[arg-type]
    sizes = {"num_tokens": 3, "topk": 2, "num_experts": 2, "hidden_size": 128, "intermediate_size": 128}
    with pytest.raises(ArgumentError, match="interleaved: expected True or False, got no"):
        moe_workspace_bytes(**sizes, interleaved="no")  # type: ignore[arg-type]
    one = torch.ones(1, dtype=torch.bool)
    assert moe_workspace_bytes(**sizes, interleaved=one) == moe_workspace_bytes(**sizes, interleaved=True)  # type: ignore[arg-type]


def test_ids_beyond_the_map_go_to_no_expert() -> None:
    x, ids = torch.zeros(4, 128, dtype=torch.bfloat16), torch.tensor([[0], [2], [99], [-7]])
    permuted = moe_permute(x, ids, num_experts=2, expert_map=torch.tensor([1, 0], dtype=torch.int32))
    assert permuted[-1].tolist() == [[0], [-1], [-1], [-1]]

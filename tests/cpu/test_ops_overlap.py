"""Outputs share no memory with another argument: a kernel could overwrite what another block still reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fp8
from moe_fp8 import ArgumentError
from moe_fp8.ops import registry
from moe_fp8.ops.arguments import overlap
from tests import cases, moe_cases
from tests.cpu.op_arguments import I32, OPS, run
from tests.gemm_addend_cases import addend, call, named_case


def placed(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """Zeros of the tensor's form that begin at this byte of `memory`."""
    view = memory[start:].view(tensor.dtype)
    return view.as_strided(tensor.shape, tensor.stride(), view.storage_offset()).zero_()


def pairs() -> list[tuple[str, str, str]]:
    """Each op with an output and another tensor."""
    found = []
    for op, arguments in OPS.items():
        given, schema = arguments(), getattr(torch.ops.moe_fp8, op).default._schema
        values = {one.name: given[one.name] for one in schema.arguments}
        tensors = [name for name, value in values.items() if isinstance(value, Tensor) and value.numel()]
        outputs = [one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write]
        found += [(op, out, other) for out in outputs for other in tensors if out in tensors and other != out]
    return found


@pytest.mark.parametrize(("op", "output", "other"), pairs())
def test_an_output_over_another_argument_is_refused(op: str, output: str, other: str) -> None:
    arguments = OPS[op]()
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    apart = {
        **arguments,
        output: placed(arguments[output], memory, 0),
        other: placed(arguments[other], memory, 1 << 19),
    }
    registry.OPS[op].apart(tuple(apart[name] for name in registry.OPS[op].arguments))
    over = {**arguments, output: apart[output], other: placed(arguments[other], memory, 0)}
    with pytest.raises(ArgumentError, match="no memory of") as error:
        run(op, over)
    assert error.value.argument in (output, other)


def test_columns_of_one_buffer_are_apart() -> None:
    case = cases.dense_case(5, 64, 128, "cpu", 1)
    buffer = torch.zeros(5, 320, dtype=torch.uint8)
    a = buffer[:, 64:192].view(torch.float8_e4m3fn)
    a.copy_(case.a)
    for start in (192, 0):  # behind a, and before a by 64 bytes too few
        out = buffer[:, start : start + 128].view(torch.bfloat16)
        if start:
            moe_fp8.gemm_fp8(a, case.a_scale, case.b, case.b_scale, out=out)
            expected = moe_fp8.gemm_fp8(case.a, case.a_scale, case.b, case.b_scale)
            assert torch.equal(out, expected) and torch.equal(a.float(), case.a.float())
        else:
            with pytest.raises(ArgumentError, match="no memory of a"):
                moe_fp8.gemm_fp8(a, case.a_scale, case.b, case.b_scale, out=out)


@pytest.mark.parametrize("name", ["dense", "m_indices", "masked"])
def test_an_addend_shares_all_memory_or_none(name: str) -> None:
    case = named_case(name, (3, 130), 64, 128)
    c = addend(case)
    expected = call(case, c=c)
    same = c.clone()
    assert torch.equal(call(case, c=same.view(same.shape), out=same), expected)
    memory = torch.zeros(2 * c.numel())
    for step in (64, c.numel() - 64):  # by a row, and only the last row
        moved, out = memory[: c.numel()].view(c.shape), memory[step : step + c.numel()].view(c.shape)
        kept = memory.clone()
        with pytest.raises(ArgumentError, match="no memory of out") as error:
            call(case, c=moved, out=out)
        assert error.value.argument == "c" and torch.equal(memory, kept)


def test_wrong_memory_leaves_the_output_as_it_was() -> None:
    """`c` would be copied to `out` before the op itself looks."""
    case = named_case("dense", (130,), 64, 128)
    c = addend(case)
    memory = torch.full((c.numel() + 1024,), 2.0)
    out = memory[: c.numel()].view(c.shape)
    scale: Any = memory[64 : 64 + case.a_scale.shape[0]].view(case.a_scale.shape)
    with pytest.raises(ArgumentError, match="no memory of a_scale"):
        moe_fp8.gemm_fp8(case.a, scale, case.b, case.b_scale, c=c, out=out)
    assert (memory == 2).all()


@pytest.mark.parametrize("start", [256, 248])
@pytest.mark.parametrize("read, written", [((0, 3), (1, 2)), ((1, 2), (0, 3)), ((1, 2), (1, 2))])
def test_a_single_row_is_apart_from_other_columns(
    read: tuple[int, int], written: tuple[int, int], start: int
) -> None:
    buffer = torch.randn(3, 512, generator=cases.generator(0, "cpu")).bfloat16()
    y, out = buffer[slice(*read), :256], buffer[slice(*written), start : start + 256]
    places = torch.zeros(len(out), 1, dtype=torch.int32)
    if start == 256:
        assert torch.equal(moe_fp8.moe_combine(y, places, out=out), y[:1].expand_as(out))
    else:
        with pytest.raises(ArgumentError, match="no memory of y"):
            moe_fp8.moe_combine(y, places, out=out)


def test_rows_of_mn_major_scales_are_apart() -> None:
    buffer = torch.empty_strided((64, 3), (1, 64))
    assert not overlap(buffer[:32], buffer[32:])
    assert not overlap(buffer[40:41], buffer[:40])
    assert overlap(buffer[:33], buffer[32:])
    assert overlap(buffer[32:33], buffer[32:])


def _with_workspace() -> dict[str, tuple[Callable[..., Tensor], dict[str, Any], dict[str, Any]]]:
    """Each op with a workspace, its tensors by name with one output, and its other arguments."""
    layer = moe_cases.Layer(moe_cases.Case(9, 2, 3, 256), 128, "cpu")
    x, ids, weights = layer.inputs()
    x, x_scale = moe_fp8.quantize_fp8(x)
    names = ("w13", "w13_scale", "w2", "w2_scale")
    tokens = {"x": x, "topk_ids": ids, "topk_weights": weights, "x_scale": x_scale}
    tokens |= {name: getattr(layer, name) for name in names}
    tokens |= {"expert_map": torch.arange(3, dtype=torch.int32), "out": torch.zeros(9, 256).bfloat16()}
    mqa = dict(
        zip(("q", "k", "k_scale", "weights", "ks", "ke"), cases.mqa_case(4, 9, 8).arguments(), strict=True)
    )
    case = cases.paged_case([64, 128], 1, 8, 64)
    cached = {
        name: getattr(case, name) for name in ("q", "kv_cache", "weights", "context_lens", "block_table")
    }
    sizes = {"topk": 5, "max_context_len": 128, "num_sms": 4}
    return {
        "fused_moe": (moe_fp8.fused_moe, tokens, {}),
        "indexer_select": (moe_fp8.indexer_select, {**mqa, "out": torch.zeros(4, 5, dtype=I32)}, {"topk": 5}),
        "paged_indexer_select": (
            moe_fp8.paged_indexer_select, {**cached, "out": torch.zeros(2, 5, dtype=I32)}, sizes,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("op", ["fused_moe", "indexer_select", "paged_indexer_select"])
def test_a_workspace_over_another_argument_is_refused(op: str) -> None:
    function, tensors, options = _with_workspace()[op]
    expected = function(**tensors, **options).clone()
    size = 1 << 20
    memory = torch.zeros(3 * size, dtype=torch.uint8)
    workspace = memory[size : 2 * size]
    for name, tensor in tensors.items():
        for start in (size, 2 * size - 16, *([size - 16] if tensor.nbytes > 16 else [])):
            view = placed(tensor, memory, start)
            with pytest.raises(ArgumentError, match=f"no memory of {name}") as error:
                function(**{**tensors, name: view}, **options, workspace=workspace)
            assert (error.value.op, error.value.argument) == (op, "workspace")
        for start in (0, 2 * size):
            view = placed(tensor, memory, start)
            if tensor.element_size() == 1:
                view.view(torch.uint8).copy_(tensor.view(torch.uint8))
            else:
                view.copy_(tensor)
            got = function(**{**tensors, name: view}, **options, workspace=workspace)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("op", ["fused_moe", "indexer_select", "paged_indexer_select"])
def test_an_output_of_several_ops_over_an_argument_is_refused(op: str) -> None:
    function, tensors, options = _with_workspace()[op]
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    for name, tensor in tensors.items():
        if name in ("x", "out"):  # `out` of a layer may be x
            continue
        over = {**tensors, name: placed(tensor, memory, 0), "out": placed(tensors["out"], memory, 0)}
        with pytest.raises(ArgumentError, match=f"{op}: out: expected no memory of {name}"):
            function(**over, **options)


def test_scales_that_overlap_themselves_are_refused() -> None:
    x, ids = torch.zeros(4, 256).bfloat16(), torch.zeros(4, 2, dtype=I32)
    room = torch.zeros(64)
    q, values = (torch.zeros(rows, 256).to(torch.float8_e4m3fn) for rows in (4, 8))
    permuted = torch.zeros(3, dtype=I32), torch.zeros(4, 2, dtype=I32)
    w13 = torch.zeros(2, 512, 256).to(torch.float8_e4m3fn), torch.zeros(2, 4, 2)
    gated = {"a": values, "a_scale": torch.ones(8, 2), "offsets": torch.zeros(3, dtype=I32)}
    calls: list[tuple[Callable[[Tensor], object], tuple[int, ...], list[tuple[int, ...]]]] = [
        (lambda scale: moe_fp8.quantize_fp8(x, out=(q, scale)), (4, 2), [(1, 1), (0, 1), (1, 3)]),
        (
            lambda scale: moe_fp8.silu_mul_quantize(
                torch.zeros(2, 4, 512).bfloat16(), masked_m=torch.ones(2, dtype=I32),
                out=(values.view(2, 4, 256), scale),
            ),
            (2, 4, 2), [(4, 1, 4), (0, 1, 4)],
        ),
        (
            lambda scale: moe_fp8.moe_permute(x, ids, num_experts=2, out=(values, scale, *permuted)),
            (8, 2), [(1, 1), (1, 4)],
        ),
        (
            lambda scale: moe_fp8.grouped_gemm_silu_mul_fp8(
                gated["a"], gated["a_scale"], *w13, offsets=gated["offsets"], out=(values, scale)
            ), (8, 2), [(1, 1), (2, 4)],
        ),
    ]  # fmt: skip
    for call_with, shape, strides in calls:
        for stride in strides:
            with pytest.raises(ArgumentError, match="scale: expected elements that do not overlap"):
                call_with(room.as_strided(shape, stride))


def test_a_tensor_without_dimensions_shares_memory_like_any_other() -> None:
    weights, scale = moe_fp8.quantize_fp8_blocks(torch.randn(128, 128))
    room = torch.zeros(6, 128)
    ids = torch.zeros(6, 2, dtype=torch.int32)
    layer = torch.zeros(1, 256, 128).to(torch.float8_e4m3fn), torch.ones(1, 2, 1)
    layer += torch.zeros(1, 128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1, 1)
    x = torch.zeros(6, 128).bfloat16()
    with pytest.raises(ArgumentError, match="out"):
        moe_fp8.fused_moe(x, ids, room[:, :2], *layer, out=room[0, 1])
    with pytest.raises(ArgumentError, match="out"):
        moe_fp8.linear_fp8(x, weights, scale, out=weights.view(torch.uint8)[3, 3])


def test_the_last_element_of_spaced_rows_is_theirs() -> None:
    memory = torch.zeros(32)
    spaced = memory.view(4, 8)[:3, :4]  # its last element is the 20th
    for first, shared in ((18, True), (19, True), (20, False)):
        assert overlap(spaced, memory[first : first + 8]) == shared
        assert overlap(memory[first : first + 8], spaced) == shared


def test_a_single_row_with_a_stride_is_where_its_elements_are() -> None:
    room = torch.zeros(64)
    a_scale, x_scale = room.as_strided((2, 2), (1, 8), 0), room.as_strided((1, 2), (64, 4), 4)
    assert x_scale[0, 1].data_ptr() == a_scale[0, 1].data_ptr()
    for row in (x_scale, x_scale[0], x_scale[None]):
        assert overlap(row, a_scale) and overlap(a_scale, row)
    assert not overlap(room.as_strided((1, 2), (64, 8), 4), a_scale)

"""Outputs share no memory with another argument: a kernel could overwrite what another block still reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fp8
from moe_fp8 import ArgumentError
from moe_fp8.ops import registry
from tests import cases
from tests.cpu.op_arguments import OPS, run
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

"""What ops refuse beside single bad arguments: outputs, layouts, alignment, shapes that no kernel serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import moe_fp8
from moe_fp8 import ArgumentError, UnsupportedError
from moe_fp8.ops.registry import OPS as REGISTERED
from tests import cases
from tests.cpu import accepted_arguments as accepted
from tests.cpu.accepted_arguments import GEMMS, I32, OPS, Change, strided


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


@pytest.mark.parametrize("value", [None, [1, 2], np.zeros(3, np.float32)], ids=["None", "list", "numpy"])
@pytest.mark.parametrize("op", OPS)
def test_what_is_no_tensor_is_named(op: str, value: Any) -> None:
    function, make = OPS[op]
    arguments = make()
    first = next(iter(arguments))
    tensors = [name for name, one in arguments.items() if isinstance(one, torch.Tensor)]
    for name in set(tensors) - {first, "b", "out", "masked_m", "offsets"}:
        with pytest.raises(ArgumentError, match=f"{name}: expected a tensor, got {type(value).__name__}"):
            function(**{**arguments, name: value})


@pytest.mark.parametrize("layout", ["offsets", "psum", "m_indices"])
def test_an_index_that_is_a_list_is_named(layout: str) -> None:
    arguments = accepted.contiguous()
    del arguments["offsets"]
    with pytest.raises(ArgumentError, match=f"{layout}: expected a tensor, got list"):
        moe_fp8.grouped_gemm_fp8_contiguous(**arguments, **{layout: [0, 5]})


def _layer() -> dict[str, Any]:
    """Arguments of `fused_moe`."""
    w13, w2 = (torch.zeros(2, n, 128).to(torch.float8_e4m3fn) for n in (256, 128))
    return {
        "x": torch.zeros(3, 128).bfloat16(),
        "topk_ids": torch.zeros(3, 2, dtype=torch.int32),
        "topk_weights": None,
        "w13": w13,
        "w13_scale": torch.ones(2, 2, 1),
        "w2": w2,
        "w2_scale": torch.ones(2, 1, 1),
    }


@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
def test_a_layer_names_a_scale_that_is_none(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"fused_moe: {name}: expected a tensor, got NoneType"):
        moe_fp8.fused_moe(**{**_layer(), name: None})


@pytest.mark.parametrize("name", ["topk_weights", "x_scale", "expert_map", "workspace", "out"])
def test_a_layer_names_what_is_no_tensor(name: str) -> None:
    arguments: dict[str, Any] = {**_layer(), name: 4096}
    with pytest.raises(ArgumentError, match=f"^fused_moe: {name}: expected a tensor, got int"):
        moe_fp8.fused_moe(**arguments)


@pytest.mark.parametrize("limit", ["7", [7.0], 7j])
def test_a_limit_that_is_no_number_is_named(limit: Any) -> None:
    with pytest.raises(ArgumentError, match="fused_moe: limit: expected a positive number"):
        moe_fp8.fused_moe(**_layer(), limit=limit)


@pytest.mark.parametrize("op", ["gemm_fp8", "grouped_gemm_fp8_masked"])
def test_an_addend_that_is_no_tensor_is_named(op: str) -> None:
    function, make = OPS[op]
    arguments = make()
    del arguments["out"]
    with pytest.raises(ArgumentError, match=f"^{op}: c: expected a tensor, got float"):
        function(**arguments, c=1.0)


def test_a_remedy_fits_an_output_too() -> None:
    arguments = accepted.dense()
    wide = torch.zeros(4, 128, dtype=torch.bfloat16)[:, ::2]
    with pytest.raises(ArgumentError, match="allocate it contiguous if it is an output"):
        moe_fp8.gemm_fp8(**{**arguments, "out": wide})


def test_unaligned_addresses_are_refused() -> None:
    arguments = accepted.dense()
    storage = torch.zeros(4 * 256 + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    arguments["a"] = storage[1:].view(4, 256)
    with pytest.raises(ArgumentError, match="a: expected a 16-byte aligned address"):
        moe_fp8.gemm_fp8(**arguments)


def test_exactly_one_layout() -> None:
    arguments = accepted.contiguous()
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
        (0, strided, "q: expected a contiguous tensor"),
        (1, lambda scale: scale.double(), "scale: expected dtype"),
        (1, lambda scale: scale[:, :2], "scale: expected shape"),
    ],
)
def test_outputs_of_silu_mul(at: int, change: Change, message: str) -> None:
    arguments = accepted.silu_mul()
    out = list(arguments["out"])
    out[at] = change(out[at])
    with pytest.raises(ArgumentError, match=message):
        moe_fp8.silu_mul_quantize(**{**arguments, "out": out})


def test_experts_of_silu_mul_come_with_their_counts() -> None:
    x = accepted.silu_mul()["x"]
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
        moe_fp8.paged_mqa_logits_fp8(**{**accepted.paged(), "metadata": shifted})
    paged, room = accepted.paged(), torch.zeros(2 * 5, dtype=I32)
    assert room.data_ptr() % 16 == 0
    schedule, half = paged["metadata"], room[2:].view(4, 2)
    REGISTERED["paged_mqa_logits_metadata"].call(paged["context_lens"], 64, 2, half)
    assert torch.equal(half, schedule)
    moe_fp8.paged_mqa_logits_fp8(**{**paged, "metadata": half})


def test_shapes_no_kernel_serves() -> None:
    mqa = accepted.mqa()
    with pytest.raises(UnsupportedError, match="heads"):
        moe_fp8.mqa_logits_fp8(**{**mqa, "q": mqa["q"][:, :4].contiguous()})
    paged = accepted.paged()
    few = {"q": paged["q"][:, :, :4].contiguous(), "weights": paged["weights"][:, :4].contiguous()}
    with pytest.raises(UnsupportedError, match="heads"):
        moe_fp8.paged_mqa_logits_fp8(**{**paged, **few})
    with pytest.raises(UnsupportedError, match="block_size"):
        moe_fp8.paged_mqa_logits_metadata(torch.zeros(3, dtype=I32), block_size=16, num_sms=4)
    with pytest.raises(UnsupportedError, match="next_n"):
        moe_fp8.paged_mqa_logits_metadata(torch.zeros(3, dtype=I32), block_size=64, num_sms=4, next_n=9)
    cache = accepted.cache()
    with pytest.raises(UnsupportedError, match="head dimension"):
        moe_fp8.indexer_quantize_and_cache(**{**cache, "k": cache["k"][:, :96]})
    with pytest.raises(UnsupportedError, match="block_size"):
        moe_fp8.indexer_quantize_and_cache(**{**cache, "kv_cache": cache["kv_cache"][:, :16]})


def test_selections_refuse_the_same_shapes() -> None:
    mqa, paged = accepted.mqa(), accepted.paged()
    del mqa["out"], paged["metadata"], paged["out"]
    with pytest.raises(UnsupportedError, match=r"^indexer_select: q: .* heads"):
        moe_fp8.indexer_select(**{**mqa, "q": mqa["q"][:, :4].contiguous()}, topk=4)
    with pytest.raises(UnsupportedError, match="paged_indexer_select: block_size"):
        cache = paged["kv_cache"][:, :16]
        moe_fp8.paged_indexer_select(**{**paged, "kv_cache": cache}, topk=4, num_sms=4)


@pytest.mark.parametrize(
    "argument, change",
    [
        ("w13", lambda w: w[:, :128]),
        ("w13", lambda w: w.to(torch.bfloat16)),
        ("w13", lambda w: w.mT.contiguous().mT),
        ("w13_scale", lambda s: s[:, :1]),
        ("w13_scale", lambda s: s.double()),
        ("w13_scale", lambda s: s.mT.contiguous().mT),
    ],
)
def test_the_fused_gemm_calls_weights_by_their_name(argument: str, change: Change) -> None:
    case = cases.contiguous_case("offsets", (3, 2), 256, 256)
    given = {"a": case.a, "a_scale": case.a_scale, "w13": case.b, "w13_scale": case.b_scale}
    given[argument] = change(given[argument])
    with pytest.raises(ArgumentError) as caught:
        moe_fp8.grouped_gemm_silu_mul_fp8(**given, offsets=case.index)
    assert (caught.value.op, caught.value.argument) == ("grouped_gemm_silu_mul_fp8", argument)


def test_widths_of_given_outputs() -> None:
    with pytest.raises(ArgumentError, match="max_seqlen_k"):
        moe_fp8.mqa_logits_fp8(**accepted.mqa(), max_seqlen_k=8)
    with pytest.raises(ArgumentError, match="max_context_len"):
        moe_fp8.paged_mqa_logits_fp8(**{**accepted.paged(), "max_context_len": 79})


@pytest.mark.parametrize("w", [torch.zeros(4), torch.zeros(4, 4, dtype=torch.int32), torch.zeros(0, 128)])
def test_quantize_blocks_refuses(w: torch.Tensor) -> None:
    with pytest.raises(ArgumentError) as caught:
        moe_fp8.quantize_fp8_blocks(w)
    assert caught.value.argument == "w"


@pytest.mark.parametrize("op", ["quantize_fp8", "silu_mul_quantize", "moe_permute", "route_topk"])
def test_an_out_without_all_tensors_is_refused(op: str) -> None:
    x, ids = torch.zeros(4, 256, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int32)
    given: dict[str, tuple[Any, ...]] = {"moe_permute": (x, ids), "route_topk": (x, 2)}
    options = {"num_experts": 2} if op == "moe_permute" else {}
    for out in ((torch.zeros(4),), torch.zeros(2, 4)):
        with pytest.raises(ArgumentError, match=f"{op}: out: expected "):
            getattr(moe_fp8, op)(*given.get(op, (x,)), **options, out=out)

"""The ops in torch.compile and in exporters, and with tensors that have no contents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import moe_fp8
from tests import cases


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_equal_eager_ones(dynamic: bool) -> None:
    gen = cases.generator(0, "cpu")
    b, b_scale = cases.weights(3, 64, 256, gen)

    def layer(x: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, scale = moe_fp8.quantize_fp8(x)
        dense = moe_fp8.gemm_fp8(q, scale, b[0], b_scale[0])
        grouped = moe_fp8.grouped_gemm_fp8_contiguous(q, scale, b, b_scale, offsets=offsets)
        batched = q[None].expand(3, -1, -1).contiguous()
        batched_scale = scale[None].expand(3, -1, -1).contiguous()
        masked = moe_fp8.grouped_gemm_fp8_masked(
            batched, batched_scale, b, b_scale, counts, expected_m=2, config="16x128"
        )
        rows = torch.arange(x.shape[0])[None, :, None] < counts[:, None, None]
        masked = torch.where(rows, masked, 0)
        down, down_scale = moe_fp8.silu_mul_quantize(masked.repeat(1, 1, 4), masked_m=counts, limit=0.5)
        last = torch.where(rows, down.float(), 0), torch.where(rows, down_scale, 0)
        return dense, grouped, masked, *last, *moe_fp8.silu_mul_quantize(x, power_of_two=True)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for m in (6, 9):
        x = torch.randn(m, 256, generator=gen).bfloat16()
        offsets = torch.tensor([0, 2, 2, m], dtype=torch.int32)
        counts = torch.tensor([1, 0, m], dtype=torch.int32)
        for got, expected in zip(compiled(x, offsets, counts), layer(x, offsets, counts), strict=True):
            assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("own_workspace", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_block_of_experts_equals_the_eager_one(dynamic: bool, own_workspace: bool) -> None:
    gen = cases.generator(0, "cpu")
    router = torch.randn(6, 256, generator=gen)
    w13, w2 = cases.weights(6, 512, 256, gen), cases.weights(6, 256, 256, gen)
    size = moe_fp8.moe_workspace_bytes(
        num_tokens=9, topk=2, num_experts=6, hidden_size=256, intermediate_size=256
    )
    workspace = torch.empty(size, dtype=torch.uint8) if own_workspace else None

    def block(x: torch.Tensor) -> torch.Tensor:
        weights, ids = moe_fp8.route_topk(x.float() @ router.t(), 2, scoring="sigmoid", num_expert_group=2)
        return x + moe_fp8.fused_moe(x, ids, weights, *w13, *w2, limit=2.0, workspace=workspace)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (6, 9):
        x = torch.randn(tokens, 256, generator=gen).bfloat16()
        assert torch.equal(compiled(x), block(x))


@pytest.mark.parametrize("own_workspace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_inductor_adds_no_kernel_to_a_block_of_experts(interleaved: bool, own_workspace: bool) -> None:
    gen = cases.generator(0, "cpu")
    weights = (*cases.weights(4, 256, 256, gen), *cases.weights(4, 256, 128, gen))
    x, ids = torch.randn(9, 256, generator=gen).bfloat16(), torch.randint(0, 4, (9, 2), generator=gen)

    def block(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return moe_fp8.fused_moe(x, ids, None, *weights, interleaved=interleaved, workspace=workspace)

    size = moe_fp8.moe_workspace_bytes(
        num_tokens=9, topk=2, num_experts=4, hidden_size=256, intermediate_size=128, interleaved=interleaved
    )
    memory = torch.full((2 * size,), 7, dtype=torch.uint8)
    workspace = memory[:size] if own_workspace else None
    with torch.no_grad():
        out, code = run_and_get_code(torch.compile(block, fullgraph=True), x, ids)
        assert torch.equal(out, block(x, ids))
    (source,) = code
    assert source.count("torch.ops.moe_fp8.") >= (4 if interleaved else 5)
    assert "async_compile.cpp" not in source
    assert (memory[size:] == 7).all()


def test_an_exported_layer_takes_any_number_of_tokens() -> None:
    gen = cases.generator(0, "cpu")
    weights = (*cases.weights(4, 256, 256, gen), *cases.weights(4, 256, 128, gen))
    weight, weight_scale = cases.weights(1, 192, 256, gen)

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids = x[:, :2].long().abs() % 4
            return moe_fp8.fused_moe(x, ids, None, *weights), moe_fp8.linear_fp8(
                x, weight[0], weight_scale[0]
            )

    def tokens(count: int) -> torch.Tensor:
        return torch.randn(count, 256, generator=gen).bfloat16()

    count = torch.export.Dim("count", min=0, max=1000)
    exported = torch.export.export(
        Block(), (tokens(7),), dynamic_shapes={"x": {0: count}}, strict=False
    ).module()
    for some in (0, 1, 6, 33):
        x = tokens(some)
        for got, expected in zip(exported(x), Block()(x), strict=True):
            assert torch.equal(got, expected)


def test_a_compiler_may_copy_offsets_late() -> None:
    """So the second GEMM of a traced layer does not read them before the kernel before has ended."""
    gen = cases.generator(0, "cpu")
    weights = (*cases.weights(4, 256, 256, gen), *cases.weights(4, 256, 128, gen))
    operands = torch.randn(9, 256, generator=gen).bfloat16(), torch.randint(0, 4, (9, 2), generator=gen), None
    graph = make_fx(lambda *given: moe_fp8.fused_moe(*given))(*operands, *weights).graph
    op = torch.ops.moe_fp8.grouped_gemm_fp8_contiguous.default
    at = [argument.name for argument in op._schema.arguments].index("constant_weights")
    gemms = [node.args[at : at + 1] for node in graph.nodes if node.target is op]
    assert len(gemms) == 2 and not any(map(any, gemms))


def test_compiled_logits_equal_eager_ones() -> None:
    case = cases.paged_case([64, 128, 0], 2, 8, 64)
    mqa = cases.mqa_case(4, 9, 8)

    def indexer(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prefill = moe_fp8.mqa_logits_fp8(*arguments, fill=True)
        metadata = moe_fp8.paged_mqa_logits_metadata(case.context_lens, block_size=64, num_sms=4, next_n=2)
        decode = torch.zeros(6, 128)
        moe_fp8.paged_mqa_logits_fp8(
            case.q,
            case.kv_cache,
            case.weights,
            case.context_lens,
            case.block_table,
            metadata,
            max_context_len=128,
            out=decode,
        )
        return prefill, decode

    compiled = torch.compile(indexer, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(*mqa.arguments()), indexer(*mqa.arguments()), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("given", [False, True])
def test_a_compiled_selection_equals_the_eager_one(given: bool) -> None:
    """With a workspace of the caller's, and with a workspace of its own."""
    arguments = cases.mqa_case(4, 9, 8).arguments()
    workspace = torch.empty(1 << 16, dtype=torch.uint8) if given else None
    selection = partial(moe_fp8.indexer_select, topk=5, workspace=workspace)
    compiled = torch.compile(selection, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), selection(*arguments))


def test_a_compiled_paged_selection_equals_the_eager_one() -> None:
    case = cases.paged_case([64, 128, 0], 2, 8, 64)
    arguments = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    selection = partial(moe_fp8.paged_indexer_select, topk=5, max_context_len=128, num_sms=4)
    compiled = torch.compile(selection, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), selection(*arguments))


def _selections() -> dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Each selection, with its tensors and a workspace at the end."""
    mqa, paged = cases.mqa_case(4, 9, 8), cases.paged_case([64, 128, 0], 2, 8, 64)
    workspace = torch.empty(1 << 16, dtype=torch.uint8)
    cached = paged.q, paged.kv_cache, paged.weights, paged.context_lens, paged.block_table

    def prefill(*tensors: torch.Tensor) -> torch.Tensor:
        return moe_fp8.indexer_select(*tensors[:-1], topk=5, workspace=tensors[-1])

    def decode(*tensors: torch.Tensor) -> torch.Tensor:
        sizes = {"topk": 5, "max_context_len": 128, "num_sms": 4}
        return moe_fp8.paged_indexer_select(*tensors[:-1], **sizes, workspace=tensors[-1])

    return {"prefill": (prefill, (*mqa.arguments(), workspace)), "decode": (decode, (*cached, workspace))}


@pytest.mark.parametrize("lengths", [[64, 128, 0], [[64, 63], [127, 128], [0, 0]]], ids=["request", "token"])
def test_inductor_writes_only_to_the_workspace_of_a_selection(lengths: list[Any]) -> None:
    case = cases.paged_case(lengths, 2, 8, 64)
    tensors = case.q, case.kv_cache, case.weights, case.context_lens, case.block_table
    selection = partial(moe_fp8.paged_indexer_select, topk=5, max_context_len=128, num_sms=4)
    size = moe_fp8.indexer_workspace_bytes(num_queries=6, num_keys=128, topk=5, next_n=2, num_sms=4)
    memory = torch.full((4096 + 3 * size,), 7, dtype=torch.uint8)
    workspace = memory[4096 : 4096 + size]
    with torch.no_grad():
        compiled = torch.compile(selection, fullgraph=True)
        assert torch.equal(compiled(*tensors, workspace=workspace), selection(*tensors))
    assert (memory[:4096] == 7).all() and (memory[4096 + size :] == 7).all()


@pytest.mark.parametrize("own_workspace", [False, True])
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_compiled_selection_takes_any_number_of_queries(name: str, own_workspace: bool) -> None:
    torch._dynamo.reset()  # else what other tests have compiled counts
    compiles = 0

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal compiles
        compiles += 1
        return module.forward

    def prefill(count: int) -> tuple[torch.Tensor, ...]:
        return cases.mqa_case(count, count + 7, 8).arguments()

    def decode(count: int) -> tuple[torch.Tensor, ...]:
        case = cases.paged_case([70] * count, 1, 8, 64)
        return case.q, case.kv_cache, case.weights, case.context_lens, case.block_table

    workspace = torch.empty(1 << 18, dtype=torch.uint8) if own_workspace else None
    selection, make = {
        "prefill": (partial(moe_fp8.indexer_select, topk=5), prefill),
        "decode": (partial(moe_fp8.paged_indexer_select, topk=5, max_context_len=128, num_sms=4), decode),
    }[name]
    compiled = torch.compile(selection, backend=backend, fullgraph=True, dynamic=True)
    for count in (6, 7, 12, 33, 2):
        given = make(count)
        assert torch.equal(compiled(*given, workspace=workspace), selection(*given))
    assert compiles == 1


@pytest.mark.parametrize("name", ["prefill", "decode"])
@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.usefixtures("checked_mode")
def test_an_exporter_traces_a_selection(name: str, mode: str) -> None:
    selection, tensors = _selections()[name]
    traced = make_fx(selection, tracing_mode=mode)(*tensors)
    assert torch.equal(traced(*tensors), selection(*tensors))


@pytest.mark.parametrize("name", ["prefill", "decode"])
@pytest.mark.usefixtures("checked_mode")
def test_tensors_without_contents_are_not_checked(name: str) -> None:
    selection, tensors = _selections()[name]
    mode = FakeTensorMode()
    fake = [mode.from_tensor(tensor) for tensor in tensors]
    with mode:
        assert selection(*fake).shape == selection(*(tensor.to("meta") for tensor in fake)).shape
    assert selection(*(tensor.to("meta") for tensor in tensors)).is_meta

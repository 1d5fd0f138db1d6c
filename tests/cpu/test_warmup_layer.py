"""Every kernel that `fused_moe` launches is in the plan: the layer itself launches, without data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.ops import fused_moe
from moe_fp8.settings import settings
from moe_fp8.specs import KernelSpec
from moe_fp8.warmup import GemmShape, Plan, PlanOptions, gemm_shapes, load_model, plan
from moe_fp8.warmup.options import every
from moe_fp8.warmup.shapes import experts_per_token
from tests.cpu.cuda_side import import_cuda_side
from tests.remembered import forget_launches

CONFIGS = Path(__file__).parent.parent / "configs"

#: Ranks that have all experts of the model, or a share down to one, and how they are served.
RANKS = {
    "deepseek_v3 of 256": PlanOptions(tp=8, max_tokens=4096),
    "deepseek_v3 of 32": PlanOptions(tp=8, ep=8, max_tokens=4096),
    "deepseek_v3 of 9": PlanOptions(tp=8, ep=32, max_tokens=512, fuse_shared=True),
    "deepseek_v3 of 1": PlanOptions(tp=8, ep=256, max_tokens=64),
    "deepseek_v3 of 5": PlanOptions(tp=1, ep=64, max_tokens=64, redundant_experts=64),
    "deepseek_v3 of 4": PlanOptions(tp=1, ep=64, max_tokens=1, max_batch=3, engine="vllm"),
    "glm_45 of 40": PlanOptions(tp=4, ep=4, max_tokens=4096, num_sms=(132, 78)),
    "qwen3_30b of 128": PlanOptions(max_tokens=4096),
    "qwen3_30b of 16": PlanOptions(tp=8, ep=8, max_tokens=4096, batch_invariant=(False, True)),
    "qwen3_30b invariant of 16": PlanOptions(tp=8, ep=8, max_tokens=4096, batch_invariant=True),
}

LARGE = (65, 100, 256, 1000, 4096)


class _Kernel:
    def prepare(self, device: int) -> None: ...

    def launch(self, *arguments: object) -> None: ...


class Server:
    """The layer of a rank on meta tensors, which count as CUDA tensors here; records what it launches."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launched: list[KernelSpec] = []
        self.sms, self.device, self.patch = 132, "", patch
        launch = import_cuda_side("moe_fp8.ops.launch", patch)
        for name, replaced in {
            "get_kernel": lambda spec: self.launched.append(spec) or _Kernel(),
            "repeat": lambda call: False,
            "move": lambda call, form, check: False,
            "starts_with_address": lambda: False,
            "ensure_context": lambda device: None,
            "num_sms": lambda device: self.sms,
            "table": lambda device: self.device,
            "_raw_stream": lambda device: 0,
            "_exchange_device": lambda device: device,
        }.items():
            patch.setattr(launch, name, replaced)
        forget_launches(launch, patch)
        parameters = import_cuda_side("moe_fp8.ops.parameters", patch)
        patch.setattr(parameters, "encode_tiled", lambda *described: bytes(128))
        patch.setattr(parameters, "_address", lambda spec, tensor: 0)  # of tensors that are never read
        patch.setattr("moe_fp8.ops.arguments.get_num_sms", lambda device: self.sms)
        patch.setattr("moe_fp8.ops.arguments.workers", lambda op, tensor, num_sms: num_sms or self.sms)
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        self.gemm_cache = import_cuda_side("moe_fp8.ops.gemm.cuda", patch)._gemm_plan

    def calls(self, planned: Plan, tokens: Iterable[int]) -> Iterator[_Call]:
        """Calls of so many tokens, with and without a map, on every device and with every option."""
        options, topk = planned.options, experts_per_token(planned.model, planned.options)
        up, down = shapes_of(planned)
        experts, width, hidden = up.num_experts, down.k, down.n
        assert experts is not None and (up.n, up.k) == (2 * width, hidden)
        fp8 = torch.float8_e4m3fn
        w13 = empty(experts, 2 * width, hidden, dtype=fp8), empty(experts, 2 * width // 128, hidden // 128)
        w2 = empty(experts, hidden, width, dtype=fp8), empty(experts, hidden // 128, width // 128)
        everywhere = experts * options.ep
        maps = [None, *(empty(length, dtype=torch.int32) for length in (everywhere, 3 * everywhere))]
        for self.sms in options.sm_budgets:
            for invariant in every(options.batch_invariant):
                self.patch.setenv("MOE_FP8_BATCH_INVARIANT", str(int(invariant)))
                settings.cache_clear()
                for self.device in gemm_table.devices():
                    self.gemm_cache.cache_clear()
                    for count in tokens:
                        x = empty(count, hidden, dtype=torch.bfloat16)
                        ids = empty(count, topk, dtype=torch.int32)
                        for expert_map in maps:
                            for interleaved in (False, "grouped_gemm_silu_mul_fp8" in options.calls.further):
                                self.launched.clear()
                                with torch.no_grad():
                                    fused_moe(
                                        x, ids, None, *w13, *w2, expert_map=expert_map,
                                        interleaved=interleaved,
                                    )  # fmt: skip
                                assert len(self.launched) == (4 if interleaved else 5)
                                for spec in self.launched:
                                    yield _Call(count, spec)


class _Call(NamedTuple):
    """A launch of a layer with so many tokens."""

    tokens: int
    spec: KernelSpec


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def shapes_of(planned: Plan) -> tuple[GemmShape, GemmShape]:
    """The experts' two GEMMs."""
    routed = {shape.what: shape for shape in gemm_shapes(planned.model, planned.options)}
    return routed["experts.gate_up"], routed["experts.down"]


def planned_for(name: str) -> Plan:
    planned = plan(load_model(CONFIGS / f"{name.split()[0]}.json"), RANKS[name])
    assert shapes_of(planned)[0].num_experts == int(name.split()[-1])
    return planned


def tokens_of(planned: Plan) -> list[int]:
    options = planned.options
    most = max(options.max_tokens, options.most_decoded) * options.dp
    return [tokens for tokens in (*range(1, 65), *LARGE) if tokens <= most]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        made = Server(patch)
        yield made
        made.gemm_cache.cache_clear()
    settings.cache_clear()


@pytest.mark.parametrize("name", RANKS)
def test_every_launch_of_a_layer_is_in_the_plan(name: str, server: Server) -> None:
    planned = planned_for(name)
    calls = list(server.calls(planned, tokens_of(planned)))
    assert calls and not [call for call in calls if call.spec not in planned]


def test_a_kernel_that_the_plan_lacks_is_found(server: Server) -> None:
    other = plan(load_model(CONFIGS / "qwen3_30b.json"), PlanOptions(engine="sglang"))
    assert [call for call in server.calls(other, [8]) if call.spec not in other]

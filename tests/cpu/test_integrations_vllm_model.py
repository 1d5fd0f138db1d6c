"""The limits of the calls of a model that vLLM has loaded, with ranks that share it in several ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_fp8.integrations import planning
from moe_fp8.integrations import vllm as plug_in
from moe_fp8.problems import GemmProblem
from moe_fp8.specs import kernel_spec
from tests.cpu.vllm_stand_in import Fake, exchange, layer, vllm

__all__ = ["vllm"]


def _described(
    vllm: Fake, patch: pytest.MonkeyPatch, speculative: Any = None, *layers: Any, **parallel: Any
) -> Any:
    """What the plug-in plans for `layers` with 64 tokens of at most 32 requests."""
    from moe_fp8.integrations.vllm import model as models

    patch.setattr(models, "get_num_sms", lambda: 132)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=32),
        parallel_config=SimpleNamespace(
            **{"prefill_context_parallel_size": 1, "use_ubatching": False, **parallel}
        ),
        speculative_config=speculative,
    )
    sizes = SimpleNamespace(max_model_len=64, hf_text_config=SimpleNamespace())
    return models.describe_loaded(torch.nn.Sequential(*layers), config, sizes)


def test_each_rank_of_prefill_context_parallelism_has_tokens_of_its_own(
    vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def groups(**parallel: int) -> int:
        return int(_described(vllm, monkeypatch, None, **parallel).data_parallel)

    assert groups(data_parallel_size=2, prefill_context_parallel_size=4) == 8
    # vLLM 0.33 sets the limit of elastic expert parallelism, which is the number of groups without it.
    assert groups(data_parallel_size=2, elastic_ep_max_dp_size=2) == 2
    assert groups(data_parallel_size=2, elastic_ep_max_dp_size=6) == 6


@pytest.mark.parametrize(
    ("given", "copies"),
    [
        (exchange(8, gathers=False), 4),  # four ranks of each of two groups send the same tokens
        (exchange(8, sequence=4, gathers=False), 1),
        (exchange(8), 1),
        (exchange(), 1),
    ],
)
def test_tensor_parallel_ranks_may_all_send_their_tokens(
    given: SimpleNamespace, copies: int, vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in.activate(["experts"])
    holder = SimpleNamespace(experts_cls=vllm.oracle.backend_to_kernel_cls("triton")[0])
    experts = layer(
        {"w13_weight": (4, 512, 256), "w2_weight": (4, 256, 256)},
        quant_method=holder,
        moe_config=given,
        top_k=2,
    )
    loaded = _described(vllm, monkeypatch, None, experts, data_parallel_size=2)
    assert loaded.data_parallel == 2 * copies
    most = max(
        last for row in planning.plan_loaded(loaded).rows if row.op == "moe_permute" for _, last in row.rows
    )
    assert most == 64 * 2 * copies


def test_a_draft_model_gets_a_token_more_of_each_request(vllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in.activate(["dense"])
    shape = (4096, 12288)
    linear = layer({"weight": shape}, quant_method=SimpleNamespace(fp8_linear=vllm.kernels[0]()))
    for method, most in (("draft_model", 96), ("mtp", 64)):
        speculative = SimpleNamespace(method=method, num_speculative_tokens=1)
        loaded = _described(vllm, monkeypatch, speculative, linear, data_parallel_size=1)
        assert loaded.max_tokens == most and loaded.dense == {shape}
        specs = set(planning.plan_loaded(loaded).specs)
        assert (kernel_spec(GemmProblem("dense", 96, *shape)) in specs) == (method == "draft_model")

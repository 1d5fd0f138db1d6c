"""The plan has the kernel for every number of rows of every GEMM; the ops themselves make the problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moe_fp8.errors import ConfigError
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.problems import GemmLayout, gemm_selection
from moe_fp8.settings import settings as package_settings
from moe_fp8.warmup import GemmShape, Parallelism, Plan, PlanOptions, describe, gemm_shapes, load_model, plan
from tests.cpu.cuda_side import import_cuda_side

CONFIGS = Path(__file__).parent.parent / "configs"

#: GLM-4.5's own FP8 has a scale for each channel; here it has its dimensions and the others' block scales.
REAL = {
    "deepseek_v3": PlanOptions(tp=8, ep=8, max_tokens=4096),
    "deepseek_v32": PlanOptions(tp=8, ep=32, max_tokens=1024, next_n=4),
    "glm_45": PlanOptions(tp=4, ep=4, max_tokens=4096),
    "glm_5": PlanOptions(tp=8, ep=8, max_tokens=4096, next_n=2),
    "kimi_k2": PlanOptions(tp=8, ep=8, max_tokens=4096, num_sms=78),
    "qwen3_235b": PlanOptions(tp=4, ep=4, max_tokens=4096),
    "qwen3_30b": PlanOptions(max_tokens=4096, max_batch=1024),
    "qwen3_30b invariant": PlanOptions(max_tokens=4096, batch_invariant=True),
}

GROUPED: tuple[GemmLayout, ...] = ("m_indices", "psum", "offsets", "masked")


@pytest.fixture(scope="module")
def launcher() -> Iterator[ModuleType]:
    """`moe_fp8.ops.gemm.cuda`, which needs no GPU up to the launch; device numbers count the tables."""
    with pytest.MonkeyPatch.context() as patch:
        module = import_cuda_side("moe_fp8.ops.gemm.cuda", patch)
        patch.setattr(module.launch, "table", lambda device: gemm_table.devices()[device])
        # The patch restores this in the end; the sweep sets it for each plan.
        patch.setattr(module, "settings", module.settings)
        yield module


def most_rows(planned: Plan, layout: str, shape: GemmShape) -> int:
    """Rows of the largest buffer that an engine with these options makes."""
    options, model = planned.options, planned.model
    tokens = max(options.max_tokens, options.max_batch * options.next_n)
    parallelism = Parallelism(options.tp, options.ep)
    if layout == "dense":
        return max(tokens, model.max_positions) if shape.whole_context else tokens
    if layout == "masked":
        return options.max_batch * options.next_n * parallelism.dp
    return tokens * parallelism.dp * model.experts_per_token + model.num_experts // options.ep * 127


def uncovered(planned: Plan, launcher: ModuleType) -> Iterator[tuple[Any, ...]]:
    """The arguments of `_gemm_plan` in allowed calls whose kernel is not in the plan, each once.

    The calls have every M without a hint and, in the largest buffer, every hint.
    """
    options = planned.options
    specs, devices = set(planned.specs), range(len(gemm_table.devices()))
    given = replace(package_settings(), batch_invariant=options.batch_invariant)
    launcher.settings = lambda: given  # type: ignore[attr-defined]
    select = launcher._gemm_plan.__wrapped__
    parallelism = Parallelism(options.tp, options.ep)
    for shape in gemm_shapes(planned.model, parallelism, pad_intermediate=options.pad_intermediate):
        n, k, experts = shape.n, shape.k, shape.num_experts or 1
        for layout in ("dense",) if shape.num_experts is None else GROUPED:
            most = most_rows(planned, layout, shape)
            calls = [(m, None) for m in range(1, most + 1)]
            if layout != "dense":
                calls += [(most, hint) for hint in range(most + 2)]
            seen: set[tuple[int, int | None]] = set()
            for m, hint in calls:
                rows = gemm_selection(layout, m, experts, hint)  # the selector looks only at these
                if rows in seen:
                    continue
                seen.add(rows)
                for device in devices:
                    call = (layout, rows[0], n, k, experts, rows[1], False, None, device, options.num_sms)
                    if select(*call).spec not in specs:
                        yield call


@pytest.mark.parametrize("name", REAL)
def test_every_m_of_a_real_model_is_in_its_plan(name: str, launcher: ModuleType) -> None:
    planned = plan(load_model(CONFIGS / f"{name.split()[0]}.json"), REAL[name])
    assert list(uncovered(planned, launcher)) == []


def test_a_missing_kernel_is_found(launcher: ModuleType) -> None:
    planned = plan(load_model(CONFIGS / "qwen3_30b.json"), PlanOptions(max_tokens=64, max_batch=8))
    for row in planned.rows:
        if row.layout in ("dense", "offsets"):
            object.__setattr__(planned, "specs", tuple(spec for spec in planned.specs if spec != row.spec))
            assert any(True for _ in uncovered(planned, launcher)), row
            object.__setattr__(planned, "specs", (*planned.specs, row.spec))


def times(multiple: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most // multiple).map(lambda count: count * multiple)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A `config.json` of any model that the package serves."""
    heads = draw(st.sampled_from((8, 16, 32, 64, 96)))
    experts = draw(st.sampled_from((4, 8, 24, 64, 128, 160)))
    config: dict[str, Any] = {
        "model_type": "glm4_moe",
        "vocab_size": 1024,
        "torch_dtype": "bfloat16",
        "hidden_size": draw(times(128, 8192)),
        "num_hidden_layers": 4,
        "max_position_embeddings": draw(st.integers(1, 2048)),
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(experts, 10))),
        "moe_intermediate_size": draw(times(128, 4096)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "first_k_dense_replace": draw(st.integers(0, 2)),
        "intermediate_size": draw(times(128, 20480)),
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    if draw(st.booleans()):
        config |= {"num_key_value_heads": draw(st.sampled_from((1, 4, 8))), "head_dim": 128}
    else:
        config |= {
            "model_type": "deepseek_v3",
            "q_lora_rank": draw(st.none() | times(128, 2048)),
            "kv_lora_rank": draw(times(128, 1024)),
            "qk_nope_head_dim": draw(st.sampled_from((64, 128, 192))),
            "qk_rope_head_dim": 64,
            "v_head_dim": draw(st.sampled_from((128, 256))),
        }
    return config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    config=configs(),
    tp=st.sampled_from((1, 2, 4, 8)),
    ep=st.sampled_from((1, 2, 4, 8)),
    max_tokens=st.integers(1, 600),
    max_batch=st.integers(1, 96),
    next_n=st.integers(1, 4),
    num_sms=st.sampled_from((1, 2, 3, 66, 78, 114, 132)),
    batch_invariant=st.booleans(),
)
def test_every_m_of_any_model_is_in_its_plan(
    launcher: ModuleType,
    config: dict[str, Any],
    tp: int,
    ep: int,
    max_tokens: int,
    max_batch: int,
    next_n: int,
    num_sms: int,
    batch_invariant: bool,
) -> None:
    options = PlanOptions(
        tp=tp,
        ep=ep,
        max_tokens=max_tokens,
        max_batch=max_batch,
        next_n=next_n,
        num_sms=num_sms,
        pad_intermediate=True,
        batch_invariant=batch_invariant,
    )
    try:
        planned = plan(describe(config), options)
    except ConfigError:
        assume(False)
    assert list(uncovered(planned, launcher)) == []

"""The examples run, compute what they say, and call only kernels that they plan."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from moe_fp8.warmup import PlanOptions, describe, plan

STEP = Path(__file__).resolve().parents[2] / "examples" / "engine_step.py"


def test_the_step_runs_frozen() -> None:
    done = subprocess.run(
        [sys.executable, str(STEP)], cwd=STEP.parents[1], capture_output=True, text=True, check=True
    )
    assert "kernels planned; [64, 512] on" in done.stdout
    assert len(STEP.read_text().splitlines()) <= 60


def test_the_step_is_a_mixture_of_experts() -> None:
    names = runpy.run_path(str(STEP))
    torch.manual_seed(0)
    layer = names["Layer"]("cpu")
    x = torch.randn(7, names["HIDDEN"]).bfloat16()

    def weights(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        blocks = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        return values.float() * blocks[:, : values.shape[1], : values.shape[2]]

    gate_up, down = (
        weights(getattr(layer, name), getattr(layer, f"{name}_scale")) for name in ("gate_up", "down")
    )
    chosen, ids = (x @ layer.router.t()).float().softmax(-1).topk(names["TOPK"])
    chosen /= chosen.sum(-1, keepdim=True)
    expected = torch.zeros(x.shape)
    for token, (some, experts) in enumerate(zip(chosen, ids, strict=True)):
        for weight, expert in zip(some, experts, strict=True):
            gate, up = (gate_up[expert] @ x[token].float()).chunk(2)
            expected[token] += weight * (down[expert] @ (silu(gate) * up))
    assert (layer(x) - expected).norm() / expected.norm() < 0.05


def test_the_page_on_engines_puts_our_module_in_the_place_of_deep_gemm() -> None:
    page = (STEP.parents[1] / "docs" / "engines.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    code += "import deep_gemm\nassert deep_gemm.fp8_gemm_nt.__module__.startswith('moe_fp8.')\n"
    code += "moe_fp8.integrations.uninstall()\nassert moe_fp8.integrations.installed() == ()\n"
    subprocess.run([sys.executable, "-c", code], cwd=STEP.parents[1], check=True)
    assert page.count("| `grouped_gemm_fp8_contiguous`") == STEP.read_text().count(
        "grouped_gemm_fp8_contiguous("
    )


@pytest.mark.parametrize(
    "op", ["route_topk", "moe_permute", "grouped_gemm_fp8_contiguous", "silu_mul_quantize", "moe_combine"]
)
def test_the_plan_has_the_ops_of_the_step(op: str) -> None:
    names = runpy.run_path(str(STEP))
    rows = plan(describe(names["CONFIG"]), PlanOptions(max_tokens=64, max_batch=64)).rows
    assert op in {row.op for row in rows}
    assert f"moe_fp8.{op}(" in STEP.read_text()

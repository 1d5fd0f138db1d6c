"""Runs an engine's layers on the CPU, with its Triton kernels interpreted and the reference of our ops.

    python -m tests.engines.interpreted vllm-0.33.0

It is a process of its own because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["DG_JIT_CACHE_DIR"] = "unused"

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import triton.language
from torch import Tensor

from tests.engines import ops, sglang_layers, vllm_layers
from tests.engines.providers import Ours
from tests.engines.step import Moe, Step, compare, eager
from tests.engines.vllm_indexer import DecodeStep, Indexer, PrefillStep

_MOE = (Moe(5, 2, 4, 256, 384), Moe(9, 2, 4, 256, 384, ranks=2))


def check(step: Step, overall: float) -> None:
    out = eager(step, 0)
    expected = step.expected()
    compare({name: out[name].to(expected[name].dtype) for name in expected}, expected, overall, 2 * overall)


def silu_mul_quant(
    *,
    input: Tensor,
    output: Tensor,
    use_ue8m0: bool,
    expert_ends: Tensor,
    expert_alignment: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """In the place of a kernel of vLLM's with products of bf16, which the interpreter takes as integers."""
    ends = torch.cat([expert_ends.new_zeros(1), expert_ends])
    starts = -(-ends[:-1] // expert_alignment) * expert_alignment
    row = torch.arange(len(input))[:, None]
    live = ((row >= starts) & (row < expert_ends)).any(1)
    scale = torch.empty(output.shape[1] // 128, len(input)).T
    ops.quantize(ops.silu_mul(input), output, scale, use_ue8m0, live)
    return output, scale


class _Number(int):
    def to(self, dtype: Any) -> _Number:
        return self


class _Language:
    """Triton's language with ranges of numbers that have `to`, as on a GPU, where they are tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(triton.language, name)

    def range(self, *bounds: Any, **options: Any) -> list[_Number]:
        return [_Number(number) for number in triton.language.range(*bounds, **options)]


def run_vllm(layers: vllm_layers.VllmLayers) -> None:
    layers.module(vllm_layers.EXPERTS).silu_mul_per_token_group_quant_fp8_colmajor = silu_mul_quant
    for case in _MOE:
        for batched in (False, True):
            check(vllm_layers.ExpertsStep(layers, case, "cpu", batched), 0.06)
    check(PrefillStep(layers, Indexer((70, 5, 600), (3, 5, 2), topk=512), "cpu"), 1e-5)
    check(DecodeStep(layers, Indexer((70, 0, 600), (1, 1, 1), topk=512), "cpu"), 1e-5)
    check(DecodeStep(layers, Indexer((70, 2, 600), (2, 2, 2), heads=32, topk=512), "cpu"), 1e-5)


def run_sglang(layers: sglang_layers.SglangLayers) -> None:
    kernels = layers.module(sglang_layers.KERNELS)
    # The interpreter looks for the language among a kernel's globals, so its own name stays there too.
    kernels.language, kernels.tl = triton.language, _Language()
    kernels.range = kernels.tl.range
    layers.module(sglang_layers.ENTRYPOINT)._ensure_cuda = lambda pair: pair
    hopper = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048)
    torch.cuda.get_device_properties = lambda device=None: hopper
    for case in _MOE:
        for layout in ("compact", "masked"):
            check(sglang_layers.RunnerStep(layers, case, "cpu", layout), 0.06)


def main(name: str) -> None:
    vllm = name == vllm_layers.RELEASE.name
    assert vllm or name == sglang_layers.RELEASE.name, name
    layers = vllm_layers.VllmLayers() if vllm else sglang_layers.SglangLayers()
    with Ours().active(), layers.active():
        for module in layers.real:
            importlib.import_module(module)
        run_vllm(layers) if vllm else run_sglang(layers)
    idle = sorted(layers.provided.keys() - layers.used)
    assert not idle, f"no code of {name} asks for the stand-ins {idle}"
    loaded = sorted(layers.source(name) for name in layers.real)
    assert loaded == sorted(layers.files), "not every module has been loaded"


if __name__ == "__main__":
    main(sys.argv[1])

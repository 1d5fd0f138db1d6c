"""What the plug-in for SGLang uses and replaces, in SGLang's sources."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_fp8 import integrations, paged_mqa_logits_metadata
from moe_fp8.integrations import deep_gemm
from moe_fp8.integrations.sglang import schedule
from tests.cpu.sglang_stand_in import KernelType
from tests.engines.layers import EngineLayers
from tests.engines.sglang_layers import RELEASE
from tests.engines.sources import fetch, files, skipped, tree

pytestmark = pytest.mark.skipif(skipped(), reason="ENGINE_SOURCES=skip")

#: Names of SGLang that the plug-in uses or replaces: module -> names that the module defines.
USED = {
    "sglang.srt.utils.common": ("get_device_sm", "is_cuda"),
    "sglang.srt.plugins": ("GENERAL_PLUGINS_GROUP", "load_plugins"),
    "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookRegistry.register", "HookType.AROUND"),
    "sglang.srt.managers.scheduler": ("run_scheduler_process",),
    "sglang.srt.model_executor.model_runner": ("ModelRunner.load_model",),
    "sglang.srt.runtime_context": (
        "get_exec",
        "get_parallel",
        "get_schedule",
        "get_spec",
        "max_prefill_buffer_tokens",
    ),
    "sglang.srt.arg_groups.fields.exec_": (
        "ExecOverlap.enable_two_batch_overlap",
        "ExecDeterministic.enable_deterministic_inference",
        "ExecGraph.cuda_graph_config",
    ),
    "sglang.srt.model_executor.cuda_graph_config": (
        "Backend.DISABLED",
        "CudaGraphConfig.prefill",
        "PhaseConfig.backend",
        "PhaseConfig.bs",
    ),
    "sglang.srt.layers.moe.token_dispatcher.deepep": ("DeepEPConfig.get_instance", "use_deepep"),
    "sglang.srt.layers.deep_gemm_wrapper.configurer": ("ENABLE_JIT_DEEPGEMM",),
    "sglang.srt.layers.deep_gemm_wrapper.compile_utils": (
        "_INITIALIZATION_DICT",
        *(f"DeepGemmKernelType.{kind.name}" for kind in KernelType),
    ),
    "sglang.srt.layers.quantization.fp8_utils": (
        "get_fp8_gemm_runner_backend",
        "Fp8GemmRunnerBackend.is_auto",
        "Fp8GemmRunnerBackend.is_deep_gemm",
        "Fp8GemmRunnerBackend.is_flashinfer_deepgemm",
    ),
    "sglang.srt.layers.moe.utils": ("_MoeRunnerBackendPredicates.is_deep_gemm",),
    "sglang.srt.layers.attention.dsa.utils": ("resolve_fp8_mqa_logits_fn",),
    "sglang.srt.layers.attention.dsv4.v41_indexer": ("has_dense_fp4_indexer",),
}


def _defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The names that statements define, those of classes and of branches included."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Try):
            yield from _defined(node.body, prefix)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("module", USED)
def test_sglangs_sources_have_the_names(module: str) -> None:
    base = fetch(RELEASE).joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    assert set(USED[module]) <= set(_defined(tree(path).body))


_METADATA = "sglang.srt.layers.attention.dsv4.metadata"
_SCHEDULE = schedule._NAME


def _importers(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules that `path` imports the schedule's builder from, and whether a function imports it."""
    nodes = list(ast.walk(tree(path)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and _SCHEDULE in [alias.name for alias in node.names]:
            yield "." * node.level + (node.module or ""), id(node) in inside


def test_sglang_has_no_other_builder_of_the_schedule() -> None:
    """Our logits need our schedule; SGLang finds it in `deep_gemm` or under the name that is replaced."""
    root = fetch(RELEASE)
    holders = files(RELEASE, _SCHEDULE)
    package = root.joinpath(*schedule._HOME.split("."))
    assert [path for path in holders if _SCHEDULE in _defined(tree(path).body)] == [package / "attn.py"]
    assert files(RELEASE, "paged_mqa_metadata.cuh") == [package / "attn.py"], "the file of SGLang's kernel"
    found = {path: set(_importers(path)) for path in holders}
    assert found.pop(package / "__init__.py") == {(".attn", False)}
    found.pop(package / "attn.py")
    # A function looks the name up at each call, or keeps it until the plug-in makes it forget.
    assert set().union(*found.values()) == {("deep_gemm", True), (schedule._HOME, True)}
    logits = root.joinpath(*_METADATA.split(".")).parent / "indexer.py"
    assert "from deep_gemm import fp8_paged_mqa_logits as fn" in logits.read_text(encoding="utf-8")


@pytest.mark.parametrize("own_schedule", [True, False])
def test_deepseek_v4_gets_our_schedule(own_schedule: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own schedule is a hollow name here, whose call fails."""
    setting = SimpleNamespace(get=lambda: own_schedule)
    false = dict.fromkeys(("is_hip", "is_xpu", "is_sm120_supported"), lambda: False)
    provided = {
        **{f"sglang.srt.utils.{name}": function for name, function in false.items()},
        "sglang.srt.environ.envs": SimpleNamespace(
            SGLANG_FP8_PAGED_MQA_LOGITS_TORCH=SimpleNamespace(get=lambda: False),
            SGLANG_OPT_USE_JIT_INDEXER_METADATA=setting,
        ),
    }
    undo: list[Callable[[], None]] = []
    monkeypatch.setitem(deep_gemm._SHARED, "get_num_sms", lambda: 132)
    integrations.install()
    try:
        with EngineLayers(RELEASE, (_METADATA,), provided).active() as layers:
            schedule.replace_schedule(undo)
            lens = torch.tensor([1, 8192, 300, 64])
            made = layers.module(_METADATA).PagedIndexerMetadata(
                page_size=256, compressed_page_size=64, page_table=torch.zeros(4, 128, dtype=torch.int32),
                compressed_seq_lens=lens, use_topk_v2=False,
            )  # fmt: skip
            expected = paged_mqa_logits_metadata(lens.int(), block_size=64, num_sms=132)
            assert torch.equal(made.deep_gemm_metadata, expected)
            (restore,) = undo
            restore()
            with pytest.raises(AssertionError, match=f"{_SCHEDULE} is called"):
                getattr(layers.module(schedule._HOME), _SCHEDULE)(lens, 64, 132)
    finally:
        integrations.uninstall()

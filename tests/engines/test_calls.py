"""Every call that an engine's code makes of a served name of `deep_gemm` binds to our function."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_fp8.integrations import deep_gemm
from moe_fp8.integrations.sglang.model import _OVERLAPPED
from tests.engines.sources import ENGINES, Engine, fetch, files, skipped, tree

pytestmark = pytest.mark.skipif(skipped(), reason="ENGINE_SOURCES=skip")

VLLM = [engine for engine in ENGINES if engine.package == "vllm"]
(SGLANG,) = (engine for engine in ENGINES if engine.package == "sglang")

SERVED: dict[str, Callable[..., Any]] = {
    **{name: function for name, (_, function) in deep_gemm._SERVED.items()},
    **{name: function for name, function in deep_gemm._SHARED.items() if callable(function)},
}


def bind(call: ast.Call, name: str, also: tuple[str, ...] = ()) -> None:
    """Bind the call's arguments to our function; unpacked arguments count as none."""
    positional = [None for argument in call.args if not isinstance(argument, ast.Starred)]
    named: dict[str, None] = {word.arg: None for word in call.keywords if word.arg is not None}
    signature = inspect.signature(SERVED[name])
    unpacked = len(positional) < len(call.args) or any(word.arg is None for word in call.keywords)
    binder = signature.bind_partial if unpacked else signature.bind
    binder(*positional, **named, **dict.fromkeys(also))


def called(root: ast.AST, name: str) -> Iterator[ast.Call]:
    """The calls of a plain name."""
    for node in ast.walk(root):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def served_by(value: ast.AST) -> str | None:
    """The served name that an expression such as getattr(_dg, "a", None) or getattr(_dg, "b") looks up."""
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and node.value in SERVED:
            return str(node.value)
    return None


def wrappers(engine: Engine) -> dict[str, tuple[str, ast.FunctionDef]]:
    """vLLM's functions in front of `deep_gemm`: name -> the served name that it calls, and the function."""
    module = tree(fetch(engine) / "vllm/utils/deep_gemm.py")
    symbols = {
        target.id: name
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and (name := served_by(node.value))
    }
    found = {}
    for function in module.body:
        if isinstance(function, ast.FunctionDef):
            for symbol, name in symbols.items():
                if next(called(function, symbol), None) is not None:
                    found[function.name] = (name, function)
    return found


@pytest.mark.parametrize("engine", VLLM, ids=lambda engine: engine.name)
def test_vllms_wrappers_bind(engine: Engine) -> None:
    found = wrappers(engine)
    assert {name for name, _ in found.values()} >= {
        "fp8_gemm_nt",
        "m_grouped_fp8_gemm_nt_contiguous",
        "fp8_fp4_mqa_logits",
        "fp8_fp4_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
        "transform_sf_into_required_layout",
        "get_mn_major_tma_aligned_tensor",
        "get_mk_alignment_for_contiguous_layout",
        "get_theoretical_mk_alignment_for_contiguous_layout",
    }
    assert any("masked" in name for name, _ in found.values())
    for name, function in found.values():
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_impl"):
                bind(node, name)
    module = tree(fetch(engine) / "vllm/utils/deep_gemm.py")
    for name, node in attribute_calls(module, ("dg", "_dg", "mod")):
        bind(node, name)


@pytest.mark.parametrize("engine", VLLM, ids=lambda engine: engine.name)
def test_vllms_callers_bind(engine: Engine) -> None:
    known = wrappers(engine)
    counts: Counter[str] = Counter()
    for path in files(engine, "utils.deep_gemm import"):
        for local, original in imported(tree(path), "vllm.utils.deep_gemm"):
            if original not in known:
                continue
            name, wrapper = known[original]
            passes_through = wrapper.args.vararg is not None
            for call in called(tree(path), local):
                words = [word for word in call.keywords if word.arg != "is_deep_gemm_e8m0_used"]
                call = ast.Call(call.func, call.args, words)
                if passes_through:
                    bind(call, name, ("disable_ue8m0_cast",))
                counts[original] += 1
    for original in ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "fp8_m_grouped_gemm_nt_masked"):
        assert counts[original] >= 1, (original, counts)
    for original in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata"):
        assert counts[original] >= 1, (original, counts)


def imported(root: ast.AST, module: str) -> Iterator[tuple[str, str]]:
    """(local name, name in the module) of every import from `module`."""
    for node in ast.walk(root):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            for alias in node.names:
                yield alias.asname or alias.name, alias.name


def attribute_calls(root: ast.AST, objects: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    """Calls of served names as attributes of one of these names."""
    for node in ast.walk(root):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in objects and node.func.attr in SERVED:
                yield node.func.attr, node


def test_sglangs_calls_bind() -> None:
    counts: Counter[str] = Counter()
    for path in {*files(SGLANG, "deep_gemm"), *files(SGLANG, "mqa_logits")}:
        for name, call in sglang_calls(path):
            bind(call, name)
            counts[name] += 1
            counts[f"{name} in {path.name}"] += 1
    wanted = {
        "fp8_gemm_nt",
        "m_grouped_fp8_gemm_nt_contiguous",
        "fp8_m_grouped_gemm_nt_masked",
        "fp8_mqa_logits",
        "fp8_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
        "get_num_sms",
        "set_num_sms",
        "get_mk_alignment_for_contiguous_layout",
        "get_compile_mode",
        "set_compile_mode",
        "transform_sf_into_required_layout",
        "fp8_mqa_logits in dsa_indexer.py",
        "fp8_paged_mqa_logits in dsa_indexer.py",
        "get_paged_mqa_logits_metadata in dsa_backend.py",
    }
    assert wanted <= set(counts), wanted - set(counts)


@pytest.mark.parametrize("engine", VLLM, ids=lambda engine: engine.name)
def test_vllms_numbers_of_sms_are_known(engine: Engine) -> None:
    """Overlapped micro-batches alone: the lambda that is called with what communication leaves."""
    assert {argument for _, argument in numbers_of_sms(engine, "deep_gemm_set_num_sms")} == {"sms"}


#: Each number of SMs that SGLang gives `deep_gemm`. The plug-in plans those that occur on Hopper.
NUMBERS_OF_SMS = {
    # The indexer of sparse attention: beside its keys, and beside the receipt of the next batch.
    ("dsa_indexer.py", "self.half_device_sm_count"),
    ("dsa_indexer.py", "self.sm_count - pp_recv_sm_count"),
    ("dsa_indexer_kpool.py", "self.half_device_sm_count"),
    # Two-batch overlap.
    ("two_batch_overlap.py", "strategy.deep_gemm_num_sms"),
    # Single-batch overlap, which SGLang refuses on Hopper.
    ("deepseek_v2.py", "dispatcher.meta_overlap_args['compute_num_sms']"),
    ("entrypoint.py", "overlap_args.num_sms if overlap_args is not None else None"),
    # Not before Blackwell.
    ("mega_moe.py", "target_num_sms"),
    # Wrappers, and what was set before.
    ("entrypoint.py", "num_sms"),
    ("entrypoint.py", "original_num_sms"),
    ("mega_moe.py", "current_num_sms"),
}


def test_sglangs_numbers_of_sms_are_known() -> None:
    assert numbers_of_sms(SGLANG, "set_num_sms", "configure_deep_gemm_num_sms") == NUMBERS_OF_SMS


def numbers_of_sms(engine: Engine, *functions: str) -> set[tuple[str, str]]:
    """The files that call these functions, and the first arguments."""
    return {
        (path.name, ast.unparse(node.args[0]))
        for path in files(engine, "num_sms(")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(functions)
    }


def test_sglangs_indexers_and_overlapped_layers_are_known() -> None:
    srt = fetch(SGLANG) / "sglang/srt"
    pooled = {"half_device_sm_count", "sm_count", "alt_stream"}
    further = {"use_dsa_indexer_fusion", "dsa_enable_prefill_cp", "logits_with_pp_recv"}
    for file, names in (("dsa_indexer", pooled | further), ("dsa_indexer_kpool", pooled)):
        attributes = ast.walk(tree(srt / f"layers/attention/dsa/{file}.py"))
        stored = {node.attr for node in attributes if isinstance(node, ast.Attribute) and is_stored(node)}
        assert names <= stored and ((further & stored) == (further & names))
    strategies = ast.walk(tree(srt / "batch_overlap/operations_strategy.py"))
    compared = {ast.unparse(node) for node in strategies if isinstance(node, ast.Compare)}
    layers = {text.split("'")[1] for text in compared if text.startswith("layer_name == ")}
    assert layers == set(_OVERLAPPED)
    text = (srt / "layers/moe/utils.py").read_text(encoding="utf-8")
    assert "SBO (single batch overlap) is not supported on SM90 GPUs" in text


def is_stored(node: ast.Attribute) -> bool:
    """Whether the node is an assignment to an attribute of `self`."""
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def sglang_calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    yield from attribute_calls(tree(path), ("deep_gemm",))
    yield from resolved_calls(tree(path))
    for module in ("deep_gemm", "deep_gemm.utils.layout", "deep_gemm.utils"):
        for function in ast.walk(tree(path)):
            if isinstance(function, ast.FunctionDef | ast.Module):
                for local, name in imported(function, module):
                    if name in SERVED and isinstance(function, ast.FunctionDef):
                        yield from ((name, call) for call in called(function, local))


def resolved_calls(root: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls of what `resolve_NAME_fn()` returned, as it is or as an argument `NAME_fn`."""
    for node in ast.walk(root):
        if not isinstance(node, ast.Call):
            continue
        if found := re.fullmatch(r"resolve_(\w+)_fn\(\)|(?!resolve_)(\w+)_fn", ast.unparse(node.func)):
            name = found[1] or found[2]
            yield from ((served, node) for served in (name, f"get_{name}") if served in SERVED)


@pytest.mark.parametrize("engine", VLLM, ids=lambda engine: engine.name)
@pytest.mark.parametrize(
    ("file", "names"),
    [
        (
            "vllm/model_executor/kernels/linear/__init__.py",
            ("_POSSIBLE_FP8_BLOCK_KERNELS", "_LINEAR_BACKEND_KERNEL_MAP", '"deep_gemm": {'),
        ),
        (
            "vllm/model_executor/kernels/linear/scaled_mm/deep_gemm.py",
            (
                "DeepGemmFp8BlockScaledMMKernel",
                "use_deep_gemm_e8m0",
                "process_weights_after_loading",
                "@classmethod\n    def is_supported(cls, compute_capability=None):",
            ),
        ),
        (
            "vllm/model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py",
            ("apply_input_quant", "apply_block_scaled_mm", "_get_layer_params", "can_implement"),
        ),
        (
            "vllm/model_executor/layers/fused_moe/oracle/fp8.py",
            ("backend_to_kernel_cls", "Fp8MoeBackend", "DEEPGEMM", "TRITON"),
        ),
        (
            "vllm/model_executor/layers/fused_moe/experts/deep_gemm_moe.py",
            ("DeepGemmExperts", "gemm1_clamp_limit", "workspace_shapes", "apply_router_weight_on_input"),
        ),
        *(
            (
                f"vllm/model_executor/layers/fused_moe/experts/{name}_moe.py",
                ("@staticmethod\n    def _supports_current_device() -> bool:",),
            )
            for name in ("deep_gemm", "batched_deep_gemm")
        ),
        (
            "vllm/model_executor/layers/fused_moe/modular_kernel.py",
            ("expects_unquantized_inputs", "w2_scale", "def _supports_batch_invariance"),
        ),
        ("vllm/model_executor/layers/fused_moe/utils.py", ("_resize_cache",)),
        (
            "vllm/model_executor/layers/fused_moe/config.py",
            (
                "num_local_experts",
                "intermediate_size_per_partition",
                "hidden_dim",
                "experts_per_token",
                "in_dtype: torch.dtype",
            ),
        ),
        (
            "vllm/model_executor/model_loader/__init__.py",
            ("import BaseModelLoader", "import TensorizerLoader"),
        ),
        ("vllm/model_executor/model_loader/base_loader.py", ("BaseModelLoader", "load_model", "vllm_config")),
        ("vllm/utils/deep_gemm.py", ("_oracle_cache", "_import_deep_gemm", "FLOAT32_CEIL_UE8M0")),
        ("vllm/config/scheduler.py", ("max_num_batched_tokens", "max_num_seqs")),
        (
            "vllm/config/parallel.py",
            (
                "data_parallel_size",
                "prefill_context_parallel_size",
                "enable_expert_parallel",
                "use_ubatching",
            ),
        ),
        ("vllm/config/speculative.py", ('self.method == "draft_model"',)),
        (
            "vllm/model_executor/layers/fused_moe/config.py",
            ("ep_size: int", "dp_size: int", "pcp_size: int", "sp_size: int", "moe_parallel_config:",
             "def use_all2all_kernels", "def use_ag_rs_all2all_kernels"),
        ),
        ("vllm/envs.py", ("VLLM_DBO_COMM_SMS", "VLLM_BATCH_INVARIANT")),
        ("vllm/compilation/caching.py", ("env_hash = hash_factors(envs.compile_factors())",)),
        ("vllm/model_executor/layers/linear.py", ("self.quant_method",)),
        (
            "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py",
            ("layer.scheme = ",),
        ),
        ("vllm/model_executor/layers/quantization/quark/quark.py", ("layer.scheme = ",)),
        (
            "vllm/model_executor/layers/fused_moe/routed_experts.py",
            ("self.quant_method = ", "self.top_k = ", "self.moe_config = "),
        ),
        ("vllm/distributed/parallel_state.py", ("def get_ep_group", "device_communicator")),
        ("vllm/distributed/device_communicators/base_device_communicator.py", ("max_sms_used",)),
        ("vllm/plugins/__init__.py", ("vllm.general_plugins",)),
        ("vllm/platforms/interface.py", ("def is_cpu(", "def is_unspecified(", "def is_device_capability(")),
    ],
)  # fmt: skip
def test_the_plug_in_finds_what_it_changes(engine: Engine, file: str, names: tuple[str, ...]) -> None:
    text = (fetch(engine) / file).read_text(encoding="utf-8")
    assert not [name for name in names if name not in text]


@pytest.mark.parametrize("engine", VLLM, ids=lambda engine: engine.name)
@pytest.mark.parametrize(
    ("function", "kept"),
    [
        ("init_fp8_linear_kernel", "self."),
        ("select_linear_kernel", "self."),
        ("select_fp8_moe_backend", "self.experts_cls"),
    ],
)
def test_quantization_methods_keep_our_classes(engine: Engine, function: str, kept: str) -> None:
    """The plug-in finds kernels in any attribute of a method, and the class of experts in one attribute."""
    targets = [
        ast.unparse(node.targets[0])
        for path in files(engine, f"{function}(")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assign) and next(called(node.value, function), None) is not None
    ]
    assert targets or (function, engine.version) == ("select_linear_kernel", "0.24.0")
    assert all(kept in target for target in targets), targets


@pytest.mark.parametrize("engine", VLLM, ids=lambda engine: engine.name)
def test_our_experts_take_the_arguments_of_vllms(engine: Engine) -> None:
    ours = tree(Path(deep_gemm.__file__).parents[1] / "vllm/experts.py")
    theirs = tree(fetch(engine) / "vllm/model_executor/layers/fused_moe/experts/deep_gemm_moe.py")
    assert parameters(theirs, "DeepGemmExperts", "apply") == parameters(ours, "MoeFp8Experts", "apply")
    assert parameters(theirs, "DeepGemmExperts", "workspace_shapes")[:5] == ["self", "M", "N", "K", "topk"]


def parameters(module: ast.Module, owner: str, method: str) -> list[str]:
    """The names of a method's parameters."""
    (cls,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == owner)
    (found,) = (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return [argument.arg for argument in found.args.args]

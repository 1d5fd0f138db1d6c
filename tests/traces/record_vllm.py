"""Records the linear layers that vLLM's own model code makes for one rank, without a GPU.

    python tests/traces/record_vllm.py --config tests/configs/glm_45.json --tp 4 --ep 4 --out FILE

vLLM's Python files must be importable (unpack its wheel into a folder of PYTHONPATH). torch, transformers, pydantic, msgspec,
cloudpickle, cbor2, psutil, einops, pyzmq, compressed-tensors and what they need must be installed; other missing
modules and compiled extensions are replaced (`absent.py`). The platform says that it is an H200. The ranks of the
process groups are torch's fake ones. The model is made on the meta device by the class that vLLM's registry names, with as few
layers of each kind as the file has in "count". Its weights have the shapes of rank 0.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.library
from absent import Absent, Nothing
from torch.testing._internal.distributed.fake_pg import FakeStore

#: Modules for whose absence vLLM has another way.
_MISSING = (
    "aiter", "amdsmi", "deep_ep", "deep_gemm", "flashinfer", "flashinfer_cubin", "flashinfer_jit_cache", "gmpy2", "humming",
    "libtpu", "mori", "nixl", "nixl_ep", "pplx_kernels", "pynvml", "quack", "tilelang", "torchao", "tpu_inference",
    "triton", "triton_kernels",
)  # fmt: skip

_COMPILED = ("vllm._C", "vllm._moe_C", "vllm.vllm_flash_attn", "vllm._rocm")

#: Layers of a model that are made: all kinds of layers are among them.
_LAYERS = {"deepseek_v32": 5, "glm4_moe": 5, "qwen3_moe": 2}


def _without_a_gpu() -> None:
    """Let torch's registrations and streams go without compiled ops and without a GPU."""
    namespace = torch._ops._OpNamespace
    found = namespace.__getattr__
    compiled = re.compile(r"_C|_moe_C|_C_cache_ops|_rocm_C|_C_custom_ar|_flashmla_C|_vllm_fa\d_C|_qutlass_C")

    def op(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if name.startswith("__") or not compiled.fullmatch(self.name):
                raise
            return lambda *arguments, **options: True

    namespace.__getattr__ = op
    register = torch.library.Library._register_fake

    def register_fake(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return register(self, *arguments, **options)
        except RuntimeError as error:
            if "does not exist" not in str(error):
                raise
            return None

    torch.library.Library._register_fake = register_fake  # type: ignore[method-assign]
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *arguments: Nothing()  # type: ignore[assignment, return-value]
    torch.cuda.current_device = lambda: 0
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.synchronize = lambda *arguments: None


def _platform() -> None:
    """Make vLLM believe that it runs on an H200."""
    import vllm.platforms as platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):  # type: ignore[misc, valid-type]
        device_name, device_type = "cuda", "meta"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
            return (9, 0) >= tuple(wanted)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

        @classmethod
        def set_device(cls, device: Any) -> None:
            pass

    usual = Hopper.get_attn_backend_cls

    def backend(cls: type, *arguments: Any, **options: Any) -> Any:
        if "use_sparse=True" in f"{arguments} {options}":
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        return usual(*arguments, **options)

    Hopper.get_attn_backend_cls = classmethod(backend)
    platforms._current_platform = Hopper()


def _fake_ranks(tp: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    made = dist.new_group

    def new_group(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        return made(ranks)

    dist.new_group = new_group


def build(config: dict[str, Any], tp: int, ep: int) -> torch.nn.Module:
    """The model of `config` on rank 0 of `tp` ranks; with `ep` = `tp` its experts are divided whole."""
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(config))
    _fake_ranks(tp)
    import vllm.distributed.device_communicators.shm_broadcast as broadcast
    import vllm.distributed.parallel_state as state
    import vllm.model_executor.layers.sparse_attn_indexer as sparse
    import vllm.model_executor.models.registry as registry
    import vllm.v1.worker.workspace as workspace
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import get_model_architecture

    registry._run_in_subprocess = lambda function: function()
    state.in_the_same_node_as = lambda group, source_rank=0: [True] * tp
    state._node_count = lambda *arguments, **options: 1
    broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *arguments, **options: None)
    sparse.has_deep_gemm = lambda: True
    model = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        max_model_len=4096,
    )  # fmt: skip
    ranks = {"tensor_parallel_size": tp, "enable_expert_parallel": ep > 1}
    parallel = ParallelConfig(**ranks, distributed_executor_backend="mp") if tp > 1 else ParallelConfig()
    whole = VllmConfig(model_config=model, parallel_config=parallel)
    with set_current_vllm_config(whole):
        state.init_distributed_environment(
            world_size=tp, rank=0, local_rank=0, distributed_init_method="env://", backend="fake"
        )
        state.initialize_model_parallel(tp, 1)
        made, _ = get_model_architecture(model)
        torch.set_default_dtype(torch.bfloat16)
        workspace.init_workspace_manager(torch.device("meta"))
        with torch.device("meta"):
            return made(vllm_config=whole, prefix="")


def layers_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Each kind of linear layer once, with its sizes on this rank and how many layers have it."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for name, module in model.named_modules():
        for kind, weight in module.named_parameters(recurse=False):
            if weight.dim() < 2 or "scale" in kind or "embed_tokens" in name:
                continue
            path = re.sub(r"layers\.\d+\.", "layers.*.", name) + ("" if kind == "weight" else f".{kind}")
            *experts, n, k = weight.shape
            fp8 = weight.dtype is torch.float8_e4m3fn
            counts[path, n, k, experts[0] if experts else None, fp8] += 1
    names = ("what", "n", "k", "experts", "fp8")
    return [
        {**dict(zip(names, key, strict=True)), "count": count}
        for key, count in sorted(counts.items(), key=str)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--ep", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sys.meta_path.append(Absent("vllm", _MISSING, _COMPILED))
    _without_a_gpu()
    _platform()
    config = json.loads(options.config.read_text())
    config["num_hidden_layers"] = _LAYERS[config["model_type"]]
    told = {
        "engine": "vllm",
        "version": importlib.metadata.version("vllm"),
        "model": options.config.stem,
        "tp": options.tp,
        "ep": options.ep,
        "layers": layers_of(build(config, options.tp, options.ep)),
    }
    lines = ",\n".join("  " + json.dumps(layer) for layer in told.pop("layers"))
    head = json.dumps(told)[:-1]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(f'{head}, "layers": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()

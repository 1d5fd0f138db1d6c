"""Records the linear layers that one rank of vLLM creates for a model. Needs no GPU and no weights."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from recording import Linear, OnMeta, accept_missing_ops, fake_streams, install_stubs, linears_of, write_trace

#: The wheel's compiled extensions; they need CUDA's libraries.
EXTENSIONS = (
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._moe_C",
    "vllm._moe_C_stable_libtorch",
    "vllm._deepselect_C",
    "vllm._flashkda_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._qutlass_C",
    "vllm.cumem_allocator",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.third_party.deep_gemm._C_extension",
)
ABSENT = (
    "aiter",
    "amdsmi",
    "deep_gemm",
    "libtpu",
    "tpu_inference",
    "triton",
    "triton_kernels",
)
OPS = (
    "_C",
    "_C_cache_ops",
    "_C_custom_ar",
    "_flashmla_C",
    "_moe_C",
    "_qutlass_C",
    "_vllm_fa2_C",
    "_vllm_fa3_C",
    "deep_gemm",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the model's config.json")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="1: experts are split by tp; else tp * dp ranks")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.ep != 1 and args.ep % args.tp:
        raise SystemExit(
            "vLLM's expert parallelism covers all tp * dp ranks: ep must be 1 or a multiple of tp"
        )

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_PLUGINS"] = ""
    stubs = install_stubs("vllm", always=EXTENSIONS, absent=ABSENT)
    accept_missing_ops(OPS)
    fake_streams()
    _pretend_hopper()
    header, linears = _record(args.config, args.tp, args.ep)
    header["stand_ins"] = sorted(stubs.made)
    write_trace(args.out, header, linears)


def _pretend_hopper() -> None:
    """Sets vLLM's platform to an H200, of which only the queries are answered."""
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            # The CUDA communicator allocates; nothing here communicates.
            base = "vllm.distributed.device_communicators.base_device_communicator"
            return f"{base}.DeviceCommunicatorBase"

        @classmethod
        def set_device(cls, device: torch.device) -> None:
            pass

    vllm.platforms._current_platform = Hopper()


def _record(path: Path, tp: int, ep: int) -> tuple[dict[str, Any], list[Linear]]:
    import torch.distributed as dist
    import vllm
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import (
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry

    dp = max(1, ep // tp)
    config = json.loads(path.read_text(encoding="utf-8"))
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")

    # The registry inspects a model class in a child process, which would have no stand-ins.
    registry._run_in_subprocess = lambda function: function()
    dist.init_process_group("fake", rank=0, world_size=tp * dp, store=FakeStore())
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *args, **kwargs: new_group(ranks)  # Of the fake backend.
    # The shared-memory queue between ranks would wait for the other ranks.
    MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)

    model_config = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096
    )
    parallel_config = ParallelConfig(
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        data_parallel_size_local=dp,
        enable_expert_parallel=ep > 1,
        distributed_executor_backend="mp" if tp > 1 else None,
    )
    speculative = None
    if config.get("num_nextn_predict_layers"):
        speculative = SpeculativeConfig(
            method="mtp",
            model=folder,
            num_speculative_tokens=1,
            target_model_config=model_config,
            target_parallel_config=parallel_config,
        )
    vllm_config = VllmConfig(
        model_config=model_config, parallel_config=parallel_config, speculative_config=speculative
    )
    header: dict[str, Any] = {
        "engine": "vllm",
        "version": vllm.__version__,
        "model": path.stem,
        "tp": tp,
        "ep": ep,
        "dp": dp,
        "sequence_parallel_moe": parallel_config.use_sequence_parallel_moe,
        "all2all_backend": parallel_config.all2all_backend,
        "classes": [],
    }
    linears: list[Linear] = []
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(vllm_config):
        parallel_state.init_distributed_environment(
            world_size=tp, rank=0, local_rank=0, distributed_init_method="env://", backend="fake"
        )
        parallel_state.initialize_model_parallel(tp, 1)
        try:
            with torch.device("meta"), OnMeta():
                model = initialize_model(vllm_config, model_config=model_config)
        except ValueError as error:
            header["refused"] = str(error)
            return header, linears
        header["classes"].append(f"{type(model).__module__}.{type(model).__name__}")
        linears += _linears(model)
        if speculative is not None:
            with torch.device("meta"), OnMeta():
                draft = initialize_model(vllm_config, model_config=speculative.draft_model_config)
            header["classes"].append(f"{type(draft).__module__}.{type(draft).__name__}")
            linears += _linears(draft, "mtp.")
    return header, linears


def _linears(model: torch.nn.Module, prefix: str = "") -> list[Linear]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return linears_of(model, prefix, experts=RoutedExperts, dense=(LinearBase, ParallelLMHead))


if __name__ == "__main__":
    sys.exit(main())

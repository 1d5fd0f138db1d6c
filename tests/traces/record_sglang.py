"""Records the linear layers that one rank of SGLang creates for a model. Needs no GPU and no weights."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from recording import Linear, OnMeta, accept_missing_ops, fake_streams, install_stubs, linears_of, write_trace

ABSENT = (
    "aiter",
    "amdsmi",
    "torch_npu",
    "vllm",
    "mindspore",
    "torch_musa",
    "intel_extension_for_pytorch",
    "torchcodec",
)
OPS = ("sgl_kernel",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the model's config.json")
    parser.add_argument("--tp", type=int, default=1, help="all ranks (SGLang's --tp-size)")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--attention-dp", type=int, default=1, help="groups of data-parallel attention")
    parser.add_argument("--moe-a2a-backend", default="none", help="none or deepep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    # The shared-memory queue between ranks would wait for the other ranks.
    os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "false"
    _pretend_hopper()
    fake_streams()
    accept_missing_ops(OPS)
    stubs = install_stubs("sglang", always=("deep_gemm",), absent=ABSENT, present=("triton",))
    import deep_gemm

    deep_gemm.get_num_sms = lambda: 132  # The indexer divides it.
    header, linears = _record(args.config, args.tp, args.ep, args.attention_dp, args.moe_a2a_backend)
    header["stand_ins"] = sorted(stubs.made)
    write_trace(args.out, header, linears)


def _pretend_hopper() -> None:
    """Makes torch report eight H200 GPUs. Only queries are answered."""
    properties = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30
    )
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.mem_get_info = lambda device=None: (140 << 30, 141 << 30)
    torch.cuda.is_current_stream_capturing = lambda: False
    # The compiler would import Triton's internals.
    torch.compile = lambda model=None, **kwargs: model if model is not None else lambda function: function


def _record(
    path: Path, tp: int, ep: int, attention_dp: int, a2a_backend: str
) -> tuple[dict[str, Any], list[Linear]]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = json.loads(path.read_text(encoding="utf-8"))
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *args, **kwargs: new_group(ranks)  # Of the fake backend.

    import sglang
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=folder,
        tp_size=tp,
        ep_size=ep,
        attn_dp_size=attention_dp,
        moe_a2a_backend=a2a_backend,
        skip_tokenizer_init=True,
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with OnMeta():
        init_distributed_environment(backend="fake", world_size=tp, rank=0, local_rank=0)
        initialize_model_parallel()
        initialize_dp_attention(server_args)
    initialize_moe_config()

    parallel = get_parallel()
    header: dict[str, Any] = {
        "engine": "sglang",
        "version": sglang.__version__,
        "model": path.stem,
        "tp": tp,
        "ep": ep,
        "attention_dp": attention_dp,
        "attention_tp": parallel.attn_tp_size,
        "moe_tp": parallel.moe_tp_size,
        "moe_a2a_backend": a2a_backend,
        "classes": [],
        "fused_shared_experts": [],
    }
    linears: list[Linear] = []
    drafts = (False, True) if config.get("num_nextn_predict_layers") else (False,)
    for draft in drafts:
        model_config = ModelConfig.from_server_args(server_args, is_draft_model=draft)
        load_config = LoadConfig()
        quant_config = _get_quantization_config(model_config, load_config)
        try:
            with set_default_torch_dtype(model_config.dtype), torch.device("meta"), OnMeta():
                model = _initialize_model(model_config, load_config, quant_config)
        except ValueError as error:
            header["refused"] = str(error)
            return header, []
        header["classes"].append(f"{type(model).__module__}.{type(model).__name__}")
        header["fused_shared_experts"].append(model.shared_experts_config.num_fused_shared_experts)
        linears += _linears(model, "mtp." if draft else "")
    return header, linears


def _linears(model: torch.nn.Module, prefix: str = "") -> list[Linear]:
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    return linears_of(
        model,
        prefix,
        experts=FusedMoE,
        dense=(LinearBase, ParallelLMHead),
        routers=("MoEGate", "Glm4MoeGate"),
    )


if __name__ == "__main__":
    sys.exit(main())

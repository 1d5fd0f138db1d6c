"""One vLLM engine on random weights in this process: what a decode step takes and which tokens come out.

`benchmarks.engine` starts it, once for each contestant. vLLM 0.24 or newer must be importable. The weights
are the same in every process. The models have the widths of real checkpoints and few layers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_VOCABULARY = 32768
_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_COMMON = {
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _unconverted(layers: int, router: str) -> dict[str, Any]:
    return {
        **_BLOCKS,
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.{router}" for i in range(layers))],
    }


#: Model -> its config, attention backend ("" for vLLM's choice) and the tokens of a prompt.
MODELS: dict[str, tuple[dict[str, Any], str, int]] = {
    "qwen3_30b": (
        {
            **_COMMON,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_hidden_layers": 4,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_theta": 1e6,
            "attention_bias": False,
            "quantization_config": _unconverted(4, "mlp.gate"),
        },
        "TRITON_ATTN",
        192,
    ),
    "minimax_m2": (
        {
            **_COMMON,
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "num_hidden_layers": 4,
            "attn_type_list": [1, 1, 1, 1],
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rotary_dim": 64,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "rope_theta": 5e6,
            "quantization_config": _unconverted(4, "block_sparse_moe.gate"),
        },
        "TRITON_ATTN",
        192,
    ),
    "deepseek_v32": (
        {
            **_COMMON,
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 32,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "ep_size": 1,
            "quantization_config": {**_BLOCKS, "scale_fmt": "ue8m0"},
        },
        "",
        2304,
    ),
}


def _fill(model: Any) -> None:
    """Random weights with which activations keep a size near 1; each parameter has a seed of its own."""
    import torch

    for number, (name, parameter) in enumerate(model.named_parameters()):
        data = parameter.data
        if not data.is_floating_point():
            continue
        draw = torch.Generator(device=data.device).manual_seed(7000 + number)
        kind = name.rsplit(".", 1)[-1]
        if data.dtype is torch.float8_e4m3fn:
            for part in data if data.dim() == 3 else [data]:
                values = torch.randn(part.shape, generator=draw, device=data.device)
                part.copy_((64 * values).clamp_(-448, 448).to(data.dtype))
        elif "scale" in kind:
            if data.dim() < 2:
                data.fill_(1)
            else:
                sizes = torch.rand(data.shape, generator=draw, device=data.device) + 0.5
                data.copy_(sizes / (64 * math.sqrt(128 * data.shape[-1])))
        elif "norm" in name or kind == "bias" or data.dim() < 2:
            data.fill_(0 if "bias" in kind else 1)
        else:
            values = torch.randn(data.shape, generator=draw, device=data.device)
            width = 1.0 if "embed" in name else math.sqrt(data.shape[-1]) / (4 if "lm_head" in name else 1)
            data.copy_(values / width)


def _steps(engine: Any, prompts: list[list[int]], length: int, label: str, logprobs: bool) -> Iterator[Any]:
    """Run the prompts together; yields after each step (whether every prompt has been read, outputs)."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=length, min_tokens=length, ignore_eos=True, detokenize=False,
        logprobs=0 if logprobs else None,
    )  # fmt: skip
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{label}-{number}", {"prompt_token_ids": prompt}, sampling)
    started: set[str] = set()
    while engine.has_unfinished_requests():
        decoding = len(started) == len(prompts)
        outputs = engine.step()
        started |= {output.request_id for output in outputs}
        yield decoding, outputs


def _generate(engine: Any, prompts: list[list[int]], length: int) -> tuple[list[Any], list[Any]]:
    """Tokens and their log-probabilities."""
    done: dict[int, Any] = {}
    for _, outputs in _steps(engine, prompts, length, f"tokens{len(prompts)}", True):
        done |= {int(out.request_id.split("-")[1]): out.outputs[0] for out in outputs if out.finished}
    chosen = [done[i] for i in range(len(prompts))]
    tokens = [list(one.token_ids) for one in chosen]
    logprobs = [
        [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)]
        for one in chosen
    ]
    return tokens, logprobs


def _time(engine: Any, prompts: list[list[int]], length: int, profiled: int) -> dict[str, Any]:
    """Wall time of decode steps, and the time of a step in which the GPU runs any kernel."""
    import torch

    walls: list[float] = []
    profiler: Any = None
    last = time.perf_counter()
    busy = 0.0
    kernels: dict[str, float] = {}
    for decoding, _ in _steps(engine, prompts, length, f"timed{len(prompts)}", False):
        now = time.perf_counter()
        if decoding and profiler is None:
            walls.append(now - last)
        if len(walls) == length // 2 and profiler is None:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profiler.start()
            left = profiled
        elif profiler is not None and left:
            left -= 1
            if not left:
                torch.cuda.synchronize()
                profiler.stop()
                busy, kernels = _busy(profiler, profiled)
        last = time.perf_counter()
    top = dict(sorted(kernels.items(), key=lambda item: -item[1])[:14])
    return {"wall_us": statistics.median(walls[2:]) * 1e6, "gpu_us": busy, "kernels_us": top}


def _busy(profiler: Any, steps: int) -> tuple[float, dict[str, float]]:
    """Microseconds of a step in which at least one kernel runs, and the kernels' own times, which overlap."""
    from torch._C._autograd import DeviceType

    spans = []
    kernels: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            name = event.name[:80]
            kernels[name] = kernels.get(name, 0.0) + (event.time_range.end - event.time_range.start) / steps
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / steps, kernels


def main() -> None:
    started = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where config.json is written")
    parser.add_argument("--batches", default="1,8,32,64,256")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config, attention, length = MODELS[options.model]
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "config.json").write_text(json.dumps(config))

    import torch
    import vllm
    from vllm.model_executor.model_loader import dummy_loader

    dummy_loader.DummyModelLoader.load_weights = lambda self, model, model_config: _fill(model)
    batches = [int(batch) for batch in options.batches.split(",")]
    engine = vllm.LLM(
        model=str(options.folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        max_model_len=8192 if length > 1000 else 4096, max_num_seqs=max(batches), max_num_batched_tokens=8192,
        gpu_memory_utilization=0.6, enable_prefix_caching=False, disable_log_stats=True,
        async_scheduling=False,
        compilation_config={
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": batches,
        },
        **({"attention_config": {"backend": attention}} if attention else {}),
    ).llm_engine  # fmt: skip
    up = time.time()
    draw = torch.Generator().manual_seed(11)
    prompts = torch.randint(2, _VOCABULARY, (max(batches), length), generator=draw).tolist()
    told: dict[str, Any] = {"vllm": vllm.__version__, "model": options.model, "batches": {}}
    for _, _ in _steps(engine, prompts[:1], 1, "first", False):
        pass
    told["seconds"] = {"imports": started - float(os.environ.get("STARTED", started))}
    told["seconds"] |= {"engine": up - started, "first token": time.time() - up}
    for batch in batches:
        tokens, logprobs = _generate(engine, prompts[:batch], options.steps)
        timed = _time(engine, prompts[:batch], options.steps + 16, 8)
        told["batches"][str(batch)] = {"tokens": tokens, "logprobs": logprobs, **timed}
        print(options.model, batch, {name: timed[name] for name in ("wall_us", "gpu_us")}, file=sys.stderr)
    if "moe_fp8" in sys.modules:
        counters = sys.modules["moe_fp8"].jit.counters()
        told["counters"] = {
            name: getattr(counters, name)
            for name in ("compiles", "store_hits", "loads", "misses", "scale_conversions")
        }
    options.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()

"""A decode step of a mixture-of-experts layer on the ops of moe_fp8: on a Hopper GPU, else on the CPU."""

import math

import torch

import moe_fp8
from moe_fp8.warmup import PlanOptions, describe, load_plan, plan

HIDDEN, WIDTH, EXPERTS, TOPK, MAX_BATCH = 512, 256, 16, 4, 64

# The fields of a model's config.json; `load_model(path)` reads the file of a real model.
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS,
    "num_experts_per_tok": TOPK, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 512, "max_position_embeddings": 4096, "vocab_size": 1024,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


class Layer:
    """The weights of the layer: a router in bf16, and two FP8 weights with block scales for all experts."""

    def __init__(self, device: str) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device).bfloat16() / math.sqrt(shape[-1])

        self.router = random(EXPERTS, HIDDEN)
        self.gate_up, self.gate_up_scale = moe_fp8.quantize_fp8_blocks(random(EXPERTS, 2 * WIDTH, HIDDEN))
        self.down, self.down_scale = moe_fp8.quantize_fp8_blocks(random(EXPERTS, HIDDEN, WIDTH))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: bf16 [tokens, HIDDEN]. Nothing here waits for the GPU, so a CUDA graph may capture it."""
        # Choose each token's experts; their weights add up to 1.
        weights, ids = moe_fp8.route_topk(x @ self.router.t(), TOPK)
        # Copy each token to a row for each of its experts, sorted by expert, and quantize it.
        a, a_scale, offsets, rows = moe_fp8.moe_permute(x, ids, num_experts=EXPERTS)
        y = moe_fp8.grouped_gemm_fp8_contiguous(a, a_scale, self.gate_up, self.gate_up_scale, offsets=offsets)
        # SiLU(gate) * up, quantized for the second product.
        a, a_scale = moe_fp8.silu_mul_quantize(y)
        y = moe_fp8.grouped_gemm_fp8_contiguous(a, a_scale, self.down, self.down_scale, offsets=offsets)
        # The sum of each token's rows, times the router's weights.
        return moe_fp8.moe_combine(y, rows, weights)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sms = moe_fp8.get_num_sms() if device == "cuda" else 132
    kernels = plan(describe(CONFIG), PlanOptions(max_tokens=MAX_BATCH, max_batch=MAX_BATCH, num_sms=sms))
    if device == "cuda":
        load_plan(kernels)  # compile what has not been compiled before; load all
    moe_fp8.jit.freeze("strict")  # from here on, a kernel that was not planned is an error
    layer = Layer(device)
    out = layer(torch.randn(MAX_BATCH, HIDDEN, device=device).bfloat16())
    print(f"{len(kernels.specs)} kernels planned; {list(out.shape)} on {device}; norm {out.norm():.1f}")


if __name__ == "__main__":
    main()

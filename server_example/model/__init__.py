"""A DeepSeek-V3.2 model in torch and moe_fp8 ops; the same code on CPU and on Hopper."""

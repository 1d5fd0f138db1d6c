"""A DeepSeek-V3.2 model in torch and moe_fp8 ops; CPU and Hopper run the same code."""

"""Trains a small DeepSeek-V3.2 on plays: plain PyTorch, without ops of moe_fp8 until the export."""

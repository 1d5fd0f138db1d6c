"""A DeepSeek-V3.2 model in torch and moe_fp8 ops; the same code on CPU and on Hopper."""

from server_example.model.config import ModelConfig
from server_example.model.transformer import Transformer

__all__ = ["ModelConfig", "Transformer"]

"""An example of serving with moe_fp8: a FastAPI app over a small paged-KV engine."""

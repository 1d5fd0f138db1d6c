"""An example server for moe_fp8: a FastAPI app over a small engine with a paged cache."""

"""Timings of moe_fp8's public ops beside a peer's; see `python -m benchmarks --help`."""

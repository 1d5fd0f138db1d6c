"""Side-by-side timings of moe_fp8's public ops; `python -m benchmarks --help`."""

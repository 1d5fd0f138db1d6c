"""The facts of this machine that the numbers depend on."""

from __future__ import annotations

import argparse
import subprocess

import torch

from .results import device_slug, today


def demand_gpu(parser: argparse.ArgumentParser) -> None:
    """End the program with exit code 2 and a message if torch sees no GPU."""
    if not torch.cuda.is_available():
        parser.error("no CUDA device: benchmarks run on a Hopper GPU")


def environment(commit: str) -> dict[str, str]:
    """The facts that the numbers depend on; they are the head of the results file."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": device_slug(properties.name),
        "device_name": properties.name,
        "driver": _driver_version(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "commit": commit,
        "date": today(),
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

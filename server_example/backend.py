"""The backend that runs the model: planned, loaded and frozen Hopper kernels, or the reference on the CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from moe_fp8.errors import ConfigError
from moe_fp8.warmup import Plan, PlanOptions, load_model, load_plan, plan
from server_example.pages import PAGE_TOKENS

logger = logging.getLogger(__name__)

DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Backend:
    """`name` is "cuda" (Hopper kernels) or "reference" (plain torch); `reason` says why it was chosen."""

    name: Literal["cuda", "reference"]
    device: torch.device
    num_sms: int
    description: str
    reason: str


def choose_backend(choice: DeviceChoice = "auto") -> Backend:
    """Hopper if present and allowed by `choice`.

    Raises `ConfigError` for "cuda" without a Hopper GPU, and for a GPU that is there but cannot be used: a
    server that was meant for it would be slow without a word.
    """
    missing = None if choice == "cpu" else _why_no_hopper()
    if choice != "cpu" and missing is None:
        # With TF32, the plain-torch parts would differ from the reference backend by more than rounding.
        torch.backends.cuda.matmul.allow_tf32 = False
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        return Backend(
            "cuda",
            torch.device("cuda", 0),
            properties.multi_processor_count,
            properties.name,
            f"a Hopper GPU was found; {free / 2**30:.1f} of its {total / 2**30:.1f} GiB are free",
        )
    if choice == "cuda":
        raise ConfigError("device", "a Hopper GPU", missing, "use --device cpu for the reference backend")
    reason = "--device cpu" if choice == "cpu" else str(missing)
    return Backend("reference", torch.device("cpu"), 1, "CPU, plain torch", reason)


def _why_no_hopper() -> str | None:
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "no CUDA device" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})")
    try:
        major, minor = torch.cuda.get_device_capability(0)
        torch.cuda.mem_get_info(0)  # the first call that needs the device
    except RuntimeError as error:
        raise ConfigError(
            "device", "a GPU that starts", _first_line(error),
            "see by nvidia-smi which process holds it, or use --device cpu for the reference backend",
        ) from error  # fmt: skip
    return None if (major, minor) == (9, 0) else f"compute capability {major}.{minor} is not 9.0"


@contextmanager
def explained_memory() -> Iterator[None]:
    """Within it, a lack of memory is a `ConfigError` that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has no class of its own for the CPU's memory.
        on_cpu = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        if not on_cpu and "out of memory" not in str(error):
            raise
        others = "give the server more memory" if on_cpu else "end the processes that nvidia-smi shows"
        raise ConfigError(
            "memory" if on_cpu else "GPU memory",
            "room for the weights, the cache, the graphs and the longest prompt",
            _first_line(error),
            f"lower --cache-pages, --max-batch, --max-context or --prefill-chunk, or {others}",
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def plan_kernels(folder: Path, max_tokens: int, max_batch: int, num_sms: int) -> Plan:
    """The plan for the engine's calls: one rank, and one token for each request and step."""
    options = PlanOptions(max_tokens=max_tokens, max_batch=max_batch, num_sms=num_sms, block_size=PAGE_TOKENS)
    # The model computes in bf16, whatever dtype its config names.
    return plan(replace(load_model(folder), dtype="bfloat16"), options)


def load_kernels(kernels: Plan) -> int:
    """Builds the kernels that the disk store lacks (with progress) and loads all; returns their number."""
    loaded = load_plan(kernels, progress=True)
    logger.info("%d kernels loaded", loaded)
    return loaded

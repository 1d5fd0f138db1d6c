"""Checked mode (MOE_FP8_CHECKED=1): run an op's contract, and write a replay file if it is broken.

A replay file is JSON: the op, the wrong entry, every argument (of tensors the shape, stride, dtype, device
and address; the values too for small tensors of integers), the kernel that the call would have launched, the
settings, and versions. It has no values of activations or weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_fp8.errors import ContractError
from moe_fp8.settings import settings

#: Larger tensors of integers are described without their values.
_MOST_VALUES = 1 << 16

_numbers = itertools.count()


def examine(
    op: str,
    arguments: Mapping[str, Any],
    contract: Callable[[], object],
    kernel: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Run `contract`. If it raises ContractError, write a replay file and name it in the error.

    `kernel` describes the kernel that the call would have launched.
    """
    try:
        contract()
    except ContractError as error:
        error.add_replay_file(_write(op, _content(op, arguments, error, kernel)))
        raise


def _content(
    op: str,
    arguments: Mapping[str, Any],
    error: ContractError,
    kernel: Callable[[], dict[str, Any]] | None,
) -> dict[str, Any]:
    wrong = {
        name: getattr(error, name) for name in ("argument", "expected", "got", "expert", "row", "remedy")
    }
    described = {name: _describe(value) for name, value in arguments.items()}
    try:
        launched = None if kernel is None else kernel()
    except Exception as reason:  # such as a missing compiler: the error about the contents matters more
        launched = {"unknown": str(reason)}
    return {
        "op": op,
        "error": wrong,
        "arguments": described,
        "kernel": launched,
        "settings": dataclasses.asdict(settings()),
        "versions": {
            "moe_fp8": _version("moe-fp8"),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvrtc": _version("nvidia-cuda-nvrtc"),
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    described = {
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "dtype": str(value.dtype),
        "device": str(value.device),
        "address": hex(value.data_ptr()),
    }
    if value.dtype in (torch.int32, torch.int64) and value.numel() <= _MOST_VALUES:
        described["values"] = value.tolist()
    return described


def _write(op: str, content: dict[str, Any]) -> Path | OSError:
    """Write the file; returns its path, or the reason why there is none."""
    name = f"{op}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_numbers)}.json"
    try:
        folder = _folder()
        # The parent may be the kernel store, which is not used if others can write to it.
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / name
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")
    except OSError as error:
        return error
    return path


def _folder() -> Path:
    chosen = settings()
    if chosen.checked_dir is not None:
        return chosen.checked_dir
    if chosen.cache_dir is not None:
        return chosen.cache_dir / "checked"
    return Path(tempfile.mkdtemp(prefix="moe_fp8-"))

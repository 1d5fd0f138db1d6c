"""Modes of the process that hold for every op: the number of SMs to use, and whether to launch at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_fp8.errors import ConfigError, UnsupportedError


class Modes:
    """The modes in force. `usual`: both have their usual values, which every call asks first."""

    num_sms: int | None = None
    launching: bool = True
    usual: bool = True
    #: How often the number of SMs was put, so that a call can tell whether it changed meanwhile.
    changes: int = 0

    #: Blocks of `compile_only` that have begun and not ended, in all threads.
    _compiling: int = 0
    _changing = threading.Lock()

    @classmethod
    def put_num_sms(cls, num_sms: int | None) -> None:
        with cls._changing:
            cls.num_sms = num_sms
            cls.changes += 1
            cls._put_usual()

    @classmethod
    def count_compiling(cls, more: int) -> None:
        """Count blocks of `compile_only`. Those of several threads may end in any order."""
        with cls._changing:
            cls._compiling += more
            cls.launching = cls._compiling == 0
            cls._put_usual()

    @classmethod
    def _put_usual(cls) -> None:
        cls.usual = cls.num_sms is None and cls.launching


def launches(out: torch.Tensor) -> bool:
    """Whether calls that write `out` do so: within `compile_only` those on a GPU do not."""
    return Modes.launching or not out.is_cuda


def set_num_sms(num_sms: int | None) -> None:
    """From now on, the GEMMs and the logits of this process use at most `num_sms` SMs; None: all of them.

    It leaves the other SMs to kernels of another stream, for example to communication. The short kernels
    around them may still use all SMs (docs/ops.md, "SMs, and calls without a launch"). It holds for all
    threads and devices, and for later calls; a captured graph keeps what held at its capture. The number may
    change the tile of a dense GEMM and the kernel of `mqa_logits_fp8`, and so the last bits of their results,
    as another number of rows may. With MOE_FP8_BATCH_INVARIANT=1 it changes no bit. A number may have
    kernels of its own, so that a plan needs the same `num_sms`. A paged schedule that was made with another
    number stays valid. Raises ConfigError unless it is at least 1.
    """
    if num_sms is not None and (isinstance(num_sms, bool) or not isinstance(num_sms, int) or num_sms < 1):
        raise ConfigError("num_sms", "an integer of at least 1, or None", num_sms)
    Modes.put_num_sms(num_sms)


def get_num_sms(device: int | torch.device | None = None) -> int:
    """The number of SMs that the ops use on a GPU (default: the current GPU).

    Raises UnsupportedError if there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "there is no GPU whose SMs could be counted; pass a number, such as 132 of an H200"
        )
    found = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return found if Modes.num_sms is None else min(Modes.num_sms, found)


@contextmanager
def compile_only() -> Iterator[None]:
    """Within this block, a call on a GPU loads its kernel, compiled if need be, and launches nothing.

    Torch may still copy scales into the layout that a kernel reads. Outputs keep what they held. It holds for
    all threads, until all such blocks have ended.
    """
    Modes.count_compiling(1)
    try:
        yield
    finally:
        Modes.count_compiling(-1)

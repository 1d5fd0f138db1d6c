"""The capture of one call: warm-up runs, then the capture, with an error that names the line it failed at."""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from moe_fp8.errors import CaptureError
from moe_fp8.graph.memory import Pool

_Result = TypeVar("_Result")

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"

#: Parts of the messages of torch and of the driver for what a capture does not allow.
_FORBIDDEN = ("captur", "synchronizing")


def warm_up(call: Callable[[], object], runs: int) -> None:
    """Run `call` on a side stream, as torch asks before a capture; the current stream waits for it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(runs):
                call()
    finally:
        torch.cuda.current_stream().wait_stream(stream)


def refuse_synchronization(name: str, call: Callable[[], object]) -> None:
    """Run `call`; raises CaptureError if it makes torch wait for the device.

    It finds most host reads without a failed capture. It holds for all threads while it runs.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with _named(name):
            call()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def capture(name: str, call: Callable[[], _Result], pool: Pool) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """Capture `call` on the current device; returns its graph and its result.

    Raises CaptureError, with the line of `call`, for what a graph cannot hold; any other error of `call` is
    raised as it is. The current stream is as before in each case.
    """
    graph = torch.cuda.CUDAGraph()
    failed: Exception | None = None
    # If the end of a capture fails, torch.cuda.graph leaves its own stream current.
    current = torch.cuda.stream(torch.cuda.current_stream())
    with current, _named(name), _collector_off(), _no_kept_casts():
        try:
            with torch.cuda.graph(graph, pool=pool, stream=_stream(torch.cuda.current_device())):
                try:
                    result = call()
                except Exception as error:
                    failed = error
                    raise
        except Exception as error:
            # Some versions of torch leave the allocator in the pool after a capture that failed; others
            # refuse to end what has ended.
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            # The end of a failed capture raises an error of its own, which says less.
            raise failed or error from None
    return graph, result


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of captures on `device`. (Torch's own is the stream of the first device for all devices.)

    A device has a single stream, since a pool gives memory back to the stream that took it.
    """
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """No garbage collection: a graph that it frees would end the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _no_kept_casts() -> Iterator[None]:
    """Autocast casts every weight anew: casts that it keeps are not in the graph, and end with autocast."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()  # a step may have an autocast of its own, which keeps casts again
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn an error about what a capture does not allow into a CaptureError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CaptureError) or not any(word in str(error).lower() for word in _FORBIDDEN):
            raise
        raise CaptureError(
            name,
            "capture",
            "only work that the device does by itself",
            f"{_line(error)}: {str(error).splitlines()[0]}",
            "keep values on the device (no .item(), .tolist(), .cpu(), nonzero or boolean index), and copy "
            "from the host before the call",
        ) from error


def _line(error: Exception) -> str:
    """The innermost line of the traceback that is not torch's own, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_TORCH, __file__))]
    frame = (own or frames)[-1]
    return f"`{frame.line}` ({Path(frame.filename).name}:{frame.lineno})"

"""CUDA-graph replay timing of several contestants in one process, alternating."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

#: Cycles of a spinning kernel in front of every timed replay (about 500 us), so that the device is
#: still busy while the host enqueues the graph and launch latency stays outside the events.
_SPIN_CYCLES = 1_000_000


class Replay:
    """One contestant: `num_calls` calls, rotating over its input sets, captured in one CUDA graph.

    Every call must be capture-safe. Whatever compiles on first use does so in the constructor, which
    calls each input set twice before it captures.
    """

    def __init__(self, calls: Sequence[Call], num_calls: int) -> None:
        self.num_calls = num_calls
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            for call in (*calls, *calls):
                call()
            torch.cuda.synchronize()
            # Not `torch.cuda.graph`, which empties the allocator's cache each time.
            self._graph.capture_begin()
            try:
                for i in range(num_calls):
                    calls[i % len(calls)]()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def time_us(self) -> float:
        """One replay, in microseconds a call."""
        torch.cuda._sleep(_SPIN_CYCLES)
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3 / self.num_calls


def alternate(contestants: Sequence[Replay], replays: int = 20, pause_s: float = 0.010) -> list[float]:
    """Median microseconds a call of each contestant over `replays` replays.

    They take turns with a pause before every replay, and each time another one comes first, so that clocks
    and temperature favour none.
    """
    for contestant in contestants:
        contestant.time_us()
    samples: list[list[float]] = [[] for _ in contestants]
    for turn in range(replays):
        for place in range(len(contestants)):
            number = (turn + place) % len(contestants)
            time.sleep(pause_s)
            samples[number].append(contestants[number].time_us())
    return [statistics.median(times) for times in samples]


def l2_bytes() -> int:
    """Bytes of the current device's L2."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)

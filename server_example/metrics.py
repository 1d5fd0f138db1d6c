"""Prometheus metrics of one engine, and of the process that serves HTTP, each in a registry of their own."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from moe_fp8 import jit

if TYPE_CHECKING:  # the process with HTTP needs no scheduler
    from server_example.scheduler import Request

_EVENTS = ("compiles", "store_hits", "loads", "misses", "scale_conversions")

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 20.0)


class _Kernels(Collector):
    """The JIT events of every op's kernels; all of them should happen before the first request."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "moe_fp8_jit_events", "Compiles, loads, misses by op", labels=["op", "event"]
        )
        for op, counters in sorted(jit.counters().by_op.items()):
            for event in _EVENTS:
                family.add_metric([op, event], getattr(counters, event))
        yield family


class _CountedHistogram(Collector):
    """A histogram of one thread, to which a value can be added many times at once."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = ("+Inf" if bound == math.inf else str(bound) for bound in self._bounds)
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class HttpMetrics:
    """What the process that serves HTTP counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "server_http_answers", "HTTP answers, by status", ["status"], registry=self.registry
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Metrics:
    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        """`gauges`: for each name of a gauge, its help text and a function that reads its value."""
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "server_requests", "Requests that ended, by reason", ["reason"], registry=registry
        )
        self.prompt_tokens = Counter(
            "server_prompt_tokens", "Tokens of the prompts of all choices", registry=registry
        )
        self.generated_tokens = Counter("server_generated_tokens", "Tokens generated", registry=registry)
        self.preemptions = Counter(
            "server_preemptions", "Requests that gave their pages to older requests", registry=registry
        )
        self.step_seconds = Histogram(
            "server_step_seconds",
            "Steps with their scheduling; prefill if prompts were prefilled too, else decode",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "server_time_to_first_token_seconds",
            "From a request's arrival in the queue to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token_seconds = _CountedHistogram(
            "server_inter_token_seconds", "Between two tokens of a request", _SECONDS
        )
        self.batch_size = Histogram(
            "server_batch_size",
            "Requests decoded together in a step",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )
        kernels: dict[str, tuple[str, Callable[[], float]]] = {
            "moe_fp8_jit_compiles": ("Kernels compiled", lambda: jit.counters().compiles),
            "moe_fp8_jit_loads": ("Kernels loaded", lambda: jit.counters().loads),
            "moe_fp8_jit_misses": ("Kernels missed while frozen", lambda: jit.counters().misses),
        }
        for name, (text, value) in {**gauges, **kernels}.items():
            Gauge(name, text, registry=registry).set_function(value)
        registry.register(_Kernels())
        registry.register(self.inter_token_seconds)

    def tokens(self, requests: Sequence[Request]) -> None:
        """Counts a token of each request, and the time since the one before or since the request came."""
        now = time.monotonic()
        self.generated_tokens.inc(len(requests))
        gaps: dict[float, int] = {}
        for request in requests:
            if request.last_token is None:
                self.first_token_seconds.observe(now - request.created)
            else:
                gaps[request.last_token] = gaps.get(request.last_token, 0) + 1
            request.last_token = now
        # The tokens of a step have the same time, so most gaps are equal.
        for last, count in gaps.items():
            self.inter_token_seconds.observe(now - last, count)

    def values(self) -> dict[str, float]:
        """The value of each sample by its name and the values of its labels: `server_requests_total/stop`."""
        return {
            "/".join((sample.name, *sample.labels.values())): sample.value
            for family in self.registry.collect()
            for sample in family.samples
        }

    def render(self) -> bytes:
        return generate_latest(self.registry)

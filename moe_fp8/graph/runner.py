"""One step function, captured once per batch bucket and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from moe_fp8.errors import ArgumentError
from moe_fp8.graph.buckets import BatchBuckets
from moe_fp8.graph.buffers import BufferSpec, StaticBuffers

Tensors = Mapping[str, torch.Tensor]
Step = Callable[[Tensors], Tensors]


class GraphRunner:
    """Runs `step` over static buffers: a graph replay on CUDA, a plain call on CPU.

    `step(inputs) -> outputs` maps names to tensors; every input and output has the batch as its
    first dimension. A capturable step must have shapes that depend only on the bucket, must not
    read device data on the host (`.item()`, `.tolist()`, boolean indexing, `nonzero`), and must not
    copy host tensors to the device. State that outlives a step (a paged cache) is written in place.
    Its kernels must be loaded before capture: preload the warmup plan first.

    `warmup_runs` eager calls precede each capture, so that libraries allocate workspaces and
    choose algorithms outside the capture. These calls see only padded rows. One thread may use a runner at
    a time.
    """

    def __init__(
        self,
        step: Step,
        inputs: Mapping[str, BufferSpec],
        buckets: BatchBuckets,
        device: torch.device | str,
        *,
        warmup_runs: int = 2,
    ) -> None:
        self.step = step
        self.buckets = buckets
        self.device = torch.device(device)
        self.warmup_runs = warmup_runs
        self.buffers = StaticBuffers(inputs, buckets.largest, self.device)
        self.replays = 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensors]] = {}

    @property
    def uses_graphs(self) -> bool:
        return self.device.type == "cuda"

    @property
    def captured(self) -> tuple[int, ...]:
        """Buckets that have a graph, in increasing order."""
        return tuple(sorted(self._graphs))

    def capture(self, progress: Callable[[int], None] | None = None) -> None:
        """Capture every bucket, the largest first, so that the smaller buckets fit in its memory pool.

        `progress(bucket)` is called after each bucket. On CPU nothing is captured, and the step is called
        once for each bucket. Call `capture` again after replacing a tensor that the step closes over; it
        drops the old graphs. Raises `ArgumentError` if the first dimension of an output is not the bucket's
        size.
        """
        self._graphs.clear()
        # Otherwise the step would see the last run's rows again and write them into its state again.
        self.buffers.clear()
        with self._on_device():
            pool = torch.cuda.graph_pool_handle() if self.uses_graphs else None
            for bucket in reversed(self.buckets.sizes):
                inputs = self.buffers.view(bucket)
                if pool is None:
                    _check_outputs(self.step(inputs), bucket)
                else:
                    self._graphs[bucket] = self._capture(inputs, bucket, pool)
                if progress is not None:
                    progress(bucket)

    def _capture(self, inputs: Tensors, bucket: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensors]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.warmup_runs):
                self.step(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = self.step(inputs)
        _check_outputs(outputs, bucket)
        return graph, outputs

    def run(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Load `inputs` (`[rows, ...]` each), pad them to a bucket, run the step, and return `rows` rows.

        The outputs are views of memory that the next `run` overwrites. On CUDA they are ordered with the
        current stream, and `run` does not synchronise. Raises `ArgumentError` for inputs that do not match
        the specs, for a batch that no bucket holds and, on CUDA, for a bucket that was not captured.
        """
        bucket = self.buckets.bucket(self.buffers.check(inputs))
        if self.uses_graphs and bucket not in self._graphs:
            raise ArgumentError("GraphRunner.run", "bucket", "a captured bucket", bucket, "call capture()")
        with self._on_device():
            rows = self.buffers.load(inputs, bucket)
            if self.uses_graphs:
                graph, outputs = self._graphs[bucket]
                graph.replay()
                self.replays += 1
            else:
                outputs = self.step(self.buffers.view(bucket))
        return {name: tensor[:rows] for name, tensor in outputs.items()}

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make `device` current: streams and graphs are created on the current device."""
        if self.uses_graphs:
            with torch.cuda.device(self.device):
                yield
        else:
            yield


def _check_outputs(outputs: Tensors, bucket: int) -> None:
    for name, tensor in outputs.items():
        if tensor.dim() == 0 or tensor.shape[0] != bucket:
            raise ArgumentError(
                "GraphRunner.capture",
                f"output {name}",
                f"{bucket} rows, as the bucket has",
                f"shape {list(tensor.shape)}",
            )

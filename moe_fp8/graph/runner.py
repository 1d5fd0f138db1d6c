"""One step function, captured once per batch bucket and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from moe_fp8.errors import ArgumentError
from moe_fp8.graph import memory
from moe_fp8.graph.buckets import BatchBuckets
from moe_fp8.graph.buffers import BufferSpec, StaticBuffers
from moe_fp8.graph.capture import capture, warm_up
from moe_fp8.graph.memory import GraphMemory, Pool
from moe_fp8.ops.arguments import integer

Tensors = Mapping[str, torch.Tensor]
Step = Callable[[dict[str, torch.Tensor]], Tensors]


class GraphRunner:
    """Runs `step` over static buffers: a graph replay on CUDA, a plain call on CPU.

    `step(inputs) -> outputs` maps names to tensors. A bucket counts requests. The first dimension of an input
    is the bucket times its spec's `rows`, and the first dimension of an output is the bucket times any number
    of rows, the same number in every bucket. A capturable step must have shapes that depend only on the
    bucket, must not read device data on the host (`.item()`, `.tolist()`, boolean indexing, `nonzero`), and
    must not copy host tensors to the device; `verify_capture_safe` tells. State that outlives a step (a paged
    cache) is written in place. Its kernels must be loaded before capture: preload the warmup plan first. The
    step runs under `torch.no_grad()`.

    `warmup_runs` eager calls precede each capture, so that libraries allocate workspaces and
    choose algorithms outside the capture. These calls see only padded rows. One thread may use a runner at
    a time.

    `pool` is a handle of `torch.cuda.graph_pool_handle()`. Runners with the same handle share the memory of
    scratch, so that they must run in one order, as on one stream. A run of a runner may overwrite the outputs
    of runners that were captured later, and never those of runners that were captured before. None: each
    `capture` makes a pool of its own.
    """

    def __init__(
        self,
        step: Step,
        inputs: Mapping[str, BufferSpec],
        buckets: BatchBuckets,
        device: torch.device | str,
        *,
        warmup_runs: int = 2,
        pool: Pool = None,
    ) -> None:
        if not isinstance(buckets, BatchBuckets):
            raise ArgumentError(
                "GraphRunner", "buckets", "BatchBuckets", type(buckets).__name__, "BatchBuckets(sizes)"
            )
        if not callable(step):
            raise ArgumentError("GraphRunner", "step", "a function", type(step).__name__)
        self.step = step
        self.buckets = buckets
        self.device = torch.device(device)
        if self.uses_graphs and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.warmup_runs = integer("GraphRunner", "warmup_runs", warmup_runs, 0)
        self.pool = pool
        self.buffers = StaticBuffers(inputs, buckets.largest, self.device)
        self.replays = 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensors]] = {}
        self._grown: dict[int, int] = {}
        self._captured_pool: Pool = None
        self._rows: dict[str, int] = {}  # of a request, in each output

    @property
    def uses_graphs(self) -> bool:
        """Whether steps are graphs, as on a GPU; on a CPU they are calls."""
        return self.device.type == "cuda"

    @property
    def captured(self) -> tuple[int, ...]:
        """Buckets that have a graph, in increasing order."""
        return tuple(sorted(self._graphs))

    def memory(self) -> GraphMemory:
        """The bytes of the buffers, of the pool, and of each bucket at its capture."""
        pool = memory.pool_bytes(self._captured_pool) if self._graphs else 0
        return GraphMemory(self.buffers.num_bytes, pool, dict(self._grown))

    def capture(self, progress: Callable[[int], None] | None = None) -> None:
        """Capture every bucket, the largest first, so that the smaller buckets fit in its memory pool.

        `progress(bucket)` is called after each bucket. On CPU nothing is captured, and the step is called
        once for each bucket. Call `capture` again after replacing a tensor that the step closes over; it
        drops the old graphs; with a pool of your own, drop their outputs first. Raises `ArgumentError` if the
        step does not return a dict of tensors, or if the first dimension of an output does not fit the
        bucket; `CaptureError`, which names the line, for a step that cannot be captured.
        """
        self._graphs.clear()
        self._grown.clear()
        self._rows.clear()
        with self._on_device():
            if self.uses_graphs:
                self._captured_pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
            for bucket in reversed(self.buckets.sizes):
                if self.uses_graphs:
                    self._capture(bucket)
                else:
                    self._call(self._padding(bucket), bucket)
                if progress is not None:
                    progress(bucket)

    @torch.no_grad()  # what autograd saved for an output would keep the scratch of its bucket
    def _capture(self, bucket: int) -> None:
        warm_up(lambda: self.step(self._padding(bucket)), self.warmup_runs)
        before = memory.pool_bytes(self._captured_pool)
        inputs = self._padding(bucket)
        graph, outputs = capture("GraphRunner.capture", lambda: self.step(inputs), self._captured_pool)
        self._check_outputs(outputs, bucket)
        self._graphs[bucket] = graph, dict(outputs)  # the step may use its dict again for the next bucket
        self._grown[bucket] = memory.pool_bytes(self._captured_pool) - before

    def _padding(self, bucket: int) -> dict[str, torch.Tensor]:
        """Padded inputs for one call: a step may write to them, and bind other tensors to their names.

        Padding also keeps a step from writing the last run's rows into its state again.
        """
        self.buffers.clear()
        return self.buffers.view(bucket)

    @torch.no_grad()
    def _call(self, inputs: dict[str, torch.Tensor], bucket: int) -> Tensors:
        outputs = self.step(inputs)
        self._check_outputs(outputs, bucket)
        return outputs

    def run(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Load `inputs`, pad them to a bucket, run the step, and return the outputs' rows of the requests.

        The outputs are views of memory that the next `run` overwrites. On CUDA they are ordered with the
        current stream. `run` does not wait for the device, and inputs may be reused at once, those on the
        device in the order of the stream. Raises `ArgumentError` for inputs that do not match the specs, for
        a batch that no bucket holds and, on CUDA, for a bucket that was not captured.
        """
        bucket = self.buckets.bucket(self.buffers.check(inputs))
        if self.uses_graphs and bucket not in self._graphs:
            raise ArgumentError("GraphRunner.run", "bucket", "a captured bucket", bucket, "call capture()")
        with self._on_device():
            requests = self.buffers.load(inputs, bucket)
            if self.uses_graphs:
                graph, outputs = self._graphs[bucket]
                graph.replay()
                self.replays += 1
            else:
                outputs = self._call(self.buffers.view(bucket), bucket)
        return {name: tensor[: requests * self._rows[name]] for name, tensor in outputs.items()}

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make `device` current: streams and graphs are created on the current device."""
        if self.uses_graphs:
            with torch.cuda.device(self.device):
                yield
        else:
            yield

    def _check_outputs(self, outputs: Tensors, bucket: int) -> None:
        """Every output is a tensor of whole requests, with as many rows as in the buckets before."""
        if not isinstance(outputs, Mapping):
            raise ArgumentError(
                "GraphRunner.capture", "step", "a dict of tensors as its result", type(outputs).__name__
            )
        found = dict(self._rows)
        for name, tensor in outputs.items():
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentError(
                    "GraphRunner.capture", f"output {name}", "a tensor", type(tensor).__name__
                )
            size = tensor.shape[0] if tensor.dim() else 0
            rows = self._rows.get(name) or max(1, size // bucket)
            if size != bucket * rows:
                raise ArgumentError(
                    "GraphRunner.capture",
                    f"output {name}",
                    f"{bucket * rows} rows: the bucket's {bucket} requests of {rows}",
                    f"shape {list(tensor.shape)}",
                )
            found[name] = rows
        self._rows = found

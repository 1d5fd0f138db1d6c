"""CUDA graphs for a decode step: static buffers, batch buckets, capture after warmup, replay.

The same `GraphRunner` calls the step eagerly on a CPU device, so that an engine has one code path.
`verify_capture_safe` tells of any function whether it may be captured.
"""

from moe_fp8.graph.buckets import BatchBuckets
from moe_fp8.graph.buffers import BufferSpec, StaticBuffers
from moe_fp8.graph.memory import GraphMemory
from moe_fp8.graph.runner import GraphRunner, Step, Tensors
from moe_fp8.graph.verify import CaptureReport, verify_capture_safe

__all__ = [
    "BatchBuckets",
    "BufferSpec",
    "CaptureReport",
    "GraphMemory",
    "GraphRunner",
    "StaticBuffers",
    "Step",
    "Tensors",
    "verify_capture_safe",
]

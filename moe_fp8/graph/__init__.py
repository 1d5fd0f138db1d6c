"""CUDA graphs for a decode step: static buffers, batch buckets, capture after warmup, replay.

The same `GraphRunner` calls the step eagerly on a CPU device, so that an engine has one code path.
"""

from moe_fp8.graph.buckets import BatchBuckets
from moe_fp8.graph.buffers import BufferSpec, StaticBuffers
from moe_fp8.graph.runner import GraphRunner

__all__ = ["BatchBuckets", "BufferSpec", "GraphRunner", "StaticBuffers"]

"""The indexer of sparse attention: its cache, its logits, their top-k, and the selection made of these."""

from moe_fp8.ops.indexer.cache import indexer_quantize_and_cache
from moe_fp8.ops.indexer.logits import mqa_logits_fp8, paged_mqa_logits_fp8, paged_mqa_logits_metadata
from moe_fp8.ops.indexer.select import indexer_select, indexer_workspace_bytes, paged_indexer_select
from moe_fp8.ops.indexer.topk import indexer_topk

__all__ = [
    "indexer_quantize_and_cache",
    "indexer_select",
    "indexer_topk",
    "indexer_workspace_bytes",
    "mqa_logits_fp8",
    "paged_indexer_select",
    "paged_mqa_logits_fp8",
    "paged_mqa_logits_metadata",
]

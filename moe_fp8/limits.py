"""The sizes that the kernels serve: the ops refuse other sizes, and the planner lists them, by these rules.

Each function returns the reason for a refusal, or "" for sizes that are served. This module needs only the
standard library.
"""

from __future__ import annotations

#: Elements of K that share one activation scale, and edge of a weight's scale block.
SCALE_BLOCK = 128

#: N of a GEMM is a multiple of this number, and K is a multiple of SCALE_BLOCK.
N_MULTIPLE = 64

#: Heads that an indexer may have, and their dimensions.
INDEXER_HEADS = (8, 16, 32, 64)
HEAD_DIMS = (32, 64, 128)

#: Keys of a page of the indexer's cache.
PAGE_SIZES = (32, 64, 128)

#: The most tokens of a request in one decode step, and the most positions that a top-k selects.
MAX_NEXT_N = 8
MAX_TOPK = 4096


#: The most experts of one rank, and the most experts that a token goes to, of the kernels around the experts.
MAX_EXPERTS = 1024
MAX_EXPERTS_PER_TOKEN = 512

#: The most experts that `route_topk` chooses for a token, and the most groups that it chooses from.
MAX_ROUTED_EXPERTS = 32
MAX_EXPERT_GROUPS = 32


def refuse_n(n: int) -> str:
    """N of a GEMM: rows of its weights."""
    return f"N is a positive multiple of {N_MULTIPLE}, got {n}" if n % N_MULTIPLE or n <= 0 else ""


def refuse_k(k: int) -> str:
    """K of a GEMM: elements that are multiplied and summed."""
    return f"K is a positive multiple of {SCALE_BLOCK}, got {k}" if k % SCALE_BLOCK or k <= 0 else ""


def refuse_head_dim(head_dim: int) -> str:
    """The dimension of an indexer's heads and keys."""
    return "" if head_dim in HEAD_DIMS else f"expected a head dimension of {HEAD_DIMS}, got {head_dim}"


def refuse_heads(num_heads: int) -> str:
    """The number of an indexer's heads."""
    if num_heads in INDEXER_HEADS:
        return ""
    return f"expected {INDEXER_HEADS} heads, got {num_heads}; pad heads with zero weights"


def refuse_page(tokens: int) -> str:
    """The number of keys of a page of the indexer's cache."""
    return "" if tokens in PAGE_SIZES else f"expected one of {PAGE_SIZES} tokens, got {tokens}"


def refuse_next_n(next_n: int) -> str:
    """The number of tokens of each request in a decode step."""
    return "" if 1 <= next_n <= MAX_NEXT_N else f"expected 1 to {MAX_NEXT_N}, got {next_n}"


def refuse_topk(topk: int) -> str:
    """The number of positions that a top-k selects."""
    return "" if 1 <= topk <= MAX_TOPK else f"expected 1 to {MAX_TOPK}, got {topk}"

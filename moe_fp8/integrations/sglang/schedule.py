"""The schedule of decode's logits, which SGLang's attention of DeepSeek-V4 makes with a kernel of its own.

A schedule divides the keys among SMs in chunks. SGLang's kernel counts chunks of 256 keys, because DeepGEMM's
logits do. Our logits count chunks of 64 keys, so they need our schedule: with SGLang's, one SM would get most
of the keys.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from moe_fp8.integrations.deep_gemm import indexer

_HOME = "sglang.kernels.ops.attention.dsv4"
_NAME = "get_paged_mqa_logits_metadata"


def replace_schedule(undo: list[Callable[[], None]]) -> None:
    """Make SGLang's name of its own schedule lead to ours, and add to `undo` how to change it back.

    SGLang's functions import the name when they run. If this release has no such name, nothing is changed.
    """
    try:
        home = importlib.import_module(_HOME)
    except ModuleNotFoundError:
        return
    theirs = getattr(home, _NAME, None)
    if theirs is not None:
        setattr(home, _NAME, get_paged_mqa_logits_metadata)
        undo.append(lambda: setattr(home, _NAME, theirs))


def get_paged_mqa_logits_metadata(seq_lens: Tensor, page_size: int, num_sm: int) -> Tensor:
    """Our schedule under SGLang's names: int32 `[num_sm + 1, 2]` for the lengths of each request's tokens.

    seq_lens: integers `[B]` or `[B, next_n]`; SGLang's attention of DeepSeek-V4 passes `[tokens, 1]`. Safe to
    capture.
    """
    return indexer.get_paged_mqa_logits_metadata(seq_lens.to(torch.int32), page_size, num_sm)

"""A step of vLLM's sparse-attention indexer: prefill of chunks, or decode of a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests import cases
from tests.engines import ops
from tests.engines.step import Step
from tests.engines.vllm_layers import INDEXER, METADATA, VllmLayers

_PAGE, _DIM, _PREFIX = 64, 128, "layer"


@dataclass(frozen=True)
class Indexer:
    """Requests with `contexts` keys each, of which the last `queries` are of this step.

    For decode, `queries` is the same for all requests; a request with no key at all is padding of a batch.
    """

    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int = 64
    topk: int = 2048

    @property
    def tokens(self) -> int:
        return sum(self.queries)


class IndexerStep(Step):
    """`sparse_attn_indexer` with keys in the cache. Results: the logits that it selects from, its choice."""

    def __init__(self, layers: VllmLayers, case: Indexer, device: str) -> None:
        self.layers, self.case, self.device = layers, case, device
        layers.workspaces.device = device
        self.width = -(-max(case.contexts) // 256) * 256
        self.parts: dict[str, Any] = {}
        pages = cases.paged_case(case.contexts, 1, 1, _PAGE, dim=_DIM)
        self.kv_cache = pages.kv_cache.squeeze(2).to(device)
        unused = pages.block_table >= len(self.kv_cache)
        self.block_table = pages.block_table.masked_fill(unused, 0).to(device)
        rows = max(case.tokens, 1)
        self.q = torch.empty(rows, case.heads, _DIM, dtype=torch.float8_e4m3fn, device=device)
        self.weights = torch.empty(rows, case.heads, device=device)
        self.hidden = torch.empty(rows, 1, dtype=torch.bfloat16, device=device)
        self.chosen = torch.empty(rows, case.topk, dtype=torch.int32, device=device)
        self.starts, self.ends = self.ranges()

    def ranges(self) -> tuple[Tensor, Tensor]:
        """int32 [tokens]: where each token's keys begin and end among the keys of all requests."""
        starts, ends, first = [], [], 0
        for context, queries in zip(self.case.contexts, self.case.queries, strict=True):
            starts += [first] * queries
            ends += [first + max(context - queries + 1 + i, 0) for i in range(queries)]
            first += context
        return self._ints(starts), self._ints(ends)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def metadata(self, **parts: Any) -> Any:
        made = self.layers.module(METADATA).DeepseekV32IndexerMetadata
        lengths = self._ints(self.case.contexts)
        slots = torch.full((self.case.tokens,), -1, dtype=torch.int64, device=self.device)
        counts = dict.fromkeys(("num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens"), 0)
        return made(lengths, self.width, slots, **(counts | parts))

    def prepare(self) -> None:
        # A graph keeps the addresses of the first metadata, so they are made once.
        self.parts = self.parts or self.made_once()
        self.layers.context.attn_metadata = {_PREFIX: self.metadata(**self.parts)}

    @abstractmethod
    def made_once(self) -> dict[str, Any]:
        """The metadata of a prefill or a decode, and how many requests and tokens it has."""

    def expected(self) -> dict[str, Tensor]:
        """The results in plain fp64 maths."""
        pages = self.kv_cache.flatten(1)
        keys = pages[:, : _PAGE * _DIM].view(torch.float8_e4m3fn).double().unflatten(1, (_PAGE, _DIM))
        scales = pages[:, _PAGE * _DIM :].contiguous().view(torch.float32).double()
        logits = torch.zeros(self.case.tokens, self.width, dtype=torch.float64, device=self.device)
        number = torch.zeros(self.case.tokens, dtype=torch.int64, device=self.device)
        row = 0
        for request, queries in enumerate(self.case.queries):
            for _ in range(queries):
                count = int(self.ends[row] - self.starts[row])
                own = self.block_table[request, : -(-count // _PAGE)].long()
                products = keys[own].flatten(0, 1)[:count] @ self.q[row].double().T
                sums = products.relu() @ self.weights[row].double()
                logits[row, :count] = sums * scales[own].flatten()[:count]
                number[row] = min(count, self.case.topk)
                row += 1
        return {"logits": logits, "number of chosen": number}

    def draw(self, seed: int) -> None:
        gen = cases.generator(seed, "cpu")
        self.q.copy_(cases.random_fp8(self.q.shape, gen))
        self.weights.copy_(torch.randn(self.weights.shape, generator=gen))

    def poison(self) -> None:
        self.chosen.fill_(1 << 30)

    def run(self) -> None:
        ops.seen_logits.clear()
        self.layers.module(INDEXER).sparse_attn_indexer(
            self.hidden, _PREFIX, self.kv_cache, self.q, None, None, self.weights, 128, None, self.case.topk,
            _DIM, self.width, sum(self.case.contexts), self.chosen, True, False, False, "",
        )  # fmt: skip

    def results(self) -> dict[str, Tensor]:
        logits = torch.cat([part[:, : self.width] for part in ops.seen_logits])
        columns = torch.arange(logits.shape[1], device=self.device)
        live = columns < (self.ends - self.starts)[:, None]
        logits = logits.masked_fill(~live, 0)
        inside = self.chosen.clamp(0, logits.shape[1] - 1).long()
        # Equal logits may be chosen in any order, so the choice is compared by the logits that it names.
        scores = logits.gather(1, inside).masked_fill(self.chosen < 0, float("-inf")).sort(1, True).values
        return {
            "logits": logits,
            "chosen logits": scores.masked_fill(scores == float("-inf"), 0),
            "number of chosen": (self.chosen >= 0).sum(1),
        }


class PrefillStep(IndexerStep):
    """Prefill in chunks of whole requests, `chunks` of them."""

    def __init__(self, layers: VllmLayers, case: Indexer, device: str, chunks: int = 2) -> None:
        super().__init__(layers, case, device)
        self.chunks = min(chunks, len(case.contexts))

    def made_once(self) -> dict[str, Any]:
        module = self.layers.module(METADATA)
        requests = len(self.case.contexts)
        bounds = [requests * i // self.chunks for i in range(self.chunks + 1)]
        chunks, token = [], 0
        for low, high in pairwise(bounds):
            contexts, queries = self.case.contexts[low:high], self.case.queries[low:high]
            first, total = sum(self.case.contexts[:low]), sum(contexts)
            rows = slice(token, token + sum(queries))
            starts = self._ints([0, *contexts]).cumsum(0, dtype=torch.int32)
            owner = torch.repeat_interleave(torch.arange(high - low), torch.tensor(contexts)).int()
            chunks.append(
                module.DeepseekV32IndexerPrefillChunkMetadata(
                    block_table=self.block_table[low:high],
                    cu_seqlen_ks=self.starts[rows] - first,
                    cu_seqlen_ke=self.ends[rows] - first,
                    cu_seq_lens=starts,
                    token_to_seq=owner.to(self.device),
                    total_seq_lens=total,
                    max_seqlen_k=self.width,
                    token_start=rows.start,
                    token_end=rows.stop,
                    num_reqs=high - low,
                    local_cu_seq_lens=starts,
                    local_total_seq_lens=total,
                    max_local_total_seq_lens=total,
                )
            )
            token = rows.stop
        prefill = module.DeepseekV32IndexerPrefillMetadata(chunks)
        return {"num_prefills": requests, "num_prefill_tokens": self.case.tokens, "prefill": prefill}


class DecodeStep(IndexerStep):
    """Decode with the same number of tokens in every request; the schedule has a fixed place."""

    def __init__(self, layers: VllmLayers, case: Indexer, device: str) -> None:
        super().__init__(layers, case, device)
        (next_n,) = set(case.queries)
        self.lengths = (self.ends - self.starts).view(-1, next_n)
        self.schedule: Tensor | None = None

    def prepare(self) -> None:
        sms = 132
        if self.device == "cuda":
            sms = torch.cuda.get_device_properties(0).multi_processor_count
        module = self.layers.module(METADATA)
        schedule = module.get_paged_mqa_logits_metadata(self.lengths, _PAGE, sms)
        self.schedule = schedule if self.schedule is None else self.schedule.copy_(schedule)
        super().prepare()

    def made_once(self) -> dict[str, Any]:
        decode = self.layers.module(METADATA).DeepSeekV32IndexerDecodeMetadata(
            block_table=self.block_table, seq_lens=self.lengths, decode_lens=self._ints(self.case.queries),
            requires_padding=False, schedule_metadata=self.schedule,
        )  # fmt: skip
        return {
            "num_decodes": len(self.case.contexts),
            "num_decode_tokens": self.case.tokens,
            "decode": decode,
        }

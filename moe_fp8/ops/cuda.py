"""CUDA launches: problem -> spec -> loaded kernel -> parameters -> launch.

Arguments arrive checked, with outputs allocated and activation scales MN-major. Each function packs the
one struct that its kernel takes (the layouts are those of the `*Params` structs in `moe_fp8/kernels`) and
launches on the current stream. Nothing here waits for the device, reads device data or allocates.

Given the call's key they remember the launch, and `repeat` makes it again without checks or preparation.
"""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8 import heuristics
from moe_fp8.errors import UnsupportedError
from moe_fp8.heuristics import gemm_table
from moe_fp8.jit.driver import LoadedKernel, ParamBlock, device_info
from moe_fp8.jit.runtime import get_kernel
from moe_fp8.jit.tensor_map import encode_2d, encode_tiled
from moe_fp8.ops.keys import Key
from moe_fp8.problems import (
    GemmLayout,
    GemmProblem,
    IndexerCacheProblem,
    InDtype,
    MqaLogitsProblem,
    OutDtype,
    PagedMqaLogitsProblem,
    PagedMqaMetadataProblem,
    QuantizeProblem,
)
from moe_fp8.settings import settings
from moe_fp8.specs import KernelSpec, kernel_spec

_raw_stream = torch._C._cuda_getCurrentRawStream
_current_device = torch._C._cuda_getDevice

_GEMM = struct.Struct("128s128s128s128sQQQqiiii")
_MQA = struct.Struct("128s128s128s128sQQQqiiii")
_PAGED = struct.Struct("128s128s128s128sQQQQiiqqii")
_METADATA = struct.Struct("QiiQii")
_QUANTIZE = struct.Struct("QQQqqii")
_INDEXER_CACHE = struct.Struct("QQQqqqiii")


class _Launch(NamedTuple):
    """A launch in full but for the stream; read-only, so that threads may share it."""

    kernel: LoadedKernel
    grid: int
    device: int
    block: ParamBlock


_launches: dict[Key, _Launch] = {}
# Allocators hand out the same addresses again and again; where they do not, launches remembered in vain
# must not grow without end. One takes about 2.5 KiB.
_MAX_LAUNCHES = 8192


@cache
def _num_sms(device: int) -> int:
    info = device_info(device)
    if info.cc != (9, 0):
        raise UnsupportedError(
            f"{info.name} (compute capability {info.cc[0]}.{info.cc[1]}): the kernels need Hopper (9.0); "
            "move the tensors to such a GPU, or to the CPU for the reference implementation"
        )
    return info.num_sms


@cache
def _table(device: int) -> str:
    """The measured table that is meant for the device, "" for none."""
    return gemm_table.device_of(device_info(device).name)


def repeat(key: Key) -> bool:
    """Launch what was launched for a call of this key; False if there was none.

    Such a call has passed the checks: ask before them.
    """
    launch = _launches.get(key)
    if launch is None:
        return False
    kernel, grid, device, block = launch
    if device == _current_device():
        kernel.launch(grid, _raw_stream(device), block)
    else:
        with torch.cuda.device(device):
            kernel.launch(grid, _raw_stream(device), block)
    return True


def _launch(spec: KernelSpec, grid: int, device: int, block: ParamBlock, key: Key | None) -> None:
    if device != _current_device():
        with torch.cuda.device(device):
            return _launch(spec, grid, device, block, key)
    kernel = get_kernel(spec)
    kernel.launch(grid, _raw_stream(device), block)
    if key is not None:
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = _Launch(kernel, grid, device, block)


def _block(layout: struct.Struct) -> ParamBlock:
    # Structs that hold tensor maps are 64-byte aligned, and so padded.
    return ParamBlock(-(-layout.size // 64) * 64)


class _GemmPlan(NamedTuple):
    """A GEMM's kernel, its grid, and the boxes of its tensor maps, innermost dimension first."""

    spec: KernelSpec
    grid: int
    a_box: tuple[int, int]
    a_scale_box: tuple[int, int]
    b_box: tuple[int, int]
    out_box: tuple[int, int]


def _gemm_problem(
    layout: GemmLayout,
    m: int,
    n: int,
    k: int,
    num_experts: int,
    expected_m: int | None,
    fp32: bool,
    config_text: str | None,
    device: int,
) -> GemmProblem:
    return GemmProblem(
        layout,
        m,
        n,
        k,
        num_experts,
        expected_m,
        "float32" if fp32 else "bfloat16",
        _num_sms(device),
        _table(device),
        settings().batch_invariant,
        config_text,
    )


@lru_cache(maxsize=65536)
def _gemm_plan(
    layout: GemmLayout,
    m: int,
    n: int,
    k: int,
    num_experts: int,
    expected_m: int | None,
    fp32: bool,
    config_text: str | None,
    device: int,
) -> _GemmPlan:
    """Raises ConfigError where `config_text` names no config that this call may use."""
    problem = _gemm_problem(layout, m, n, k, num_experts, expected_m, fp32, config_text, device)
    config = heuristics.gemm_config(problem)
    return _GemmPlan(
        kernel_spec(problem),
        heuristics.gemm_grid(config, layout, m, n, problem.num_sms),
        a_box=(128, config.token_box),
        a_scale_box=(config.block_m, 1),
        b_box=(128, config.weight_box),
        out_box=config.out_box,
    )


def gemm(
    layout: GemmLayout,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    index: Tensor | None,
    expected_m: int | None,
    config: str | None = None,
    key: Key | None = None,
) -> None:
    """Dense and grouped GEMM; a [M,K] or [E,Mmax,K], b [N,K] or [E,N,K], out [..., N]."""
    device = a.get_device()
    k = a.shape[-1]
    m = a.shape[-2]
    n = b.shape[-2]
    num_experts = b.shape[0] if layout != "dense" else 1
    fp32 = out.dtype is torch.float32
    plan = _gemm_plan(layout, m, n, k, num_experts, expected_m, fp32, config, device)
    batch = num_experts if layout == "masked" else 1
    block = _block(_GEMM)
    # A box is 128 bytes of each row. Promoted to 256, L2 would fetch the next box's too: 4.04 TB/s, not 4.39.
    _GEMM.pack_into(
        block.buffer,
        0,
        encode_2d(a.data_ptr(), "uint8", (k, m * batch), k, plan.a_box, l2_promotion=128),
        encode_2d(
            a_scale.data_ptr(), "float32", (m, batch * (k >> 7)), ((m + 3) & -4) * 4, plan.a_scale_box, 0
        ),
        encode_2d(b.data_ptr(), "uint8", (k, n * num_experts), k, plan.b_box, l2_promotion=128),
        b""
        if fp32
        else encode_2d(out.data_ptr(), "bfloat16", (n, m * batch), n * 2, plan.out_box, plan.out_box[0] * 2),
        out.data_ptr(),
        b_scale.data_ptr(),
        0 if index is None else index.data_ptr(),
        n,
        m,
        n,
        k,
        num_experts,
    )
    _launch(plan.spec, plan.grid, device, block, key)


_OUT_DTYPES: dict[torch.dtype, OutDtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

#: Keys of a prefill work item: enough items to spread evenly, few enough that loading queries stays cheap.
_MIN_CHUNK, _MAX_CHUNK, _ITEMS_PER_SM = 512, 8192, 6


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    out: Tensor,
    compressed: bool,
    fill: bool,
    key: Key | None = None,
) -> None:
    """Prefill indexer logits; q [M,H,D], k [N,D], weights [M,H], out [M, N or max_seqlen_k]."""
    device = q.get_device()
    num_sms = _num_sms(device)
    m, heads, dim = q.shape
    n = k.shape[0]
    width = out.shape[1]
    problem = MqaLogitsProblem(m, n, heads, dim, compressed, fill, num_sms, _OUT_DTYPES[out.dtype])
    spec = kernel_spec(problem)
    block_q = heuristics.mqa_config(problem).block_q
    query_blocks = -(-m // block_q)
    columns = max(n, width) if compressed else n
    share = -(-columns * query_blocks // (num_sms * _ITEMS_PER_SM * 128)) * 128
    chunk = min(max(share, _MIN_CHUNK), _MAX_CHUNK)
    block = _block(_MQA)
    _MQA.pack_into(
        block.buffer,
        0,
        encode_2d(q.data_ptr(), "uint8", (dim, m * heads), dim, (dim, block_q * heads), dim),
        encode_2d(k.data_ptr(), "uint8", (dim, n), dim, (dim, heuristics.MQA_BLOCK_KV), dim),
        encode_2d(k_scale.data_ptr(), "float32", (n, 1), (n + 3 & -4) * 4, (heuristics.MQA_BLOCK_KV, 1), 0),
        encode_2d(weights.data_ptr(), "float32", (heads, m), heads * 4, (heads, block_q), 0),
        out.data_ptr(),
        ks.data_ptr(),
        ke.data_ptr(),
        out.stride(0),
        m,
        n,
        width,
        chunk,
    )
    _launch(spec, min(num_sms, query_blocks * -(-columns // chunk)), device, block, key)


def paged_mqa_logits_metadata(
    context_lens: Tensor,
    block_size: int,
    num_workers: int,
    next_n: int,
    out: Tensor,
    key: Key | None = None,
) -> None:
    """Schedule of the paged logits; context_lens [B] or [B,next_n], out [num_workers + 1, 2]."""
    device = context_lens.get_device()
    batch = context_lens.shape[0]
    spec = kernel_spec(PagedMqaMetadataProblem(batch, next_n, _num_sms(device)))
    block = _block(_METADATA)
    _METADATA.pack_into(
        block.buffer,
        0,
        context_lens.data_ptr(),
        next_n,
        context_lens.dim() == 2,
        out.data_ptr(),
        batch,
        num_workers,
    )
    _launch(spec, 1, device, block, key)


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    metadata: Tensor,
    out: Tensor,
    key: Key | None = None,
) -> None:
    """Decode indexer logits; q [B,next_n,H,D], kv_cache [pages,block,1,D+4], out [B*next_n, width]."""
    device = q.get_device()
    batch, next_n, heads, dim = q.shape
    pages, page_size = kv_cache.shape[0], kv_cache.shape[1]
    page_stride = kv_cache.stride(0) if pages > 1 else page_size * (dim + 4)
    problem = PagedMqaLogitsProblem(
        batch, next_n, heads, dim, page_size, _num_sms(device), _OUT_DTYPES[out.dtype]
    )
    spec = kernel_spec(problem)
    block_q = heuristics.paged_mqa_config(problem).block_q
    rows = batch * next_n
    box = min(page_size, heuristics.MQA_BLOCK_KV)
    cache = kv_cache.data_ptr()
    block = _block(_PAGED)
    _PAGED.pack_into(
        block.buffer,
        0,
        encode_2d(q.data_ptr(), "uint8", (dim, rows * heads), dim, (dim, block_q * heads), dim),
        encode_tiled(cache, "uint8", (dim, page_size, pages), (dim, page_stride), (dim, box, 1), dim, 128),
        encode_2d(cache + page_size * dim, "float32", (page_size, pages), page_stride, (box, 1), 0),
        encode_2d(weights.data_ptr(), "float32", (heads, rows), heads * 4, (heads, block_q), 0),
        out.data_ptr(),
        block_table.data_ptr(),
        metadata.data_ptr(),
        context_lens.data_ptr(),
        next_n,
        context_lens.dim() == 2,
        out.stride(0),
        block_table.stride(0),
        batch,
        # The kernel works up to here whatever the lengths say, and so reads no page past the table.
        min(out.shape[1], block_table.shape[1] * page_size),
    )
    _launch(spec, metadata.shape[0] - 1, device, block, key)


_IN_DTYPES: dict[torch.dtype, InDtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}

#: Rows that one block of the quantiser takes at once, and blocks that share an SM.
_QUANTIZE_ROWS, _QUANTIZE_BLOCKS_PER_SM = 16, 8


def quantize(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool, key: Key | None = None) -> None:
    """x [M,K] -> q [M,K] fp8 and scale [M,K/128] MN-major."""
    device = x.get_device()
    num_sms = _num_sms(device)
    m, k = x.shape
    spec = kernel_spec(QuantizeProblem(m, k, _IN_DTYPES[x.dtype], power_of_two, num_sms))
    block = _block(_QUANTIZE)
    _QUANTIZE.pack_into(block.buffer, 0, x.data_ptr(), q.data_ptr(), scale.data_ptr(), k, (m + 3) & -4, m, k)
    tiles = -(-m // _QUANTIZE_ROWS) * (k >> 7)
    _launch(spec, min(tiles, num_sms * _QUANTIZE_BLOCKS_PER_SM), device, block, key)


def indexer_quantize_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, power_of_two: bool, key: Key | None = None
) -> None:
    """k [T,D] -> slots slot_mapping [T] of kv_cache [pages,block,1,D+4]."""
    device = k.get_device()
    rows, dim = k.shape
    pages, page_size = kv_cache.shape[0], kv_cache.shape[1]
    spec = kernel_spec(IndexerCacheProblem(rows, dim, _IN_DTYPES[k.dtype], power_of_two, _num_sms(device)))
    block = _block(_INDEXER_CACHE)
    _INDEXER_CACHE.pack_into(
        block.buffer,
        0,
        k.data_ptr(),
        kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        k.stride(0),
        kv_cache.stride(0),
        pages,
        rows,
        page_size.bit_length() - 1,
        slot_mapping.dtype is torch.int64,
    )
    # Eight values of a row are one thread's.
    _launch(spec, -(-rows * dim // (spec.num_threads * 8)), device, block, key)

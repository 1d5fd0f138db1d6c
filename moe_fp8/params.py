"""The parameter struct of each kernel, and the constants that Python and device code share.

A struct is an ordered list of fields. It gives the format in which a launch packs its parameters. It also
gives `static_assert`s for the kernel: if a struct or a constant of the device code differs, the kernel does
not compile, even on a machine without a GPU. `jit/sources.py` appends these assertions to the kernel's
source, so they are a part of its key. This module needs only the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from moe_fp8 import heuristics
from moe_fp8.limits import (
    INDEXER_HEADS,
    MAX_EXPERT_GROUPS,
    MAX_EXPERTS,
    MAX_ROUTED_EXPERTS,
    PAGE_SIZES,
    SCALE_BLOCK,
)
from moe_fp8.problems import SEGMENT_ALIGNMENT
from moe_fp8.specs import (
    GEMM_LAYOUTS,
    IN_DTYPES,
    K_OFFSETS,
    MOE_PLACES,
    QUANTIZE_ROWS,
    QUANTIZE_VALUES,
    SILU_ROWS,
    SILU_VALUES,
)

#: Type -> (format of the struct module, bytes, alignment).
_TYPES = {
    "TensorMap": ("128s", 128, 64),
    "pointer": ("Q", 8, 8),
    "int64": ("q", 8, 8),
    "int": ("i", 4, 4),
    "float": ("f", 4, 4),
}


class ParamStruct:
    """A struct of device code: its `name` there, and its fields in order, each as "type name".

    Types are TensorMap, pointer, int64, int and float. `pack_into(buffer, offset, *values)` takes a value for
    each field: 128 bytes for a TensorMap, an address for a pointer. `size` is in bytes and includes padding.
    `maps` and `pointers` have, for each field of these types, its number and its offset in words of 8 bytes;
    `addresses` has the offsets of both.
    """

    def __init__(self, name: str, *fields: str) -> None:
        self.name = name
        self.offsets: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        found: dict[str, list[tuple[int, int]]] = {"TensorMap": [], "pointer": []}
        layout, end, largest = "=", 0, 1
        for number, (kind, field) in enumerate(text.split() for text in fields):
            code, size, alignment = _TYPES[kind]
            padding = -end % alignment
            layout += f"{padding}x{code}" if padding else code
            self.offsets[field], self._sizes[field] = end + padding, size
            if kind in found:
                found[kind].append((number, self.offsets[field] // 8))
            end += padding + size
            largest = max(largest, alignment)
        self.size = end + -end % largest
        self.maps, self.pointers = tuple(found["TensorMap"]), tuple(found["pointer"])
        self.addresses = tuple(word for _, word in (*self.maps, *self.pointers))
        self.pack_into = struct.Struct(layout).pack_into

    def assertions(self) -> Iterable[tuple[str, int]]:
        """Pairs (expression of device code, its required value): the size, each field's offset and size."""
        yield f"sizeof({self.name})", self.size
        for field, offset in self.offsets.items():
            yield f"offsetof({self.name}, {field})", offset
            yield f"sizeof((({self.name}*)0)->{field})", self._sizes[field]


_GEMM_FIELDS = (
    "TensorMap a",
    "TensorMap a_scale",
    "TensorMap b",
    "TensorMap out_map",
    "pointer out",
    "pointer b_scale",
    "pointer index",
    "int64 out_stride",
    "int m",
    "int n",
    "int k",
    "int num_experts",
    "int constant_weights",
)
GEMM = ParamStruct("GemmParams", *_GEMM_FIELDS, "int accumulate")
GEMM_SILU_MUL = ParamStruct(
    "GemmParams", *_GEMM_FIELDS, "float limit", "pointer out_scale", "int64 out_scale_stride"
)

K_GROUPED_GEMM = ParamStruct("GemmParams", *_GEMM_FIELDS, "int accumulate", "TensorMap b_scale_map")

MQA_LOGITS = ParamStruct(
    "MqaLogitsParams",
    "TensorMap q",
    "TensorMap k",
    "TensorMap k_scale",
    "TensorMap weights",
    "pointer logits",
    "pointer ks",
    "pointer ke",
    "int64 logits_stride",
    "int num_queries",
    "int num_keys",
    "int width",
    "int chunk_kv",
    "int query_blocks",
    "int num_items",
    "int even",
)

PAGED_MQA_LOGITS = ParamStruct(
    "PagedMqaLogitsParams",
    "TensorMap q",
    "TensorMap k",
    "TensorMap k_scale",
    "TensorMap weights",
    "pointer logits",
    "pointer block_table",
    "pointer metadata",
    "pointer context_lens.lens",
    "int context_lens.next_n",
    "int context_lens.per_token",
    "int64 logits_stride",
    "int64 block_table_stride",
    "int batch",
    "int width",
)

PAGED_MQA_METADATA = ParamStruct(
    "PagedMqaLogitsMetadataParams",
    "pointer context_lens.lens",
    "int context_lens.next_n",
    "int context_lens.per_token",
    "pointer metadata",
    "int batch",
    "int workers",
)

QUANTIZE = ParamStruct(
    "QuantizeParams",
    "pointer x",
    "pointer q",
    "pointer scale",
    "int64 x_stride",
    "int64 scale_stride",
    "int m",
    "int k",
)

SILU_MUL_QUANTIZE = ParamStruct(
    "SiluMulQuantizeParams",
    "pointer x",
    "pointer masked_m",
    "pointer q",
    "pointer scale",
    "int64 expert_stride",
    "int64 row_stride",
    "int64 scale_stride",
    "int m",
    "int k",
    "int num_experts",
    "float limit",
)

INDEXER_CACHE = ParamStruct(
    "IndexerCacheParams",
    "pointer k",
    "pointer kv_cache",
    "pointer slot_mapping",
    "int64 k_stride",
    "int64 page_stride",
    "int64 num_pages",
    "int num_rows",
    "int page_shift",
    "int wide_slots",
)

INDEXER_TOPK = ParamStruct(
    "IndexerTopkParams",
    "pointer logits",
    "pointer starts",
    "pointer ends",
    "pointer out",
    "pointer values",
    "pointer carried",
    "int64 stride",
    "int num_columns",
    "int k",
    "int sorted",
    "int first_column",
    "int num_carried",
)

MOE_PERMUTE = ParamStruct(
    "MoePermuteParams",
    "pointer x",
    "pointer x_scale",
    "pointer ids",
    "pointer expert_map",
    "pointer a",
    "pointer a_scale",
    "pointer offsets",
    "pointer rows",
    "int64 x_stride",
    "int64 x_scale_stride",
    "int64 x_group_stride",
    "int64 ids_stride",
    "int64 a_scale_stride",
    "int num_tokens",
    "int topk",
    "int k",
    "int num_experts",
    "int num_ids",
    "int tokens",
    "int splits",
)

MOE_COMBINE = ParamStruct(
    "MoeCombineParams",
    "pointer y",
    "pointer rows",
    "pointer weights",
    "pointer out",
    "int64 y_stride",
    "int64 weights_stride",
    "int64 out_stride",
    "int num_tokens",
    "int topk",
    "int n",
    "int num_rows",
)

ROUTE_TOPK = ParamStruct(
    "RouteTopkParams",
    "pointer logits",
    "pointer bias",
    "pointer weights",
    "pointer ids",
    "int64 logits_stride",
    "int64 weights_stride",
    "int64 ids_stride",
    "int num_tokens",
    "int num_experts",
    "int topk",
    "int num_groups",
    "int kept_groups",
    "int softmax",
    "int renormalize",
    "int wide_ids",
    "float scaling",
)

#: Layout of a GEMM -> enumerator of `sched::Layout`.
_ENUMERATORS = {
    "dense": "kDense",
    "m_indices": "kMIndices",
    "psum": "kPsum",
    "offsets": "kOffsets",
    "masked": "kMasked",
}

_IN_DTYPE_ENUMERATORS = {"bfloat16": "kBf16", "float16": "kFp16", "float32": "kFp32"}
_IN_DTYPES = {
    f"static_cast<int>(moe_fp8::InDtype::{enumerator})": IN_DTYPES[dtype]
    for dtype, enumerator in _IN_DTYPE_ENUMERATORS.items()
}


def _gemm_boxes() -> dict[str, int]:
    """The boxes of a GEMM's tensor maps for every tile that there is, so that each kernel checks them all."""
    boxes: dict[str, int] = {}
    for config in heuristics.every_gemm_config():
        boxes[f"moe_fp8::kPiecesOf<{config.block_n}>"] = int(config.divided)
        boxes[f"moe_fp8::kLaunchClusterOf<{config.block_m}, {config.cluster}>"] = config.launch_cluster
        boxes[f"moe_fp8::sched::kTokenBoxOf<{config.block_m}>"] = config.token_box
        boxes[f"moe_fp8::kWeightBoxOf<{config.block_n}>"] = config.weight_box
        if config.out_box is not None:
            box_rows = f"moe_fp8::mma::kBoxRowsOf<{config.block_n}>"
            boxes[box_rows], boxes["moe_fp8::kStoredTokens"] = config.out_box
    return boxes


def _query_boxes() -> dict[str, int]:
    """The boxes of queries for every tile that there is."""
    return {
        f"moe_fp8::kHeadColumnsOf<{block_q}, {heads}>": heuristics.query_box_rows(block_q, heads)
        for heads in INDEXER_HEADS
        for block_q in (1, 2, 4, 8)
        if block_q * heads <= heuristics.MQA_COLUMNS
    }


_MQA = {
    "moe_fp8::kBlockKv": heuristics.MQA_BLOCK_KV,
    "moe_fp8::kMathWarpgroups": heuristics.MQA_MATH_WARPGROUPS,
    "moe_fp8::kWarpgroup": heuristics.WARPGROUP,
    **_query_boxes(),
}

#: Kernel -> its struct, and the required values of its constants.
_KERNELS: dict[str, tuple[ParamStruct, dict[str, int]]] = {
    "gemm_fp8": (
        GEMM,
        {
            "moe_fp8::kBlockK": SCALE_BLOCK,
            "moe_fp8::kSegmentAlignment": SEGMENT_ALIGNMENT,
            "moe_fp8::kWarpgroup": heuristics.WARPGROUP,
            **{
                f"static_cast<int>(moe_fp8::sched::Layout::{enumerator})": GEMM_LAYOUTS[layout]
                for layout, enumerator in _ENUMERATORS.items()
            },
            **_gemm_boxes(),
        },
    ),
    "gemm_silu_mul_fp8": (
        GEMM_SILU_MUL,
        {
            "moe_fp8::kBlockK": SCALE_BLOCK,
            "static_cast<int>(moe_fp8::sched::Layout::kOffsets)": GEMM_LAYOUTS["offsets"],
            **{
                f"moe_fp8::{name}Of<{tile}>": box
                for config in heuristics.silu_mul_configs()
                for name, tile, box in (
                    ("sched::kTokenBox", config.block_m, config.token_box),
                    ("kWeightBox", config.block_n, config.weight_box),
                )
            },
        },
    ),
    "k_grouped_gemm_fp8": (
        K_GROUPED_GEMM,
        {
            "moe_fp8::kBlockK": SCALE_BLOCK,
            "static_cast<int>(moe_fp8::sched::Layout::kKOffsets)": K_OFFSETS,
            "moe_fp8::mma::kSumColumns": heuristics.K_GROUPED_SUM_BOX[0],
            "moe_fp8::mma::kSumRows": heuristics.K_GROUPED_SUM_BOX[1],
            **_gemm_boxes(),
        },
    ),
    "mqa_logits_fp8": (MQA_LOGITS, _MQA),
    "paged_mqa_logits_fp8": (
        PAGED_MQA_LOGITS,
        _MQA | {f"moe_fp8::kBoxKeysOf<{size}>": heuristics.key_box_rows(size) for size in PAGE_SIZES},
    ),
    "paged_mqa_logits_metadata": (PAGED_MQA_METADATA, {}),
    "quantize_fp8": (
        QUANTIZE,
        {
            "moe_fp8::kBlockK": SCALE_BLOCK,
            "moe_fp8::kRows": QUANTIZE_ROWS,
            "moe_fp8::kQuantizeValues": QUANTIZE_VALUES,
            **_IN_DTYPES,
        },
    ),
    "silu_mul_quantize": (
        SILU_MUL_QUANTIZE,
        {
            "moe_fp8::kBlockK": SCALE_BLOCK,
            "moe_fp8::kRows": SILU_ROWS,
            "moe_fp8::kSiluValues": SILU_VALUES,
        },
    ),
    "indexer_quantize_and_cache": (
        INDEXER_CACHE,
        {"moe_fp8::kQuantizeValues": QUANTIZE_VALUES, **_IN_DTYPES},
    ),
    "moe_permute": (
        MOE_PERMUTE,
        {
            "moe_fp8::kBlockK": SCALE_BLOCK,
            "moe_fp8::kQuantizeValues": QUANTIZE_VALUES,
            "moe_fp8::kPlaces": MOE_PLACES,
            "moe_fp8::kMaxExperts": MAX_EXPERTS,
        },
    ),
    "moe_combine": (MOE_COMBINE, {"moe_fp8::kQuantizeValues": QUANTIZE_VALUES}),
    "route_topk": (
        ROUTE_TOPK,
        {
            "moe_fp8::kMostChosen": MAX_ROUTED_EXPERTS,
            "moe_fp8::kMostGroups": MAX_EXPERT_GROUPS,
            **_IN_DTYPES,
        },
    ),
    "indexer_topk": (INDEXER_TOPK, {"moe_fp8::topk::kBins": heuristics.TOPK_BINS, **_IN_DTYPES}),
}

#: `#line` makes diagnostics name this module. NVRTC has neither <cstddef> nor `__builtin_offsetof`.
_HEAD = ('#line 1 "params.py"', "#define offsetof(type, field) __INTADDR__(&((type*)0)->field)")


def assertions(kernel: str) -> str:
    """The text that is appended to the source of `kernel`; empty if the kernel has no struct here."""
    if kernel not in _KERNELS:
        return ""
    params, constants = _KERNELS[kernel]
    facts = [*params.assertions(), *constants.items()]
    lines = [f'static_assert({expression} == {value}, "see params.py");' for expression, value in facts]
    return "\n".join([*_HEAD, *lines, ""])

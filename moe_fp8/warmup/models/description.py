"""A model as the planner sees it: its linear layers before parallelism, and the sizes that bound calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from moe_fp8.limits import SCALE_BLOCK
from moe_fp8.problems import InDtype

#: What cuts a side of a weight: nothing, whole heads, whole key-value heads (which ranks share if there are
#: fewer heads than ranks), or a width that is cut in blocks of 128.
CutBy = Literal["whole", "heads", "kv_heads", "width"]

#: The parallelism that cuts a linear layer.
Domain = Literal["attention", "mlp", "shared", "experts"]


def whole_blocks(size: int) -> int:
    """`size` rounded up to a multiple of 128."""
    return -(-size // SCALE_BLOCK) * SCALE_BLOCK


class Part(NamedTuple):
    """A part of one side of a weight: `units` of `size`, of which a rank has its share.

    `padded`: the engines round a rank's share of this width, or of these heads, up to a multiple of 128.
    """

    units: int
    size: int = 1
    cut: CutBy = "whole"
    padded: bool = False


@dataclass(frozen=True)
class Linear:
    """One linear layer of a model, `[n, k]`, or `[experts, n, k]` if `routed`.

    `what` is the usual name of the module; "+" joins projections that engines fuse. `n` has the parts that
    lie one behind the other. `modules` are the names in a checkpoint, below "layers.N." if the module belongs
    to a layer. `layers` are the numbers of the layers that have it; () means that it belongs to no layer.
    `whole_context`: its rows may be all tokens of a context, not only the tokens of one pass. `reason` says
    why no FP8 kernel of this package computes it; it is "" for a layer that is planned. `lacking`: its
    weights are quantized all the same, so that another kernel must serve it. `partial`: its weight may end
    in a part of a block of 128 rows, which vLLM fills with zeros. `engine`: the only engine that builds the
    layer, where engines fuse projections differently; "" if all build it.
    """

    what: str
    n: tuple[Part, ...]
    k: Part
    domain: Domain
    modules: tuple[str, ...]
    layers: tuple[int, ...]
    routed: bool = False
    whole_context: bool = False
    reason: str = ""
    lacking: bool = False
    partial: bool = False
    engine: str = ""

    def because(self, reason: str, *, lacking: bool = False) -> Linear:
        """This layer, which is not planned for `reason`."""
        return replace(self, reason=reason, lacking=lacking)


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer of sparse attention, which picks `topk` positions for every query.

    `compression`: tokens of the context for each key of the indexer. `pooled`: the model pools these keys
    (`index_kpool`).
    """

    num_heads: int
    head_dim: int
    topk: int
    compression: int = 1
    pooled: bool = False


@dataclass(frozen=True)
class ModelDescription:
    """A mixture-of-experts model before any parallelism.

    `linears` are all its linear layers, planned or not. `num_shared_experts` counts shared experts of the
    width of a routed expert, which an engine may fuse with them. `max_positions` is the longest context.
    `dtype` is the dtype of the activations before quantization.
    """

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    max_positions: int
    dtype: InDtype
    linears: tuple[Linear, ...]
    indexer: Indexer | None
    num_experts: int
    experts_per_token: int
    num_shared_experts: int

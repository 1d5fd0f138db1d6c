"""The linear layers of the blocks that models are made of: kinds of attention, MLPs and experts.

Each function reads the fields of one block and returns its linear layers. `layers` are the numbers of the
layers that have the block. Projections that engines fuse are one linear layer.
"""

from __future__ import annotations

from typing import NamedTuple

from moe_fp8.warmup.models.description import Domain, Indexer, Linear, Part
from moe_fp8.warmup.models.fields import Fields

#: Why layers are not planned in any checkpoint.
ROUTER = "routers stay in bf16 or fp32"
HEAD = "the output head stays in bf16"
GATE = "gates of a few columns stay in bf16"
INDEXER_WEIGHTS = "the indexer's weights stay in bf16"
PREDICTOR = "the projection of a prediction layer stays in bf16"
COMPRESSOR = "the compressors' weights stay in bf16"

Numbers = tuple[int, ...]


class MlaSizes(NamedTuple):
    """Sizes of multi-head latent attention; `q_lora_rank` is 0 if queries are projected directly."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def read(cls, fields: Fields, prefix: str = "") -> MlaSizes:
        """The sizes from fields whose names begin with `prefix`."""
        return cls(
            fields.number(f"{prefix}num_attention_heads"),
            fields.number(f"{prefix}q_lora_rank") if fields.has(f"{prefix}q_lora_rank") else 0,
            fields.number(f"{prefix}kv_lora_rank"),
            fields.number(f"{prefix}qk_nope_head_dim"),
            fields.number(f"{prefix}qk_rope_head_dim", least=0),
            fields.number(f"{prefix}v_head_dim"),
        )


def mla(fields: Fields, layers: Numbers, sizes: MlaSizes) -> list[Linear]:
    """Latent attention: down projections, which every rank has whole, up projections by heads, and output."""
    hidden = fields.number("hidden_size")
    heads, q_lora, kv_lora, nope, rope, v = sizes
    kv_a = Part(kv_lora + rope)

    def linear(what: str, n: tuple[Part, ...], k: Part, *names: str, whole_context: bool = False) -> Linear:
        modules = tuple(f"self_attn.{name}" for name in names)
        return Linear(what, n, k, "attention", modules, layers, whole_context=whole_context)

    queries = Part(heads, nope + rope, "heads")
    if q_lora:
        found = [
            linear("q_a+kv_a", (Part(q_lora), kv_a), Part(hidden), "q_a_proj", "kv_a_proj_with_mqa"),
            linear("q_b", (queries,), Part(q_lora), "q_b_proj"),
        ]
    else:
        found = [
            linear("q", (queries,), Part(hidden), "q_proj"),
            linear("kv_a", (kv_a,), Part(hidden), "kv_a_proj_with_mqa"),
        ]
    up = (Part(heads, nope + v, "heads"),)
    found.append(linear("kv_b", up, Part(kv_lora), "kv_b_proj", whole_context=True))
    found.append(linear("o", (Part(hidden),), Part(heads, v, "heads"), "o_proj"))
    return found


def indexer(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """The indexer of sparse attention. Every rank has it whole: it picks the same tokens for all heads.

    Its keys' projection is FP8 in checkpoints; vLLM computes it in bf16, together with the heads' weights.
    """
    names = ("index_n_heads", "index_head_dim", "index_topk")
    if not any(fields.has(name) for name in names):
        return [], None
    heads, dim, topk = (fields.number(name) for name in names)
    hidden, q_lora = fields.number("hidden_size"), fields.number("q_lora_rank")

    def linear(name: str, n: int, k: int, reason: str = "") -> Linear:
        modules = (f"self_attn.indexer.{name}",)
        return Linear(f"indexer.{name}", (Part(n),), Part(k), "attention", modules, layers, reason=reason)

    found = [
        linear("wq_b", heads * dim, q_lora),
        linear("wk", dim, hidden),
        linear("weights_proj", heads, hidden, INDEXER_WEIGHTS),
    ]
    pooled = fields.number("index_kpool", least=0, default=1) > 1
    return found, Indexer(heads, dim, topk, pooled=pooled)


def gqa(fields: Fields, layers: Numbers, *, prefix: str = "", gated: bool = False) -> list[Linear]:
    """Grouped-query attention: queries, keys and values in one projection, and the output.

    Without `head_dim` the heads share the hidden size. `gated`: each query head has as many columns for a
    gate.
    """
    hidden = fields.number("hidden_size")

    def size(name: str, otherwise: int) -> int:
        """The block's own field if there is one, else the model's."""
        return fields.number(prefix + name, default=fields.number(name, default=otherwise))

    heads = fields.number(prefix + "num_attention_heads", default=fields.number("num_attention_heads"))
    kv_heads = size("num_key_value_heads", heads)
    fields.demand(
        heads % kv_heads == 0, "num_key_value_heads", f"a divisor of {heads} attention heads", kv_heads
    )
    dim = size("head_dim", hidden // heads)
    v_dim = size("v_head_dim", dim)
    queries = Part(heads, 2 * dim if gated else dim, "heads")
    keys, values = (Part(kv_heads, size, "kv_heads") for size in (dim, v_dim))
    names = tuple(f"self_attn.{name}_proj" for name in "qkv")
    return [
        Linear("qkv", (queries, keys, values), Part(hidden), "attention", names, layers),
        Linear("o", (Part(hidden),), Part(heads, v_dim, "heads"), "attention", ("self_attn.o_proj",), layers),
    ]


def gated_delta_net(fields: Fields, layers: Numbers) -> list[Linear]:
    """Linear attention of Qwen3-Next and Qwen3.5: projections of q, k, v and z, of b and a, and output."""
    hidden = fields.number("hidden_size")
    key_heads, value_heads = (fields.number(f"linear_num_{name}_heads") for name in ("key", "value"))
    key_dim, value_dim = (fields.number(f"linear_{name}_head_dim") for name in ("key", "value"))
    keys, values = Part(key_heads, key_dim, "heads"), Part(value_heads, value_dim, "heads")

    def linear(name: str, n: tuple[Part, ...], k: Part, names: tuple[str, ...]) -> Linear:
        modules = tuple(f"linear_attn.{each}" for each in names)
        return Linear(f"linear_attn.{name}", n, k, "attention", modules, layers)

    inputs = ("in_proj_qkvz",) if fields.raw("model_type") == "qwen3_next" else ("in_proj_qkv", "in_proj_z")
    gates = ("in_proj_ba",) if fields.raw("model_type") == "qwen3_next" else ("in_proj_b", "in_proj_a")
    return [
        linear("in_proj_qkvz", (keys, keys, values, values), Part(hidden), inputs),
        linear("in_proj_ba", (Part(value_heads, 2, "heads"),), Part(hidden), gates),
        linear("out_proj", (Part(hidden),), values, ("out_proj",)),
    ]


def delta_attention(fields: Fields, layers: Numbers) -> list[Linear]:
    """Kimi's delta attention, as in GLM-5.3: one input projection of six, two up projections, output."""
    hidden, own = fields.number("hidden_size"), fields.within("linear_attn_config")
    if own is not None:
        dim, heads = own.number("head_dim"), own.number("num_heads")
    else:
        dim, heads = fields.number("linear_head_dim"), fields.number("linear_num_heads")
    all_heads = Part(heads, dim, "heads")

    def linear(name: str, n: tuple[Part, ...], k: Part, *names: str) -> Linear:
        modules = tuple(f"self_attn.{each}_proj" for each in names)
        return Linear(f"linear_attn.{name}", n, k, "attention", modules, layers)

    inputs = (all_heads, all_heads, all_heads, Part(heads, 1, "heads"), Part(dim), Part(dim))
    return [
        linear("in_proj", inputs, Part(hidden), "q", "k", "v", "b", "f_a", "g_a"),
        linear("f_b", (all_heads,), Part(dim), "f_b"),
        linear("g_b", (all_heads,), Part(dim), "g_b"),
        linear("out_proj", (Part(hidden),), all_heads, "o"),
    ]


def mlp(
    fields: Fields, what: str, layers: Numbers, width: int, domain: Domain, modules: tuple[str, ...],
    *, padded: bool = False,
) -> list[Linear]:  # fmt: skip
    """A gated MLP or the routed experts: gate and up in one projection, and down.

    `modules` are the checkpoint's names of gate, up and down.
    """
    hidden = fields.number("hidden_size")
    part = Part(width, 1, "width", padded)
    routed = domain == "experts"
    gate, up, down = modules
    return [
        Linear(f"{what}.gate_up", (part, part), Part(hidden), domain, (gate, up), layers, routed),
        Linear(f"{what}.down", (Part(hidden),), part, domain, (down,), layers, routed),
    ]


def projections(module: str) -> tuple[str, ...]:
    """The usual names of an MLP's projections in a checkpoint."""
    return tuple(f"{module}.{name}_proj" for name in ("gate", "up", "down"))


def whole(what: str, n: int, k: int, layers: Numbers, module: str, reason: str) -> Linear:
    """A linear layer that every rank has whole and that is not planned for `reason`."""
    return Linear(what, (Part(n),), Part(k), "attention", (module,), layers, reason=reason)


def joined_states(fields: Fields, layers: Numbers, reason: str = PREDICTOR) -> list[Linear]:
    """A prediction layer (MTP) first projects two hidden states to one, on every rank, mostly in bf16."""
    hidden = fields.number("hidden_size")
    return [whole("mtp.eh_proj", hidden, 2 * hidden, layers, "eh_proj", reason)]


def joined_states_in_fp8(fields: Fields, layers: Numbers) -> list[Linear]:
    """As `joined_states`, with FP8 weights (dots3, MiniMax-M3)."""
    return joined_states(fields, layers, reason="")


def joined_states_by_columns(fields: Fields, layers: Numbers) -> list[Linear]:
    """As `joined_states`; the ranks split the columns, and all prediction layers share it (Qwen)."""
    hidden = fields.number("hidden_size")
    return [Linear("mtp.fc", (Part(hidden, 1, "heads"),), Part(2 * hidden), "attention", ("mtp.fc",), ())]


def states_apart(fields: Fields, layers: Numbers) -> list[Linear]:
    """A projection for each of the two hidden states (DeepSeek-V4)."""
    hidden = fields.number("hidden_size")
    return [
        Linear(f"mtp.{name}", (Part(hidden),), Part(hidden), "attention", (name,), layers)
        for name in ("e_proj", "h_proj")
    ]


def hyper_connections(fields: Fields) -> Linear:
    """The weights that mix the streams of hyper-connections (DeepSeek-V4, GLM-5.3, HY-V4), in fp32."""
    hidden, streams = fields.number("hidden_size"), fields.number("hc_mult")
    columns = 2 * streams if fields.raw("model_type") == "hy_v4" else (2 + streams) * streams
    return whole(
        "hyper_connections",
        columns,
        streams * hidden,
        (),
        "hyper_connections",
        "hyper-connections stay in fp32",
    )

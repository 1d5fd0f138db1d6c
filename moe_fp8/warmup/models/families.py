"""Architectures by `model_type`: which blocks a model is made of, and how its config spells their sizes.

Sources: the configuration and modeling files of transformers 5.23 and vLLM 0.33; SGLang 0.5.23 where it
fuses other projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_fp8.errors import ModelError
from moe_fp8.warmup.models import blocks
from moe_fp8.warmup.models.blocks import MlaSizes, Numbers
from moe_fp8.warmup.models.description import Indexer, Linear, Part, whole_blocks
from moe_fp8.warmup.models.fields import Fields

Attention = Callable[[Fields, Numbers], tuple[list[Linear], Indexer | None]]


@dataclass(frozen=True)
class Family:
    """How a family of models is put together.

    `attention` gives the linear layers of attention in all layers. `expert_width`, `dense_width` and
    `shared_width` are the names of config fields; the first that exists counts. A shared expert without a
    field of its own has the width of a routed expert times the number of shared experts, which `shared_count`
    names. `moe` is the module of the experts, `dense` that of dense MLPs, `shared` that of shared experts
    within `moe`. `projections` are the names of gate, up and down in an expert. `shared_gate`: shared experts
    have a gate of one column. `dense_everywhere`: layers with experts have dense MLPs too.
    `padded`: engines round a rank's width of dense MLPs and shared experts up to whole blocks. `fp4_experts`:
    the experts are FP4 unless the config says otherwise. `quantized_router`: an engine that quantizes a bf16
    checkpoint quantizes its router, too. `predictor` gives what a prediction layer (MTP) has
    beside a layer of the model; its MLP is dense if `dense_predictors`. `predictor_count` are names of the
    field that counts prediction layers; without the field there are `num_predictors`. `layer_count` are names
    of the field that counts layers. `spellings` are parts of modules' names, each with another word that
    checkpoints have for it.
    """

    attention: Attention
    expert_width: tuple[str, ...] = ("moe_intermediate_size",)
    dense_width: tuple[str, ...] = ("intermediate_size",)
    shared_width: tuple[str, ...] = ()
    shared_count: tuple[str, ...] = ("n_shared_experts",)
    moe: str = "mlp"
    dense: str = "mlp"
    shared: str = "shared_experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    dense_everywhere: bool = False
    shared_gate: bool = False
    padded: bool = False
    fp4_experts: bool = False
    quantized_router: bool = False
    predictor: Callable[[Fields, Numbers], list[Linear]] = blocks.joined_states
    dense_predictors: bool = False
    predictor_count: tuple[str, ...] = (
        "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers",
    )  # fmt: skip
    num_predictors: int = 0
    layer_count: tuple[str, ...] = ("num_hidden_layers", "num_layers")
    spellings: tuple[tuple[str, str], ...] = ()

    def spelled(self, linear: Linear) -> Linear:
        """The layer with all names that checkpoints have for its modules."""
        others = [name.replace(*pair) for pair in self.spellings for name in linear.modules]
        return replace(linear, modules=tuple(dict.fromkeys((*linear.modules, *others))))


def family_of(model_type: str) -> Family | None:
    """The family of an architecture, or None if it is not known."""
    return _FAMILIES.get(model_type)


def known() -> tuple[str, ...]:
    """The `model_type`s that are known."""
    return tuple(sorted(_FAMILIES))


def shared_fields() -> frozenset[str]:
    """The fields that tell the number or the width of shared experts, in any family."""
    families = _FAMILIES.values()
    names = {name for family in families for name in (*family.shared_count, *family.shared_width)}
    others = {name for family in families for name in (*family.expert_width, *family.dense_width)}
    return frozenset(names - others)


def _select(fields: Fields, name: str, word: str, layers: Numbers, *, predictors: bool) -> Numbers | None:
    """The layers that the field `name` calls `word`; None without the field.

    `predictors`: whether prediction layers are among them, for which the field has no word.
    """
    words = fields.words(name, _model_layers(fields))
    if words is None:
        return None
    return tuple(i for i in layers if (words[i] == word if i < len(words) else predictors))


def _layer_types(fields: Fields, word: str, layers: Numbers, *, predictors: bool) -> Numbers:
    """`_select` by the field `layer_types`, without which the config is incomplete."""
    found = _select(fields, "layer_types", word, layers, predictors=predictors)
    if found is None:
        fields.number("layer_types")  # notes that it is missing
    return found or ()


def _model_layers(fields: Fields) -> int:
    return fields.number("num_hidden_layers", "num_layers")


def _latent(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """DeepSeek's attention, with an indexer in layers that do not reuse another layer's selection."""
    found = blocks.mla(fields, layers, MlaSizes.read(fields))
    own = _select(fields, "indexer_types", "full", layers, predictors=True)
    more, indexer = blocks.indexer(fields, layers if own is None else own)
    return [*found, *more], indexer


def _sparse_latent(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """As `_latent`, of a model that must have an indexer."""
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        fields.number(name)
    return _latent(fields, layers)


def _gated_latent(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """As `_sparse_latent`, with a gate on the heads' outputs (HY-V4)."""
    found, indexer = _sparse_latent(fields, layers)
    sizes = MlaSizes.read(fields)
    columns = 1 if fields.raw("gating_type") == "headwise" else sizes.v_head_dim
    gate = Linear(
        "gate", (Part(sizes.num_heads, columns, "heads"),), Part(fields.number("hidden_size")), "attention",
        ("self_attn.gate_proj", "self_attn.linear_gate"), layers,
    )  # fmt: skip
    return [*found, gate], indexer


def _doubled_latent(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """LongCat: two latent attentions in each layer, of equal sizes."""
    return blocks.mla(fields, layers, MlaSizes.read(fields)), None


def _dots3(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """dots3: sparse latent attention in some layers and sliding latent attention in others, all gated.

    SGLang multiplies the gate of a rank together with the down projections, each in whole blocks.
    """
    sliding = _layer_types(fields, "sliding_attention", layers, predictors=True)
    full = tuple(i for i in layers if i not in sliding)
    found, indexer = _sparse_latent(fields, full)
    gated = [(full, MlaSizes.read(fields), fields.raw("attention_gate_type"))]
    if sliding:
        place, prefix = _sliding_fields(fields, sliding[0])
        small = MlaSizes.read(place, prefix)
        found += blocks.mla(fields, sliding, small)
        gated.append((sliding, small, place.raw(f"{prefix}attention_gate_type")))
    hidden = fields.number("hidden_size")
    found = [replace(one, engine="vllm") if one.what == "q_a+kv_a" else one for one in found]
    for where, sizes, kind in gated:
        headwise = kind in (None, "headwise")
        columns = Part(sizes.num_heads, 1 if headwise else sizes.v_head_dim, "heads")
        gate = (Part(sizes.num_heads),) if headwise else (columns,)
        fused = (
            Part(sizes.q_lora_rank), Part(sizes.kv_lora_rank),
            Part(whole_blocks(sizes.qk_rope_head_dim)), columns._replace(padded=True),
        )  # fmt: skip
        names = tuple(f"self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"))
        found += [
            Linear("gate", gate, Part(hidden), "attention", names[2:], where, engine="vllm"),
            Linear("q_a+kv_a+gate", fused, Part(hidden), "attention", names, where, engine="sglang"),
        ]
    return found, indexer


def _sliding_fields(fields: Fields, layer: int) -> tuple[Fields, str]:
    """The fields of dots3's sliding layers and the prefix of their names.

    They are fields of their own, or those of the model with what differs in `per_layer_config`.
    """
    if fields.has("swa_num_attention_heads"):
        return fields, "swa_"
    return fields.within("per_layer_config", f"{layer:02d}", str(layer)) or fields, ""


def _glm5_next(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """GLM-5.3: delta attention in most layers, sparse latent attention in the others."""
    linear = _layer_types(fields, "linear_attention", layers, predictors=False)
    found, indexer = _sparse_latent(fields, tuple(i for i in layers if i not in linear))
    return [*found, *(blocks.delta_attention(fields, linear) if linear else [])], indexer


def _grouped(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """Grouped-query attention; MLA fields would contradict it."""
    fields.demand(
        not fields.has("kv_lora_rank") and not fields.has("q_lora_rank"), "kv_lora_rank, q_lora_rank",
        "no ranks, as this architecture has grouped-query attention", fields.raw("kv_lora_rank"),
    )  # fmt: skip
    return blocks.gqa(fields, layers), None


def _grouped_and_sliding(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """MiMo-V2: sliding layers have heads of their own."""
    pattern = fields.numbers("hybrid_layer_pattern")
    if pattern is not None:
        sliding = tuple(i for i in layers if i >= len(pattern) or pattern[i] == 1)
    else:
        sliding = _layer_types(fields, "sliding_attention", layers, predictors=True)
    found = blocks.gqa(fields, tuple(i for i in layers if i not in sliding))
    if sliding:
        found += blocks.gqa(fields, sliding, prefix="swa_")
    return found, None


def _minimax_m3(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """MiniMax-M3: grouped-query attention; sparse layers also project an indexer's queries and key.

    vLLM fuses all these projections, and SGLang those of the indexer. The indexer picks blocks of keys, so
    that its logits are none of our ops.
    """
    own = fields.within("sparse_attention_config")
    if own is not None:
        marks = own.numbers("sparse_attention_freq") or []
        sparse = tuple(i for i in layers if i >= len(marks) or marks[i])
        heads, dim = own.number("sparse_num_index_heads"), own.number("sparse_index_dim")
    else:
        sparse = _layer_types(fields, "minimax_m3_sparse", layers, predictors=True)
        heads, dim = fields.number("index_n_heads"), fields.number("index_head_dim")
    found = blocks.gqa(fields, tuple(i for i in layers if i not in sparse))
    qkv, o = blocks.gqa(fields, sparse)
    index = (Part(heads, dim, "kv_heads"), Part(dim))
    names = ("self_attn.index_q_proj", "self_attn.index_k_proj", "self_attn.indexer")
    found += [
        replace(qkv, what="qkv+index", n=qkv.n + index, modules=qkv.modules + names, engine="vllm"),
        replace(qkv, engine="sglang"),
        replace(qkv, what="index", n=index, modules=(*names, "self_attn.index_qkv_proj"), engine="sglang"),
        o,
    ]
    return [linear for linear in found if linear.layers], None


def _delta_and_grouped(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """Qwen3-Next and Qwen3.5: gated delta nets, and grouped-query attention in every fourth layer.

    Attention is gated unless the config says otherwise.
    """
    full = _select(fields, "layer_types", "full_attention", layers, predictors=True)
    if full is None:
        every = fields.number("full_attention_interval", default=4)
        last = _model_layers(fields)
        full = tuple(i for i in layers if i >= last or (i + 1) % every == 0)
    linear = tuple(i for i in layers if i not in full)
    gated = fields.flag("attn_output_gate", default=True)
    return [*blocks.gated_delta_net(fields, linear), *blocks.gqa(fields, full, gated=gated)], None


def _deepseek_v4(fields: Fields, layers: Numbers) -> tuple[list[Linear], Indexer | None]:
    """DeepSeek-V4: one key-value head, compressed keys, two output projections (the first is batched)."""
    hidden, dim = fields.number("hidden_size"), fields.number("head_dim")
    heads, q_lora = fields.number("num_attention_heads"), fields.number("q_lora_rank")
    groups, o_lora = fields.number("o_groups"), fields.number("o_lora_rank")
    ratios = fields.numbers("compress_ratios")
    if ratios is not None:
        num_layers = _model_layers(fields)
        if len(ratios) < num_layers or not {0, 4, 128}.issuperset(ratios):
            raise ModelError("compress_ratios", f"0, 4 or 128 for each of {num_layers} layers", ratios)
        sparse = tuple(i for i in layers if i < len(ratios) and ratios[i] == 4)
        coarse = tuple(i for i in layers if i < len(ratios) and ratios[i] > 4)
    elif fields.has("layer_types"):
        kinds = (f"{name}_attention" for name in ("compressed_sparse", "heavily_compressed"))
        sparse, coarse = (
            _select(fields, "layer_types", kind, layers, predictors=False) or () for kind in kinds
        )
    else:
        fields.number("compress_ratios", "layer_types")  # notes that one of them is missing
        sparse = coarse = ()

    def linear(what: str, n: tuple[Part, ...], k: Part, where: Numbers, *names: str) -> Linear:
        return Linear(what, n, k, "attention", tuple(f"self_attn.{name}" for name in names), where)

    batched = linear(
        "o_a",
        (Part(groups, o_lora, "heads"),),
        Part(heads // max(1, groups) * dim),
        layers,
        "o_a_proj",
        "wo_a",
    )
    found = [
        linear(
            "q_a+kv", (Part(q_lora), Part(dim)), Part(hidden), layers, "q_a_proj", "kv_proj", "wq_a", "wkv"
        ),
        linear("q_b", (Part(heads, dim, "heads"),), Part(q_lora), layers, "q_b_proj", "wq_b"),
        batched.because(
            "a projection with one weight for each group of heads is not served yet", lacking=True
        ),
        linear("o_b", (Part(hidden),), Part(groups, o_lora, "heads"), layers, "o_b_proj", "wo_b"),
    ]
    for name, where, columns in (("compressor", sparse, 4 * dim), ("compressor", coarse, 2 * dim)):
        if where:
            found.append(
                blocks.whole(name, columns, hidden, where, "self_attn.compressor", blocks.COMPRESSOR)
            )
    if not sparse:
        return found, None
    index_heads, index_dim = fields.number("index_n_heads"), fields.number("index_head_dim")
    module = "self_attn.indexer"
    found += [
        linear("indexer.wq_b", (Part(index_heads * index_dim),), Part(q_lora), sparse, "indexer.wq_b"),
        blocks.whole(
            "indexer.compressor", 4 * index_dim, hidden, sparse, f"{module}.compressor", blocks.COMPRESSOR
        ),
        blocks.whole(
            "indexer.weights_proj", index_heads, hidden, sparse, f"{module}.weights_proj",
            blocks.INDEXER_WEIGHTS,
        ),
    ]  # fmt: skip
    return found, Indexer(index_heads, index_dim, fields.number("index_topk"), compression=4)


_LATENT = Family(_latent)
_SPARSE = Family(_sparse_latent)
_GROUPED = Family(_grouped)
_ONE_WIDTH = replace(
    _GROUPED, expert_width=("moe_intermediate_size", "intermediate_size"), moe="block_sparse_moe",
    projections=("w1", "w3", "w2"),
)  # fmt: skip
_QWEN_NEXT = Family(
    _delta_and_grouped, shared_width=("shared_expert_intermediate_size",), shared="shared_expert",
    shared_count=("num_shared_experts",), shared_gate=True, predictor=blocks.joined_states_by_columns,
)  # fmt: skip

_DOTS3 = Family(
    _dots3, padded=True, predictor=blocks.joined_states_in_fp8, dense_predictors=True,
    shared_width=("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"),
)  # fmt: skip

_FAMILIES: dict[str, Family] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": Family(_deepseek_v4, padded=True, fp4_experts=True, predictor=blocks.states_apart),
    "dots1": _GROUPED,
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "ernie4_5_moe": replace(_GROUPED, shared_count=("moe_num_shared_experts",)),
    "glm4_moe": _GROUPED,
    "glm4_moe_lite": _LATENT,
    "glm5_next": Family(_glm5_next),
    "glm5_next_text": Family(_glm5_next),
    "glm_moe_dsa": _SPARSE,
    "gpt_oss": replace(_ONE_WIDTH, moe="mlp"),
    "hunyuan_v1_moe": replace(
        _GROUPED, expert_width=("moe_intermediate_size", "intermediate_size"), shared="shared_mlp",
        shared_count=("num_shared_expert",), shared_width=("intermediate_size",),
    ),
    "hy_v3": replace(
        _GROUPED, shared_count=("num_shared_experts",), spellings=(("shared_experts", "shared_mlp"),)
    ),
    "hy_v4": Family(_gated_latent),
    "kimi_k2": _LATENT,
    "kimi_k25": _LATENT,
    "longcat_flash": Family(
        _doubled_latent, expert_width=("expert_ffn_hidden_size", "moe_intermediate_size"),
        dense_width=("ffn_hidden_size", "intermediate_size"), dense="mlps", dense_everywhere=True,
        predictor=blocks.joined_states_in_fp8, dense_predictors=True, num_predictors=1,
        layer_count=("num_layers",),  # num_hidden_layers, where it is written, counts attentions
    ),
    "mimo_v2_flash": Family(_grouped_and_sliding, dense_predictors=True),
    "minimax_m2": _ONE_WIDTH,
    "minimax_m3": replace(
        _ONE_WIDTH, attention=_minimax_m3, dense_width=("dense_intermediate_size",),
        shared_width=("shared_intermediate_size",), predictor=blocks.joined_states_in_fp8,
        predictor_count=("num_mtp_modules",),
    ),
    "qwen3_5_moe": _QWEN_NEXT,
    "qwen3_5_moe_text": _QWEN_NEXT,
    "qwen3_moe": replace(
        _GROUPED, shared_width=("shared_expert_intermediate_size",), shared="shared_expert", shared_gate=True,
        shared_count=(), quantized_router=True,
    ),
    "qwen3_next": replace(_QWEN_NEXT, num_predictors=1),
}  # fmt: skip
_FAMILIES["minimax_m3_vl"] = _FAMILIES["minimax_m3_vl_text"] = _FAMILIES["minimax_m3"]

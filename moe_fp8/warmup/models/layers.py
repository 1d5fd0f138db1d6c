"""Which layers of a model have experts, in every spelling of configs."""

from __future__ import annotations

from moe_fp8.errors import ModelError
from moe_fp8.warmup.models.fields import Fields

#: What configs call a layer's MLP.
_WORDS = {"dense", "hash_moe", "moe", "sparse"}


def expert_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The numbers of the layers with routed experts. All other layers have a dense MLP.

    `mlp_layer_types` or a list `moe_layer_freq` names each layer. Otherwise these rules hold together: the
    first layers may be dense (`first_k_dense_replace`, `moe_layer_num_skipped`), every n-th layer may have
    experts (`decoder_sparse_step`, `moe_layer_freq`), listed layers are dense (`mlp_only_layers`), and
    experts may have a first and a last layer and an interval (ERNIE).
    """
    words = fields.words("mlp_layer_types", num_layers)
    if words is not None:
        if unknown := sorted({*words} - _WORDS):
            raise ModelError("mlp_layer_types", "for each layer dense, hash_moe, moe or sparse", unknown)
        return tuple(i for i, word in enumerate(words) if word != "dense")
    if isinstance(fields.raw("moe_layer_freq"), list):
        return _marked(fields, num_layers)
    first = fields.most("first_k_dense_replace", "moe_layer_num_skipped", "moe_layer_start_index", default=0)
    fields.demand(
        first <= num_layers, "first_k_dense_replace", f"at most num_hidden_layers ({num_layers})", first
    )
    frequency = fields.number("moe_layer_freq", default=1)
    step = fields.number("decoder_sparse_step", "moe_layer_interval", default=1)
    last = fields.number("moe_layer_end_index", least=-1, default=-1)
    only_dense = set(fields.numbers("mlp_only_layers") or ())
    return tuple(
        i
        for i in range(first, num_layers)
        if i % frequency == 0 and (i + 1) % step == 0 and i not in only_dense and (last < 0 or i <= last)
    )


def _marked(fields: Fields, num_layers: int) -> tuple[int, ...]:
    marks = fields.numbers("moe_layer_freq") or []
    if len(marks) < num_layers:
        raise ModelError("moe_layer_freq", f"a number for each of {num_layers} layers", len(marks))
    return tuple(i for i in range(num_layers) if marks[i])

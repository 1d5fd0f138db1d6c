"""`quantization_config` of a checkpoint: which linear layers have FP8 weights in 128 x 128 blocks.

Three forms are read: `fp8` (the checkpoints of DeepSeek, Qwen and others), `compressed-tensors` with the
strategy "block", and `modelopt` with FP8 blocks. All other forms are refused by their name. Some layers may
have another form beside them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from moe_fp8.errors import ModelError
from moe_fp8.limits import SCALE_BLOCK
from moe_fp8.warmup.models.description import Linear
from moe_fp8.warmup.models.fields import NESTED

#: A block's sizes; llm-compressor also writes them as text.
_BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
_BLOCK_TEXT = f"{SCALE_BLOCK}x{SCALE_BLOCK}"
_REMEDY = "use a checkpoint of the model whose weights are float8_e4m3fn in 128 x 128 blocks"

#: What `quantize` may be: an engine that turns bf16 weights into FP8 blocks while it loads them.
QUANTIZE = ("fp8-block",)

#: Where a checkpoint's names may have the layers.
_PREFIXES = ("model", "model.language_model", "language_model.model", "language_model", "transformer")

#: The names that engines have for projections which they fuse, by the name of the first of them.
_FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "q_a_proj": "fused_qkv_a_proj"}

#: ModelOpt's names of FP8 in blocks, which it also writes in small letters; the second in mixed checkpoints.
_IN_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")

#: ModelOpt's name of a checkpoint whose layers have a format each.
_MIXED = "MIXED_PRECISION"

#: The class name that compressed-tensors has for all linear layers.
_LINEAR = "Linear"


@dataclass(frozen=True)
class Quantization:
    """The modules of a checkpoint that are not quantized, and the formats of others.

    Modules are names, parts of names, names with `*`, or "re:" and an expression. `formats` are modules that
    are not skipped, after their format, "fp8" or "other"; the first format that has a module counts. `rest`
    is the format of all other modules. `field` is the config field that lists them. `disabled` are modules,
    also not FP8, that LongCat lists; "mtp" stands for the projection of its prediction layers, and other
    names do not hold in these layers. (SGLang has all of such a layer in bf16 then.) `partial`: the last
    block of a dense weight's rows may be partial, which vLLM fills with zeros.
    """

    field: str = ""
    skipped: tuple[str, ...] = ()
    formats: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rest: str = "fp8"
    disabled: tuple[str, ...] = ()
    partial: bool = False

    def apply(self, linear: Linear, num_layers: int) -> list[Linear]:
        """The layer, with a reason if its modules are not FP8; several forms if its layers differ in this.

        `num_layers`: the model's layers; prediction layers follow them.
        """
        if linear.reason:
            return [linear]
        linear = replace(linear, partial=self.partial and not linear.routed)
        if not (self.skipped or self.formats or self.disabled):
            return [linear]
        forms = {
            "fp8": linear,
            "bf16": linear.because(f"its weights are not FP8 ({self.field})"),
            "other": linear.because(f"its weights have another format ({self.field})", lacking=True),
        }
        if not linear.layers:
            return [forms[self._format(linear.modules, None)]]
        layers: dict[str, list[int]] = {form: [] for form in forms}
        for i in linear.layers:
            disabled = self._disables(linear.modules, i >= num_layers)
            layers["bf16" if disabled else self._format(linear.modules, i)].append(i)
        return [replace(forms[form], layers=tuple(found)) for form, found in layers.items() if found]

    def _format(self, modules: Iterable[str], layer: int | None) -> str:
        return next((form for form, names in self._names if names.have(modules, layer)), self.rest)

    def _disables(self, modules: Iterable[str], predicts: bool) -> bool:
        if predicts:
            return "mtp" in self.disabled and "eh_proj" in modules
        return any(name in module.split(".") for module in modules for name in self.disabled)

    @cached_property
    def _names(self) -> list[tuple[str, _Names]]:
        listed = (("bf16", self.skipped), *self.formats)
        return [(form, _Names.parse(self.field, names)) for form, names in listed]


_Parts = tuple[str, ...]


class _Names(NamedTuple):
    """The parsed list: names below a layer, by its number as text; names that hold anywhere; expressions."""

    in_layer: dict[str, list[_Parts]]
    anywhere: list[_Parts]
    patterns: list[re.Pattern[str]]

    @classmethod
    def parse(cls, field: str, listed: Iterable[str]) -> _Names:
        """The parsed list of the config's `field`. Raises ModelError for a bad expression."""
        found, wildcards = cls({}, [], []), []
        for name in listed:
            if name.startswith("re:"):
                found.patterns.append(_expression(field, name[3:]))
                continue
            if "*" in name:
                wildcards += [fnmatch.translate(name), fnmatch.translate(f"{name}.*")]
            parts = [part for part in name.split(".") if part not in ("", "*")]
            if "layers" in parts[:-1]:
                at = parts.index("layers")
                if at > 0 and ".".join(parts[:at]) not in _PREFIXES:
                    continue  # layers of another part of the model, such as a vision tower
                number, *rest = parts[at + 1 :]
                # Names of experts have the expert's number, which a linear layer of all experts does not
                # have.
                below = tuple(part for part in rest if not part.isdigit())
                if number.isdecimal():
                    found.in_layer.setdefault(number, []).append(below)
                else:
                    found.anywhere.append((number, *below))
            elif parts:
                found.anywhere.append(tuple(parts))
        if wildcards:
            found.patterns.append(_expression(field, "|".join(wildcards)))
        return found

    def have(self, modules: Iterable[str], layer: int | None) -> bool:
        """Whether one of the modules, or a module around it, is in the list for this layer."""
        return any(self._has(name, layer) for module in modules for name in _spellings(module))

    def _has(self, module: str, layer: int | None) -> bool:
        parts = tuple(module.split("."))
        if any(_leads(name, parts) for name in self.in_layer.get(str(layer), ())):
            return True
        if any(_within(name, parts) for name in self.anywhere):
            return True
        return any(pattern.match(path) for pattern in self.patterns for path in _paths(module, layer))


def _expression(field: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise ModelError(field, "regular expressions", text, str(error)) from error


def _spellings(module: str) -> list[str]:
    """The module's name, and the name of the fused projection that has it."""
    around, _, last = module.rpartition(".")
    return [module, f"{around}.{_FUSED[last]}"] if last in _FUSED else [module]


def _paths(module: str, layer: int | None) -> list[str]:
    """The whole names that a checkpoint may have for a module; that of a first expert stands for all."""
    names = [module, module.replace(".experts.", ".experts.0.")] if ".experts." in module else [module]
    if layer is None:
        return names
    return [f"{prefix}.layers.{layer}.{name}" for name in names for prefix in _PREFIXES]


def _leads(name: _Parts, module: _Parts) -> bool:
    """Whether `name` is the module, a module around it, or a part of it."""
    return name[: len(module)] == module or module[: len(name)] == name


def _within(name: _Parts, module: _Parts) -> bool:
    """Whether `name` is a run of the module's parts."""
    return any(module[i : i + len(name)] == name for i in range(len(module)))


def read_quantization(config: Mapping[str, Any], quantize: str | None = None) -> Quantization:
    """What the config says of FP8 weights, in the outer config or in that of its language model.

    `quantize`: "fp8-block" if the engine quantizes a bf16 checkpoint while it loads it. Raises ModelError for
    weights that are not FP8 in 128 x 128 blocks, and for static activation scales.
    """
    if quantize is not None and quantize not in QUANTIZE:
        raise ModelError("quantize", f"one of {', '.join(QUANTIZE)}", quantize)
    stated = _stated(config, quantize)
    field, disabled = _skipped("", config, "disable_quant_module")
    return replace(stated, field=_joined(stated.field, field), disabled=disabled)


def has_quantization(config: Mapping[str, Any]) -> bool:
    """Whether the config says how the layers are quantized.

    Older mixed checkpoints of ModelOpt have the formats of their layers in `hf_quant_config.json` alone.
    """
    name, value = _found(config)
    if not isinstance(value, dict):
        return value is not None
    inner = _modelopt_fields(name, value)[1]
    return not _is_one_of(_MIXED)(inner.get("quant_algo")) or "quantized_layers" in inner


def _stated(config: Mapping[str, Any], quantize: str | None) -> Quantization:
    name, value = _found(config)
    if value is None:
        if quantize is not None:
            return Quantization()
        remedy = f"{_REMEDY}; or quantize='fp8-block' (--quantize) if the engine quantizes while it loads"
        raise ModelError("quantization_config", "an object in the config", "no such field", remedy)
    if not isinstance(value, dict):
        raise ModelError(name, "an object", value, _REMEDY)
    if quantize is not None:
        remedy = "leave --quantize out: the checkpoint is quantized already"
        raise ModelError(
            "quantize", "no quantization_config in the config", value.get("quant_method"), remedy
        )
    method = value.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ModelError(f"{name}.quant_method", f"one of {', '.join(_READERS)}", method, _REMEDY)
    return reader(name, value)


def _found(config: Mapping[str, Any]) -> tuple[str, Any]:
    """The quantization's field and value."""
    places = [("", config)]
    places += [(f"{name}.", config[name]) for name in NESTED if name in config]
    for prefix, place in places:
        for name in ("quantization_config", "compression_config"):
            if isinstance(place, Mapping) and place.get(name) is not None:
                return prefix + name, place[name]
    return "quantization_config", None


def _fp8(name: str, value: dict[str, Any]) -> Quantization:
    _demand(name, "fmt", value.get("fmt", "e4m3"), "'e4m3'", lambda given: given in ("e4m3", "float8_e4m3fn"))
    _demand(name, "activation_scheme", value.get("activation_scheme", "dynamic"), "'dynamic'", _is("dynamic"))
    block = value.get("weight_block_size")
    _demand(name, "weight_block_size", block, str(_BLOCK), _is(_BLOCK))
    return Quantization(*_skipped(name, value, "modules_to_not_convert", "ignored_layers", "ignore"))


def _compressed_tensors(name: str, value: dict[str, Any]) -> Quantization:
    groups = value.get("config_groups")
    _demand(name, "config_groups", groups, "an object", lambda given: isinstance(given, dict) and given)
    assert isinstance(groups, dict)
    formats: list[tuple[str, tuple[str, ...]]] = []
    refused: ModelError | None = None
    for key, group in groups.items():
        path = f"{name}.config_groups.{key}"
        _demand(f"{name}.config_groups", key, group, "an object", _is_object)
        listed = group.get("targets", [_LINEAR])
        form = "fp8"
        try:
            _demand_blocks(path, group)
        except ModelError as error:
            refused, form = refused or error, "other"
        _demand(path, "targets", listed, f"['{_LINEAR}'], or names of modules", _are_names)
        formats.append((form, tuple(listed)))
    if refused and all(form == "other" for form, _ in formats):
        raise refused
    field, ignored = _skipped(name, value, "ignore")
    where = f"{name}.config_groups"
    for form in ("fp8", "other"):
        named = [target for kind, listed in formats if kind == form for target in listed]
        # Other classes of layers, whose modules are not known here, begin with a capital.
        classes = [] if _LINEAR in named else [target for target in named if target[:1].isupper()]
        _demand(where, "targets", classes, f"'{_LINEAR}', or names of modules", _is([]))
    # Names of modules count before the class of all layers, and those of the first groups first.
    rest = next((form for form, listed in reversed(formats) if _LINEAR in listed), "bf16")
    if rest == "fp8" and not refused:
        return Quantization(field, ignored)
    return Quantization(_joined(field, where), ignored, tuple(formats), rest)


def _demand_blocks(path: str, group: dict[str, Any]) -> None:
    """Raise ModelError if a group of compressed-tensors is not FP8 in blocks."""
    for part in ("weights", "input_activations"):
        tensor: Any = group.get(part)
        _demand(path, part, tensor, "an object", _is_object)
        _demand(path, f"{part}.type", tensor.get("type", "float"), "'float'", _is("float"))
        _demand(path, f"{part}.num_bits", tensor.get("num_bits"), "8", _is(8))
    weights, inputs = group["weights"], group["input_activations"]
    _demand(path, "weights.strategy", weights.get("strategy"), "'block'", _is("block"))
    block = weights.get("block_structure")
    if block != _BLOCK_TEXT:
        _demand(path, "weights.block_structure", block, str(_BLOCK), _is(_BLOCK))
    _demand(path, "input_activations.dynamic", inputs.get("dynamic"), "true", _is(True))
    strategy = inputs.get("strategy", "group")
    _demand(path, "input_activations.strategy", strategy, "'group'", _is("group"))
    size = inputs.get("group_size", SCALE_BLOCK)
    _demand(path, "input_activations.group_size", size, str(SCALE_BLOCK), _is(SCALE_BLOCK))


def _modelopt(name: str, value: dict[str, Any]) -> Quantization:
    name, value = _modelopt_fields(name, value)
    field, skipped = _skipped(name, value, "exclude_modules", "ignore")
    algorithm = value.get("quant_algo")
    if not _is_one_of(_MIXED)(algorithm):
        expected = f"'{_IN_BLOCKS[0]}' (FP8 in blocks), or '{_MIXED}'"
        _demand(name, "quant_algo", algorithm, expected, _is_one_of(_IN_BLOCKS[0]))
        return Quantization(field, skipped, partial=True)
    formats = value.get("quantized_layers")
    _demand(name, "quantized_layers", formats, "an object", lambda given: isinstance(given, dict) and given)
    assert isinstance(formats, dict)
    path = f"{name}.quantized_layers"
    targets: dict[str, None] = {}
    others: dict[str, None] = {}
    found = set()
    for module, stated in formats.items():
        _demand(path, module, stated, "an object", _is_object)
        algorithm = stated.get("quant_algo")
        _demand(path, f"{module}.quant_algo", algorithm, "text", lambda given: isinstance(given, str))
        found.add(algorithm)
        # The experts of a layer are one linear layer.
        module = re.sub(r"\.experts\.\d+(?=\.|$)", ".experts", module)
        if _is_one_of(*_IN_BLOCKS)(algorithm):
            size = stated.get("group_size", SCALE_BLOCK)
            _demand(path, f"{module}.group_size", size, str(SCALE_BLOCK), _is(SCALE_BLOCK))
            targets[module] = None
        else:
            others[module] = None
    _demand(name, "quantized_layers", sorted(found), f"some layers in '{_IN_BLOCKS[0]}'", lambda _: targets)
    listed = (("fp8", tuple(targets)), ("other", tuple(others)))
    return Quantization(_joined(field, path), skipped, listed, "bf16", partial=True)


def _modelopt_fields(name: str, value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The fields of ModelOpt, with those of an inner object, and the name of their place."""
    inner = value.get("quantization")
    return (f"{name}.quantization", {**value, **inner}) if isinstance(inner, dict) else (name, value)


_READERS: dict[str, Callable[[str, dict[str, Any]], Quantization]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_mixed": _modelopt,
}


def _skipped(name: str, value: Mapping[str, Any], *fields: str) -> tuple[str, tuple[str, ...]]:
    """The fields that list modules without FP8 weights, and the modules."""
    used, modules = [], []
    for field in fields:
        listed, path = value.get(field), f"{name}.{field}" if name else field
        if listed:
            if not _are_names(listed):
                raise ModelError(path, "a list of names", listed)
            used.append(path)
            modules += listed
    return _joined(*used), tuple(dict.fromkeys(modules))


def _joined(*fields: str) -> str:
    return ", ".join(field for field in fields if field)


def _demand(name: str, field: str, given: Any, expected: str, holds: Callable[[Any], Any]) -> None:
    if not holds(given):
        raise ModelError(f"{name}.{field}", expected, given, _REMEDY)


def _is(expected: Any) -> Callable[[Any], bool]:
    return lambda given: type(given) is type(expected) and bool(given == expected)


def _is_one_of(*names: str) -> Callable[[Any], bool]:
    """Whether a value is one of ModelOpt's names of formats, in capitals or small letters."""
    return lambda given: isinstance(given, str) and given.upper() in names


def _is_object(given: Any) -> bool:
    return isinstance(given, dict)


def _are_names(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(each, str) for each in given)

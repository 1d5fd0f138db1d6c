"""Explains a miss: which call of a model launches a kernel, and which option of the plan would have it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moe_fp8.errors import ConfigError
from moe_fp8.jit.sources import package_sources
from moe_fp8.problems import DEFAULT_NUM_SMS
from moe_fp8.specs import KernelSpec
from moe_fp8.warmup.models import ModelDescription
from moe_fp8.warmup.options import PlanOptions, every
from moe_fp8.warmup.planner import Plan, plan
from moe_fp8.warmup.shapes import GemmShape

_TEXT = re.compile(r"[a-z0-9_]+\[[a-z0-9_]+=\d+(,[a-z0-9_]+=\d+)*\]")


@dataclass(frozen=True)
class Miss:
    """What a plan says of a kernel.

    `uses` are the uses of the kernel in the plan, as text. If there are none, `remedies` has options with
    which the plan has the kernel, each with the first of its uses. If there are no remedies, `nearest` is the
    most similar kernel of the same op and layout in the plan: how it differs, and its use; else "".
    """

    kernel: str
    uses: tuple[str, ...]
    remedies: tuple[tuple[str, str], ...] = ()
    nearest: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The explanation as JSON types."""
        remedies = [{"options": options, "use": use} for options, use in self.remedies]
        return {"kernel": self.kernel, "uses": list(self.uses), "remedies": remedies, "nearest": self.nearest}

    def lines(self) -> list[str]:
        """The explanation as text."""
        if self.uses:
            told = ["the plan with these options has the kernel, for", *(f"  {use}" for use in self.uses)]
            return [*told, "so the server was warmed up with other options, or by another version"]
        if self.remedies:
            told = ["the plan with these options lacks the kernel; it is in the plan with"]
            return told + [f"  {options}, for {use}" for options, use in self.remedies]
        told = ["the plan lacks the kernel with these options, and with each change of them that was tried"]
        return [*told, f"the nearest kernel of the plan has {self.nearest}"] if self.nearest else told


def explain_miss(
    kernel: str, model: ModelDescription, options: PlanOptions, extra: Sequence[GemmShape] = ()
) -> Miss:
    """What the plan of `model` says of `kernel`, which `JitMissError` prints as "name[macro=value,...]".

    If the plan lacks it, options are changed one at a time. Raises ConfigError for other text, and
    for a kernel that does not exist.
    """
    if not _TEXT.fullmatch(kernel):
        raise ConfigError("kernel", "name[macro=value,...], as the error of the miss has it", kernel)
    name, names = _values(kernel)[0], package_sources().kernels()
    if name not in names:
        raise ConfigError("kernel", f"one of {', '.join(names)}", name)
    planned = plan(model, options, extra=extra)
    uses = _uses(kernel, planned)
    if uses:
        return Miss(kernel, uses)
    given = options  # with the pages beside which others are proposed
    if model.indexer is not None:
        given = replace(options, block_size=options.pages(model.indexer))
    remedies = []
    for changes in (_limits(given), _parallelisms(options)):
        for changed in changes:
            try:
                found = _uses(kernel, plan(model, replace(options, **changed), extra=extra))
                told = {name: _beside(given, name, value) for name, value in changed.items()}
                replace(given, **told)
            except ConfigError:
                continue  # the change does not fit the model, or the options have no room for it
            if found:
                flags = " ".join(_flag(name, value) for name, value in told.items())
                remedies.append((flags, found[0]))
        if remedies:
            break
    return Miss(kernel, (), tuple(remedies), "" if remedies else _nearest(kernel, planned))


def _uses(kernel: str, planned: Plan) -> tuple[str, ...]:
    return tuple(row.use for row in planned.rows if str(row.spec) == kernel)


def _nearest(kernel: str, planned: Plan) -> str:
    """The values in which the most similar kernel of the same op and layout differs, and its first use."""
    name, wanted = _values(kernel)
    found: list[tuple[int, str]] = []
    for row in planned.rows:
        other, values = _values(str(row.spec))
        if (other, values.get("layout")) == (name, wanted.get("layout")):
            differing = [f"{macro}={value}" for macro, value in values.items() if wanted.get(macro) != value]
            found.append((len(differing), f"{', '.join(differing)}, for {row.use}"))
    return min(found, key=lambda one: one[0])[1] if found else ""


def _values(kernel: str) -> tuple[str, dict[str, str]]:
    """The name and the values of a kernel's text."""
    name, _, values = kernel.removesuffix("]").partition("[")
    return name, dict(part.split("=") for part in values.split(",") if part)


def _limits(options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Options that often differ between a plan and its server, one at a time."""
    candidates: dict[str, Sequence[Any]] = {
        "max_tokens": (4 * options.max_tokens, 1 << 20),
        "max_batch": (4 * options.max_batch, 1 << 16),
        "masked_rows": (1 << 16,),
        "next_n": range(1, 9) if isinstance(options.next_n, tuple) else (8,),
        "num_sms": (DEFAULT_NUM_SMS, DEFAULT_NUM_SMS - 1, 114, 112, 78, 72, 66),
        "block_size": (32, 64, 128),
        "out_dtypes": (("bfloat16", "float32"),),
        "batch_invariant": (True, False),
        "engine": (None,),
        "weight_gradients": (True,),
        "pad_intermediate": (True,),
        "fuse_shared": (True,),
        "attention_tp": (1,),
        "shared_tp": (1,),
        "redundant_experts": (options.ep, 2 * options.ep, 32),
    }
    for name, values in candidates.items():
        given = getattr(options, name)
        for value in dict.fromkeys(values):
            if value not in every(given) and value != given:
                yield {name: value}


def _beside(options: PlanOptions, name: str, value: Any) -> Any:
    """`value` beside the plan's values of an option of which a server uses all values; else `value` alone.

    A plan for several values has the kernels of each, so it is enough to plan the new value.
    """
    given = getattr(options, name)
    adds = name in ("num_sms", "block_size") or (name == "next_n" and isinstance(given, tuple))
    return (*every(given), value) if adds else value


def _parallelisms(options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Other numbers of ranks."""
    for tp in (1, 2, 4, 8, 16):
        for ep in (1, tp):
            if (tp, ep) != (options.tp, options.ep):
                yield {"tp": tp, "ep": ep}


def _flag(name: str, value: Any) -> str:
    """An option as a command's argument."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        if name == "batch_invariant":
            return f"{flag} {'on' if value else 'off'}"
        return flag
    if isinstance(value, tuple):
        return f"{flag} {','.join(map(str, value))}"
    return f"no {flag}" if value is None else f"{flag} {value}"


@dataclass(frozen=True)
class Difference:
    """What two plans, as `Plan.to_dict` gives them, do not share: kernels and uses by text, and options."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    options: tuple[str, ...]

    @classmethod
    def of(cls, first: dict[str, Any], second: dict[str, Any]) -> Difference:
        """Raises ConfigError if one of them is no plan."""
        kernels = [_described(told) for told in (first, second)]
        names = sorted({*first["options"], *second["options"]})
        changed = [
            f"{name}: {first['options'].get(name)} -> {second['options'].get(name)}"
            for name in names
            if first["options"].get(name) != second["options"].get(name)
        ]
        return cls(
            tuple(text for kernel, text in kernels[0].items() if kernel not in kernels[1]),
            tuple(text for kernel, text in kernels[1].items() if kernel not in kernels[0]),
            tuple(changed),
        )

    def to_dict(self) -> dict[str, Any]:
        """The difference as JSON types."""
        return {field.name: list(getattr(self, field.name)) for field in fields(self)}

    def lines(self) -> list[str]:
        """The difference as text."""
        return [
            *(f"option {line}" for line in self.options),
            *(f"- {kernel}" for kernel in self.only_first),
            *(f"+ {kernel}" for kernel in self.only_second),
            f"{len(self.only_first)} kernels only in the first plan, {len(self.only_second)} in the second",
        ]


def _described(told: dict[str, Any]) -> dict[str, str]:
    """The kernels of a plan by their macros, each with a text that names its first use."""
    try:
        found: dict[str, str] = {}
        for row in told["rows"]:
            kernel = told["kernels"][row["kernel"]]
            spec = str(KernelSpec.from_json({field.name: kernel[field.name] for field in fields(KernelSpec)}))
            sizes = " x ".join(str(row[name]) for name in ("num_experts", "n", "k") if row[name] is not None)
            use = " ".join(part for part in (row["op"], row["layout"], sizes) if part)
            found.setdefault(spec, f"{spec} for {use}")
        if not isinstance(told["options"], dict):
            raise TypeError("its options are no object")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError("--diff", "two files that `moe-fp8 plan --json` wrote", "another file") from error
    return found

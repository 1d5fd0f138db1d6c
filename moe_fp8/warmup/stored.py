"""Plans that earlier processes made: the rows of a plan, kept in the store of kernels.

A plan is a function of the model, the options, further GEMMs, and the sources and tables that choose kernels.
The digest of all of them names the file, so a plan that is read is the plan that would be made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from moe_fp8.jit.store import KernelStore
from moe_fp8.specs import KernelSpec
from moe_fp8.warmup.models import ModelDescription
from moe_fp8.warmup.options import PlanOptions
from moe_fp8.warmup.planner import Plan, demand_all, plan
from moe_fp8.warmup.rows import PlanRow
from moe_fp8.warmup.shapes import GemmShape, Unplanned

#: What decides a plan, below the package's folder.
_DECIDING = ("problems.py", "limits.py", "specs.py", "heuristics", "warmup")


def stored_plan(
    model: ModelDescription,
    options: PlanOptions,
    store: KernelStore,
    *,
    extra: Sequence[GemmShape] = (),
    strict: bool = False,
) -> Plan:
    """As `plan`, but read from `store` if a process has made the plan before; else made and kept there.

    A file that is damaged, or that other users can write, counts as absent. Nothing is kept if the package's
    sources cannot be read, for example in an archive. Raises what `plan` raises.
    """
    sources = _sources()
    key = _key(sources, model, options, extra)
    name = f"{key}.plan"
    data = store.read_file(name) if sources else None
    found = None if data is None else _decode(key, data, model, options)
    if found is None:
        found = plan(model, options, extra=extra)
        lock = store.try_lock(key) if sources else None
        if lock is not None:
            # Whoever takes the lock removes the temporary files that killed processes have left.
            with lock:
                store.publish(name, _encode(key, found))
    if strict:
        demand_all(found)
    return found


def _key(sources: str, model: ModelDescription, options: PlanOptions, extra: Sequence[GemmShape]) -> str:
    given = [asdict(model), asdict(options), [asdict(shape) for shape in extra]]
    text = json.dumps(given, sort_keys=True)
    return hashlib.sha256(f"{sources}\n{text}".encode()).hexdigest()[:32]


@cache
def _sources() -> str:
    """A digest of the sources and tables that decide a plan; "" if they are no files."""
    package = Path(__file__).parents[1]
    if not all((package / part).exists() for part in _DECIDING):
        return ""
    hasher = hashlib.sha256()
    for part in _DECIDING:
        place = package / part
        files = [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.json")])
        for file in files:
            data = file.read_bytes()
            hasher.update(f"{file.relative_to(package)}\n{len(data)}\n".encode())
            hasher.update(data)
    return hasher.hexdigest()


def _encode(key: str, found: Plan) -> bytes:
    """The file of a plan: a digest, and the key, the kernels, rows and unplanned layers as JSON."""
    numbers = {spec: number for number, spec in enumerate(found.specs)}
    body = {
        "key": key,
        "specs": [asdict(spec) for spec in found.specs],
        "rows": [{**vars(row), "spec": numbers[row.spec]} for row in found.rows],
        "unplanned": [asdict(layer) for layer in found.unplanned],
    }
    text = json.dumps(body).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _decode(key: str, data: bytes, model: ModelDescription, options: PlanOptions) -> Plan | None:
    """The plan in a file; None if the file is damaged, or has another plan."""
    digest, _, text = data.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        return None
    body: dict[str, Any] = json.loads(text)
    if body.get("key") != key:
        return None
    specs = [KernelSpec.from_json(spec) for spec in body["specs"]]
    rows = tuple(
        PlanRow(
            **{
                **row,
                "what": tuple(row["what"]),
                "rows": tuple((first, last) for first, last in row["rows"]),
                "devices": tuple(row["devices"]),
                "spec": specs[row["spec"]],
            }
        )
        for row in body["rows"]
    )
    return Plan(model, options, rows, tuple(Unplanned(**layer) for layer in body["unplanned"]))

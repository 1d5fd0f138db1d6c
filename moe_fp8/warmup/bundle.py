"""Plan -> kernel bundle: a folder from which a server without compiler, network or cache loads kernels."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.build import BuildReport, Progress
from moe_fp8.jit.bundle import Bundle
from moe_fp8.jit.bundle_writer import existing_bundle, write_bundle
from moe_fp8.jit.store import KernelStore
from moe_fp8.settings import settings
from moe_fp8.specs import KernelSpec
from moe_fp8.warmup.planner import Plan
from moe_fp8.warmup.run import build_plan


def coverage(plan: Plan) -> dict[str, Any]:
    """The coverage of a bundle of `plan`, as JSON types: model, options, tables of measured tiles.

    `tables` has the SHA-256 of each device's table, because with a different table the selector may ask for
    other kernels.
    """
    tables = {
        device: hashlib.sha256(gemm_table.table_file(device).read_bytes()).hexdigest()
        for device in gemm_table.devices()
        if device
    }
    told = {
        "model": asdict(plan.model),
        "options": asdict(plan.options),
        "tables": tables,
        "kernels": len(plan.specs),
    }
    whole: dict[str, Any] = json.loads(json.dumps(told))
    return whole


def build_bundle(
    plan: Plan,
    path: Path,
    cache_dir: Path | None = None,
    *,
    jobs: int | None = None,
    progress: Progress = None,
    force: bool = False,
) -> tuple[BuildReport, Bundle]:
    """Put every kernel of `plan` into the bundle `path`, which is made if it does not exist; needs no GPU.

    A bundle of this toolchain keeps its kernels; any other bundle is refused. With `force`, an existing
    bundle is replaced. Kernels come from the bundle, else from the cache in `cache_dir` (default: the cache
    of the settings), else from the compiler. `jobs` and `progress` are as in `build_plan`. Raises
    BundleError, CompileError, ToolchainError.
    """
    there = existing_bundle(path, force=force)
    store = KernelStore(settings().cache_dir if cache_dir is None else cache_dir, bundle=there)
    report = build_plan(plan, store, jobs=jobs, progress=progress)
    artifacts: dict[KernelSpec, Artifact] = {}
    for spec in plan.specs:
        artifact, _ = store.get_or_compile(spec)
        artifacts[spec] = artifact
    return report, write_bundle(path, artifacts, coverage(plan), force=force)

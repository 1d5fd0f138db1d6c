"""The process's kernels: every launch looks its kernel up here, and `freeze` closes the set after warmup."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from moe_fp8.errors import ConfigError, JitMissError, ToolchainError
from moe_fp8.jit import driver
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.build import Progress, build
from moe_fp8.jit.driver import LoadedKernel
from moe_fp8.jit.store import KernelStore, default_store
from moe_fp8.settings import MissPolicy, settings
from moe_fp8.specs import KernelSpec

#: The fields of `JitCounters` that count something.
Event: TypeAlias = Literal["compiles", "store_hits", "loads", "misses", "scale_conversions"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JitCounters:
    """How often each event has happened since the process started.

    `compiles`: kernels that were compiled. `store_hits`: kernels that were read from the store or a bundle.
    `loads`: kernels that were loaded onto a GPU. `misses`: requests for a kernel that was not loaded, after
    `freeze`. `scale_conversions`: scales of a GEMM's operands that had to be copied into the MN-major layout.

    `by_op` holds the same counters for each kernel, by its name; the three GEMMs share "gemm_fp8". Kernels
    that nothing has happened to are left out.
    """

    compiles: int = 0
    store_hits: int = 0
    loads: int = 0
    misses: int = 0
    scale_conversions: int = 0
    by_op: Mapping[str, JitCounters] = field(default_factory=dict, compare=False, repr=False)


def _snapshot(counts: Counter[Event], by_op: Mapping[str, JitCounters]) -> JitCounters:
    return JitCounters(
        counts["compiles"],
        counts["store_hits"],
        counts["loads"],
        counts["misses"],
        counts["scale_conversions"],
        by_op,
    )


class KernelRuntime:
    """Gives the loaded kernel of a spec, and knows what to do if it is not loaded. Thread-safe."""

    def __init__(
        self,
        store: KernelStore | None = None,
        loader: Callable[[Artifact, int, int], LoadedKernel] = driver.load,
    ) -> None:
        self._store = store
        self._loader = loader
        self._by_spec: dict[KernelSpec, LoadedKernel] = {}
        self._renew_locks()
        self._mode: MissPolicy | None = None
        self._counts: dict[str, Counter[Event]] = {}

    def _renew_locks(self) -> None:
        self._loading: dict[KernelSpec, threading.RLock] = {}
        self._lock = threading.RLock()

    def get_kernel(self, spec: KernelSpec) -> LoadedKernel:
        """Return the loaded kernel of `spec`. A kernel that is not loaded is compiled and loaded first.

        A loaded kernel is found without a lock. Raises JitMissError for any other after a strict `freeze`,
        CompileError, DriverError, ToolchainError.
        """
        kernel = self._by_spec.get(spec)
        if kernel is None:
            if self._mode is not None:
                self._miss(spec, self._mode)
            kernel = self._load(spec)
        return kernel

    def _load(self, spec: KernelSpec, just_built: bool = False) -> LoadedKernel:
        """`just_built`: the artifact was compiled for this very load, so the load counts a compile."""
        with self._lock:
            loading = self._loading.setdefault(spec, threading.RLock())
        with loading:
            kernel = self._by_spec.get(spec)
            if kernel is not None:
                return kernel
            artifact, hit = self.store.get_or_compile(spec)
            kernel = self._loader(artifact, spec.smem_bytes, spec.num_threads)
            with self._lock:
                self._count(spec.name, "store_hits" if hit and not just_built else "compiles", "loads")
                self._by_spec[spec] = kernel
                self._loading.pop(spec, None)
            return kernel

    def _count(self, op: str, *events: Event) -> None:
        """The caller holds the lock."""
        self._counts.setdefault(op, Counter()).update(events)

    def _miss(self, spec: KernelSpec, mode: MissPolicy) -> None:
        with self._lock:
            self._count(spec.name, "misses")
        if mode == "strict":
            try:
                key = self.store.key(spec)
            except ToolchainError:
                key = "unknown: there is no compiler here"
            raise JitMissError(spec, key)
        if mode == "warn":
            _logger.warning(
                "%s was not loaded before freeze() and is being loaded on demand; "
                "add the shape that asked for it to the warmup plan",
                spec,
            )

    @property
    def store(self) -> KernelStore:
        """The store behind this runtime. It is the process's default store unless the caller gave another."""
        if self._store is None:
            self._store = default_store()
        return self._store

    def preload(
        self, specs: Iterable[KernelSpec], jobs: int | None = None, progress: Progress = False
    ) -> int:
        """Compile (in parallel) and load every spec that is not loaded yet; return how many were loaded.

        The request is explicit, so it is allowed after `freeze` and counts no miss. It launches nothing and
        allocates no tensor.
        """
        wanted = [spec for spec in dict.fromkeys(specs) if spec not in self._by_spec]
        if not wanted:
            return 0
        for row in build(wanted, self.store, jobs, progress).rows:
            self._load(row.spec, just_built=not row.cached)
        return len(wanted)

    def freeze(self, mode: MissPolicy | None = None) -> None:
        """From now on, a request for a kernel that is not loaded counts as a miss.

        `mode` says what else a miss does: "strict" raises JitMissError, "warn" logs a warning and loads the
        kernel, "compile" loads it. None takes MOE_FP8_JIT_MISS, whose default is "strict". Raises ConfigError
        for another mode.
        """
        if mode is None:
            mode = settings().miss
        if mode not in ("compile", "warn", "strict"):
            raise ConfigError("mode", '"strict", "warn" or "compile"', mode)
        self._mode = mode

    def unfreeze(self) -> None:
        """Undo `freeze`: kernels are loaded and compiled on demand again, and nothing counts as a miss."""
        self._mode = None

    def is_frozen(self) -> bool:
        """Whether `freeze` is in force, in any mode."""
        return self._mode is not None

    def is_loaded(self, spec: KernelSpec) -> bool:
        """Whether `get_kernel(spec)` returns without loading anything."""
        return spec in self._by_spec

    def counters(self) -> JitCounters:
        """Return a consistent snapshot: the events of all ops and, in `by_op`, the events of each op."""
        with self._lock:
            by_op = {op: _snapshot(counts, {}) for op, counts in self._counts.items()}
            return _snapshot(sum(self._counts.values(), Counter[Event]()), by_op)

    def count_scale_conversion(self, op: str) -> None:
        """Count that a call of the kernel `op` had to copy a scale into the MN-major layout."""
        with self._lock:
            self._count(op, "scale_conversions")


_RUNTIME = KernelRuntime()
# A forked process has none of the threads that may hold the locks.
os.register_at_fork(after_in_child=_RUNTIME._renew_locks)

get_kernel = _RUNTIME.get_kernel
preload = _RUNTIME.preload
freeze = _RUNTIME.freeze
unfreeze = _RUNTIME.unfreeze
is_frozen = _RUNTIME.is_frozen
is_loaded = _RUNTIME.is_loaded
counters = _RUNTIME.counters
count_scale_conversion = _RUNTIME.count_scale_conversion

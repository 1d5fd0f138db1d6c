"""The process's kernels: looked up on every launch, loaded once, frozen after warmup."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from typing import Literal

from moe_fp8.errors import ConfigError, JitMissError, ToolchainError
from moe_fp8.jit import driver
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.build import Progress, build
from moe_fp8.jit.driver import LoadedKernel
from moe_fp8.jit.store import KernelStore, default_store
from moe_fp8.settings import settings
from moe_fp8.specs import KernelSpec

FreezeMode = Literal["compile", "warn", "strict"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JitCounters:
    """Events since the process started. `misses` counts kernels asked for while frozen and not loaded."""

    compiles: int = 0
    store_hits: int = 0
    loads: int = 0
    misses: int = 0


class KernelRuntime:
    """Spec -> loaded kernel, with the policy for what is not loaded yet. Thread-safe."""

    def __init__(
        self,
        store: KernelStore | None = None,
        loader: Callable[[Artifact, int, int], LoadedKernel] = driver.load,
    ) -> None:
        self._store = store
        self._loader = loader
        self._by_spec: dict[KernelSpec, LoadedKernel] = {}
        self._loading: dict[KernelSpec, threading.Lock] = {}
        self._lock = threading.Lock()
        self._mode: FreezeMode | None = None
        self._counts: dict[str, JitCounters] = {}

    def get_kernel(self, spec: KernelSpec) -> LoadedKernel:
        """The loaded kernel of `spec`; compiles and loads it first if need be and allowed.

        Raises JitMissError when frozen strictly, CompileError, DriverError, ToolchainError. A
        loaded kernel is found without a lock.
        """
        kernel = self._by_spec.get(spec)
        if kernel is None:
            if self._mode is not None:
                self._miss(spec, self._mode)
            kernel = self._load(spec)
        return kernel

    def _load(self, spec: KernelSpec, just_built: bool = False) -> LoadedKernel:
        """`just_built`: what the store holds was compiled for this very load, so it counts as a compile."""
        with self._lock:
            loading = self._loading.setdefault(spec, threading.Lock())
        with loading:
            kernel = self._by_spec.get(spec)
            if kernel is not None:
                return kernel
            artifact, hit = self.store.get_or_compile(spec)
            kernel = self._loader(artifact, spec.smem_bytes, spec.num_threads)
            with self._lock:
                found = hit and not just_built
                self._count(spec, compiles=not found, store_hits=found, loads=True)
                self._by_spec[spec] = kernel
                self._loading.pop(spec, None)
            return kernel

    def _count(self, spec: KernelSpec, **events: bool) -> None:
        """Under the lock."""
        so_far = self._counts.get(spec.name, JitCounters())
        self._counts[spec.name] = replace(
            so_far, **{event: getattr(so_far, event) + happened for event, happened in events.items()}
        )

    def _miss(self, spec: KernelSpec, mode: FreezeMode) -> None:
        with self._lock:
            self._count(spec, misses=True)
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
        """The store behind this runtime; the process's default one unless another was given."""
        if self._store is None:
            self._store = default_store()
        return self._store

    def preload(
        self, specs: Iterable[KernelSpec], jobs: int | None = None, progress: Progress = False
    ) -> int:
        """Compile (in parallel) and load every spec that is not loaded yet; the number newly loaded.

        An explicit request, so it is allowed and counts no miss while frozen. Launches nothing and
        allocates no tensor.
        """
        wanted = [spec for spec in dict.fromkeys(specs) if spec not in self._by_spec]
        if not wanted:
            return 0
        for row in build(wanted, self.store, jobs, progress).rows:
            self._load(row.spec, just_built=not row.cached)
        return len(wanted)

    def freeze(self, mode: FreezeMode | None = None) -> None:
        """From now on a kernel that is not loaded is a miss, which is counted.

        "strict" raises JitMissError, "warn" logs and loads, "compile" loads; None takes
        MOE_FP8_JIT_MISS (default "strict").
        """
        if mode is None:
            mode = settings().miss
        if mode not in ("compile", "warn", "strict"):
            raise ConfigError("mode", '"strict", "warn" or "compile"', mode)
        self._mode = mode

    def unfreeze(self) -> None:
        """Load and compile on demand again, without counting."""
        self._mode = None

    def is_frozen(self) -> bool:
        """Whether `freeze` is in force, in any mode."""
        return self._mode is not None

    def is_loaded(self, spec: KernelSpec) -> bool:
        """Whether `get_kernel(spec)` would return without loading anything."""
        return spec in self._by_spec

    def counters(self) -> JitCounters:
        """A consistent snapshot."""
        rows = [astuple(counts) for counts in self.counters_by_op().values()]
        return JitCounters(*map(sum, zip(*rows, strict=True)))

    def counters_by_op(self) -> dict[str, JitCounters]:
        """The same for each kernel that was asked for, by its name: "gemm_fp8", "indexer_topk"..."""
        with self._lock:
            return dict(self._counts)


_RUNTIME = KernelRuntime()

get_kernel = _RUNTIME.get_kernel
preload = _RUNTIME.preload
freeze = _RUNTIME.freeze
unfreeze = _RUNTIME.unfreeze
is_frozen = _RUNTIME.is_frozen
is_loaded = _RUNTIME.is_loaded
counters = _RUNTIME.counters
counters_by_op = _RUNTIME.counters_by_op

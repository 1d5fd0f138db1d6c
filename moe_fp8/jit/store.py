"""Compiled kernels on disk, shared by any number of processes and published atomically.

A truncated or altered file (`moe_fp8.jit.files`) counts as absent. The store reads a file only if no other
user can write the file or its folder, because its code is executed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from moe_fp8.errors import ToolchainError
from moe_fp8.jit.artifact import Artifact
from moe_fp8.jit.bundle import Bundle, bundle_in_use
from moe_fp8.jit.compiler import compile_kernel
from moe_fp8.jit.files import SUFFIX, decode, distrust, encode, publish, read_file, sync_folder
from moe_fp8.jit.key import kernel_key
from moe_fp8.jit.sources import SourceTree
from moe_fp8.jit.toolchain import nvrtc
from moe_fp8.settings import settings
from moe_fp8.specs import KernelSpec

_logger = logging.getLogger(__name__)

# This is longer than any compilation. After this time the lock's holder is stopped, or the file system has
# lost the lock; compiling twice is then better than waiting for ever.
_LOCK_SECONDS = 120.0

#: Errors that pass, such as too many open files in this process.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)

#: The first pause in seconds between two attempts to take a lock; `longer` gives the next.
FIRST_PAUSE = 0.002

_Result = TypeVar("_Result")


class KernelStore:
    """Artifacts by key: in the optional `bundle`, in memory, and on disk if `root` can be used.

    `root` is created with mode 0755 less the umask, and files get mode 0644: others may read them, but only
    this user may write them. If `root` cannot be read or written, belongs to another user or can be written
    by others, the store warns once and keeps new kernels in memory. A read-only folder of this user or of
    root is still read, so an image may ship it. If `root` is None, everything is kept in memory. The bundle
    is searched before the disk and never written. With a bundle, keys use the bundle's NVRTC version, so that
    they need no NVRTC.
    """

    def __init__(
        self,
        root: Path | str | None,
        sources: SourceTree | None = None,
        bundle: Bundle | None = None,
    ) -> None:
        self.root = None if root is None else Path(root)
        self.bundle = bundle
        self._sources = sources
        self._memory: dict[str, Artifact] = {}
        self._keys: dict[KernelSpec, str] = {}
        self._mutex = threading.Lock()
        self._held: set[str] = set()
        self._lock_files: set[FileIO] = set()
        self._refused: dict[str, float] = {}
        self._warned = False
        self._warned_files: set[Path | None] = set()
        self._readable = False
        self._writable = False
        self._opened = False
        _STORES.add(self)

    def key(self, spec: KernelSpec) -> str:
        """The key of `spec`; raises ToolchainError, or CompileError for a missing source."""
        key = self._keys.get(spec)
        if key is None:
            version = None if self.bundle is None else self.bundle.nvrtc
            key = self._keys[spec] = kernel_key(spec, self._sources, version)
        return key

    def get(self, key: str) -> Artifact | None:
        """The artifact of `key`, or None if there is none or its file on disk is damaged.

        Raises BundleError if the bundle's file of this artifact is damaged.
        """
        artifact = self._memory.get(key)
        if artifact is None:
            artifact = self.get_kept(key)
            if artifact is not None:
                self._memory[key] = artifact
        return artifact

    def get_kept(self, key: str) -> Artifact | None:
        """As `get`, but only from the bundle or the disk, where other processes find the artifact too."""
        artifact = None if self.bundle is None else self.bundle.get(key)
        return self._read(key) if artifact is None else artifact

    def put(self, artifact: Artifact) -> None:
        """Publish `artifact` for this process and, atomically, for others; never raises OSError."""
        self._memory[artifact.key] = artifact
        self.publish(f"{artifact.key}{SUFFIX}", encode(artifact))

    def get_or_compile(self, spec: KernelSpec) -> tuple[Artifact, bool]:
        """(artifact, whether the store already held it); if several processes ask, only one compiles.

        Raises CompileError, ToolchainError, BundleError.
        """
        key = self.key(spec)
        artifact = self.get(key)
        if artifact is not None:
            return artifact, True
        pause = FIRST_PAUSE
        while (lock := self.try_lock(key)) is None:
            time.sleep(pause)
            pause = longer(pause)
            artifact = self.get(key)
            if artifact is not None:
                return artifact, True
        with lock:
            artifact = self.get(key)
            if artifact is not None:
                return artifact, True
            return self.compile(spec), False

    def compile(self, spec: KernelSpec) -> Artifact:
        """Compile and publish `spec`, whose lock the caller holds. Raises CompileError, ToolchainError."""
        self.check_compiler(spec)
        artifact = compile_kernel(spec, self._sources)
        self.put(artifact)
        return artifact

    def try_lock(self, key: str, *, clean: bool = True) -> ExitStack | None:
        """The lock of `key`, which `close()` releases in any thread; None while somebody else holds it.

        Its holder compiles the kernel. Look for the artifact again after this method returned a lock: the
        last holder may have published it. A lock that is held for longer than any compilation takes is
        passed over. The OS releases a lock if its process dies. A forked process inherits no lock. `clean`:
        remove the temporary files that dead holders have left, which lists the folder.
        """
        self._open()
        with self._mutex:
            # Another thread may hold it, and a store in memory has no file to lock.
            free = key not in self._held
            self._held.add(key)
        lock = self._try_file(f"{key}.lock", clean) if free else None
        if lock is not None:
            self._refused.pop(key, None)
            lock.callback(self._held.discard, key)
            return lock
        if free:
            self._held.discard(key)
        now = time.monotonic()
        if now - self._refused.setdefault(key, now) <= _LOCK_SECONDS:
            return None
        _logger.debug("kernel %s is compiled without a lock: its holder is stuck", key)
        return ExitStack()

    def try_slot(self, jobs: int, waited: float = 0.0) -> ExitStack | None:
        """The right to run one compiler process on this store, which `close()` gives back; None if there is
        no free slot.

        There are as many slots as cores, or `jobs` if this is more. After `waited` seconds without any
        kernel, their holders count as stuck, and no slot is needed.
        """
        self._open()
        if waited > _LOCK_SECONDS:
            return ExitStack()
        for number in range(max(jobs, os.cpu_count() or 1)):
            slot = self._try_file(f"slot{number}.lock")
            if slot is not None:
                return slot
        return None

    def _try_file(self, name: str, clean: bool = True) -> ExitStack | None:
        """The lock of a file in the folder; None if somebody else holds it.

        Without a folder that can be written, or on a file system without locks, it locks nothing. Publishing
        is atomic anyway, so this costs only a second compilation.
        """
        lock = ExitStack()
        if self.root is None or not self._writable:
            return lock
        path = self.root / name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = FileIO(self._persist(lambda: os.open(path, flags, 0o600)))
        except OSError as error:
            # A link or a folder in place of one lock hinders no other file.
            if error.errno not in (errno.ELOOP, errno.EISDIR, *_PASSING):
                self._writable = False
                self._warn(f"cannot be written ({error})")
            return lock
        # A forked process closes the files in this set, and a file is closed once at most.
        self._lock_files.add(file)
        lock.callback(self._lock_files.discard, file)
        lock.callback(file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            return None if error.errno in (errno.EWOULDBLOCK, errno.EINTR) else lock
        # A process that is just being forked may still have the file open, which would keep the lock.
        lock.callback(_unlock, file)
        if not clean:
            return lock
        # Whoever held this lock before has finished its temporary files, or has left them when it died.
        with suppress(OSError):  # a folder that cannot be listed now may be listed the next time
            for stale in self.root.glob(f"{path.stem}.*.tmp"):
                with suppress(OSError):
                    stale.unlink()
        return lock

    def _persist(self, write: Callable[[], _Result]) -> _Result:
        """Call `write`, and again if somebody has removed its file or the folder; raises OSError."""
        try:
            return write()
        except FileNotFoundError:
            with self._mutex:
                self._opened = False
            self._open()
            if not self._writable:
                raise
            return write()

    def _after_fork(self) -> None:
        """In a forked process, give up the locks of its parent, which keeps them."""
        self._mutex = threading.Lock()
        self._held, self._refused = set(), {}
        for file in self._lock_files:
            with suppress(OSError):
                file.close()
        self._lock_files.clear()

    def read_file(self, name: str) -> bytes | None:
        """The bytes of the store's file `name`; None if it does not exist, or may not or cannot be read."""
        self._open()
        if self.root is None or not self._readable:
            return None
        path = self.root / name
        try:
            data, status = read_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_of_file(path, f"cannot be read ({error.strerror}) and is not used")
            return None
        if problem := distrust(status):
            self._warn_of_file(path, f"{problem} and is not used")
            return None
        return data

    def publish(self, name: str, data: bytes) -> None:
        """Write the store's file `name` atomically, if the folder can be written; never raises OSError."""
        self._open()
        if self.root is not None and self._writable:
            try:
                self._write(self.root / name, data)
            except OSError as error:
                # Other files can be written, or this file later.
                if error.errno in (errno.EISDIR, *_PASSING):
                    self._warn_of_file(self.root / name, f"cannot be written ({error.strerror})")
                else:
                    self._writable = False
                    self._warn(f"cannot be written ({error})")

    def check_compiler(self, missing: KernelSpec) -> None:
        """Raise ToolchainError if `missing`, which the store does not hold, cannot be compiled either."""
        try:
            nvrtc()
        except ToolchainError as error:
            if self.bundle is None:
                raise
            raise ToolchainError(
                f"{missing} is neither in the bundle {self.bundle.path} nor in the cache {self.root}, and "
                f"cannot be compiled: {error}; or add it with `moe-fp8 build --bundle` elsewhere"
            ) from error

    def adopt(self, artifact: Artifact) -> None:
        """Keep `artifact`, which another process has published, in this process's memory."""
        self._memory[artifact.key] = artifact

    def location(self) -> dict[str, str | None]:
        """The arguments with which another process makes the same store: `KernelStore.at(**location)`."""
        self._open()
        folder = None if self._sources is None else self._sources.folder
        return {
            "root": str(self.root) if self._writable else None,
            "kernels": None if folder is None else str(folder),
        }

    @staticmethod
    def at(root: str | None, kernels: str | None) -> KernelStore:
        """The store that `location` describes."""
        return KernelStore(root, None if kernels is None else SourceTree(Path(kernels)))

    def path(self, key: str) -> Path | None:
        """The path of the artifact of `key` on disk, whether it exists or not; None without `root`."""
        return None if self.root is None else self.root / f"{key}{SUFFIX}"

    def _open(self) -> None:
        """Create and check the folder, once."""
        with self._mutex:
            if not self._opened:
                self._opened = True
                self._readable, self._writable = self._examine()

    def _examine(self) -> tuple[bool, bool]:
        """(whether files of the folder may be read, whether it can be written); creates the folder."""
        if self.root is None:
            return False, False
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            status = self.root.stat()
        except OSError as error:
            self._opened = error.errno not in _PASSING  # else the next use tries it again
            self._warn(f"cannot be created ({error})")
            return False, False
        if not stat.S_ISDIR(status.st_mode):
            self._warn("is not a folder")
        elif problem := distrust(status):
            self._warn(problem)
        elif not os.access(self.root, os.R_OK | os.X_OK):
            self._warn("cannot be read")
        elif not os.access(self.root, os.W_OK | os.X_OK):
            self._warn("is read-only")
            return True, False
        else:
            return True, True
        return False, False

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(
                "kernel store %s %s: kernels compiled now are kept in memory only; "
                "set MOE_FP8_CACHE_DIR to a folder that only this user can write",
                self.root,
                problem,
            )

    def _warn_of_file(self, path: Path | None, problem: str) -> None:
        # A build may look for the same file many times, and then write it.
        if path not in self._warned_files:
            self._warned_files.add(path)
            _logger.warning("kernel file %s %s", path, problem)

    def _read(self, key: str) -> Artifact | None:
        data = self.read_file(f"{key}{SUFFIX}")
        if data is None:
            return None
        artifact = decode(data)
        if artifact is None or artifact.key != key:
            self._warn_of_file(self.path(key), "is damaged and will be rebuilt")
            return None
        return artifact

    def _write(self, path: Path, data: bytes) -> None:
        # A process that is killed here leaves only its temporary file. The next process that takes the lock
        # of this key removes the file.
        self._persist(lambda: publish(path, data))
        sync_folder(path.parent)


#: The stores of this process.
_STORES: WeakSet[KernelStore] = WeakSet()


def _give_up_locks() -> None:
    for store in _STORES:
        store._after_fork()


os.register_at_fork(after_in_child=_give_up_locks)


def _unlock(file: FileIO) -> None:
    if not file.closed:
        with suppress(OSError):  # such as a stale handle on NFS; the kernel is compiled all the same
            fcntl.flock(file, fcntl.LOCK_UN)


def longer(pause: float) -> float:
    """The pause after `pause` between two attempts to take a lock."""
    return min(pause * 1.5, 0.1)


@cache
def default_store() -> KernelStore:
    """The store in `settings().cache_dir`, with the bundle of `settings().bundle`; raises BundleError."""
    root = settings().cache_dir
    if root is None:
        _logger.warning("there is no HOME: kernels are kept in memory only; set MOE_FP8_CACHE_DIR")
    return KernelStore(root, bundle=bundle_in_use())

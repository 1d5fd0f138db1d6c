"""The file format of a compiled kernel, safe writes, and the check that a file may be executed.

One file holds one kernel: a header with the SHA-256 of the rest, the metadata, the cubin. The GPU executes
the cubin, so other users must be able to write neither the file nor its folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from moe_fp8.jit.artifact import Artifact

SUFFIX = ".kernel"

_MAGIC = b"moe_fp8-kernel-1\n"
_DIGEST_BYTES = 32


def encode(artifact: Artifact) -> bytes:
    """The file of `artifact`: magic, digest of the rest, metadata length, metadata, cubin."""
    metadata = {field.name: getattr(artifact, field.name) for field in fields(Artifact)}
    del metadata["cubin"]
    text = json.dumps(metadata, sort_keys=True).encode()
    body = len(text).to_bytes(4, "little") + text + artifact.cubin
    return _MAGIC + hashlib.sha256(body).digest() + body


def decode(data: bytes) -> Artifact | None:
    """The artifact in a file's bytes, or None if `encode` of this version did not write these bytes."""
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    length = int.from_bytes(body[:4], "little")
    try:
        metadata: dict[str, Any] = json.loads(body[4 : 4 + length])
        metadata["warnings"] = tuple(metadata["warnings"])
        return Artifact(cubin=body[4 + length :], **metadata)
    except (ValueError, KeyError, TypeError, RecursionError):
        # The file is whole, but another version of this package with other fields wrote it.
        return None


def distrust(status: os.stat_result) -> str:
    """Why a file or folder must not be used; "" if only this user or root can write it."""
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link, which anyone who can write its target could change"
    reasons = []
    if status.st_uid not in (os.geteuid(), 0):
        reasons.append(f"belongs to user {status.st_uid}, neither to this user ({os.geteuid()}) nor to root")
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        whom = "its group" if not mode & stat.S_IWOTH else "all users"
        reasons.append(f"can be written by others: its mode {mode:o} lets {whom} write")
    return ", and it ".join(reasons)


def read_file(path: Path) -> tuple[bytes, os.stat_result]:
    """The bytes of a file and the status of the open file; raises OSError.

    A symbolic link is not followed. It has no bytes, and `distrust` refuses its status. A named pipe or a
    device has no bytes either, so that it counts as a damaged file.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for somebody who writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return b"", os.lstat(path)
        raise
    try:
        # open() refuses a folder but does not close its descriptor; `finally` closes it.
        with open(descriptor, "rb", closefd=False) as file:
            status = os.fstat(descriptor)
            return file.read() if stat.S_ISREG(status.st_mode) else b"", status
    finally:
        os.close(descriptor)


def write_synced(descriptor: int, data: bytes) -> None:
    """Write `data` to the disk, then close; raises OSError."""
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(path: Path, data: bytes) -> None:
    """Put `data` at `path`; raises OSError. A reader sees either the old file or the new file."""
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        # Independent of the umask: other users, such as a server's, may read the file but not write it.
        os.fchmod(descriptor, 0o644)
        write_synced(descriptor, data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames within `folder` durable after a crash, if its file system can sync a folder."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock against others that write there; raises OSError.

    The OS releases it if this process dies.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

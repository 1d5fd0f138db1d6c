"""A compiled kernel as a file, and which files may be executed.

One file holds one kernel: a header with the SHA-256 of the rest, the metadata, the cubin. What is in
it is executed, so that neither it nor its folder may be writable by other users.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
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
    """The artifact in a file's bytes, or None where they are not exactly what `encode` wrote."""
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    length = int.from_bytes(body[:4], "little")
    try:
        metadata: dict[str, Any] = json.loads(body[4 : 4 + length])
        metadata["warnings"] = tuple(metadata["warnings"])
        return Artifact(cubin=body[4 + length :], **metadata)
    except (ValueError, KeyError, TypeError):
        # Whole, but of another version of this package, whose artifacts have other fields.
        return None


def distrust(status: os.stat_result) -> str:
    """Why a file or folder must not be used, "" where it may: it is this user's or root's alone to write."""
    if status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return ""
    return (
        f"belongs to user {status.st_uid} or can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    )


def read_file(path: Path) -> tuple[bytes, os.stat_result]:
    """The bytes of a file that is no link, and the status of what was read; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # open() leaves the descriptor of a folder open when it refuses it.
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(), os.fstat(descriptor)
    finally:
        os.close(descriptor)


def write_synced(descriptor: int, data: bytes) -> None:
    """Write `data` to the disk, then close; raises OSError."""
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames within `folder` outlive a crash; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A compiler process of a parallel build: it reads specs from stdin and writes artifacts to a pipe.

`moe_fp8.jit.build` starts the process, which ends when stdin ends. It uses neither torch nor a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from moe_fp8.errors import JitError
from moe_fp8.jit.files import encode
from moe_fp8.jit.store import KernelStore
from moe_fp8.specs import KernelSpec


def write_frame(stream: IO[bytes], header: Mapping[str, Any], payload: bytes = b"") -> None:
    """Write one message: lengths, JSON header, payload."""
    text = json.dumps(header).encode()
    stream.write(len(text).to_bytes(4, "little") + len(payload).to_bytes(8, "little") + text + payload)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Read the next message as (header, payload); None at the end of the stream."""
    lengths = stream.read(12)
    if len(lengths) < 12:
        return None
    text_length = int.from_bytes(lengths[:4], "little")
    payload_length = int.from_bytes(lengths[4:], "little")
    data = stream.read(text_length + payload_length)
    if len(data) < text_length + payload_length:
        return None
    return json.loads(data[:text_length]), data[text_length:]


def serve(store: KernelStore, requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer each request {"spec": ...} with {} and the artifact, or with {"error": text}.

    The process that asks holds the kernel's lock. When it has ended, nobody needs the reply.
    """
    with suppress(BrokenPipeError):
        while (message := read_frame(requests)) is not None:
            spec = KernelSpec.from_json(message[0]["spec"])
            try:
                artifact = store.compile(spec)
            except JitError as error:
                write_frame(replies, {"error": getattr(error, "log", str(error))})
            else:
                write_frame(replies, {}, encode(artifact))


def main(replies: int) -> None:
    """Entry point of the process: the first frame names the store; the following frames are requests.

    `replies`: the descriptor of the pipe for the replies.
    """
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    serve(KernelStore.at(**first[0]), sys.stdin.buffer, os.fdopen(replies, "wb"))

"""A clear end where the server's libraries are not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server_extra() -> Iterator[None]:
    """Imports within it end the process with a message if a library is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("moe_fp8", "server_example"):
            raise
        sys.exit(f"error: {error.name} is not installed; run: pip install -e '.[server]'")

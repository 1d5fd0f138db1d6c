"""Files that tuning writes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def put(path: Path, data: bytes) -> None:
    """Put `data` at `path`. A reader sees either the old file or the new file."""
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

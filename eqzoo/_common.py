"""The version, and atomic file writes."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["__version__", "atomic"]

__version__ = "0.1.0"

T = TypeVar("T")


def atomic(path: Path, write: Callable[[Path], T]) -> T:
    """Writes a file atomically: to a temporary name beside it, then renamed into place.

    A reader sees the old file or the new one, never a part of it, and an interrupted write leaves the old one.

    Args:
        path: The file.
        write: Writes to the temporary path that it is given.

    Returns:
        What ``write`` returned.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        result = write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return result

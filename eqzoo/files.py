"""Files that are whole or not there."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["atomic"]

T = TypeVar("T")


def atomic(path: Path, write: Callable[[Path], T]) -> T:
    """Writes a file under a temporary name and renames it into place, so that it is whole or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        result = write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return result

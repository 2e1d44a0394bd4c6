"""Atomic writes of files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write UTF-8 text as :func:`write_bytes_atomically` writes bytes."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: str | Path, content: bytes) -> None:
    """Write a file so that readers and a crash see the old one or the whole new one.

    The folder is made where missing.

    Raises
    ------
    OSError
        The folder or the file cannot be written; an existing file at ``path`` is unchanged.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    current = os.umask(0)
    os.umask(current)
    return current

"""Files that are there completely or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 text to ``path``: a reader sees the old file or the new one, never a part.

    The text goes to a file beside it, to the disk, and then to its name; the folder is made where missing.

    Raises
    ------
    OSError
        The folder or the file cannot be written; what was at ``path`` is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """Permission bits that new files do not get; reading them means setting them."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

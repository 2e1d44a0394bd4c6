"""Values on the command line: sizes, meshes and files."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from planner.common.units import bytes_in

if TYPE_CHECKING:
    from planner.explore.tables import Table

STANDARD_OUTPUT = Path("-")
"""File of ``--json`` that stands for standard output."""


class OptionError(ValueError):
    """An invalid value on the command line; the message names the option, the value and the remedy."""


def parse_bytes(text: str, option: str) -> int:
    """Read a size such as ``4GiB``, ``1.5GB`` or ``4294967296`` (bytes), rounded down.

    Raises
    ------
    OptionError
        When ``text`` is no positive number with a known unit.
    """
    try:
        return bytes_in(text, option)
    except ValueError as error:
        raise OptionError(str(error)) from None


def device_memory(memory: str | None, tensor_memory: str | None, cluster: str) -> int | None:
    """Read ``--memory``, or ``--tensor-memory`` and add the cluster's reserve; None where neither is given.

    Raises
    ------
    OptionError
        A value is no size, or both are given.
    ClusterError
        There is no such cluster.
    """
    if tensor_memory is None:
        return None if memory is None else parse_bytes(memory, "--memory")
    if memory is not None:
        raise OptionError(f"--tensor-memory: {tensor_memory} beside --memory {memory}; give one of them")
    tensors = parse_bytes(tensor_memory, "--tensor-memory")

    from planner.machine.cluster import load_cluster

    return tensors + load_cluster(cluster).device.reserve_bytes


def parse_mesh(text: str, option: str) -> tuple[int, ...]:
    """Read a mesh such as ``2`` or ``2x4``: ranks along each axis.

    Raises
    ------
    OptionError
        When ``text`` is not positive whole numbers with ``x`` between them.
    """
    if re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text) is None:
        raise OptionError(f"{option}: {text!r} is no mesh; write the ranks along each axis, such as 2 or 2x4")
    return tuple(int(axis) for axis in text.split("x"))


def parse_pins(texts: list[str] | None, option: str) -> list[tuple[str, str]]:
    """Read pins such as ``*.mlp=recompute``: a part of the step and a decision about it.

    Raises
    ------
    OptionError
        A text has no ``=``, or nothing on one side of it.
    """
    found = []
    for text in texts or ():
        target, _, decision = text.partition("=")
        if not (target and decision):
            raise OptionError(f"{option}: {text!r} is no pin; write PART=DECISION, such as '*.mlp=recompute'")
        found.append((target, decision))
    return found


def writable_file(path: Path, option: str) -> Path:
    """Return ``path`` if a file can be written there; checked before the computation of its content.

    Raises
    ------
    OptionError
        When the folder does not exist, the path is a folder, or nothing can be written there.
    """
    if path.is_dir():
        raise OptionError(f"{option}: {str(path)!r} is a folder; name a file in it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise OptionError(f"{option}: the folder {str(path.parent)!r} does not exist; create it first")
    try:
        # Permissions are not enough: a file system may be read-only or hold no files of users.
        with tempfile.TemporaryFile(dir=folder):
            return path
    except OSError as error:
        raise OptionError(
            f"{option}: no file can be written in the folder {str(folder)!r} ({error.strerror}); choose another"
        ) from None


def readable_file(path: Path, option: str) -> Path:
    """Return ``path`` if it is a file.

    Raises
    ------
    OptionError
        When there is no such file.
    """
    if not path.is_file():
        raise OptionError(f"{option}: there is no file {str(path)!r}")
    return path


def listed(text: str, option: str) -> list[str]:
    """Return the names in a list with commas.

    Raises
    ------
    OptionError
        A name is empty, or there twice.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise OptionError(f"{option}: {text!r} is no list; write names with a comma between them")
    if len(set(names)) < len(names):
        raise OptionError(f"{option}: {text!r} names something twice; name each once")
    return names


def stem_of(path: Path) -> str:
    """Return the name of a problem file without ``.json`` or ``.json.gz``."""
    return path.name.removesuffix(".gz").removesuffix(".json")


def figure_file(path: Path, option: str) -> Path:
    """Return ``path`` if a figure can be written there.

    Raises
    ------
    OptionError
        As for :func:`writable_file`, or matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise OptionError(f"{option}: matplotlib is not installed; install meshwright[notebooks] or leave it out")
    return writable_file(path, option)


def started_by_launcher() -> bool:
    """Return whether this process is one rank of a job; Slurm's variables become those of torch's launcher."""
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        from runtime.job.slurm import adopt_slurm

        adopt_slurm()
    return "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Return whether this process writes files and prints: rank 0 of a job, or one without a job."""
    return os.environ.get("RANK", "0") == "0"


def check_json_file(path: Path | None) -> None:
    """Refuse a file of ``--json`` that cannot be written; ranks of a job beside the first write none.

    Raises
    ------
    OptionError
        As for :func:`writable_file`.
    """
    if path not in (None, STANDARD_OUTPUT) and is_first_rank():
        writable_file(path, "--json")


def json_path(path: Path | None) -> Path | None:
    """Return the file of ``--json`` where it is one, for what is written while it is computed."""
    return None if path == STANDARD_OUTPUT else path


def write_json(path: Path | None, content: object) -> None:
    """Write the result of a command as ``--json`` asks, atomically; nothing where it does not ask.

    Parameters
    ----------
    path
        File of the option, :data:`STANDARD_OUTPUT`, or None.
    content
        A dataclass, or what JSON holds.
    """
    if path is None:
        return

    from formulations.problem.files import write_text_atomically

    document = asdict(content) if is_dataclass(content) and not isinstance(content, type) else content
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if path == STANDARD_OUTPUT:
        print(text, end="", file=sys.__stdout__, flush=True)  # sys.stdout is standard error by now
    else:
        write_text_atomically(path, text)


def table_document(table: Table) -> dict[str, object]:
    """A table as JSON holds it: its title, rows and notes."""
    return {"title": table.title(), "rows": table.rows(), "notes": list(table.notes())}

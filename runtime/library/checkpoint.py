"""Checkpoints: written by ``torch.distributed.checkpoint`` as safetensors, complete or not there, read under any plan.

A checkpoint is a folder ``step-00000100`` with one file of tensors per rank and ``loop.pt``: counts, the optimizer's
settings, the schedule, the position in the data, the states of each rank's random generators. Nothing in it is code,
and nothing is unpickled but plain values.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from runtime.job.process_group import broadcast_text
from runtime.job.watchdog import waiting, watched
from runtime.library.errors import CheckpointError
from runtime.library.saved_state import (
    matching_groups,
    random_state,
    read_tensors,
    reason_of,
    saved_blocks,
    scalars_of,
    set_random_state,
    settings,
)
from runtime.library.writing import begin_writing, lock_folder, remove_folder, remove_remains

if TYPE_CHECKING:
    from runtime.library.step import Step

LOOP_FILE = "loop.pt"
_VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")


def save_checkpoint(
    step: Step,
    folder: Path | str,
    scheduler: Any | None = None,
    position: Mapping[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = True,
) -> Path:
    """Write everything that the next step depends on; a collective of all ranks.

    Parameters
    ----------
    step
        The step; a checkpoint of it that is being written is waited for.
    folder
        Folder of a run's checkpoints, which all ranks see; one job at a time writes into it.
    scheduler
        Learning-rate scheduler, or anything else with ``state_dict``.
    position
        Plain values to find again, such as the position in the data.
    keep
        Number of checkpoints that stay, this one included; None: all.
    wait
        Whether it is written when the call returns; otherwise it is copied to host memory and written beside the next
        steps, until :func:`wait_for_checkpoint`.

    Returns
    -------
    Path
        The checkpoint's own folder.

    Raises
    ------
    CheckpointError
        It, or the one before it, cannot be written, or another job writes into the folder; older checkpoints are
        unchanged.
    """
    wait_for_checkpoint(step)
    folder = Path(folder)
    name = f"step-{step.steps:08d}"
    with watched("checkpoint"):
        loop = {
            "version": _VERSION,
            "steps": step.steps,
            "plan": step.plan_name,
            "optimizer": type(step.optimizer).__name__,
            "groups": [settings(group) | {"names": names} for group, names in step.updates.groups()],
            "scalars": {key: value for one in _of_all_ranks(scalars_of(step)) for key, value in one.items()},
            "loss_scale": None if step.updates.scale is None else step.updates.scale.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "position": dict(position or {}),
            "random": _of_all_ranks(random_state()),
        }
        written = _plain(loop)
        lock_folder(folder)
        part = folder / broadcast_text(f".writing-{name}-{uuid4().hex}")

    def put_in_place() -> None:
        _write_synced(part / LOOP_FILE, written)
        _put_in_place(part, folder / name)
        _prune(folder, keep)

    step.saving = folder / name, begin_writing(part, saved_blocks(step), put_in_place, beside=not wait)
    if wait:
        wait_for_checkpoint(step)
    return folder / name


def wait_for_checkpoint(step: Step) -> None:
    """Wait until a checkpoint of a step that is being written is complete; a collective of all ranks.

    Raises
    ------
    CheckpointError
        It could not be written.
    """
    if step.saving is None:
        return
    (path, writing), step.saving = step.saving, None
    try:
        with waiting():  # for a thread that is watched itself
            writing.result()
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise CheckpointError(f"checkpoint {path} cannot be written: {reason_of(error)}") from error


def _of_all_ranks(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Values of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return found


def latest_checkpoint(folder: Path | str) -> Path | None:
    """The checkpoint of most steps in a folder, as rank 0 sees it; None if there is none. A collective of all ranks."""
    newest = ""
    if dist.get_rank() == 0:
        found = _complete(Path(folder))
        newest = str(found[-1]) if found else ""
    newest = broadcast_text(newest)
    return Path(newest) if newest else None


def load_checkpoint(step: Step, path: Path | str, scheduler: Any | None = None) -> dict[str, Any]:
    """Continue where a checkpoint was written, under this step's plan and mesh; a collective of all ranks.

    Parameters
    ----------
    step
        A step of the same model and optimizer class; its tensors are overwritten.
    path
        A checkpoint's own folder, or the folder of a run's checkpoints, of which the latest is taken.
    scheduler
        Gets its state.

    Returns
    -------
    dict
        The position that was saved.

    Raises
    ------
    CheckpointError
        There is none, or it is of another model or optimizer.
    """
    path = Path(path)
    if not (path / LOOP_FILE).exists():
        found = latest_checkpoint(path)
        if found is None:
            raise CheckpointError(f"checkpoint {path}: neither a checkpoint nor a folder that holds one")
        path = found
    loop = _read_loop(path)
    kind = type(step.optimizer).__name__
    if loop["optimizer"] != kind:
        raise CheckpointError(f"checkpoint {path} is of {loop['optimizer']}, the step has {kind}: use the same class")
    if (loop["scheduler"] is None) != (scheduler is None):
        has, got = ("no", "one") if loop["scheduler"] is None else ("a", "none")
        raise CheckpointError(f"checkpoint {path} has {has} scheduler's state, {got} was given: pass what was saved")
    groups = matching_groups(path, step, loop)
    read_tensors(step, path, loop)
    for group, saved in groups:
        group.update(saved)
    step.updates.step_count = loop["steps"]
    if step.updates.scale is not None and loop.get("loss_scale") is not None:
        step.updates.scale.load_state_dict(loop["loss_scale"])
    if scheduler is not None:
        scheduler.load_state_dict(loop["scheduler"])
    random, rank = loop.get("random", ()), dist.get_rank()
    if rank < len(random):
        set_random_state(random[rank])
    position: dict[str, Any] = loop["position"]
    return position


def _plain(loop: dict[str, Any]) -> bytes:
    """Bytes of plain values, which are read back once before they are relied on."""
    stream = io.BytesIO()
    try:
        torch.save(loop, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "the scheduler's state, the optimizer's settings or the position holds more than plain values, so no "
            f"checkpoint can hold it ({reason_of(error)}): use a scheduler of torch without functions of your own"
        ) from error
    return stream.getvalue()


def _read_loop(path: Path) -> dict[str, Any]:
    try:
        loop: dict[str, Any] = torch.load(path / LOOP_FILE, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {reason_of(error)}") from error
    if not isinstance(loop, dict) or loop.get("version") != _VERSION:
        raise CheckpointError(f"checkpoint {path} is of another version than {_VERSION}: write it with this one")
    return loop


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(part: Path, final: Path) -> None:
    """Rename a complete folder; one of the same step goes aside first."""
    _sync(part)
    aside = part.with_name(part.name.replace(".writing", ".replaced"))
    if final.exists():
        os.replace(final, aside)
    os.replace(part, final)
    _sync(final.parent)
    remove_folder(aside)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(folder: Path) -> list[Path]:
    """Checkpoints of a folder, fewest steps first."""
    if not folder.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def _prune(folder: Path, keep: int | None) -> None:
    """Remove all but the last few checkpoints, and what a save that failed left half written."""
    remove_remains(folder)
    for path in _complete(folder)[: 0 if keep is None else -keep]:
        gone = path.with_name(f".removed-{path.name}")
        os.replace(path, gone)  # so that what is half removed is no checkpoint
        remove_folder(gone)

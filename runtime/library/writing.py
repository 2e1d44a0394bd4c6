"""Blocks of tensors into files by ``torch.distributed.checkpoint``, at once or beside the training.

Files reach the disk piece by piece, and each piece that has is reported to the watchdog: a disk may be slow, but a rank
that writes no piece of 8 MiB in 15 s and does nothing else hangs.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult

from runtime.job.process_group import broadcast_text
from runtime.job.watchdog import WatchedThread, progressed, watched
from runtime.library.errors import CheckpointError
from runtime.library.saved_state import SavedBlock

LOCK_FILE = ".writer"
PIECE_BYTES = 8 << 20
"""Bytes after which a file is synchronized with the disk."""
_locks: dict[Path, TextIO] = {}
"""Files that this process holds locked, by folder; the system lets them go with the process."""


def _close_in_child() -> None:
    """Close the locks in a fork, such as a worker of a data loader, that may outlive this process for a while."""
    for file in _locks.values():
        file.close()
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)


@watched("write of checkpoint", is_limited=False)
def begin_writing(
    folder: Path, blocks: Mapping[str, SavedBlock], put_in_place: Callable[[], None], *, beside: bool
) -> Future[Any]:
    """Write blocks into files of a folder; a collective of all ranks.

    Parameters
    ----------
    folder
        New folder.
    blocks
        This rank's, by their own keys. Of a block that several ranks have, one writes it.
    put_in_place
        Called on rank 0 when all files are written.
    beside
        Whether to copy the blocks to host memory and write them from a thread.

    Returns
    -------
    Future
        Done when ``put_in_place`` has returned; holds the error of any rank.
    """
    writer = _Writer(folder, put_in_place)
    planner = _BlockPlanner(blocks)
    tensors = {key: entry.tensor for key, entry in blocks.items()}
    if beside:
        started = async_save(tensors, storage_writer=writer, planner=planner, process_group=_group())
        assert isinstance(started, Future)
        started.add_done_callback(lambda _: writer.thread.end())
        return started
    done: Future[Any] = Future()
    try:
        done.set_result(save(tensors, storage_writer=writer, planner=planner))
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        done.set_exception(error)
    return done


def lock_folder(folder: Path) -> None:
    """Make this job the only one that writes into a folder, until it ends; a collective of all ranks.

    Raises
    ------
    CheckpointError
        Another job writes into it, or it cannot be made.
    """
    failure = ""
    if dist.get_rank() == 0:
        try:
            failure = _lock(folder)
        except OSError as error:
            failure = f"checkpoints {folder}: the folder cannot be written ({error.strerror}): give another"
    failure = broadcast_text(failure)
    if failure:
        raise CheckpointError(failure)


def _lock(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    if folder in _locks and (folder / LOCK_FILE).exists():
        return ""
    file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        return f"checkpoints {folder}: {holder} writes into this folder: give this job one of its own, or end that one"
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _locks[folder] = file
    remove_remains(folder)
    return ""


def remove_remains(folder: Path) -> None:
    """Remove what interrupted jobs left half written or half removed; for the job that writes into the folder."""
    for left in (".writing-*", ".replaced-*", ".removed-*"):
        for path in folder.glob(left):
            remove_folder(path)


def remove_folder(folder: Path) -> None:
    """Remove a folder of files, as far as that is possible; each file is reported to the watchdog."""
    for path in folder.glob("*"):
        with suppress(OSError):
            path.unlink()
        progressed()
    shutil.rmtree(folder, ignore_errors=True)


class SyncedFile(io.FileIO):
    """A file whose pieces of :data:`PIECE_BYTES` are on the disk before the next is written, each reported."""

    _unsynced = 0

    def write(self, content: Any) -> int:
        """Write all of an object with a buffer."""
        view = memoryview(content)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            while piece:
                count = super().write(piece) or 0
                piece = piece[count:]
                self._unsynced += count
            if self._unsynced >= PIECE_BYTES:
                self.sync()
        return len(view)

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        os.fsync(self.fileno())
        self._unsynced = 0
        progressed()


class _SyncedFiles(FileSystem):
    """Files of a checkpoint as torch opens them."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A new file."""
        with SyncedFile(path, mode) as file:
            yield file


@cache
def _group() -> dist.ProcessGroup:
    """A group of all ranks whose collectives do not mix with those of the training."""
    made: dist.ProcessGroup = dist.new_group(backend="gloo")
    return made


class _Writer(HuggingFaceStorageWriter):
    """Writes safetensors files, a rank's blocks into one, and puts the folder in place behind the last."""

    def __init__(self, folder: Path, put_in_place: Callable[[], None]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._put_in_place = put_in_place
        self.fs = _SyncedFiles()
        self.thread = WatchedThread()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called first, in the thread that writes."""
        if threading.current_thread() is not threading.main_thread():
            self.thread.begin()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0 when all ranks have written."""
        super().finish(metadata, results)
        self._put_in_place()


class _BlockPlanner(DefaultSavePlanner):
    """Plans blocks of tensors, of which a rank may have several of one name."""

    def __init__(self, blocks: Mapping[str, SavedBlock]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = dict(blocks)

    def create_local_plan(self) -> SavePlan:
        """Every block of this rank."""
        items = []
        for entry in self._blocks.values():
            offsets, sizes = torch.Size(entry.block.offsets), torch.Size(entry.block.sizes)
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes),
                properties=TensorProperties.create_from_tensor(entry.tensor),
                size=torch.Size(entry.block.shape),
            )
            items.append(WriteItem(MetadataIndex(entry.key, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keys of their own for blocks of one name: a file of safetensors has each key once."""
        count = Counter(item.index.fqn for item in new_plan.items)
        items = [
            replace(item, index=replace(item.index, fqn=self._own_key(item.index)))
            if count[item.index.fqn] > 1
            else item
            for item in new_plan.items
        ]
        return super().finish_plan(replace(new_plan, items=items))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Values of a block, as they were copied where the copy is what is written."""
        progressed()
        tensor: Tensor = self.state_dict[index.fqn if index.fqn in self._blocks else self._own_key(index)]
        return tensor.contiguous()

    def _own_key(self, index: MetadataIndex) -> str:
        offsets = ",".join(map(str, index.offset or ()))
        return f"{index.fqn}@{offsets}" if offsets else index.fqn

"""Whole weights in one safetensors file, written tensor by tensor: no rank holds more than the largest one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.job.process_group import broadcast_text, gather_texts
from runtime.job.watchdog import progressed, watched
from runtime.library.errors import WeightsError
from runtime.library.weights import SINGLE
from runtime.library.writing import SyncedFile
from runtime.measure.local_shards import Block

if TYPE_CHECKING:
    from runtime.library.step import Step

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


@watched("export", is_limited=False)
def export(step: Step, path: Path | str) -> Path:
    """Write parameters and persistent buffers; a collective of all ranks, rank 0 writes.

    Parameters
    ----------
    step
        Its parameters and persistent buffers; a tied parameter is written under each of its names.
    path
        A file that ends in ``.safetensors``; or a folder, which gets ``model.safetensors`` and, from a module of
        transformers, ``config.json``, as ``from_pretrained`` reads them.

    Returns
    -------
    Path
        The safetensors file; it is there completely or not at all.

    Raises
    ------
    WeightsError
        It cannot be written, or a tensor has a dtype that the format does not know.
    """
    path = Path(path)
    as_folder = path.suffix != ".safetensors"
    file = path / SINGLE if as_folder else path
    holders = _holders(step)
    names = {key: name for key, name in step.saved_names.items() if name in holders}
    tensors = {key: (step.model[name].shape, holders[name][0].dtype) for key, name in names.items()}
    unknown = [f"{key} ({dtype})" for key, (_, dtype) in tensors.items() if dtype not in _DTYPES]
    if unknown:
        raise WeightsError(f"export: {unknown[0]} has no counterpart in safetensors: convert the module before")
    order = sorted(tensors, key=lambda key: (-tensors[key][1].itemsize, key))
    part = file.with_name(f".{file.name}.{uuid4().hex}")
    with _RankZero(file) as rank_0:
        rank_0.run(rank_0.begin, part, step, path if as_folder else None, _header(order, tensors))
        for key in order:
            rank_0.run(rank_0.append, _full(step, names[key], holders[names[key]]))
            progressed()
        rank_0.run(rank_0.finish, part)
    return file


@dataclass(frozen=True, slots=True)
class _Held:
    """A block that a rank has under a name of its own."""

    rank: int
    path: str
    block: Block
    dtype: torch.dtype


def _holders(step: Step) -> dict[str, list[_Held]]:
    """By name of the model's tensor, the blocks that make it up; the same on all ranks."""
    rank = dist.get_rank()
    own = [
        (path, block.name, block.shape, block.offsets, block.sizes, block.transposed, str(step.state[path].dtype))
        for path, block in step.blocks.items()
        if not block.is_empty
    ]
    found: dict[str, dict[tuple[int, ...], _Held]] = {}
    for rank, text in enumerate(gather_texts(json.dumps(own))):
        for path, name, shape, offsets, sizes, transposed, dtype in json.loads(text):
            block = Block(name, tuple(shape), tuple(offsets), tuple(sizes), transposed)
            held = _Held(rank, path, block, getattr(torch, dtype.removeprefix("torch.")))
            found.setdefault(name, {}).setdefault(block.offsets, held)
    return {name: list(blocks.values()) for name, blocks in found.items()}


def _full(step: Step, name: str, holders: list[_Held]) -> Tensor:
    """The whole tensor on rank 0; something else on the others, which send their blocks."""
    rank = dist.get_rank()
    full = torch.empty(step.model[name].shape if rank == 0 else (0,), dtype=holders[0].dtype)
    for held in holders:
        if rank not in (0, held.rank):
            continue
        block = torch.empty(held.block.sizes, dtype=held.dtype)
        if rank == held.rank:
            block.copy_(held.block.of(step.state[held.path]))
        if held.rank:
            if rank == 0:
                dist.recv(block, held.rank)
            else:
                dist.send(block, 0)
        if rank == 0:
            full[held.block.slices] = block
    return full


class _RankZero:
    """Writes a file on rank 0 alone; the first error is raised on every rank at the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failure = ""
        self._out: SyncedFile | None = None

    def __enter__(self) -> Self:
        return self

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run, unless an earlier one failed: the other ranks wait in collectives."""
        if dist.get_rank() == 0 and not self._failure:
            try:
                function(*arguments)
            except OSError as error:
                self._failure = error.strerror or str(error)

    def begin(self, part: Path, step: Step, folder: Path | None, header: bytes) -> None:
        """Write what comes before the tensors; into a folder also the configuration of its module."""
        part.parent.mkdir(parents=True, exist_ok=True)
        self._out = SyncedFile(part, "xb")
        self._out.write(header)
        config: Any = getattr(step.module, "config", None)
        if folder is not None and hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)

    def append(self, tensor: Tensor) -> None:
        """Write the values of a tensor."""
        assert self._out is not None
        self._out.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    def finish(self, part: Path) -> None:
        """Put the file in place when it is on the disk."""
        assert self._out is not None
        self._out.sync()
        os.replace(part, self._file)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._out is not None:
            self._out.close()
        if kind is None:
            failure = broadcast_text(self._failure)
            if failure:
                raise WeightsError(f"export {self._file} cannot be written: {failure}")


def _header(names: list[str], tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        shape, dtype = tensors[name]
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

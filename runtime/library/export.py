"""Whole weights in one safetensors file, written tensor by tensor: no rank holds more than the largest one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from runtime.job.process_group import broadcast_text
from runtime.library.dtensors import placement_of
from runtime.library.errors import WeightsError
from runtime.library.weights import SINGLE
from runtime.measure.local_shards import gather_full

if TYPE_CHECKING:
    from runtime.library.step import Step

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


def export(step: Step, path: Path | str) -> Path:
    """Write parameters and persistent buffers; a collective of all ranks, rank 0 writes.

    Parameters
    ----------
    step
        Its :meth:`~runtime.library.step.Step.state_dict`; a tied parameter is written under each of its names.
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
    state = step.state_dict()
    tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    unknown = [f"{name} ({dtype})" for name, (_, dtype) in tensors.items() if dtype not in _DTYPES]
    if unknown:
        raise WeightsError(f"export: {unknown[0]} has no counterpart in safetensors: convert the module before")
    names = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    part = file.with_name(f".{file.name}.{uuid4().hex}")
    with _RankZero(file) as rank_0:
        rank_0.run(_begin, step, path if as_folder else None, part, _header(names, tensors))
        for name in names:
            rank_0.run(_append, part, _full(step, state[name]))
        rank_0.run(_finish, part, file)
    return file


class _RankZero:
    """Runs functions on rank 0 alone; the first error of one is raised on every rank at the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failure = ""

    def __enter__(self) -> Self:
        return self

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run, unless an earlier one failed: the other ranks wait in collectives."""
        if dist.get_rank() == 0 and not self._failure:
            try:
                function(*arguments)
            except OSError as error:
                self._failure = error.strerror or str(error)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            failure = broadcast_text(self._failure)
            if failure:
                raise WeightsError(f"export {self._file} cannot be written: {failure}")


def _full(step: Step, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return gather_full(tensor.to_local(), placement_of(tensor), step.groups)


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


def _begin(step: Step, folder: Path | None, part: Path, header: bytes) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(header)
    config: Any = getattr(step.module, "config", None)
    if folder is not None and hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)


def _append(part: Path, tensor: Tensor) -> None:
    with part.open("ab") as file:
        file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _finish(part: Path, file: Path) -> None:
    with part.open("rb+") as written:
        os.fsync(written.fileno())
    os.replace(part, file)

"""Where the initial tensors come from: a module, a mapping, files of safetensors or of torch.

A rank reads its own blocks; of a file nothing else is read, and of the model no rank holds more than one whole tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.torch_adapter.deferred_values import DeferredValues
from runtime.library.errors import WeightsError
from runtime.measure.initial_state import map_tensors
from runtime.measure.local_shards import Slices

Weights = Mapping[str, Tensor] | Path | str
"""A state dict, a file of one, or a folder as ``from_pretrained`` reads it."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TORCH_INDEX, TORCH = "pytorch_model.bin.index.json", "pytorch_model.bin"
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


class TensorSource(Protocol):
    """Full tensors by name, read in part."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a full tensor."""

    def blocks(self, name: str, wanted: Sequence[Slices]) -> Sequence[Tensor]:
        """Blocks of a tensor; may share memory with the source."""

    def close(self) -> None:
        """Let files go."""


class MappedTensors:
    """A mapping of names to tensors: a state dict in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a full tensor."""
        return tuple(self._tensors[name].shape)

    def blocks(self, name: str, wanted: Sequence[Slices]) -> Sequence[Tensor]:
        """Views of blocks."""
        return [self._tensors[name].detach()[slices] for slices in wanted]

    def close(self) -> None:
        """Forget the mapping."""
        self._tensors = {}


class ModuleTensors:
    """Tensors of a module, as rank 0 has them; :meth:`blocks` is a collective of all ranks.

    With ``seeded`` the parameters are on ``meta``, and rank 0 makes each of them when it is read.
    """

    def __init__(self, module: nn.Module, device: torch.device, seeded: DeferredValues | None = None) -> None:
        self._device, self._seeded = device, seeded
        self._tensors = {name: tensor.detach() for name, tensor in _named_tensors(module)}

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a full tensor."""
        return tuple(self._tensors[name].shape)

    def blocks(self, name: str, wanted: Sequence[Slices]) -> Sequence[Tensor]:
        """Views of blocks of rank 0's tensor, which is copied."""
        tensor = self._tensors[name]
        if not tensor.is_meta:
            full = tensor.to(self._device, memory_format=torch.contiguous_format, copy=True)
        elif self._seeded is not None and tensor in self._seeded:
            full = self._seeded.value(tensor).to(self._device).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        dist.broadcast(full, 0)
        return [full[slices] for slices in wanted]

    def is_on_meta(self, name: str) -> bool:
        """Whether a tensor has no data, here or on rank 0."""
        return self._seeded is None and self._tensors[name].is_meta

    def close(self) -> None:
        """Forget the module's tensors."""
        self._tensors = {}

    def forget(self, name: str) -> None:
        """Let a tensor go that the module no longer has."""
        tensor = self._tensors.pop(name)
        if self._seeded is not None:
            self._seeded.forget(tensor)


class SafetensorsFiles:
    """Tensors of safetensors files."""

    def __init__(self, paths: Iterable[Path]) -> None:
        try:
            from safetensors import safe_open
        except ImportError:
            raise WeightsError("reading safetensors needs the package: pip install safetensors") from None
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except Exception as error:
                raise WeightsError(f"weights {path} cannot be read: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a full tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def close(self) -> None:
        """Close the files."""
        self._files = {}
        self._stack.close()

    def blocks(self, name: str, wanted: Sequence[Slices]) -> Sequence[Tensor]:
        """Blocks, whose bytes alone are read."""
        file = self._files[name]
        return [file.get_slice(name)[slices] if slices else file.get_tensor(name) for slices in wanted]


class TorchFiles:
    """Tensors of files of torch, one of which is mapped into memory at a time.

    Pages of a mapped file that were read count as memory of the process until it is unmapped.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._places: dict[str, tuple[Path, tuple[int, ...]]] = {}
        self._mapped: tuple[Path, Mapping[str, Tensor]] | None = None
        for path in paths:
            self._places.update({name: (path, tuple(tensor.shape)) for name, tensor in self._tensors_of(path).items()})

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a full tensor."""
        return self._places[name][1]

    def blocks(self, name: str, wanted: Sequence[Slices]) -> Sequence[Tensor]:
        """Views of blocks, which keep the file mapped as long as they live."""
        tensor = self._tensors_of(self._places[name][0])[name].detach()
        return [tensor[slices] for slices in wanted]

    def close(self) -> None:
        """Let the mapped file go."""
        self._mapped = None

    def _tensors_of(self, path: Path) -> Mapping[str, Tensor]:
        """Tensors of a file, which is mapped in the place of another."""
        if self._mapped is None or self._mapped[0] != path:
            self._mapped = None
            try:
                tensors = {name: value for name, value in map_tensors(path).items() if isinstance(value, Tensor)}
            except Exception as error:
                raise WeightsError(
                    f"weights {path} cannot be read as a state dict of tensors alone: {error}"
                ) from error
            self._mapped = path, tensors
        return self._mapped[1]


def open_weights(weights: Weights) -> TensorSource:
    """Source of a mapping, a file or a folder.

    Raises
    ------
    WeightsError
        There is no such file, or it is none of these.
    """
    if isinstance(weights, Mapping):
        return MappedTensors(weights)
    path = Path(weights)
    if path.is_dir():
        known = (INDEX, SINGLE, TORCH, TORCH_INDEX)
        found = next((path / name for name in known if (path / name).exists()), None)
        if found is None:
            raise WeightsError(f"weights {path}: the folder has none of {', '.join(known[:-1])} and {known[-1]}")
        if found.name == INDEX:
            return _indexed(found, SafetensorsFiles)
        if found.name == TORCH_INDEX:
            return _indexed(found, TorchFiles)
        path = found
    if not path.is_file() or path.suffix not in _SUFFIXES:
        raise WeightsError(
            f"weights {path}: no such file or folder; give a file ({', '.join(_SUFFIXES)}), a folder as "
            "from_pretrained reads it, or a state dict"
        )
    return SafetensorsFiles([path]) if path.suffix == ".safetensors" else TorchFiles([path])


def _indexed(path: Path, kind: Callable[[Iterable[Path]], TensorSource]) -> TensorSource:
    """Source of the files that an index names; each of them, and each tensor, is looked for."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): str(file) for name, file in written.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"weights {path}: no index of weights ({type(error).__name__}: {error})") from error
    files = sorted(set(file_of.values()))
    for file in files:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise WeightsError(
                f"weights {path}: it names {file}, outside of its folder: put all files beside the index"
            )
        if not (path.parent / file).is_file():
            raise WeightsError(f"weights {path}: it names {file}, which is not there: fetch all files of the weights")
    source = kind(path.parent / file for file in files)
    if lacking := file_of.keys() - set(source.names()):
        name = min(lacking)
        source.close()
        raise WeightsError(
            f"weights {path}: it names {name} in {file_of[name]}, but no file holds it: fetch them again"
        )
    return source


def find_names(source: TensorSource, wanted: Mapping[str, tuple[str, ...]], optional: Iterable[str]) -> dict[str, str]:
    """Name in the source by name of the tensor.

    Parameters
    ----------
    source
        Where the tensors are.
    wanted
        Other names of the same tensor by its first name.
    optional
        Tensors that the source need not have.

    Returns
    -------
    dict
        A name that the source lacks is found with or without a first part, as transformers saves a base model.

    Raises
    ------
    WeightsError
        The source lacks tensors.
    """
    there = set(source.names())
    firsts = sorted({name.partition(".")[0] for name in there if "." in name})
    found, missing = {}, []
    for name, aliases in wanted.items():
        candidates = [name, *aliases]
        candidates += [entry.partition(".")[2] for entry in (name, *aliases)]
        candidates += [f"{first}.{entry}" for first in firsts for entry in (name, *aliases)]
        match = next((candidate for candidate in candidates if candidate in there), None)
        if match is not None:
            found[name] = match
        elif name not in optional:
            missing.append(name)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise WeightsError(
            f"the weights lack {', '.join(missing[:5])}{more} of the model; they have "
            f"{', '.join(sorted(there)[:3])}, ...: give those of the planned model"
        )
    return found


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]

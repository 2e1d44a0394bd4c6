"""Profile files: a chain of layers as versioned JSON, measured anywhere, planned here.

A file holds what :class:`formulations.layers.layer.LayerChain` holds, field by field, and the version of the format.
Every layer names the source of its bytes and of its seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from formulations.layers.layer import LayerChain, LayerProfile
from formulations.problem.files import write_text_atomically
from planner.models.references import ModelReference

LAYERS_VERSION: Literal[1] = 1
"""Version of the file format; a file of another version is refused."""

SOURCE_PREFIX = "layers:"
"""In front of a profile file where the name of a model is expected."""


class LayerFileError(ValueError):
    """A profile file that cannot be read or written; the message names the file, the place and the reason."""


class LayerFile(BaseModel):
    """Content of a profile file; ``version`` is that of the format, the other fields are the chain's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    version: Literal[1]
    name: str
    dtype: str
    notes: tuple[str, ...] = ()
    layers: tuple[LayerProfile, ...]


def save_layers(chain: LayerChain, path: Path) -> None:
    """Write a chain atomically; equal chains give equal files.

    Raises
    ------
    LayerFileError
        The file cannot be written.
    """
    content = LayerFile(
        version=LAYERS_VERSION, name=chain.name, dtype=chain.dtype, notes=chain.notes, layers=chain.layers
    )
    try:
        write_text_atomically(path, content.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise LayerFileError(f"profile file {path} cannot be written: {error.strerror or error}") from error


def load_layers(path: Path) -> LayerChain:
    """Read a chain that :func:`save_layers`, or a profiler, wrote.

    Raises
    ------
    LayerFileError
        The file cannot be read, is of another version, or is not a chain of layers.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LayerFileError(f"profile file {path} cannot be read: {reason}") from error
    try:
        content = LayerFile.model_validate_json(text)
        return LayerChain(content.name, content.layers, content.dtype, content.notes)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise LayerFileError(
            f"profile file {path} is not a chain of layers of format version {LAYERS_VERSION}: "
            f"{where}: {first['msg']}; write it with planner.layers.profiles.files.save_layers"
        ) from None
    except ValueError as error:
        raise LayerFileError(f"profile file {path}: {error}") from None


def profiled_layers(reference: ModelReference) -> LayerChain | None:
    """Layers of the profile file that a reference names as ``layers:FILE``, or None where it names a model.

    Raises
    ------
    LayerFileError
        The file cannot be read, or holds numbers of another type than the reference.
    """
    if not reference.source.startswith(SOURCE_PREFIX):
        return None
    path = Path(reference.source.removeprefix(SOURCE_PREFIX))
    chain = load_layers(path)
    if chain.dtype != reference.dtype:
        raise LayerFileError(
            f"profile file {path} is of {chain.dtype}, not of {reference.dtype}: set the dtype of the file"
        )
    return chain

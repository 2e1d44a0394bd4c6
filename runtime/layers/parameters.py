"""Parameters of a layer plan: modules cut before they are sharded, and the origin of each cut parameter.

Units are rebuilt and sharded without storage; every parameter has an :class:`Origin`, a part of one of the model's
parameters. Then the shards alone get memory, and each rank reads their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.torch_adapter.local.boxes import local_box
from runtime.layers.families.units import FamilyError, LayerUnit
from runtime.measure.local_shards import Block, BlockReader, local_tensor


@dataclass(frozen=True, slots=True)
class Origin:
    """Part of one of the model's parameters.

    Parameters
    ----------
    name
        Name of the model's parameter.
    transposed
        Whether rows and columns are swapped, before the others apply.
    rows, columns
        First and one after the last of dimension 0 and of dimension 1; None: all.
    """

    name: str
    transposed: bool = False
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def part(self, whole: Tensor) -> Tensor:
        """View of this part of the model's parameter."""
        found = whole.t() if self.transposed and whole.ndim > 1 else whole
        if self.rows is not None:
            found = found[self.rows[0] : self.rows[1]]
        if self.columns is not None and found.ndim > 1:
            found = found[:, self.columns[0] : self.columns[1]]
        return found

    def within_rows(self, start: int, length: int) -> Origin:
        """Rows `start` to `start + length` of this part."""
        first = start + (self.rows[0] if self.rows else 0)
        return replace(self, rows=(first, first + length))

    def within_columns(self, start: int, length: int) -> Origin:
        """Columns `start` to `start + length` of this part."""
        first = start + (self.columns[0] if self.columns else 0)
        return replace(self, columns=(first, first + length))


Origins = dict[Tensor, Origin]
"""Origin of every parameter without storage, by identity."""


class SplitLinear(nn.Module):
    """A linear module as several, computed one after the other.

    Parameters
    ----------
    pieces
        Linear modules or again split ones.
    along_output
        Whether their results lie side by side; otherwise each takes its part of the input and the results are summed.
    """

    def __init__(self, pieces: list[nn.Module], along_output: bool) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)
        self.along_output = along_output

    def forward(self, hidden: Tensor) -> Tensor:
        """Result of the linear module that was split."""
        if self.along_output:
            return torch.cat([piece(hidden) for piece in self.pieces], dim=-1)
        parts = hidden.chunk(len(self.pieces), dim=-1)
        result: Tensor = self.pieces[0](parts[0])
        for piece, part in zip(self.pieces[1:], parts[1:], strict=True):
            result = result + piece(part)
        return result

    @property
    def weight(self) -> Tensor:
        """Matrix of the first piece; T5 reads its dtype."""
        return self.linear_pieces()[0].weight

    def linear_pieces(self) -> list[nn.Linear]:
        """Linear modules of all pieces, in the order in which they run."""
        return [module for module in self.modules() if isinstance(module, nn.Linear)]


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies with a matrix: torch's linear module or transformers' ``Conv1D``."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def split_linears(
    unit: LayerUnit, inside: nn.Module, origins: Origins, *, tensor_parallel: bool, slices: int, name: str
) -> None:
    """Split the linear modules of a layer for tensor parallelism and slices; unchanged where it has neither.

    Parameters
    ----------
    unit
        The unit, whose rules name fused modules and modules that are split along their output.
    inside
        The unit itself or the module in it that is a layer of its own.
    origins
        Extended by the new parameters.
    tensor_parallel
        Whether the products are shared by several devices. A matrix that is split along its output is then sliced
        along its input, so that every device's part of the output stays in one piece.
    slices
        Pieces of each matrix product.
    name
        Name of the layer, for errors.

    Raises
    ------
    FamilyError
        A matrix cannot be cut into so many slices of equal size.
    """
    fused, column = unit.rules.fused or {}, set(unit.rules.column)
    members = set(inside.modules())
    for path, module in list(unit.named_modules()):
        if module not in members or not is_linear(module) or path in unit.rules.vocabulary:
            continue
        split: nn.Module = module
        if type(module).__name__ == "Conv1D" and (tensor_parallel or slices > 1):
            split = _from_conv1d(module, origins)
        if tensor_parallel and path in fused:
            split = _split(split, fused[path], True, origins, name)
        if slices > 1:
            along_output = not (tensor_parallel and path in column)
            split = _sliced(split, slices, along_output, origins, name)
        if split is not module:
            unit.set_submodule(path, split)


def _sliced(module: nn.Module, slices: int, along_output: bool, origins: Origins, name: str) -> nn.Module:
    if isinstance(module, SplitLinear):
        pieces = [_sliced(piece, slices, along_output, origins, name) for piece in module.pieces]
        return SplitLinear(pieces, module.along_output)
    return _split(module, slices, along_output, origins, name)


def _split(module: nn.Module, parts: int, along_output: bool, origins: Origins, name: str) -> SplitLinear:
    assert isinstance(module, nn.Linear)
    whole = module.out_features if along_output else module.in_features
    if whole % parts:
        possible = ", ".join(str(k) for k in range(1, min(whole, 64) + 1) if whole % k == 0)
        raise FamilyError(
            f"layer {name}: a matrix of {whole} cannot be cut into {parts} slices: possible are {possible}"
        )
    length = whole // parts
    pieces: list[nn.Module] = []
    for start in range(0, whole, length):
        has_bias = module.bias is not None and (along_output or start == 0)
        shape = (module.in_features, length) if along_output else (length, module.out_features)
        piece = nn.Linear(*shape, bias=has_bias, device="meta", dtype=module.weight.dtype)
        weight, cut = origins[module.weight], Origin.within_rows if along_output else Origin.within_columns
        _inherit(piece.weight, module.weight, cut(weight, start, length), origins)
        if has_bias:
            bias = origins[module.bias]
            _inherit(piece.bias, module.bias, bias.within_rows(start, length) if along_output else bias, origins)
        pieces.append(piece)
    return SplitLinear(pieces, along_output)


def _from_conv1d(module: Any, origins: Origins) -> nn.Linear:
    """Linear module of a ``Conv1D``, whose weight is stored the other way round."""
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta", dtype=module.weight.dtype)
    _inherit(linear.weight, module.weight, replace(origins[module.weight], transposed=True), origins)
    _inherit(linear.bias, module.bias, origins[module.bias], origins)
    return linear


def _inherit(parameter: Tensor, source: Tensor, origin: Origin, origins: Origins) -> None:
    parameter.requires_grad_(source.requires_grad)
    origins[parameter] = origin


def origins_by_path(units: Sequence[LayerUnit], origins: Origins) -> dict[str, Origin]:
    """Origin of each parameter of some units by its path, which begins with the position of its unit.

    Parameters of one origin become one parameter.
    """
    by_path: dict[str, Origin] = {}
    first: dict[Origin, nn.Parameter] = {}
    for position, unit in enumerate(units):
        for path, module in unit.named_modules():
            prefix = f"{position}.{path}." if path else f"{position}."
            for name, parameter in list(module.named_parameters(recurse=False)):
                origin = origins[parameter]
                module.register_parameter(name, first.setdefault(origin, parameter))
                by_path[prefix + name] = origin
    return by_path


def parameter_block(parameter: Tensor, origin: Origin, shape: tuple[int, ...]) -> Block:
    """Place of a parameter's local part in the model's parameter of some shape."""
    if isinstance(parameter, DTensor):
        offsets, sizes = local_box(parameter)
    else:
        offsets, sizes = (0,) * parameter.ndim, tuple(parameter.shape)
    cuts = (origin.rows, origin.columns)[: len(offsets)]
    starts = [cut[0] if cut else 0 for cut in cuts] + [0] * (len(offsets) - len(cuts))
    offsets = tuple(offset + start for offset, start in zip(offsets, starts, strict=True))
    transposed = origin.transposed and len(sizes) > 1
    if transposed:
        offsets, sizes = offsets[::-1], sizes[::-1]
    return Block(origin.name, shape, offsets, sizes, transposed)


def allocate(stage: nn.Module, device: torch.device, on_host: Callable[[str], bool]) -> None:
    """Give a sharded stage memory: its shards and buffers, nothing larger.

    Parameters
    ----------
    stage
        Sharded on ``meta``.
    device
        Where its tensors go.
    on_host
        Whether a parameter of some path stays in host memory.
    """
    named = {module: path for path, module in stage.named_modules()}
    for module in reversed(named):  # FSDP2 takes the tensors of a group when its outermost module is reached
        own = next((f"{named[module]}.{name}" for name, _ in module.named_parameters(recurse=False)), None)
        module.to_empty(device="cpu" if own is not None and on_host(own) else device, recurse=False)


def fill(stage: nn.Module, blocks: Mapping[str, Block], names: Iterable[str], read: BlockReader) -> None:
    """Copy initial values into a stage's parameters and buffers; a collective where ``read`` is one.

    Parameters
    ----------
    stage
        With memory.
    blocks
        By path.
    names
        All tensors of the model, in the order of all ranks.
    read
        Where the values come from.
    """
    paths: dict[str, list[str]] = {}
    for path, block in blocks.items():
        if not block.is_empty:
            paths.setdefault(block.name, []).append(path)
    tensors: dict[str, Tensor] = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    with torch.no_grad():
        for name in names:
            here = paths.get(name, [])
            found = list(read(name, [blocks[path].slices for path in here]))
            for path in reversed(here):  # so that what was copied is let go before more is read
                blocks[path].of(local_tensor(tensors[path])).copy_(found.pop())

"""Tensor and sequence parallelism of one unit, by torch's own styles.

Column-split modules take whole inputs and give their part of the output; row-split ones take that part and give whole
outputs, summed over the devices (Shoeybi et al. 2019). Under sequence parallelism the whole inputs are gathered from,
and the sums are scattered to, parts of the sequence (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from runtime.layers.families.units import FamilyError, LayerUnit
from runtime.layers.mesh import SEQUENCE_DIMENSION
from runtime.layers.parameters import SplitLinear


def check_products(unit: LayerUnit, size: int, sequence_parallel: bool) -> None:
    """Check that a unit's matrix products can be shared by `size` devices.

    Raises
    ------
    FamilyError
        The heads, the width of a matrix or the vocabulary cannot be divided by them, or the unit has nothing between
        its products that could be sequence-parallel.
    """
    if sequence_parallel and not unit.is_block:
        raise FamilyError(
            f"layer {unit.name} cannot be sequence-parallel, only blocks can: leave it out there; hidden states are "
            "gathered in front of it"
        )
    unit.check_heads(size)
    shared: list[tuple[str, int]] = []
    for path in _present(unit, unit.rules.column):
        shared += [(path, linear.out_features) for linear in _linears(unit.get_submodule(path))]
    for path in _present(unit, unit.rules.row):
        shared += [(path, linear.in_features) for linear in _linears(unit.get_submodule(path))]
    for path in _present(unit, unit.rules.vocabulary):
        module: Any = unit.get_submodule(path)
        shared.append((path, module.out_features if isinstance(module, nn.Linear) else module.num_embeddings))
    for path, width in shared:
        if width % size:
            raise FamilyError(
                f"layer {unit.name}: {path} has a width of {width} to share, tensor-parallel {size} does not divide it"
            )


def share_products(unit: LayerUnit, mesh_of: Callable[[str], DeviceMesh], sequence_parallel: bool) -> None:
    """Share a unit's matrix products among the devices of a mesh.

    Parameters
    ----------
    unit
        A unit that passed :func:`check_products`, whose parameters are whole and equal on all devices of the mesh.
    mesh_of
        The devices, one dimension: the same for every path inside the unit, though not always the same mesh.
    sequence_parallel
        Whether the hidden states between the products are sharded along the sequence.
    """
    size = mesh_of("").size()
    unit.share_heads(mesh_of("").get_local_rank(), size)
    unit.sequence_parts = size if sequence_parallel else 1
    sequence: Placement = Shard(SEQUENCE_DIMENSION) if sequence_parallel else Replicate()
    rules = unit.rules
    for path in _present(unit, rules.column):
        # Inside attention the input has been gathered already; see below.
        outside = not any(path.startswith(f"{attention}.") for attention in rules.attention)
        style = ColwiseParallel(input_layouts=sequence if outside else Replicate())
        for linear in _linears(unit.get_submodule(path)):
            _apply(linear, mesh_of(path), style)
    for path in _present(unit, rules.row):
        for linear in _linears(unit.get_submodule(path)):
            _apply(linear, mesh_of(path), RowwiseParallel(output_layouts=sequence))
    for path in _present(unit, rules.vocabulary):
        _share_vocabulary(unit.get_submodule(path), mesh_of(path))
    for path in _present(unit, rules.replicated_tables):
        _replicate_table(unit.get_submodule(path), mesh_of(path))
    if sequence_parallel:
        for path in _present(unit, rules.norms):
            _apply(unit.get_submodule(path), mesh_of(path), SequenceParallel(use_local_output=True))
        for path in _present(unit, rules.attention):
            _gather_input(unit.get_submodule(path), mesh_of(path))


def repeat_products(unit: LayerUnit, mesh_of: Callable[[str], DeviceMesh]) -> None:
    """Compute the whole unit on every device of a mesh, and sum the gradients of which each device has a share.

    Parameters
    ----------
    unit
        A unit whose parameters are whole and equal on all devices of the mesh.
    mesh_of
        As :func:`share_products` takes it.
    """
    unit.copies = mesh_of("").size()
    for path in _present(unit, unit.rules.replicated_tables):
        _replicate_table(unit.get_submodule(path), mesh_of(path))


def _present(unit: LayerUnit, paths: Iterable[str]) -> list[str]:
    """Paths at which the unit has a module with parameters."""
    modules = dict(unit.named_modules())
    return [path for path in paths if path in modules and next(modules[path].parameters(), None) is not None]


def _linears(module: nn.Module) -> list[nn.Linear]:
    if isinstance(module, SplitLinear):
        return module.linear_pieces()
    assert isinstance(module, nn.Linear)
    return [module]


def _apply(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    # Every device has the same values already, so none need be sent.
    parallelize_module(module, mesh, style, src_data_rank=None)


def _share_vocabulary(module: Any, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        _apply(module, mesh, ColwiseParallel(output_layouts=Replicate()))
        return
    _apply(module, mesh, RowwiseParallel(input_layouts=Replicate()))


def _replicate_table(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a table on every device, where its gradient is that of a part of the columns."""

    def replicate(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(part.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
            part.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))

    def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in inputs)

    def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        local: Tensor = output.to_local(grad_placements=[Partial()])
        return local

    distribute_module(module, mesh, replicate, enter, leave)  # type: ignore[arg-type]


def _gather_input(module: nn.Module, mesh: DeviceMesh) -> None:
    """Gather the whole sequences that an attention module takes, once for all of its matrices."""

    def gather(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = inputs[0] if inputs else named["hidden_states"]
        part = DTensor.from_local(hidden, mesh, [Shard(SEQUENCE_DIMENSION)], run_check=False)
        whole = part.redistribute(placements=[Replicate()])
        return ((whole, *inputs[1:]), named) if inputs else ((), {**named, "hidden_states": whole})

    module.register_forward_pre_hook(gather, with_kwargs=True)

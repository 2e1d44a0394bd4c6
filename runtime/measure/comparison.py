"""Relative errors of gradients and of updated tensors between a run on several ranks and one process.

Each rank compares its own blocks with the same blocks of the reference's files. The error of a tensor is
``max|a - b| / max|b|``, with the maximum of ``|b|`` over the whole tensor. Two cases in which that number has no
meaning are left out:

- A gradient that is zero up to rounding (an attention key's bias, say) has no digits to compare: its scale
  is at least :data:`~runtime.measure.reference.GRADIENT_FLOOR` of the largest gradient entry of the model.
- AdamW divides a gradient by its own magnitude, so where an entry's gradient is rounding noise its update
  is a random number of the size of the learning rate. Updated parameters are compared where the first
  gradient is above :data:`NOISE_SHARE` of its tensor's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from torch import Tensor

from planner.graph.placement import Placement
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.measure.local_shards import local_block
from runtime.measure.reference import ReferenceRun
from runtime.measure.rounding import NO_ERROR, WorstError

NOISE_SHARE = 1e-3


class ReferenceComparison:
    """Compares this rank's blocks with a reference run.

    Parameters
    ----------
    reference
        Results of one process.
    placements
        Placement of each parameter and module buffer by name.
    groups
        Mesh, and this rank's place on it.
    """

    def __init__(self, reference: ReferenceRun, placements: Mapping[str, Placement], groups: MeshGroups) -> None:
        self._reference = reference
        self._placements = placements
        self._groups = groups

    def gradients(self, local: Mapping[str, Tensor]) -> dict[str, float]:
        """Relative errors of the local gradients of the first step; infinite where only one side has a gradient."""
        errors = dict.fromkeys(sorted(local.keys() ^ self._reference.gradients.keys()), inf)
        for name in sorted(local.keys() & self._reference.gradients.keys()):
            gradient, expected = local[name], self._reference.gradients[name]
            difference = (gradient.cpu() - self._block(name, expected)).abs()
            errors[name] = _largest(difference) / self._reference.scale_of(expected)
        return errors

    def updated(self, local: Mapping[str, Tensor]) -> WorstError:
        """Largest error of the local parameters and module buffers after the last step."""
        worst = NO_ERROR
        for name, tensor in local.items():
            expected = self._reference.updated.get(name)
            if expected is None:
                continue  # a constant of the graph, which is no tensor of the module
            difference = (tensor.cpu().double() - self._block(name, expected).double()).abs()
            gradient = self._reference.gradients.get(name)
            if gradient is not None:
                noise = NOISE_SHARE * self._reference.scale_of(gradient)
                difference = difference[self._block(name, gradient).abs() > noise]
            worst = worst.worse_of(WorstError(_largest(difference) / (_largest(expected) or 1.0), name))
        return worst

    def _block(self, name: str, full: Tensor) -> Tensor:
        return local_block(full, self._placements[name], self._groups.shape, self._groups.coordinate)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0

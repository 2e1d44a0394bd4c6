"""Errors of a layer plan's run against one process, as :mod:`runtime.measure.comparison` defines them."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from torch import Tensor
from torch.distributed.tensor import DTensor

from runtime.layers.parameters import Origin
from runtime.measure.comparison import GRADIENT_FLOOR, NO_ERROR, WorstError
from runtime.measure.reference import ReferenceRun


def gradient_error(
    gradients: Mapping[str, Tensor], origins: Mapping[str, Origin], reference: ReferenceRun
) -> tuple[WorstError, dict[str, int]]:
    """Compare the gradients of a stage with those of one process; a collective of the stage's ranks.

    Parameters
    ----------
    gradients
        Gradients by path, distributed as they are.
    origins
        Origin of each by path.
    reference
        Results of one process.

    Returns
    -------
    tuple
        The largest error, relative to the largest entry of the model's whole gradient, and the number of entries
        compared by name. The error is infinite where one process has no such gradient.
    """
    worst = NO_ERROR
    compared: dict[str, int] = {}
    for path, gradient in gradients.items():
        whole = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()
        origin = origins[path]
        expected = reference.gradients.get(origin.name)
        if expected is None:
            worst = worst.worse_of(WorstError(inf, origin.name))
            continue
        part = origin.part(expected)
        compared[origin.name] = compared.get(origin.name, 0) + part.numel()
        scale = max(float(expected.abs().max()), GRADIENT_FLOOR * reference.gradient_scale) or 1.0
        worst = worst.worse_of(WorstError(float((whole - part).abs().max()) / scale, f"{origin.name} ({path})"))
    return worst, compared


def uncompared(compared: list[Mapping[str, int]], reference: ReferenceRun) -> list[str]:
    """Names of gradients of one process that the stages, one entry of `compared` each, did not cover whole."""
    return [
        name
        for name, gradient in reference.gradients.items()
        if not any(stage.get(name, 0) == gradient.numel() for stage in compared)
    ]

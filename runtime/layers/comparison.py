"""Errors of a layer plan's run against one process, as :mod:`runtime.measure.comparison` defines them."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan

from torch import Tensor
from torch.distributed.tensor import DTensor

from runtime.layers.parameters import Origin
from runtime.measure.reference import ReferenceRun


def gradient_error(
    gradients: Mapping[str, Tensor], origins: Mapping[str, Origin], reference: ReferenceRun
) -> tuple[dict[str, float], dict[str, int]]:
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
        Errors by name, relative to the largest entry of the model's whole gradient, and the number of entries
        compared by name. An error is infinite where one process has no such gradient.
    """
    errors: dict[str, float] = {}
    compared: dict[str, int] = {}
    for path, gradient in gradients.items():
        whole = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()
        origin = origins[path]
        expected = reference.gradients.get(origin.name)
        if expected is None:
            errors[origin.name] = inf
            continue
        part = origin.part(expected)
        compared[origin.name] = compared.get(origin.name, 0) + part.numel()
        error = float((whole - part).abs().max()) / reference.scale_of(expected)
        errors[origin.name] = max(errors.get(origin.name, 0.0), inf if isnan(error) else error)
    return errors, compared


def uncompared(compared: list[Mapping[str, int]], reference: ReferenceRun) -> list[str]:
    """Names of gradients of one process that the stages, one entry of `compared` each, did not cover whole."""
    return [
        name
        for name, gradient in reference.gradients.items()
        if not any(stage.get(name, 0) == gradient.numel() for stage in compared)
    ]

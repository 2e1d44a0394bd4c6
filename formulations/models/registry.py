"""Operator-level models by the name that users give."""

from __future__ import annotations

from collections.abc import Callable

from formulations.models.kiwi_chain import build_kiwi_chain
from formulations.models.kiwi_reduced import build_kiwi_reduced
from formulations.models.sharding import build_sharding
from formulations.models.step import StepModel
from formulations.problem import StrategyProblem


class UnknownFormulationError(ValueError):
    """A name of no formulation; the message lists those that exist."""


MODELS: dict[str, Callable[[StepModel, int | None], StrategyProblem]] = {
    "sharding": build_sharding,
    "kiwi_reduced": build_kiwi_reduced,
    "kiwi_chain": build_kiwi_chain,
}


def build_problem(name: str, model: StepModel, memory_limit: int | None) -> StrategyProblem:
    """Build the canonical problem of the model called ``name``.

    Raises
    ------
    UnknownFormulationError
        If there is no such model; the message lists the known ones.
    """
    if name not in MODELS:
        raise UnknownFormulationError(f"model formulation {name!r} is not known; choose one of {', '.join(MODELS)}")
    return MODELS[name](model, memory_limit)

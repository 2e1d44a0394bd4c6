"""Costs that were measured where they are paid: instructions of plans that ran, by kind and signature.

A cost that was not measured is the model's, corrected by how far the model was off for the measured cost of its kind
that is closest in size. A measurement counts for as many processes as shared the machine then, and for no other number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from math import log

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from planner.graph.operator_graph import TensorSpec
from planner.graph.placement import Placement, local_shape


class CostSource(StrEnum):
    """How a cost is known.

    MEASURED: this instruction, in a plan that ran. FITTED: the model, corrected by measurements of its kind.
    MODELLED: the model alone, from rates of the cluster.
    """

    MEASURED = "measured"
    FITTED = "fitted"
    MODELLED = "modelled"


class MeasuredCost(BaseModel):
    """Seconds of an instruction as measured, as a mean of runs, and as the rates of the cluster predict it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    seconds: PositiveFloat
    modelled: PositiveFloat
    runs: PositiveInt = 1

    def merged(self, other: MeasuredCost) -> MeasuredCost:
        """The mean of both, weighted by runs; what the rates predict is that of ``other``."""
        runs = self.runs + other.runs
        seconds = (self.runs * self.seconds + other.runs * other.seconds) / runs
        return MeasuredCost(seconds=seconds, modelled=other.modelled, runs=runs)


MeasuredCosts = dict[str, dict[str, MeasuredCost]]
"""Measured costs by kind (an operator's target, a collective, an optimizer), then by signature."""


class KnownCosts:
    """Measured costs of as many processes as a mesh has.

    Parameters
    ----------
    costs
        By kind and signature.
    ranks
        Processes that share the machine.
    """

    def __init__(self, costs: Mapping[str, Mapping[str, MeasuredCost]], ranks: int) -> None:
        self.ranks = ranks
        prefix = f"{ranks} ranks: "
        self._costs = {
            kind: {key: cost for key, cost in entries.items() if key.startswith(prefix)}
            for kind, entries in costs.items()
        }
        self._ratios = {
            kind: [(log(cost.modelled), cost.seconds / cost.modelled) for cost in entries.values()]
            for kind, entries in self._costs.items()
        }

    def covers(self, kind: str) -> bool:
        """Whether anything of a kind was measured."""
        return bool(self._costs.get(kind))

    def signature(self, parts: Iterable[object]) -> str:
        """The signature of an instruction from what its time depends on."""
        return f"{self.ranks} ranks: " + " ".join(map(str, parts))

    def seconds(self, kind: str, signature: str, modelled: float) -> float:
        """Seconds of an instruction, which the model predicts to take ``modelled`` seconds."""
        known = self._costs.get(kind)
        if not known:
            return modelled
        cost = known.get(signature)
        if cost is not None:
            return cost.seconds
        size = log(max(modelled, 1e-12))
        return modelled * min(self._ratios[kind], key=lambda entry: abs(entry[0] - size))[1]

    def least_ratio(self, kind: str, modelled: float) -> float:
        """Least ratio of cost to prediction that :meth:`seconds` uses for predictions from ``modelled`` seconds on."""
        entries = self._ratios.get(kind)
        if not entries:
            return 1.0
        size = log(max(modelled, 1e-12))
        below = max((at for at, _ in entries if at < size), default=size)
        return min(ratio for at, ratio in entries if at >= below)

    def source(self, kind: str, signature: str) -> CostSource:
        """How the cost of an instruction is known."""
        known = self._costs.get(kind)
        if not known:
            return CostSource.MODELLED
        return CostSource.MEASURED if signature in known else CostSource.FITTED


def local_signature(spec: TensorSpec, placement: Placement, mesh: Sequence[int]) -> str:
    """The part of a signature that a tensor makes up: dtype, local shape, and the order of dimensions in memory."""
    shape = "x".join(map(str, local_shape(spec.shape, placement, mesh)))
    order = spec.memory_order
    plain = order == tuple(range(len(order)))
    return f"{spec.dtype}[{shape}]" + ("" if plain else f"@{','.join(map(str, order))}")

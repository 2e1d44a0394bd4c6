"""Costs that were measured where they are paid: instructions of plans that ran, by kind and signature.

A cost that was not measured is the model's, corrected by how far the model was off for measured costs of its kind: a
line between those next to it in size, of the mean where several are of one size. A measurement counts for as many
processes as shared the machine then, and for no other number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from math import inf, log
from statistics import fmean

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


_LEAST_SECONDS = 1e-12

_ONE_SIZE = 1.01
"""Sizes up to so many times another are the same size."""

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
        self._ratios = {kind: _Ratios(entries.values()) for kind, entries in self._costs.items() if entries}

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
        return modelled * self._ratios[kind].of(modelled)

    def least_ratio(self, kind: str, modelled: float) -> float:
        """Least ratio of cost to prediction that :meth:`seconds` uses for predictions from ``modelled`` seconds on."""
        ratios = self._ratios.get(kind)
        return 1.0 if ratios is None else ratios.least_from(modelled)

    def source(self, kind: str, signature: str) -> CostSource:
        """How the cost of an instruction is known."""
        known = self._costs.get(kind)
        if not known:
            return CostSource.MODELLED
        return CostSource.MEASURED if signature in known else CostSource.FITTED


class _Ratios:
    """Ratios of cost to prediction of one kind, as a function of the prediction."""

    def __init__(self, costs: Iterable[MeasuredCost]) -> None:
        every = sorted(costs, key=lambda cost: cost.modelled)
        groups: list[list[MeasuredCost]] = []
        for cost in every:
            if groups and cost.modelled <= _ONE_SIZE * groups[-1][0].modelled:
                groups[-1].append(cost)
            else:
                groups.append([cost])
        self._sizes = [log(group[0].modelled) for group in groups]
        self._means = [fmean(cost.seconds / cost.modelled for cost in group) for group in groups]
        # Of one size: what the rates predict may be that of an earlier calibration.
        self._measured = [log(cost.modelled * _ONE_SIZE) for cost in every]
        self._least_measured = _least_of_rest([cost.seconds / cost.modelled for cost in every])
        self._least_means = _least_of_rest(self._means)

    def of(self, modelled: float) -> float:
        """Ratio for a prediction of so many seconds, on a line between those next to it in logarithm."""
        size = log(max(modelled, _LEAST_SECONDS))
        at = bisect_left(self._sizes, size)
        if at in (0, len(self._sizes)):
            return self._means[min(at, len(self._means) - 1)]
        share = (size - self._sizes[at - 1]) / (self._sizes[at] - self._sizes[at - 1])
        return self._means[at - 1] + share * (self._means[at] - self._means[at - 1])

    def least_from(self, modelled: float) -> float:
        """Least ratio for predictions of so many seconds and more, measured ones included."""
        size = log(max(modelled, _LEAST_SECONDS))
        # On lines between sizes the least is at an end: this prediction, or a size above it.
        return min(
            self.of(modelled),
            self._least_means[bisect_left(self._sizes, size)],
            self._least_measured[bisect_left(self._measured, size)],
        )


def _least_of_rest(values: Sequence[float]) -> list[float]:
    """The least of each value and those behind it; infinity behind the last."""
    return [*accumulate(reversed(values), min, initial=inf)][::-1]


def local_signature(spec: TensorSpec, placement: Placement, mesh: Sequence[int]) -> str:
    """The part of a signature that a tensor makes up: dtype, local shape, and the order of dimensions in memory."""
    shape = "x".join(map(str, local_shape(spec.shape, placement, mesh)))
    order = spec.memory_order
    plain = order == tuple(range(len(order)))
    return f"{spec.dtype}[{shape}]" + ("" if plain else f"@{','.join(map(str, order))}")

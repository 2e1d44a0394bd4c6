"""Repair of a former decision: what operators near the changed ones do is decided anew, the rest stays as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from formulations.step.kiwi_chain import latest_moments
from formulations.step.solving.pinned import Allowed, Holding, Pins, holding_of
from formulations.step.solving.step_problem import Choices, StepProblem
from formulations.step.training_step import StepDecision, StepModel

RADII = (3, 12)
"""Distances in the graph within which operators are decided anew, in turn."""


@dataclass(frozen=True, eq=False)
class Repair:
    """A former decision that does not keep the pins, and the problem with them.

    Parameters
    ----------
    model
        Tables of the step.
    built
        The problem with pins.
    pins
        What they leave.
    former
        A decision of the problem without pins, or with fewer.
    choices
        Its choices there.
    """

    model: StepModel
    built: StepProblem
    pins: Pins
    former: StepDecision
    choices: Choices

    @cached_property
    def changed(self) -> tuple[int, ...]:
        """Nodes that can no longer do what they did."""
        found = []
        for i, left in self.pins.items():
            mode, layout = divmod(self.choices[i], self.built.layouts[i])
            if not left.allows(layout, holding_of(mode, len(self.built.modes.get(i, ())))):
                found.append(i)
        return tuple(found)

    def by_rule(self) -> StepDecision:
        """The former decision with each changed operator at its next best choice, one after the other.

        Reruns come as late as they may. Nothing is solved, and the decision may be none of the problem.
        """
        layouts = list(self.former.layouts)
        wanted: dict[int, int | None] = {i: moments[-1] for i, moments in self.former.recomputed.items()}
        offloaded = set(self.former.offloaded)
        for i in self.changed:
            left = self.pins[i]
            if not left.layouts[layouts[i]]:
                layouts[i] = self._cheapest(i, left, layouts)
            held = Holding.OFFLOAD if i in offloaded else Holding.RECOMPUTE if i in wanted else Holding.KEEP
            if held in left.holdings:
                continue
            wanted.pop(i, None)
            offloaded.discard(i)
            if Holding.KEEP in left.holdings:
                continue
            if Holding.RECOMPUTE in left.holdings:
                wanted[i] = None
            else:
                offloaded.add(i)
        reruns = {i: (moment,) for i, moment in latest_moments(self.model, wanted).items()}
        unchanged = {i: moments for i, moments in self.former.recomputed.items() if reruns.get(i) == moments[-1:]}
        return StepDecision(tuple(layouts), reruns | unchanged, frozenset(offloaded))

    def neighbourhoods(self) -> Iterable[StepProblem]:
        """Problems in which all but the operators near the changed ones are as they were."""
        for radius in RADII:
            near = self._near(radius)
            if len(near) >= len(self.choices):
                return
            nodes = self.built.problem.nodes
            fixed = {i: np.arange(nodes[i].size) == choice for i, choice in enumerate(self.choices) if i not in near}
            yield self.built.only(fixed)

    def _cheapest(self, node: int, left: Allowed, layouts: Sequence[int]) -> int:
        """The layout of a node that costs least where all others stay."""
        entry = self.model.nodes[node]
        cost = entry.cost.astype(np.float64) + (0 if entry.update_cost is None else entry.update_cost)
        cost[~left.layouts] = np.inf
        for edge in self.model.edges:
            if edge.producer == node:
                cost += np.where(edge.forbidden, np.inf, edge.cost)[:, layouts[edge.consumer]]
            elif edge.consumer == node:
                cost += np.where(edge.forbidden, np.inf, edge.cost)[layouts[edge.producer]]
        for gradient in self.model.gradients:
            if gradient.producer == node:
                cost += np.where(gradient.forbidden, np.inf, gradient.cost)[:, layouts[gradient.parameter]]
            elif gradient.parameter == node:
                cost += np.where(gradient.forbidden, np.inf, gradient.cost)[layouts[gradient.producer]]
        return int(np.argmin(cost))

    @cached_property
    def _neighbours(self) -> list[set[int]]:
        found: list[set[int]] = [set() for _ in self.model.nodes]
        pairs = [(edge.producer, edge.consumer) for edge in self.model.edges]
        for first, second in (*pairs, *((edge.producer, edge.parameter) for edge in self.model.gradients)):
            found[first].add(second)
            found[second].add(first)
        return found

    def _near(self, radius: int) -> set[int]:
        near, border = set(self.changed), set(self.changed)
        for _ in range(radius):
            border = set().union(*(self._neighbours[i] for i in border)) - near
            near |= border
        return near

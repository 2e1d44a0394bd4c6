"""Planning under a limit on a step's memory without parameters, their gradients and optimizer states.

That is the memory that recomputation and offload can change. A limit on all memory cannot replace it: gradients are
made one by one in backward, so until then the plan could use their memory for activations.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np

from formulations.step.training_step import StepModel
from planner.replay.report import Category, MemoryProfile, ReplayReport, Violation, ViolationKind
from planner.schedule.instructions import Schedule
from planner.session import PlanningSession
from planner.strategies.space import StrategySpace, build_strategy_space


class UncountedGradients(PlanningSession):
    """A session on one device in which gradients take no memory, as if their buffers were allocated elsewhere.

    On several devices a gradient is an activation until it is reduced, and a table of one node cannot separate the two.
    """

    @cached_property
    def space(self) -> StrategySpace:
        """Strategies and tables; gradients have no bytes.

        Raises
        ------
        ValueError
            There is more than one device.
        """
        if prod(self.mesh) > 1:
            raise ValueError(
                f"mesh {'x'.join(map(str, self.mesh))}: gradients can be left out of the memory on one device only"
            )
        space = build_strategy_space(self.traced, self.costs, self.mesh, self.optimizer)
        return replace(space, model=without_gradient_bytes(space.model))

    def replay(
        self, schedule: Schedule, limit: int | None = None, host_limit: int | None = None, *, priced: bool = True
    ) -> ReplayReport:
        """Replay a schedule; peak and limit are those of everything but gradients."""
        report = super().replay(schedule, None, host_limit, priced=priced)
        profile = _without_gradients(report.profile)
        during = profile.total_during
        peak = max(int(during.max(initial=0)), sum(profile.at_start.values()))
        over: tuple[Violation, ...] = ()
        if limit is not None and peak > limit:
            message = f"{peak} bytes without gradients, the limit is {limit}"
            over = (Violation(ViolationKind.OVER_LIMIT, int(during.argmax()), message),)
        return replace(report, profile=profile, peak_bytes=peak, violations=(*report.violations, *over))


def without_gradient_bytes(model: StepModel) -> StepModel:
    """The same step with gradients of no bytes."""
    nodes = list(model.nodes)
    for gradient in model.gradients:
        node = nodes[gradient.producer]
        columns = np.arange(node.output_bytes.shape[1]) != gradient.output
        nodes[gradient.producer] = replace(node, output_bytes=node.output_bytes * columns)
    gradients = tuple(replace(each, copy_bytes=np.zeros_like(each.copy_bytes)) for each in model.gradients)
    return replace(model, nodes=tuple(nodes), gradients=gradients)


def _without_gradients(profile: MemoryProfile) -> MemoryProfile:
    none = np.zeros_like(profile.after[Category.GRADIENTS])
    return replace(
        profile,
        at_start={**profile.at_start, Category.GRADIENTS: 0},
        after={**profile.after, Category.GRADIENTS: none},
        transient={**profile.transient, Category.GRADIENTS: none},
    )

"""Decisions to begin from: those of smaller problems, each of which takes little time.

- decisions that are known already, as those of other formulations or of a lower limit;
- the decision without a limit: where it fits, nothing is better;
- reruns by rule for the layouts of that decision, which need no search;
- recomputation for those layouts (with every layout fixed little is left to decide);
- decisions of the problems that this one contains (:attr:`StepProblem.starts`), the largest last, each from the best
  so far;
- recomputation for the layouts of the best so far, and layouts for its reruns, in turn as long as one of them helps;
- where chains reach far, the problem of the shortest reach (:func:`widen`), which has time of its own: it contains
  those before it, and what it finds in little time is better than what the whole problem does.

Where every operator has one layout, only rules remain of this; of a deep model's problem, rules and the decision
without a limit, while smaller problems are solved beside columns of its blocks
(:mod:`formulations.step.solving.beside`). Where tables are very large otherwise, the first four. A problem that extends
another one that is about as hard begins from a solution of that one, and its own for the same layouts, unless it is a
deep model's; with one layout an operator and blocks that repeat, from rules: columns of its own blocks
(:func:`use_block_columns`) are then what solves it. All are decisions of the problem itself, so a solve that begins
from them is no worse than any of them, however little time it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from formulations.problem.solution import SolveOptions
from formulations.solvers import DEFAULT_SOLVER, SolverPool
from formulations.solvers.columns.repeated_blocks import find_repeats
from formulations.solvers.running.lanes import BLOCKS
from formulations.step.solving.beside import finds_columns, solve_with_smaller
from formulations.step.solving.registry import StepProblem
from formulations.step.solving.smaller import Executed, SmallerProblems, Start
from formulations.step.training_step import StepDecision

START_SHARE, EXTENDED_SHARE, ALIKE_SHARE = 0.2, 0.5, 0.8
"""Parts of the time limit for smaller problems to begin from, for a problem that is extended, and for one that is
extended with one layout an operator: it is nearly as good."""

NARROW_SHARE = 0.5
"""Part of the time that is left then for the problem of the shortest reach."""

_SMALL, _MEDIUM, _LARGE, _WHOLE = 1 / 16, 1 / 4, 1 / 2, 1.0
"""Part of the time that is left for one of many problems, for it where nothing is known yet, for the largest of them,
and for one that is all there is to begin with."""


@dataclass(slots=True)
class FreeDecision:
    """The best decision without a limit, once one is proven: it is the same whatever the limit.

    Parameters
    ----------
    decision
        What was decided.
    cost
        What it costs (quanta); nothing costs less, whatever else a formulation has to decide.
    """

    decision: StepDecision | None = None
    cost: int | None = None


def begin(
    built: StepProblem,
    execute: Callable[[StepDecision], Executed],
    solver: str,
    options: SolveOptions,
    pool: SolverPool | None = None,
    known: Sequence[StepDecision] = (),
    on_first: Callable[[int], None] = lambda _: None,
    free: FreeDecision | None = None,
) -> Start | None:
    """Find a decision to begin from.

    Parameters
    ----------
    built
        The problem under the limit.
    execute
        Executes a decision.
    solver, options
        How to solve the smaller problems; the time limit is that of all of them together.
    pool
        Warm workers, or None.
    known
        Decisions that are known already. Those over the limit are passed over.
    on_first
        Called with the cost of the first decision within the limit, as soon as there is one.
    free
        The decision without a limit where it is known; else it is kept here once it is.

    Returns
    -------
    Start or None
        The cheapest decision found that is within the limit when it is executed, if any.

    Raises
    ------
    ValueError
        If the problem leaves a known decision out.
    """
    beginning = _Beginning(built, execute, solver, options, pool, on_first, free)
    for decision in known:
        built.encode(decision)
        beginning.keep(decision)
    return beginning.run()


def widen(
    built: StepProblem,
    start: Start | None,
    execute: Callable[[StepDecision], Executed],
    solver: str,
    options: SolveOptions,
    pool: SolverPool | None = None,
) -> Start | None:
    """Solve the problem of the shortest reach from a decision of it, for a better one to begin the whole problem from.

    Parameters
    ----------
    built
        A problem with a narrower one.
    start
        A decision within the limit, if any is known.
    execute, solver, options, pool
        As for :func:`begin`.

    Returns
    -------
    Start or None
        The cheapest decision known now.
    """
    assert built.narrower is not None, "only what has a narrower problem is widened"
    beginning = _Beginning(built, execute, solver, options, pool)
    beginning.best = start
    beginning.solve(built.narrower, _WHOLE)
    return beginning.best


def use_block_columns(built: StepProblem, solver: str) -> bool:
    """Whether columns of repeated blocks solve a problem better than what a solver does by itself.

    With offload and one layout an operator, where blocks repeat, they find more than any other.
    """
    if solver != DEFAULT_SOLVER or built.extended is None or max(built.layouts) > 1:
        return False
    return find_repeats(built.problem).count > 0


def start_share(built: StepProblem, solver: str) -> float:
    """Part of the time limit of a problem that its beginning may take."""
    if built.extended is None or (built.starts and finds_columns(built.problem, solver)):
        return START_SHARE
    return EXTENDED_SHARE if max(built.layouts) > 1 else ALIKE_SHARE


class _Beginning(SmallerProblems):
    """What a solve begins from."""

    def __init__(
        self,
        built: StepProblem,
        execute: Callable[[StepDecision], Executed],
        solver: str,
        options: SolveOptions,
        pool: SolverPool | None,
        on_first: Callable[[int], None] = lambda _: None,
        free: FreeDecision | None = None,
    ) -> None:
        super().__init__(
            built, execute, options, partial(solve_with_smaller, execute=execute, solver=solver, pool=pool)
        )
        self.solver, self.pool = solver, pool
        self.free = FreeDecision() if free is None else free
        self._on_first, self._told = on_first, False

    @cached_property
    def alone(self) -> bool:
        """Whether smaller problems are not worth their time."""
        return finds_columns(self.built.problem, self.solver)

    def run(self) -> Start | None:
        """Solve the smaller problems one after another."""
        if self.built.extended is not None and not (self.built.starts and self.alone):
            if max(self.built.layouts) == 1:
                self._try_rules((0,) * len(self.built.layouts))
                if self.solver == BLOCKS:
                    return self.best
            return self._begin_with(self.built.extended())
        if self.built.unlimited is None:
            self._try_rules((0,) * len(self.built.layouts))
            return self.best
        if self._begin_without_limit(self.built.unlimited) or self.alone or not self.built.starts:
            return self.best
        *others, largest = reversed(self.built.starts)
        for build in others:
            self.solve(build, _MEDIUM if self.best is None else _SMALL)
        self.solve(largest, _LARGE)
        while self.best is not None:
            before = self.best
            self.solve(partial(self._with_layouts, before.decision), _LARGE)
            self.solve(partial(self._with_reruns, self.best.decision), _LARGE)
            if self.best is before:
                break
        return self.best

    def _begin_with(self, extended: StepProblem) -> Start | None:
        """Solve the problem that this one extends, from what that one begins from; then this one for those layouts."""
        several = max(self.built.layouts) > 1
        if extended.has_starts:
            options = replace(self.options, time_limit=start_share(extended, self.solver) * self.left)
            begun = begin(extended, self.execute, self.solver, options, self.pool, (), self._tell, self.free)
            if begun is not None:
                self.take(begun)
        if extended.narrower is not None:
            self.solve(extended.narrower, NARROW_SHARE)
        self.solve(lambda: extended, _LARGE if several else _WHOLE)
        if self.best is not None and several:
            self.solve(partial(self._with_layouts, self.best.decision), _WHOLE)
        return self.best

    def _begin_without_limit(self, unlimited: Callable[[], StepProblem]) -> bool:
        """Solve without a limit, then recomputation for those layouts; return whether nothing can be better."""
        free, finished = self._without_limit(unlimited)
        if free is not None and not finished:
            self._try_rules(free.layouts)
            if not self.alone:
                self.solve(partial(self._with_layouts, free), _LARGE)
        return finished

    def _without_limit(self, unlimited: Callable[[], StepProblem]) -> tuple[StepDecision | None, bool]:
        """The decision without a limit, and whether it fits and is optimal."""
        if self.free.decision is not None:
            return self.free.decision, self.keep(self.free.decision)
        found = self.solve(unlimited, _LARGE if self.built.starts and not self.alone else _WHOLE)
        if found is None:  # without layouts there is nothing to go on with
            found = self.solve(unlimited, _WHOLE)
        if found is None:
            return None, False
        if found.optimal:
            self.free.decision, self.free.cost = found.decision, self.execute(found.decision).cost
        return found.decision, found.optimal and found.fits

    def _try_rules(self, layouts: tuple[int, ...]) -> None:
        """Run again what each rule says, for given layouts."""
        for reruns in self.built.rules:
            self.keep(StepDecision(layouts, {i: (moment,) for i, moment in reruns.items()}))

    def take(self, start: Start) -> None:
        """Keep a decision within the limit where it is the cheapest so far."""
        self._tell(start.executed.cost)
        super().take(start)

    def _tell(self, cost: int) -> None:
        """Tell the cost of the first decision within the limit."""
        if not self._told:
            self._told = True
            self._on_first(cost)

    def _with_layouts(self, decision: StepDecision) -> StepProblem:
        """The problem with every layout as in a decision."""
        return self.built.only({i: np.arange(self.built.layouts[i]) == k for i, k in enumerate(decision.layouts)})

    def _with_reruns(self, decision: StepDecision) -> StepProblem:
        """The problem with everything but layouts as in a decision."""
        allowed = {}
        for i, choice in enumerate(self.built.encode(decision)):
            size = self.built.layouts[i]
            allowed[i] = np.arange(self.built.problem.nodes[i].size) // size == choice // size
        return self.built.only(allowed)

"""The stages of a solve as one table: condition, problems, and part of the time of each.

All decisions found are decisions of the problem itself, so a solve that begins from them is no worse than any of them,
however little time it has. A stage solves restrictions of the problem and passes its results on in the
:class:`~formulations.step.solving.search.Search`: the best decision within the limit (``best``), the decision without a
limit (``reference``), and whether nothing is left to find in restrictions (``finished``).

Where an operator has one layout, or tables are very large, few stages apply. In a deep model the solver's patterns of
repeated blocks find good decisions without a start: restrictions are solved in parallel to it then, not before it, and
left out where that would take a process from the solver.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import numpy as np

from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.columns.repeated_blocks import find_repeats
from formulations.solvers.protocol.registry import DEFAULT_SOLVER
from formulations.step.sharding import MEMORY
from formulations.step.solving.context import NEAR_OPTIMAL, Candidate, one_greedy_round
from formulations.step.solving.merged_moments import search_merged
from formulations.step.solving.search import Attempt, Phase, Search, Solved
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision

BEGIN_SHARE = 0.2
"""Part of the time limit for the beginning."""

SLACK_SHARE = 0.6
"""Part of the time limit for the problem without a limit where the limit cannot bind: there is little else to do."""

QUICK_ENTRIES = 2_000_000
"""Table entries up to which the problem without a limit is solved in a few seconds."""

_SMALL, _MEDIUM, _LARGE, _WHOLE = 1 / 16, 1 / 4, 1 / 2, 1.0
"""Parts of the time left: for one of many problems, for it before any decision is known, for the largest of them, and
for the only one."""

_LARGEST_SHARES, _LARGEST_SHARE = 3, 0.5
"""Beside the solver: parts of the time for the largest restriction, when each of the others has one, and its part of
them where there is a base problem."""

Attempts = Generator[Attempt, Solved | None, None]


@dataclass(frozen=True, slots=True)
class Stage:
    """A row of the table.

    Parameters
    ----------
    phase, name
        Its phase, and its name.
    applies
        Whether it runs, given the state of the search.
    attempts
        Yields the problems to solve with their parts of the time left, and receives the result of each.
    """

    phase: Phase
    name: str
    applies: Callable[[Search], bool]
    attempts: Callable[[Search], Attempts]


def run_stages(phase: Phase, search: Search) -> None:
    """Run the stages of a phase one after another, until nothing is left to find."""
    for stage in STAGES:
        if stage.phase is phase and not search.finished and stage.applies(search):
            _run(stage.attempts(search), search)


def _run(attempts: Attempts, search: Search) -> None:
    solved: Solved | None = None
    while not search.finished:
        try:
            attempt = attempts.send(solved)
        except StopIteration:
            return
        solved = search.solve(attempt)


def is_slack(built: StepProblem) -> bool:
    """Whether the memory limit cannot bind: at no time, if every node and factor held its most."""
    if built.base_problem is not None or built.unlimited is None:
        return False
    if built.memory_limit is None:
        return True
    problem = built.unlimited().problem
    change = np.zeros(problem.horizon + 1, dtype=np.int64)
    for _, term in problem.usage_terms():
        if term.resource == MEMORY:
            change[term.start] += term.amount.max()
            change[term.end] -= term.amount.max()
    return int(np.cumsum(change).max()) <= built.memory_limit


def use_block_columns(built: StepProblem, solver: str) -> bool:
    """Whether patterns of repeated blocks solve a problem better than the portfolio does.

    With offload and one layout an operator, where blocks repeat, they find more than any other solver.
    """
    if solver != DEFAULT_SOLVER or built.base_problem is None or not built.has_one_layout:
        return False
    return find_repeats(built.problem).count > 0


def _begins_from_reruns(search: Search) -> bool:
    """Whether smaller problems of reruns come first: relaxations with merged moments find more."""
    return search.reference is not None and not search.is_deep and search.built.merged is None


def _begins_from_restrictions(search: Search) -> bool:
    return bool(search.built.restrictions) and _begins_from_reruns(search)


def _rules(search: Search, layouts: tuple[int, ...]) -> None:
    """Execute the reruns of each rule for given layouts; nothing is solved."""
    for reruns in search.built.rules:
        search.keep(StepDecision(layouts, {i: (moment,) for i, moment in reruns.items()}))


def _rules_of_one_layout(search: Search) -> Attempts:
    _rules(search, (0,) * len(search.built.layouts))
    yield from ()


def _without_limit(search: Search) -> Attempts:
    """The problem without a limit; where its best decision fits, all that is left is to improve that."""
    assert search.built.unlimited is not None
    free = search.context.free
    if free.best is not None:
        search.reference, search.finished = free.best.decision, search.keep(free.best.decision)
        if search.finished or free.decision is not None:
            return
    share = _LARGE if search.built.restrictions and _leaves_time(search, search.built.unlimited().problem) else _WHOLE
    solved = yield Attempt(search.built.unlimited, share, gap=NEAR_OPTIMAL)
    if solved is None:  # the later attempts need its layouts
        solved = yield Attempt(search.built.unlimited, _WHOLE, gap=NEAR_OPTIMAL)
    if solved is None:
        if search.best is None and free.best is None and not search.context.interrupted.is_set():
            _greedy_reference(search)
        return
    candidate = Candidate(solved.decision, search.context.execute(solved.decision))
    free.learn(candidate, solved.bound)
    search.reference = solved.decision
    search.finished = solved.fits and free.is_as_cheap(candidate)


def _greedy_reference(search: Search) -> None:
    """Layouts of one greedy round, where there was no time for more: nothing later finds any in less."""
    assert search.built.unlimited is not None
    unlimited = search.built.unlimited()
    found = one_greedy_round(unlimited.problem, search.context.options, search.context.pool)
    if found.choices is not None:
        search.reference = unlimited.decode(found.choices)
        search.keep(search.reference)


def _leaves_time(search: Search, unlimited: StrategyProblem) -> bool:
    """Whether restrictions come after the problem without a limit; a deep problem is not built to find that out."""
    if sum(factor.cost.size for factor in unlimited.factors) < QUICK_ENTRIES:
        return True
    return not (search.context.solves_by_patterns(unlimited) or search.is_deep)


def _rules_of_reference(search: Search) -> Attempts:
    assert search.reference is not None
    _rules(search, search.reference.layouts)
    yield from ()


def _reruns_of_reference(search: Search) -> Attempts:
    """The problem with all layouts of the reference, a much smaller one."""
    assert search.reference is not None
    yield Attempt(partial(search.built.with_layouts_of, search.reference), _LARGE)


def _restrictions(search: Search) -> Attempts:
    """Smaller problems, the largest last, each from the best decision so far."""
    largest, *others = search.built.restrictions
    for build in reversed(others):
        yield Attempt(build, _MEDIUM if search.best is None else _SMALL)
    yield Attempt(largest, _LARGE)


def _reruns_and_layouts(search: Search) -> Attempts:
    """Reruns for the layouts of the best decision, and layouts for its reruns, in turn while one of them helps."""
    before = None
    while search.best is not None and search.best is not before:
        before = search.best
        yield Attempt(partial(search.built.with_layouts_of, before.decision), _LARGE)
        yield Attempt(partial(search.built.with_reruns_of, search.best.decision), _LARGE)


def _has_merged(search: Search) -> bool:
    """Whether relaxations with merged moments come first; in a deep model they are too large to be worth their time."""
    return search.built.merged is not None and not search.is_deep


def _merged_moments(search: Search) -> Attempts:
    search_merged(search)
    yield from ()


def _restrictions_beside(search: Search) -> Attempts:
    largest, *others = search.built.restrictions
    for k, build in enumerate(reversed(others)):
        yield Attempt(build, 1.0 / (_LARGEST_SHARES + len(others) - k), patient=False)
    yield Attempt(largest, 1.0 if search.built.base_problem is None else _LARGEST_SHARE)


def _base_problem_beside(search: Search) -> Attempts:
    assert search.built.base_problem is not None
    yield Attempt(search.built.base_problem, 1.0)


STAGES = (
    Stage(Phase.BEGIN, "rules of one layout", lambda s: s.built.has_one_layout, _rules_of_one_layout),
    Stage(Phase.BEGIN, "without a limit", lambda s: s.built.unlimited is not None, _without_limit),
    Stage(Phase.BEGIN, "rules", lambda s: s.reference is not None, _rules_of_reference),
    Stage(Phase.BEGIN, "reruns of the reference", _begins_from_reruns, _reruns_of_reference),
    Stage(Phase.BEGIN, "restrictions", _begins_from_restrictions, _restrictions),
    Stage(Phase.BEGIN, "reruns and layouts", _begins_from_restrictions, _reruns_and_layouts),
    Stage(Phase.WIDEN, "merged moments", _has_merged, _merged_moments),
    Stage(Phase.BESIDE, "restrictions", lambda s: bool(s.built.restrictions), _restrictions_beside),
    Stage(Phase.BESIDE, "base problem", lambda s: s.built.base_problem is not None, _base_problem_beside),
)
"""All stages, in the order in which those of a phase run."""

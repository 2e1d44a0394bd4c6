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
from enum import Enum
from functools import partial

import numpy as np

from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.columns.repeated_blocks import find_repeats
from formulations.solvers.protocol.registry import DEFAULT_SOLVER
from formulations.solvers.running.lanes import BLOCKS
from formulations.step.sharding import MEMORY
from formulations.step.solving.context import NEAR_OPTIMAL, Candidate, SolveContext
from formulations.step.solving.search import Attempt, Search, Solved
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision

BEGIN_SHARE, BASE_SHARE, ALIKE_SHARE = 0.2, 0.5, 0.8
"""Parts of the time limit for the beginning: of a problem, of one with a base problem, and of one that differs little
from its base problem since operators have one layout."""

SLACK_SHARE = 0.6
"""Part of the time limit for the problem without a limit where the limit cannot bind: there is little else to do."""

QUICK_ENTRIES = 2_000_000
"""Table entries up to which the problem without a limit is solved in a few seconds."""

SHORT_REACH_SHARE = 0.5
"""Part of the time left after the beginning for the problem of the shortest reach."""

_SMALL, _MEDIUM, _LARGE, _WHOLE = 1 / 16, 1 / 4, 1 / 2, 1.0
"""Parts of the time left: for one of many problems, for it before any decision is known, for the largest of them, and
for the only one."""

_LARGEST_SHARES, _LARGEST_SHARE = 3, 0.5
"""Beside the solver: parts of the time for the largest restriction, when each of the others has one, and its part of
them where there is a base problem."""

Attempts = Generator[Attempt, Solved | None, None]


class Phase(Enum):
    """Phase of a stage: before the solver, before it with time of its own, or in parallel to it."""

    BEGIN = "begin"
    WIDEN = "widen"
    BESIDE = "beside"


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
        if attempt.only_begin:
            _begin(attempt, search)
            solved = None
        else:
            solved = search.solve(attempt)


def _begin(attempt: Attempt, search: Search) -> None:
    """Run the stages before the solver on another problem, and keep the decision that they find."""
    context = search.context.within(attempt.share * search.left)
    inner = Search(attempt.build(), context, search.find, search.announce)
    run_stages(Phase.BEGIN, inner)
    if inner.best is not None:
        search.take(inner.best)


def begin_share(built: StepProblem, context: SolveContext) -> float:
    """Part of the time limit of a problem that its beginning may take."""
    if built.base_problem is None or (built.restrictions and context.solves_by_patterns(built.problem)):
        return BEGIN_SHARE
    return ALIKE_SHARE if built.has_one_layout else BASE_SHARE


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


def _begins_from_base(search: Search) -> bool:
    built = search.built
    if built.base_problem is None or (built.restrictions and search.is_deep):
        return False
    return not (built.has_one_layout and search.context.solver == BLOCKS)


def _begins_without_limit(search: Search) -> bool:
    built = search.built
    return built.unlimited is not None and (built.base_problem is None or bool(built.restrictions and search.is_deep))


def _begins_from_restrictions(search: Search) -> bool:
    return bool(search.built.restrictions) and _begins_without_limit(search) and not search.is_deep


def _rules(search: Search, layouts: tuple[int, ...]) -> None:
    """Execute the reruns of each rule for given layouts; nothing is solved."""
    for reruns in search.built.rules:
        search.keep(StepDecision(layouts, {i: (moment,) for i, moment in reruns.items()}))


def _rules_of_one_layout(search: Search) -> Attempts:
    _rules(search, (0,) * len(search.built.layouts))
    yield from ()


def _base_problem(search: Search) -> Attempts:
    """The base problem from its own start; then this problem with the layouts found."""
    assert search.built.base_problem is not None
    base = search.built.base_problem()
    if base.has_smaller:
        yield Attempt(lambda: base, begin_share(base, search.context), only_begin=True)
    if base.short_reach is not None:
        yield Attempt(base.short_reach, SHORT_REACH_SHARE)
    several = not search.built.has_one_layout
    yield Attempt(lambda: base, _LARGE if several else _WHOLE)
    if search.best is not None and several:
        yield Attempt(partial(search.built.with_layouts_of, search.best.decision), _WHOLE)


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
        return
    candidate = Candidate(solved.decision, search.context.execute(solved.decision))
    free.learn(candidate, solved.bound)
    search.reference = solved.decision
    search.finished = solved.fits and free.is_as_cheap(candidate)


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


def _short_reach(search: Search) -> Attempts:
    assert search.built.short_reach is not None
    yield Attempt(search.built.short_reach, _WHOLE, patient=False)


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
    Stage(Phase.BEGIN, "base problem", _begins_from_base, _base_problem),
    Stage(Phase.BEGIN, "without a limit", _begins_without_limit, _without_limit),
    Stage(Phase.BEGIN, "rules", lambda s: s.reference is not None, _rules_of_reference),
    Stage(
        Phase.BEGIN,
        "reruns of the reference",
        lambda s: s.reference is not None and not s.is_deep,
        _reruns_of_reference,
    ),
    Stage(Phase.BEGIN, "restrictions", _begins_from_restrictions, _restrictions),
    Stage(Phase.BEGIN, "reruns and layouts", _begins_from_restrictions, _reruns_and_layouts),
    Stage(Phase.WIDEN, "short reach", lambda s: s.built.short_reach is not None and not s.is_deep, _short_reach),
    Stage(Phase.BESIDE, "restrictions", lambda s: bool(s.built.restrictions), _restrictions_beside),
    Stage(Phase.BESIDE, "base problem", lambda s: s.built.base_problem is not None, _base_problem_beside),
)
"""All stages, in the order in which those of a phase run."""

"""What is small in a branch is solved by branch and bound on linear relaxations.

Message passing cuts every cycle, so that the bound of a branch may stay where it is however often its nodes are split.
A linear relaxation keeps what cycles say, and takes milliseconds where little is left. Of a branch that is larger, what
costs up to a guess above its bound is solved (:mod:`formulations.solvers.huge_tables.core` does so for the root): that
finds assignments, and where it finds none below the guess, the guess is a bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from formulations.encodings.flat import FlatProblem
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import BoolArray, StrategyProblem
from formulations.solvers.branching import branch_and_bound
from formulations.solvers.branching.open_leaf import OpenLeaf
from formulations.solvers.branching.parts import Choices, presolved_part
from formulations.solvers.huge_tables.tunables import SETTLED_ENTRIES
from formulations.solvers.prices.fixing import largest_objective


@dataclass(frozen=True, slots=True)
class Settled:
    """What is known of a branch.

    Parameters
    ----------
    bound
        No assignment of the branch costs less than the smaller one of this and the cost asked for; None where nothing
        is known.
    choices
        The cheapest assignment found, in the strategies of the problem, or None.
    """

    bound: int | None = None
    choices: Choices | None = None


def settle(problem: StrategyProblem, leaf: OpenLeaf, below: int, options: SolveOptions) -> Settled:
    """Look for an assignment of a branch that costs less than ``below``, among the most hopeful strategies.

    Parameters
    ----------
    problem
        The problem of which the branch is a part; ``leaf.root`` is its flat form.
    leaf
        The branch, with a proof.
    below
        Cost from which on an assignment is of no use.
    options
        Limits of the search.
    """
    if leaf.proof is None:
        return Settled()
    guess = largest_objective(leaf.flat, leaf.proof, SETTLED_ENTRIES, below)
    if guess is None:
        return Settled()
    hopeful = leaf.fix_by_reduced_cost(guess)
    if hopeful is None:
        return Settled(guess)
    found = solve_part(problem, leaf.root, hopeful.kept(), below, options)
    return replace(found, bound=None if found.bound is None else min(found.bound, guess))


def solve_part(
    problem: StrategyProblem, flat: FlatProblem, allowed: BoolArray, below: int, options: SolveOptions
) -> Settled:
    """Look for an assignment of some strategies that costs less than ``below``.

    Parameters
    ----------
    problem, flat
        The problem and its flat form, without contradiction.
    allowed
        Flags of the strategies, laid out as ``flat.unary``.
    below, options
        As for :func:`settle`.
    """
    ends = time.monotonic() + options.time_limit
    reduced, lift = presolved_part(problem, flat, allowed, ends)
    if reduced.contradiction:
        return Settled(below)
    left = replace(options, time_limit=max(0.0, ends - time.monotonic()), relative_gap=0.0, initial_choices=None)
    claim = branch_and_bound.solve(reduced.problem, left, lambda _: None, lambda _: None, below=below - reduced.offset)
    if claim.proved_infeasible:
        return Settled(below)
    choices = None if claim.choices is None else lift(reduced.lift(claim.choices))
    return Settled(None if claim.bound is None else claim.bound + reduced.offset, choices)

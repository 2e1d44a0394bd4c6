"""What is small in a branch is solved by branch and bound on linear relaxations.

Message passing cuts every cycle, so that the bound of a branch may stay where it is however often its nodes are split.
A linear relaxation keeps what cycles say, and takes milliseconds where little is left. Of a branch that is larger, what
costs up to a guess above its bound is solved (:mod:`formulations.solvers.huge_tables.core` does so for the root): that
finds assignments, and where it finds none below the guess, the guess is a bound.
"""

from __future__ import annotations

import time
from dataclasses import replace

from formulations.problem.solution import Claim, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.branching import branch_and_bound
from formulations.solvers.branching.open_leaf import OpenLeaf
from formulations.solvers.branching.parts import presolved_part
from formulations.solvers.huge_tables.tunables import SETTLED_ENTRIES
from formulations.solvers.prices.fixing import largest_objective


def settle(problem: StrategyProblem, leaf: OpenLeaf, below: int, options: SolveOptions) -> Claim:
    """Look for an assignment of a branch that costs less than ``below``, among the most hopeful strategies.

    Parameters
    ----------
    problem
        The problem of which the branch is a part; ``leaf.root`` is its flat form.
    leaf
        The branch.
    below
        Cost from which on an assignment is of no use.
    options
        Limits of the search.

    Returns
    -------
    Claim
        An assignment of the problem, of any cost, and a bound on those of the branch that cost less than ``below``;
        both None where too much of the branch is hopeful, or nothing is proven of it.
    """
    guess = None if leaf.proof is None else largest_objective(leaf.flat, leaf.proof, SETTLED_ENTRIES, below)
    if guess is None:
        return Claim(None, None)
    ends = time.monotonic() + options.time_limit
    hopeful = leaf.fix_by_reduced_cost(guess)
    if hopeful is None:
        return Claim(None, guess)
    reduced, lift = presolved_part(problem, leaf.root, hopeful.kept(), ends)
    if reduced.contradiction:
        return Claim(None, guess)
    left = replace(options, time_limit=max(0.0, ends - time.monotonic()), relative_gap=0.0, initial_choices=None)
    claim = branch_and_bound.solve(reduced.problem, left, lambda _: None, lambda _: None, below=below - reduced.offset)
    choices = None if claim.choices is None else lift(reduced.lift(claim.choices))
    # What is not hopeful costs at least as much as the guess.
    return Claim(choices, None if claim.bound is None else min(claim.bound + reduced.offset, guess))

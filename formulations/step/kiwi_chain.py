"""KIWI without its rule 1: whole chains of operators may be recomputed.

As :mod:`formulations.step.kiwi_reduced`, but the inputs of a recomputed operator may be recomputed too, and
so may operators that backward does not read itself, if a recomputed operator does. An operator runs again before
one backward operator ``t``, and its outputs then stay until their last use. For an operator that backward reads first
at ``f_i``, and whose recomputed readers run again at ``t_j``:

- it runs again no later than it is needed: ``t_i <= f_i`` and ``t_i <= t_j`` for every recomputed reader ``j`` of it
  (a pair of strategies that breaks this is forbidden);
- it need only run at ``t = f_i`` or at a moment ``t`` of a reader; so its moments are
  ``T_i = {t in union of T_j: t < f_i} + {f_i}``;
- a value, kept or made again, is held until the last rerun that reads it (:mod:`formulations.step.holds`).

A value that a chain has read uses memory until backward reads it itself. So where the tables stay small and one
operator alone reads a value again (:func:`formulations.step.modes.once_or_twice`), two relaxations are possible:

- it runs again twice: at a ``t < f_i`` for the chain behind it, and at ``f_i`` for backward; between the two its copy
  is held as long as the reader's rerun needs it, and no longer;
- ``t_i <= t_j`` need not hold: a rerun of the reader before ``t_i`` reads the first copy, which is held for it.

With all moments the problem contains every plan of the reduced problem and every plan that recomputes whole blocks.
KIWI's full problem has still more: any number of reruns, also between two backward uses.
The first operators of a deep model have very many moments, because all operators behind them could be recomputed
in one chain. :func:`chain_moments` can leave early moments out (``reach``) and keep those of given plans; then
optimum and bound of the problem are those of the plans whose chains reach no further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from formulations.problem.gc_pause import gc_paused
from formulations.problem.strategy_problem import StrategyProblem
from formulations.step.counting import Counting
from formulations.step.modes import Modes, needed_reruns, once, once_or_twice
from formulations.step.recompute import RecomputeProblemBuilder
from formulations.step.training_step import Moments, StepDecision, StepModel


@gc_paused()
def build_kiwi_chain(
    model: StepModel,
    modes: Modes | None = None,
    counting: Counting = Counting.EXACT,
) -> StrategyProblem:
    """Build the joint problem of sharding and recomputation of chains.

    Parameters
    ----------
    model
        The step's tables.
    modes
        Modes of running again, from :mod:`formulations.step.modes`; all modes of all moments if None.
    counting
        How bytes are counted where they depend on three decisions.

    Returns
    -------
    StrategyProblem
        Its first nodes are the model's nodes; strategy ``mode * S + layout`` with mode 0 keep, mode ``k`` the
        reruns of the operator's mode ``k - 1``. Hold nodes follow.
    """
    if modes is None:
        modes = once_or_twice(model, chain_moments(model))
    return RecomputeProblemBuilder(model, modes, counting, chains=True).build("kiwi_chain")


@gc_paused()
def build_recompute_policy(model: StepModel, reruns: Mapping[int, int]) -> StrategyProblem:
    """Build the problem of sharding alone with given reruns.

    Parameters
    ----------
    model
        The step's tables.
    reruns
        Operators that run again, with their moments; all others keep their outputs.
    """
    modes = once({i: (moment,) for i, moment in reruns.items()})
    builder = RecomputeProblemBuilder(model, modes, Counting.OVER, chains=True)
    for i in reruns:
        size = model.nodes[i].size
        builder.forbid(i, np.arange(2 * size) < size)
    return builder.build("recompute_policy")


def chain_moments(
    model: StepModel, reach: int | None = None, plans: Iterable[Mapping[int, int]] = ()
) -> dict[int, tuple[int, ...]]:
    """Moments ``T_i`` of every operator that may run again and has any, in order.

    Parameters
    ----------
    model
        The step.
    reach
        Keep only so many of the last moments of every operator; all if None.
    plans
        Reruns with their moments that stay possible whatever the reach.
    """
    first = model.first_backward_use
    moments = sorted({use for use in first if use >= 0})
    found = {
        i: [moments[k] for k in _highest_bits(needed, reach)] for i, needed in _moment_sets(model, moments).items()
    }
    for plan in plans:
        for i, moment in plan.items():
            found[i] = sorted({*found[i], moment})
    return {i: tuple(times) for i, times in found.items()}


def _moment_sets(model: StepModel, moments: Sequence[int]) -> dict[int, int]:
    """``T_i`` as bits of integers, one for each of the moments: the first operators of a deep model have very many."""
    first = model.first_backward_use
    position = {moment: k for k, moment in enumerate(moments)}
    found: dict[int, int] = {}
    for i in reversed(np.flatnonzero(model.rerunnable).tolist()):
        needed = 0
        for edge in model.edges_from[i]:
            needed |= found.get(edge.consumer, 0)
        if first[i] >= 0:
            own = 1 << position[first[i]]
            needed = (needed & (own - 1)) | own
        if needed:
            found[i] = needed
    return found


def decode_kiwi_chain(model: StepModel, modes: Modes, choices: tuple[int, ...]) -> StepDecision:
    """Read layouts and reruns from a solution of the problem with these modes.

    A rerun whose outputs are never read is left out, so the decision may cost less than the solution.
    """
    layouts: list[int] = []
    wanted: dict[int, Moments] = {}
    for i, node in enumerate(model.nodes):
        mode, layout = divmod(choices[i], node.size)
        layouts.append(layout)
        if mode:
            wanted[i] = modes[i][mode - 1]
    return StepDecision(tuple(layouts), needed_reruns(model, wanted))


def encode_kiwi_chain(model: StepModel, modes: Modes, decision: StepDecision) -> tuple[int, ...]:
    """Strategies of the model's nodes for a decision, without the hold nodes.

    Raises
    ------
    ValueError
        If an operator runs again at moments that the problem leaves out.
    """
    choices = list(decision.layouts)
    for i, mode in decision.recomputed.items():
        if mode not in modes.get(i, ()):
            before = " and ".join(model.nodes[moment].name for moment in mode)
            raise ValueError(f"{model.nodes[i].name} cannot run again before {before} in this problem")
        choices[i] += (1 + modes[i].index(mode)) * model.nodes[i].size
    return tuple(choices)


def latest_moments(model: StepModel, wanted: Mapping[int, int | None]) -> dict[int, int]:
    """Choose the moments of reruns: given ones no later than needed, the others as late as possible.

    Parameters
    ----------
    model
        The step.
    wanted
        Operators that run again, with a moment or None. Reruns whose outputs are never read are left out.
    """
    found: dict[int, int] = {}
    for i in sorted(wanted, reverse=True):
        needed = [found[edge.consumer] for edge in model.edges_from[i] if edge.consumer in found]
        if model.first_backward_use[i] >= 0:
            needed.append(model.first_backward_use[i])
        if needed:
            given = wanted[i]
            found[i] = min(needed) if given is None else min(given, *needed)
    return found


def _highest_bits(mask: int, most: int | None) -> list[int]:
    """Positions of the highest bits that are set, all or so many, in increasing order."""
    found: list[int] = []
    while mask and len(found) != most:
        found.append(mask.bit_length() - 1)
        mask ^= 1 << found[-1]
    return found[::-1]

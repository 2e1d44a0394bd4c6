"""KIWI with reduced complexity: sharding and keep-or-recompute, jointly, with direct liveness.

The paper's reduced problem (equations 2-11) chooses for every operator a layout and for every forward
operator that backward needs (``z_i = 1``) whether it is kept (``m_i = 1``) or recomputed. Its three
rules: (1) the inputs of a recomputed operator are not recomputed; (2) a recomputed value stays until its
last use; (3) a value that is not kept is freed after its last forward use.

Here it is a canonical problem, with a node's strategy = layout x {keep, recompute}
(:mod:`formulations.step.recompute`):

- objective (2): a recomputed operator and the resharding of its inputs are paid twice;
- rule 1 (9): (producer recomputed, consumer recomputed) is forbidden, where the producer has z = 1;
- recomputation happens at ``H_i``, right before the first backward consumer (5);
- memory (3)-(8): intervals of bytes, per output instead of per operator;
- (10)-(11): a kept input of a recomputed operator is held until that recomputation has computed
  (:mod:`formulations.step.holds`).

Repairs of open points: (9) applies only where z_j = 1, the maximum of (10) ranges over recomputed
children only, and (8) and (16) are both <=.
"""

from __future__ import annotations

import numpy as np

from formulations.problem.gc_pause import gc_paused
from formulations.problem.strategy_problem import StrategyProblem
from formulations.step.counting import Counting
from formulations.step.modes import once
from formulations.step.recompute import RecomputeProblemBuilder
from formulations.step.training_step import StepModel


@gc_paused()
def build_kiwi_reduced(model: StepModel, counting: Counting = Counting.OVER) -> StrategyProblem:
    """Build the joint problem of sharding and recomputation.

    Parameters
    ----------
    model
        The step's tables.
    counting
        How bytes are counted where they depend on three decisions. OVER never counts too few and keeps all tables
        pairwise.

    Returns
    -------
    StrategyProblem
        Its first nodes are the model's nodes; strategy ``mode * S + layout`` with mode 0 keep, 1
        recompute (only where the model allows it). Hold nodes follow.
    """
    modes = once(reduced_moments(model))
    return RecomputeProblemBuilder(model, modes, counting, chains=False).build("kiwi_reduced")


def reduced_moments(model: StepModel) -> dict[int, tuple[int, ...]]:
    """The one moment of every forward operator with z = 1: right before its first backward consumer, ``H_i``."""
    first = model.first_backward_use
    return {i: (first[i],) for i in np.flatnonzero(model.rerunnable).tolist() if first[i] >= 0}

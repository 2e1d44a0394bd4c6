"""KIWI with chains and offload: an activation may also be kept in host memory until backward.

An activation that backward reads is copied to the host once it is made, leaves the device behind its last forward use,
and is prefetched for its first backward use, or for the first rerun that may read it (*soon*). The exact times of
copies follow from the schedule alone; the problem that finds plans estimates them:

- *away*: its device memory is free behind the last forward use, and taken again the time of some copies
  (:data:`formulations.step.offload.builder.LEAD`) before the first use in backward. The copies must fit into the
  capacity of the links (:mod:`formulations.step.offload.links`); where that is too little, the step stalls in forward
  or in backward, at its price;
- *exposed*, where copies cannot run beside the computation at all: the step stalls for both copies, which is exact. The
  activation is back for the first rerun or backward operator that reads it.

The bound comes from a relaxation. It underestimates cost and memory of every plan that costs at most as much as the
best known one (:mod:`formulations.step.offload.relaxation`). In both problems the memory of an activation is free
after its forward uses, though a busy link holds it longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from formulations.problem.gc_pause import gc_paused
from formulations.problem.strategy_problem import StrategyProblem
from formulations.step.counting import Counting
from formulations.step.holds import shortest_holds
from formulations.step.kiwi_chain import decode_kiwi_chain, encode_kiwi_chain
from formulations.step.modes import Modes
from formulations.step.offload.builder import OffloadProblemBuilder
from formulations.step.offload.modes import Links, offload_candidates, waiting_outputs
from formulations.step.offload.relaxation import OffloadRelaxationBuilder
from formulations.step.training_step import StepDecision, StepModel


@dataclass(frozen=True, eq=False)
class OffloadProblem:
    """The joint problem of sharding, recomputation of chains and offload.

    Parameters
    ----------
    problem
        Its first nodes are the model's nodes; strategy ``mode * S + layout`` with mode 0 keep, then the operator's
        modes of running again, then offload (:attr:`Links.modes`). Hold nodes follow, then the clock and the stalls.
    model, modes, links
        Inputs that it was built from.
    waiting
        By node of a stall, the link whose rows it makes longer.
    """

    problem: StrategyProblem
    model: StepModel
    modes: Modes
    links: Links
    waiting: Mapping[int, int]

    def decode(self, choices: tuple[int, ...]) -> StepDecision:
        """Read layouts, reruns and offloads from a solution."""
        chain, offloaded = list(choices), set()
        for i in offload_candidates(self.model):
            mode, layout = divmod(choices[i], self.model.nodes[i].size)
            if mode > len(self.modes.get(i, ())):
                chain[i] = layout
                offloaded.add(i)
        decision = decode_kiwi_chain(self.model, self.modes, tuple(chain))
        return replace(decision, offloaded=frozenset(offloaded))

    def encode(self, decision: StepDecision) -> tuple[int, ...]:
        """Strategies of the model's nodes for a decision, without the nodes behind them.

        Raises
        ------
        ValueError
            If the problem leaves one of its reruns or offloads out.
        """
        choices = list(encode_kiwi_chain(self.model, self.modes, decision))
        candidates = offload_candidates(self.model)
        for i in decision.offloaded:
            if i not in candidates:
                raise ValueError(f"{self.model.nodes[i].name} cannot be offloaded in this problem")
            away, first = waiting_outputs(self.model, i), self.model.first_backward_use[i]
            readers = (edge.consumer for edge in self.model.edges_from[i] if edge.output in away)
            soon = any(decision.recomputed.get(v, (first,))[0] < first for v in readers)
            # With blocking copies there is one mode.
            way = next((k for k, way in enumerate(self.links.modes) if way.soon == soon), 0)
            choices[i] += (1 + len(self.modes.get(i, ())) + way) * self.model.nodes[i].size
        return tuple(choices)

    def complete(self, problem: StrategyProblem, choices: tuple[int, ...]) -> tuple[int, ...]:
        """Complete choices of the model's nodes by the shortest holds and the shortest stalls.

        Parameters
        ----------
        problem
            This problem, or the same with fewer strategies allowed.
        choices
            Strategies of the model's nodes.
        """
        complete = list(shortest_holds(problem, choices))
        for node, link in self.waiting.items():
            complete[node] = shortest_wait(problem, complete, node, link)
        return tuple(complete)


def shortest_wait(problem: StrategyProblem, choices: Sequence[int], node: int, link: int) -> int:
    """The first strategy of a node that makes rows of a link long enough for the choices of all others."""
    load = np.zeros(problem.horizon, dtype=np.int64)
    for i, entry in enumerate(problem.nodes):
        for term in entry.usage:
            if term.resource == link and i != node:
                load[term.start : term.end] += term.amount[choices[i]]
    limit = problem.resources[link].limit
    assert limit is not None, "links have limits"
    fits = np.ones(problem.nodes[node].size, dtype=np.bool_)
    for term in problem.nodes[node].usage:
        if term.resource == link:
            fits &= term.amount <= limit - load[term.start : term.end].max()
    return int(np.argmax(fits))


@gc_paused()
def build_offload(
    model: StepModel,
    modes: Modes,
    links: Links,
    counting: Counting,
) -> OffloadProblem:
    """Build the joint problem of sharding, recomputation of chains and offload.

    Parameters
    ----------
    model
        The step's tables, with ``transfer_cost``.
    modes
        Modes of running again.
    links
        The host.
    counting
        How bytes are counted where they depend on three decisions.
    """
    kind = OffloadRelaxationBuilder if links.relaxed else OffloadProblemBuilder
    builder = kind(model, modes, counting, links)
    problem = builder.build("kiwi_offload")
    return OffloadProblem(problem, model, modes, links, builder.waiting)

"""Exposed activations that come back for reruns before their first backward use.

Where copies cannot run beside the computation, an activation comes back right before its first reader: its first
backward use, or an earlier rerun that reads it. From there on it is on the device, which depends on the moments of
those reruns. Where one operator alone may read it then, that is usage of the pair (activation, reader). With several it
is a minimum, so a *return node* chooses the moment: usage of the pair (activation, return), and (return, reader that
runs again sooner) forbidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from formulations.problem.strategy_problem import BoolArray
from formulations.step.counting import Counting
from formulations.step.offload.modes import waiting_outputs

if TYPE_CHECKING:
    from formulations.step.offload.builder import OffloadProblemBuilder


def add_returns(builder: OffloadProblemBuilder) -> None:
    """Add the returns for reruns to a problem in which every offload is exposed."""
    for u in sorted(builder.offloads):
        _Returned(builder, u).add()


class _Returned:
    """One activation, and the reruns that may read it before its first backward use."""

    def __init__(self, builder: OffloadProblemBuilder, u: int) -> None:
        self.builder, self.u = builder, u
        self.use = builder.model.first_backward_use[u]
        self.first_moments = {
            v: np.array([builder.first_moment(v, mode) for mode in range(builder.modes(v))])
            for v in sorted(builder.readers[u])
            if any(moments[0] < self.use for moments in builder.reruns.get(v, ()))
        }

    def add(self) -> None:
        """Add the usage and, for several readers, the return node."""
        builder, use = self.builder, self.use
        possible = {int(moment) for of_reader in self.first_moments.values() for moment in of_reader}
        sooner = sorted((moment for moment in possible if moment < use), reverse=True)
        if not sooner:
            return
        if len(self.first_moments) == 1:
            ((v, of_reader),) = self.first_moments.items()
            for moment in sooner:
                self._hold(v, moment, np.repeat(of_reader == moment, builder.model.nodes[v].size))
            return
        node = builder.new_node(f"{builder.names[self.u]} back", 1 + len(sooner))
        for k, moment in enumerate(sooner, start=1):
            self._hold(node, moment, np.arange(1 + len(sooner)) == k)
        chosen = np.array([use, *sooner])
        for v, of_reader in self.first_moments.items():
            late = np.repeat(chosen[:, None] > of_reader[None, :], builder.model.nodes[v].size, axis=1)
            builder.factor((node, v), np.zeros(late.shape, dtype=np.int64), late)

    def _hold(self, other: int, moment: int, chosen: BoolArray) -> None:
        """Use device memory from a moment to the first backward use, for some strategies of another node."""
        builder, model = self.builder, self.builder.model
        begins = builder.timeline.burst[moment]
        if builder.counting is not Counting.UNDER:
            begins = builder.taken_again(builder.burst_event(moment))
        ends = builder.taken_again(builder.burst_event(self.use))
        amount = model.nodes[self.u].output_bytes[:, waiting_outputs(model, self.u)].sum(axis=1)
        offloaded = builder.in_mode(self.u, 1 + len(builder.reruns.get(self.u, ())), amount)
        builder.pair_usage((self.u, other), builder.term(begins, ends, offloaded[:, None] * chosen[None, :]))

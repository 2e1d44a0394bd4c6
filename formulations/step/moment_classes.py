"""Classes of moments of reruns: a relaxation of a problem of chains that is exact where memory binds.

Memory limits a step at few times. Between two of them it does not matter when exactly an operator runs again, so
consecutive moments become one *class*, and the reruns of a class happen at its first moment. The times from the first
to the last burst of a class are left out, since memory is not that of the plan there; all other times count.

Moving every rerun to the first moment of its class keeps the order of reruns and what they cost. Copies that are made
earlier, and inputs that are held for less long, change memory at times that are left out only. So every plan of the
problem is one of the relaxation, at no higher cost. Where the limit is exceeded at a time that was left out, the class
is divided there: row generation (Dantzig, Fulkerson and Johnson 1954), with columns that appear with their rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray, StrategyProblem, UsageTerm
from formulations.step.modes import Modes, once
from formulations.step.timeline import EventKind, Timeline
from formulations.step.training_step import Moments, StepModel


@dataclass(frozen=True, slots=True)
class MomentClasses:
    """Consecutive moments as classes.

    Parameters
    ----------
    moments
        All moments of a problem, in order.
    firsts
        The first moment of every class, in order.
    """

    moments: tuple[int, ...]
    firsts: tuple[int, ...]

    @classmethod
    def widest(cls, model: StepModel, modes: Modes) -> MomentClasses:
        """The largest classes within which a rerun costs the same at every moment.

        Raises
        ------
        ValueError
            If an operator may run again twice: then the order of copies matters within a class.
        """
        if any(len(mode) != 1 for of_node in modes.values() for mode in of_node):
            raise ValueError("operators that run again twice have no classes of moments; give modes of one moment")
        moments = tuple(sorted({mode[0] for of_node in modes.values() for mode in of_node}))
        weights = [_weights_at(model, moment) for moment in moments]
        firsts = moments[:1] + tuple(m for m, (a, b) in zip(moments[1:], pairwise(weights), strict=True) if a != b)
        return cls(moments, firsts)

    def first(self, moment: int) -> int:
        """First moment of the class of a moment."""
        return self.firsts[bisect_right(self.firsts, moment) - 1]

    def last(self, first: int) -> int:
        """Last moment of the class that begins with a moment."""
        k = bisect_right(self.firsts, first)
        end = len(self.moments) if k == len(self.firsts) else bisect_left(self.moments, self.firsts[k])
        return self.moments[end - 1]

    def merged(self, modes: Modes) -> dict[int, tuple[Moments, ...]]:
        """Modes in which every operator runs again at the first moment of a class."""
        return once({i: tuple(dict.fromkeys(self.first(m) for (m,) in of_node)) for i, of_node in modes.items()})

    def divided(self, timeline: Timeline, times: Iterable[int]) -> MomentClasses:
        """Classes that leave none of some times out.

        Parameters
        ----------
        timeline
            Of any reruns at these moments.
        times
            Times of that timeline: one within the reruns of a moment makes a class of that moment alone, any other one
            divides the moments before it from those after it.
        """
        firsts: list[int] = []
        for t in times:
            event = bisect_right(timeline.start, t) - 1
            alone = event
            while timeline.events[alone].kind is EventKind.RECOMPUTE:
                alone += 1
            after = [moment for moment in self.moments if timeline.burst[moment] > t]
            firsts += after[:1]
            if alone != event:
                firsts.append(timeline.events[alone].index)
        return self.divided_before(firsts)

    def divided_before(self, moments: Iterable[int]) -> MomentClasses:
        """Classes that begin with some more moments."""
        return replace(self, firsts=tuple(sorted({*self.firsts, *moments})))

    def counted(self, timeline: Timeline) -> BoolArray:
        """Flags of the times at which memory counts, for reruns at the first moments of classes."""
        flags = np.ones(timeline.horizon, dtype=np.bool_)
        for first in self.firsts:
            last = self.last(first)
            if last != first:
                flags[timeline.burst[first] : timeline.start[timeline.compute[last]]] = False
        return flags

    def within(self, modes: Modes, model: StepModel, wanted: Mapping[int, Moments]) -> dict[int, Moments]:
        """Moments of modes for reruns at the first moments of classes: as late in the class as they are needed.

        A rerun that is needed before any of its moments in the class is at the last one before; where there is none, at
        the class's first moment.
        """
        found: dict[int, Moments] = {}
        for i in sorted(wanted, reverse=True):
            first = wanted[i][0]
            needed = [found[edge.consumer][0] for edge in model.edges_from[i] if edge.consumer in found]
            if model.first_backward_use[i] >= 0:
                needed.append(model.first_backward_use[i])
            last = min([self.last(first), *needed])
            found[i] = max((mode for mode in modes[i] if mode[0] <= last), default=(first,))
        return found


def at_times(problem: StrategyProblem, times: IntArray) -> StrategyProblem:
    """Return a problem whose limits hold at some times only; those become its times.

    Parameters
    ----------
    times
        In order, shape ``(new horizon,)``.
    """

    def cut(terms: tuple[UsageTerm, ...]) -> tuple[UsageTerm, ...]:
        spans = np.searchsorted(times, [(term.start, term.end) for term in terms]).tolist() if terms else []
        return tuple(
            replace(term, start=start, end=end) for term, (start, end) in zip(terms, spans, strict=True) if start < end
        )

    return replace(
        problem,
        nodes=tuple(replace(node, usage=cut(node.usage)) for node in problem.nodes),
        factors=tuple(replace(factor, usage=cut(factor.usage)) for factor in problem.factors),
        horizon=len(times),
        time_names=tuple(problem.time_names[t] for t in times.tolist()) if problem.time_names else (),
    )


def _weights_at(model: StepModel, moment: int) -> tuple[int, ...]:
    """All weights of what is paid at a moment."""
    weights = model.weights
    if weights is None:
        return ()
    links = np.concatenate([weights.activations[:, moment], weights.gathers[:, moment]])
    return int(weights.computation[moment]), int(weights.resharding[moment]), *(int(weight) for weight in links)

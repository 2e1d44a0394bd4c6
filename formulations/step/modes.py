"""Modes of operators that may run again: a mode is the set of moments at which an operator does.

A moment is a backward operator before which a rerun happens. Every rerun makes a new copy of the outputs, and every
reader takes the newest one, so a mode determines which copy is read when; each copy is held until its last reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from formulations.step.training_step import Moments, NodeKind, StepModel

Modes = Mapping[int, tuple[Moments, ...]]
"""Per operator that may run again, the moments of each mode in which it does."""


def once(moments: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[Moments, ...]]:
    """Modes of operators that run again once, at one of their moments."""
    return {i: tuple((moment,) for moment in times) for i, times in moments.items()}


def once_or_twice(model: StepModel, moments: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[Moments, ...]]:
    """Modes of operators that run again once, or at an earlier moment and at their last one.

    The last moment is an operator's own first backward use, where it has one; at an earlier one it runs again for a
    chain behind it. An operator may run twice only if at most one operator that may run again reads its outputs: then
    the copy that a rerun reads, and the time for which it is held, depend on two operators and not on more.
    """
    found = once(moments)
    for i, times in moments.items():
        readers = {(edge.output, edge.consumer) for edge in model.edges_from[i] if edge.consumer in moments}
        if len(readers) == len({output for output, _ in readers}):
            found[i] += tuple((moment, times[-1]) for moment in times[:-1])
    return found


def needed_reruns(model: StepModel, wanted: Mapping[int, Moments]) -> dict[int, Moments]:
    """Leave out reruns whose copies are never read.

    Parameters
    ----------
    model
        The step.
    wanted
        Operators that run again, with their moments.
    """
    found: dict[int, Moments] = {}
    for i in sorted(wanted, reverse=True):
        reads = {moment for edge in model.edges_from[i] for moment in found.get(edge.consumer, ())}
        reads |= {e.consumer for e in model.edges_from[i] if model.nodes[e.consumer].kind is NodeKind.BACKWARD}
        spans = pairwise((*wanted[i], len(model.nodes)))
        needed = tuple(made for made, replaced in spans if any(made <= read < replaced for read in reads))
        if needed:
            found[i] = needed
    return found

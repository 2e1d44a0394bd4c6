"""Values that have the same last reader in every plan, whatever is run again.

Such a value ends with its last reader; where it is brought to another placement for it in several steps, it ends with
the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph.operator_graph import OperatorGraph, Phase
from planner.graph.view_chains import ViewChain

OUTPUT = -1
"""Reader of a value that only the graph's output reads."""


def last_reads(graph: OperatorGraph, chains: Sequence[ViewChain]) -> dict[int, int]:
    """Find the last readers that no plan changes.

    A forward operator may run again until its last reader in backward needs it, so that it is the last reader of
    nothing. An operator of backward runs once; it is the last reader of a value that it reads as one argument, that is
    no output, and that no other operator reads later or may read later when it runs again.

    Parameters
    ----------
    graph
        A traced step.
    chains
        Its views, as :func:`~planner.graph.view_chains.view_chains` gives them.

    Returns
    -------
    dict
        By computed value that owns its storage, the operator of backward, or :data:`OUTPUT` where a single output is
        the only reader.
    """
    readers: dict[int, list[int]] = {}
    for operator in graph.operators:
        for value in () if operator.is_view else operator.inputs:
            readers.setdefault(chains[value].base, []).append(operator.index)
    outputs = [chains[output.value].base for output in graph.outputs]
    needed_until = _needed_until(graph, readers)
    found = {base: OUTPUT for base in outputs if base not in readers and outputs.count(base) == 1}
    for base, reading in readers.items():
        last = reading[-1]
        if base in outputs or reading.count(last) > 1 or needed_until[last] != last:
            continue
        if all(needed_until[reader] <= last for reader in reading):
            found[base] = last
    return {base: reader for base, reader in found.items() if graph.values[base].producer is not None}


def _needed_until(graph: OperatorGraph, readers: dict[int, list[int]]) -> dict[int, int]:
    """Last operator of backward before which each operator may run; that of an operator of backward is itself."""
    found: dict[int, int] = {}
    for operator in reversed(graph.operators):
        if operator.phase is not Phase.FORWARD:
            found[operator.index] = operator.index
            continue
        reading = [reader for value in operator.outputs if value is not None for reader in readers.get(value, ())]
        found[operator.index] = max((found[reader] for reader in reading), default=operator.index)
    return found

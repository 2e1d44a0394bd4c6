"""Views folded into edges: where every argument's storage comes from.

Two thirds of a traced transformer are views. They cost nothing and own no storage, so they are no
decisions: an argument of an operator is traced back through views to the value whose storage it reads.
The chain of views is run again by every consumer, wherever it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.operator_graph import OperatorGraph


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One view operator of a chain and which of its outputs the chain follows."""

    operator: int
    output: int


@dataclass(frozen=True, slots=True)
class ViewChain:
    """The chain of views of ``value``: the value ``base`` that owns its storage, and the views from it, in order."""

    base: int
    steps: tuple[ViewStep, ...]


def view_chains(graph: OperatorGraph) -> tuple[ViewChain, ...]:
    """Trace every value of the graph to the value that owns its storage.

    Parameters
    ----------
    graph
        A traced step.

    Returns
    -------
    tuple of ViewChain
        One per value; a value that owns its storage has no steps.
    """
    chains = [ViewChain(value.index, ()) for value in graph.values]
    for operator in graph.operators:
        if not operator.is_view:
            continue
        source = chains[operator.inputs[0]]
        for output, value in enumerate(operator.outputs):
            if value is not None:
                chains[value] = ViewChain(source.base, (*source.steps, ViewStep(operator.index, output)))
    return tuple(chains)

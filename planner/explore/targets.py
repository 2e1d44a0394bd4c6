"""Names of operators, modules and parameters, and the nodes of a step that they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from planner.common.root_name import identity, shown
from planner.explore.errors import ExploreError
from planner.graph.names import inputs_named, is_named, operators_named, paths_around
from planner.graph.operator_graph import Phase
from planner.strategies.space import StrategySpace

_MOST_NAMES = 4


def nodes_of(space: StrategySpace, target: str) -> tuple[int, ...]:
    """Nodes that a target stands for.

    Parameters
    ----------
    space
        The step.
    target
        As for :func:`planner.graph.names.operators_named`, or the name of a parameter or an input.

    Returns
    -------
    tuple of int
        Nodes of the space, ascending.

    Raises
    ------
    ExploreError
        Nothing has the name; the message has the names that are close to it.
    """
    graph = space.graph
    operators = {operator.index for operator in operators_named(graph, target)}
    values = {value.index for value in inputs_named(graph, target)}
    found = [k for k, node in enumerate(space.nodes) if node.operator in operators or node.value in values]
    if not found:
        raise ExploreError(_unknown(space, target))
    return tuple(found)


def node_name(space: StrategySpace, node: int) -> str:
    """Identity of an operator, or name of a parameter or an input."""
    entry = space.nodes[node]
    if entry.operator is not None:
        return shown(space.graph.operators[entry.operator].identity)
    assert entry.value is not None
    return space.graph.values[entry.value].name


def module_paths(space: StrategySpace) -> tuple[str, ...]:
    """Paths of all modules with operators of forward, in order of execution."""
    forward = (op for op in space.graph.operators if op.phase is Phase.FORWARD)
    return tuple(dict.fromkeys(path for op in forward for path in paths_around(op)))


def _unknown(space: StrategySpace, target: str) -> str:
    views = [op for op in space.graph.operators if op.is_view and is_named(op.identity, identity(target))]
    if views:
        base = space.chains[views[0].inputs[0]].base
        owner = node_name(space, space.node_of_value[base])
        return f"{target!r} is a view and decides nothing: pin {owner!r}, whose storage it shows"
    names: Iterable[str] = (
        (shown(op.identity) for op in space.graph.operators if not op.is_view)
        if "/" in target
        else (*module_paths(space), *(space.graph.values[v].name for v in space.graph.inputs))
    )
    names = list(dict.fromkeys(names))
    close = get_close_matches(target, names, _MOST_NAMES, 0.5) or [name for name in names if name][:_MOST_NAMES]
    return (
        f"{target!r} names no operator, module or parameter of this step; close to it: "
        f"{', '.join(map(repr, close))}; a pattern such as '*.mlp' names several"
    )

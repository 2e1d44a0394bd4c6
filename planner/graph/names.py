"""Names of operators, modules, parameters and inputs, and the parts of a graph that they stand for."""

from __future__ import annotations

from fnmatch import fnmatchcase

from planner.common.root_name import identity
from planner.graph.operator_graph import Operator, OperatorGraph, Phase, Value


def operators_named(graph: OperatorGraph, target: str) -> tuple[Operator, ...]:
    """Operators that a target stands for, in the order of execution.

    Parameters
    ----------
    graph
        The step.
    target
        The identity of an operator (``transformer.h.0.mlp.act/forward/aten.mul.Tensor/0``), or the path of a module,
        which stands for the forward operators in it. Each may be a pattern with ``*``, ``?`` and ``[...]``; ``*``
        matches dots too. A pattern with ``/`` is one of identities; the root module may be called ``(root)``.
    """
    target = identity(target)
    if "/" in target:
        return tuple(operator for operator in graph.operators if is_named(operator.identity, target))
    return tuple(
        operator
        for operator in graph.operators
        if operator.phase is Phase.FORWARD and any(is_named(path, target) for path in paths_around(operator))
    )


def inputs_named(graph: OperatorGraph, target: str) -> tuple[Value, ...]:
    """Parameters, buffers and inputs of a name or a pattern of names; a tied parameter has several names."""
    values = (graph.values[index] for index in graph.inputs)
    return tuple(value for value in values if any(is_named(name, target) for name in (value.name, *value.aliases)))


def paths_around(operator: Operator) -> list[str]:
    """Path of an operator's module and those of the modules around it, outermost first."""
    parts = operator.module_path.split(".") if operator.module_path else []
    return [".".join(parts[: k + 1]) for k in range(len(parts))] or [""]


def is_named(name: str, pattern: str) -> bool:
    """Whether a name is that of a pattern, or the pattern itself: a name may hold brackets."""
    return name == pattern or fnmatchcase(name, pattern)

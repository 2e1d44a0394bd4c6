"""Reference execution: the traced operators one after another, in one process, on whole tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from planner.graph.operator_graph import Operator
from planner.strategies.traced_step import TracedStep

Observer = Callable[[Operator, Sequence[Tensor], Sequence[Tensor | None]], None]
"""Is told each operator with its input tensors and its results, right after it ran."""


def run_reference(traced: TracedStep, inputs: Sequence[Tensor], observe: Observer | None = None) -> list[Tensor]:
    """Run the whole step.

    Parameters
    ----------
    traced
        The traced step.
    inputs
        One tensor per input of the graph, as :func:`planner.strategies.traced_step.input_tensors` gives them; none is
        changed.
    observe
        Called after every operator, for comparisons and measurements.

    Returns
    -------
    list of Tensor
        One tensor per output of the graph: loss, gradients, new values of buffers.
    """
    graph = traced.graph
    last_use = _values_by_last_use(traced)
    device = next((tensor.device for tensor in inputs), torch.device("cpu"))
    tensors: dict[int, Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    with torch.no_grad():
        for operator, call in zip(graph.operators, traced.calls, strict=True):
            read = [tensors[index] for index in operator.inputs]
            args, kwargs = call.arguments(read, device)
            result = call.target(*args, **kwargs)
            results = (result,) if isinstance(result, Tensor) else tuple(result)
            made = zip(operator.outputs, results, strict=True)
            tensors.update((index, tensor) for index, tensor in made if index is not None)
            if observe is not None:
                observe(operator, read, results)
            for index in last_use[operator.index]:
                del tensors[index]
    return [tensors[output.value] for output in graph.outputs]


def _values_by_last_use(traced: TracedStep) -> dict[int, list[int]]:
    """Values that nothing reads after an operator, by the index of that operator."""
    graph = traced.graph
    last = {}
    for operator in graph.operators:
        for index in (*operator.inputs, *operator.outputs):
            if index is not None:
                last[index] = operator.index
    for output in graph.outputs:
        last.pop(output.value, None)
    by_operator: dict[int, list[int]] = defaultdict(list)
    for index, position in last.items():
        by_operator[position].append(index)
    return by_operator

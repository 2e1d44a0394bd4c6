"""Plans between two plans: the first layers as in one, the others as in the other.

The multipliers' problem has extreme solutions, all layers alike or nearly so, where the best plan takes a part of one
and a part of another: gradients that late layers make early in backward have time to be reduced beside it, those of the
first layers have not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from formulations.step.training_step import StepDecision, StepModel

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|/|$)")


def mixtures(model: StepModel, first: StepDecision, second: StepDecision) -> Iterator[StepDecision]:
    """Decisions with the layers before a cut from ``first`` and those behind it from ``second``, for all cuts.

    What belongs to no layer is once as in the one, once as in the other.
    """
    layers = [_layer(node.name) for node in model.nodes]
    numbers = sorted({layer for layer in layers if layer is not None})
    for cut in numbers[1:]:
        for others in (first, second):
            yield _joined([others if layer is None else first if layer < cut else second for layer in layers])


def exchanges(model: StepModel, decision: StepDecision, other: StepDecision) -> Iterator[StepDecision]:
    """Decisions with one layer, or all that belongs to none, of another one."""
    layers = [_layer(node.name) for node in model.nodes]
    for exchanged in dict.fromkeys(layers):
        sources = [other if layer == exchanged else decision for layer in layers]
        found = _joined(sources)
        if found != decision:
            yield found


def _joined(sources: Sequence[StepDecision]) -> StepDecision:
    """The decision of each node from its source."""
    layouts = tuple(source.layouts[i] for i, source in enumerate(sources))
    recomputed = {i: source.recomputed[i] for i, source in enumerate(sources) if i in source.recomputed}
    return StepDecision(layouts, recomputed)


def _layer(name: str) -> int | None:
    """Number of the layer in the name of a module, if it has one."""
    found = _NUMBER.search(name)
    return None if found is None else int(found.group(1))

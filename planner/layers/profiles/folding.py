"""A traced training step folded into a chain of layers.

Bytes are those of the graph's storages, time is the planner's cost model of the cluster's device. Both are taken at two
batch sizes; the line through them gives what one sample adds and what any batch pays. So bytes are called fitted, also
where the line meets both counts exactly, as it does unless an operator's size grows faster than the batch; a note of
the chain names the layers for which it does not. Times are preset on a cluster of data sheets and fitted on a
calibrated one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from formulations.layers.layer import LayerChain, LayerProfile, ProfileSource, SplitPart
from planner.graph.operator_graph import OperatorGraph, Phase
from planner.layers.profiles.counts import LayerCount, count_layers
from planner.machine.cluster import ClusterSpec
from planner.models.references import ModelReference, load_step
from planner.strategies.traced_step import TracedStep, trace_step


class FoldingError(ValueError):
    """A step that cannot be folded into layers; the message names the remedy."""


def model_layers(reference: ModelReference, cluster: ClusterSpec, *, apart: bool = False) -> LayerChain:
    """Layers of a model, traced at its batch and at twice its batch.

    Parameters
    ----------
    reference
        Which model; its batch is the smaller one, and best not 1, where dimensions of size 1 make other operators.
    cluster
        Whose device computes.
    apart
        Whether attention and feed-forward modules are layers of their own.

    Raises
    ------
    ModelError, TraceError
        The model cannot be loaded or traced.
    FoldingError
        The two traced steps differ in more than sizes, or not at all.
    """
    steps = []
    for batch in (reference.batch, 2 * reference.batch):
        step = load_step(replace(reference, batch=batch))
        steps.append(trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn, "same"))
    batches = (reference.batch, 2 * reference.batch)
    return fold_layers(steps[0], steps[1], batches, cluster, name=reference.source, apart=apart)


def fold_layers(
    smaller: TracedStep,
    larger: TracedStep,
    batches: tuple[int, int],
    cluster: ClusterSpec,
    *,
    name: str,
    apart: bool = False,
) -> LayerChain:
    """Fold a step that was traced at two batch sizes.

    Parameters
    ----------
    smaller, larger
        The traced steps.
    batches
        Samples in each of them.
    cluster
        Whose device computes.
    name
        Of the chain.
    apart
        Whether attention and feed-forward modules are layers of their own.

    Raises
    ------
    FoldingError
        If the batches do not grow, or the steps differ in more than sizes or not at all.
    """
    if not 0 < batches[0] < batches[1]:
        raise FoldingError(f"batches of {batches[0]} and {batches[1]}: give two sizes, the smaller one first")
    if [operator.identity for operator in smaller.graph.operators] != [
        operator.identity for operator in larger.graph.operators
    ]:
        raise FoldingError(
            f"{name} has other operators at batch {batches[0]} than at batch {batches[1]}: give other batch sizes, "
            "none of them 1"
        )
    shapes = [[step.graph.values[index].spec.shape for index in step.graph.inputs] for step in (smaller, larger)]
    if shapes[0] == shapes[1]:
        raise FoldingError(
            f"{name} has the same inputs at batch {batches[0]} as at batch {batches[1]}: let its function take the "
            "argument batch and make as many samples"
        )
    counts = [count_layers(step.graph, cluster, apart) for step in (smaller, larger)]
    source = ProfileSource.PRESET if cluster.measured is None else ProfileSource.FITTED
    fitted = [_fitted(small, large, batches, source) for small, large in zip(counts[0], counts[1], strict=True)]
    layers = _with_kinds([layer for layer, _ in fitted])
    bent = [layer.name for layer, exact in fitted if not exact]
    notes = [*smaller.graph.notes, *_tied(smaller.graph, counts[0])]
    if bent:
        notes.append(
            f"bytes grow faster than the batch in {', '.join(bent)}: counts are bounds up to a batch of {batches[1]}"
        )
    return LayerChain(name, tuple(layers), _dtype(smaller.graph), tuple(notes))


# ---------------------------------------------------------------- the line through two


def _fitted(
    small: LayerCount, large: LayerCount, batches: tuple[int, int], source: ProfileSource
) -> tuple[LayerProfile, bool]:
    """Profile of one layer, and whether its lines meet both counts exactly."""
    given = _line(small.whole.input_bytes, large.whole.input_bytes, batches)
    made = _line(small.whole.output_bytes, large.whole.output_bytes, batches)
    unread = _line(small.whole.unread_input_bytes, large.whole.unread_input_bytes, batches)
    saved = _line(small.whole.saved_bytes, large.whole.saved_bytes, batches)
    rest = _line(small.undivided.saved_bytes, large.undivided.saved_bytes, batches)
    forward = _seconds_line(small.seconds[0], large.seconds[0], batches)
    backward = _seconds_line(small.seconds[1], large.seconds[1], batches)
    spaces = [_highest(small.beyond[phase], large.beyond[phase], batches) for phase in Phase]
    spaces_rest = [_highest(small.undivided_beyond[phase], large.undivided_beyond[phase], batches) for phase in Phase]
    late = _highest(small.late_beyond, large.late_beyond, batches)
    profile = LayerProfile(
        name=small.name,
        kind="",
        parameter_bytes=small.parameter_bytes,
        borrowed_parameter_bytes=small.borrowed_parameter_bytes,
        input_bytes=given.slope,
        unread_input_bytes=min(unread.slope, given.slope),
        carried_bytes=_line(small.whole.carried_bytes, large.whole.carried_bytes, batches).slope,
        output_bytes=made.slope,
        saved_bytes=saved.slope,
        fixed_saved_bytes=saved.intercept + max(0, given.intercept - unread.intercept),
        forward_workspace_bytes=spaces[0].slope,
        backward_workspace_bytes=spaces[1].slope,
        forward_fixed_workspace_bytes=spaces[0].intercept + made.intercept,
        backward_fixed_workspace_bytes=spaces[1].intercept,
        late_workspace_bytes=late.slope,
        late_fixed_workspace_bytes=late.intercept,
        largest_parameter_bytes=small.largest_parameter_bytes,
        forward_seconds=forward[0],
        backward_seconds=backward[0],
        forward_fixed_seconds=forward[1],
        backward_fixed_seconds=backward[1],
        split=SplitPart(
            divisor=small.divisor,
            parameter_bytes=small.divided_parameter_bytes,
            saved_bytes=max(0, saved.slope - rest.slope),
            forward_workspace_bytes=max(0, spaces[0].slope - spaces_rest[0].slope),
            backward_workspace_bytes=max(0, spaces[1].slope - spaces_rest[1].slope),
            forward_seconds=_part(small.divided_seconds[0], large.divided_seconds[0], batches, forward[0]),
            backward_seconds=_part(small.divided_seconds[1], large.divided_seconds[1], batches, backward[0]),
            reduced_bytes=_line(small.reduced_bytes, large.reduced_bytes, batches).slope,
        ),
        bytes_source=ProfileSource.FITTED,
        seconds_source=source,
    )
    return profile, given.exact and saved.exact


@dataclass(frozen=True, slots=True)
class _Line:
    """Bytes per sample and at any batch; ``exact`` where both counts lie on the line."""

    slope: int
    intercept: int
    exact: bool


def _line(small: int, large: int, batches: tuple[int, int]) -> _Line:
    """Line through two counts; where it would start below zero, the one from zero that is nowhere below them."""
    slope, odd = divmod(large - small, batches[1] - batches[0])
    intercept = small - slope * batches[0]
    if not odd and slope >= 0 and intercept >= 0:
        return _Line(slope, intercept, True)
    return _Line(max(-(-small // batches[0]), -(-large // batches[1])), 0, False)


def _seconds_line(small: float, large: float, batches: tuple[int, int]) -> tuple[float, float]:
    """Seconds per sample, and at any batch."""
    slope = max(0.0, (large - small) / (batches[1] - batches[0]))
    return slope, max(0.0, small - slope * batches[0])


def _part(small: float, large: float, batches: tuple[int, int], whole: float) -> float:
    return min(whole, _seconds_line(small, large, batches)[0])


def _highest(small: NDArray[np.int64], large: NDArray[np.int64], batches: tuple[int, int]) -> _Line:
    """Lowest line of the greatest slope that no moment exceeds from the smaller batch on; at least zero."""
    if not small.size:
        return _Line(0, 0, True)
    slopes = -((small - large) // (batches[1] - batches[0]))
    slope = max(0, int(slopes.max()))
    return _Line(slope, max(0, int(small.max()) - slope * batches[0]), True)


# ----------------------------------------------------------------------------- names


def _with_kinds(layers: Sequence[LayerProfile]) -> list[LayerProfile]:
    """Layers whose kind is the name of the first layer that is equal except for its name."""
    first: dict[tuple[object, ...], str] = {}
    result = []
    for layer in layers:
        figures = tuple(getattr(layer, field.name) for field in fields(layer) if field.name not in ("name", "kind"))
        result.append(replace(layer, kind=first.setdefault(figures, layer.name)))
    return result


def _tied(graph: OperatorGraph, counts: Sequence[LayerCount]) -> list[str]:
    return [
        f"{', '.join(value.aliases)} is {value.name}: counted once, in {count.name}"
        for count in counts
        for value in (graph.values[index] for index in count.parameters)
        if value.aliases
    ]


def _dtype(graph: OperatorGraph) -> str:
    """Type of most of the parameters' bytes; of a step without any, 32 bits."""
    sizes: dict[str, int] = {}
    for value in graph.parameters:
        sizes[value.spec.dtype] = sizes.get(value.spec.dtype, 0) + value.spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")

"""Which partitionings CAPTURE runs to profile a model (its Description 1), and what is read from them.

Two numbers are wanted of every layer ``l``: what a GPU holds with it alone, ``M_i(l)``, and what it adds to the layers
before it, ``M_a(l) = PM(l - n .. l) - PM(l - n .. l - 1)`` for one ``n``. So every layer has to be alone on a GPU in
some run, and every layer but the first has to be added to some layers before it.

Lines 5, 14 and 15 of Description 1 do not hold as many layers as there are (:func:`lines_as_printed`), so the runs are
made by its idea. With ``q = L // S`` layers for each of ``S`` stages, stage ``g`` is filled while the stages before it
keep ``q`` layers: it has 1, 2 .. ``q`` layers, then ``q + 1`` once, which adds the first layer of the next stage; the
stage behind it has a single layer (the two behind it, where it has ``q``), and the rest is spread evenly. The stage
before the last two goes on until one layer is left for each of these. One more run adds the last layer but one. That
makes ``L - 1`` runs; the paper counts ``L + 1``.

As many stages as layers have one partition, which adds nothing to anything. So a stage has two layers at least: where
there are too many GPUs for that, some stay unused while profiling. On fewer than three stages no layer in the middle is
ever alone. Models of up to three layers are profiled on as many stages as they have layers, and on one less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formulations.capture.problem import TraceError

__all__ = ["ProfilingRuns", "Reading", "lines_as_printed", "profiling_runs"]

_FEWEST_STAGES = 3
"""With fewer, layers in the middle are never alone."""

Reading = tuple[int, int]
"""Number of a run, and of a stage in it."""


@dataclass(frozen=True, slots=True)
class ProfilingRuns:
    """Runs, and where what is wanted of every layer is read.

    Parameters
    ----------
    partitions
        Layers of every stage, one tuple for each run.
    alone
        For each layer a stage that holds it alone.
    added
        For each layer but the first, a stage that ends with it, and one that holds the same layers without it.
    """

    partitions: tuple[tuple[int, ...], ...]
    alone: tuple[Reading, ...]
    added: tuple[tuple[Reading, Reading], ...]

    def group(self, reading: Reading) -> tuple[int, int]:
        """Half-open range of layers on a stage."""
        run, stage = reading
        first = sum(self.partitions[run][:stage])
        return first, first + self.partitions[run][stage]


def profiling_runs(layers: int, stages: int) -> ProfilingRuns:
    """Make the runs for one kind and degree of parallelism.

    Parameters
    ----------
    layers
        Number of layers.
    stages
        Submeshes of GPUs on which stages can be placed; not all may be used.

    Raises
    ------
    TraceError
        There are fewer than three submeshes for more than three layers, or fewer than layers for fewer.
    """
    needed = min(layers, _FEWEST_STAGES)
    if stages < needed:
        raise TraceError(
            f"profiling {layers} layers on {stages} submeshes: no layer in the middle is ever alone on one; "
            f"profile on {needed} at least, by more GPUs or a lower degree"
        )
    if layers <= _FEWEST_STAGES:
        pairs = [(1,) * at + (2,) + (1,) * (layers - at - 2) for at in range(layers - 1)]
        return _with_readings(((1,) * layers, *pairs))
    used = max(_FEWEST_STAGES, min(stages, layers // 2))
    each = layers // used
    runs = []
    for stage in range(used - 3):
        sizes = range(1 if stage == 0 else 2, each + 1)
        runs += [_run(layers, used, [each] * stage + [size, 1]) for size in sizes if size < each]
        runs.append(_run(layers, used, [each] * (stage + 1) + [1, 1]))
        runs.append(_run(layers, used, [each] * stage + [each + 1, 1]))
    before = [each] * (used - 3)
    start = sum(before)
    first = 1 if used == _FEWEST_STAGES else 2
    runs += [(*before, size, 1, layers - start - size - 1) for size in range(first, layers - start - 1)]
    runs.append((*before, layers - start - 3, 2, 1))
    return _with_readings(tuple(runs))


def lines_as_printed(layers: int, stages: int) -> dict[int, tuple[int, ...]]:
    """Return lines 1, 4, 5, 10, 11, 14 and 15 of Description 1 as printed, which need not hold all layers.

    Parameters
    ----------
    layers, stages
        Layers ``L`` and GPUs ``G``, of which there are at least four, and ``G`` divides ``L``.
    """
    q = layers // stages
    return {
        1: (1, 1, *_even(layers - 2, stages - 2)),
        4: (q, 1, 1, *_even(layers - (q + 2), stages - 3)),
        5: (q + 1, 1, 1, *_even(layers - (q + 2), stages - 3)),
        10: (q, q, 1, 1, *_even(layers - (2 * q + 2), stages - 4)),
        11: (q, q + 1, 1, 1, *_even(layers - (2 * q + 3), stages - 4)),
        14: (*(q,) * (stages - 2), 1, 1),
        15: (*(q,) * (stages - 3), q - 1, 1, 2),
    }


def _run(layers: int, stages: int, begin: Sequence[int]) -> tuple[int, ...]:
    """Stages that begin so, and the rest of the layers spread evenly."""
    return (*begin, *_even(layers - sum(begin), stages - len(begin)))


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """The paper's ``eq``: layers spread over stages, longer ones first."""
    if not stages:
        return ()
    each, longer = divmod(layers, stages)
    return (each + 1,) * longer + (each,) * (stages - longer)


def _with_readings(partitions: tuple[tuple[int, ...], ...]) -> ProfilingRuns:
    """Find for every layer the first stage that holds it alone, and the first two stages that differ by it."""
    layers = sum(partitions[0])
    places: dict[tuple[int, int], list[Reading]] = {}
    for run, partition in enumerate(partitions):
        assert sum(partition) == layers, "every run holds all layers"
        assert min(partition) > 0, "every stage has a layer"
        first = 0
        for stage, size in enumerate(partition):
            places.setdefault((first, first + size), []).append((run, stage))
            first += size
    assert len(partitions) <= layers + 1, "the paper allows a run more than there are layers"
    alone = tuple(places[layer, layer + 1][0] for layer in range(layers))
    return ProfilingRuns(partitions, alone, tuple(_added(places, layer) for layer in range(1, layers)))


def _added(places: dict[tuple[int, int], list[Reading]], layer: int) -> tuple[Reading, Reading]:
    """Two stages at the same place in a pipeline where there are such, with most layers before the one added."""
    pairs = [
        (longer[1] != shorter[1], first, longer, shorter)
        for first in range(layer)
        for longer in places.get((first, layer + 1), [])
        for shorter in places.get((first, layer), [])
    ]
    _, _, longer, shorter = min(pairs)
    return longer, shorter

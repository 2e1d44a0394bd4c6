"""Resharding: the cheapest sequence of collectives from one placement to another, its time and its memory.

A path is a sequence of placements; each step changes the axis placement of exactly ONE mesh axis and is executed
with functional (out of place) collectives on contiguous local tensors as follows. ``before`` and ``after``
are the step's local tensors, ``n`` is the size of the axis. *Peak* is the largest number of bytes alive
during the step beyond ``before``, *copies* is what passes through local memory besides the collective.

=============  ======================  =================================================  ================
change         operation               peak                                               copies
=============  ======================  =================================================  ================
S(0) -> R      all-gather              after                                              none
S(d) -> R      all-gather along        2 after (gathered along 0, then concatenated       after
               0, then cat along d     along d)
Psum -> R      all-reduce              after (a clone, reduced in place)                  after
               behind another step     none (reduced in place)                            none
Psum -> S(0)   reduce-scatter          after                                              none
Psum -> S(d)   chunk along d, cat      before + after (the copy is the input)             before
               along 0, reduce-scatter
S(d) -> S(e)   cat of the chunks       2 after (send and receive buffer, then receive     after where
               along e (e > 0),        buffer and result; the send buffer is freed        e > 0, after
               all-to-all, cat along   before the last cat)                               where d > 0
               d (d > 0)
R -> S(d)      local slice, copied     after                                              after
=============  ======================  =================================================  ================

The table's dimension 0 is the outermost one in memory (``order``, see :attr:`TensorSpec.memory_order`): a
transposed tensor is handled in the order in which its dimensions lie, and its copies lie in the same order. A
dimension behind others that have one element on each rank is an outermost one too (:func:`step_of`).

``Pavg`` behaves as ``Psum``; ``Pmax`` and ``Pmin`` can only be all-reduced. Nothing becomes partial.
Where several axes shard one dimension the left one is outer, so a step may only add or remove the
innermost shard of a dimension. While step i > 1 runs, the output of step i - 1 is alive beside it, and the source
of the path too, unless nothing reads it afterwards: then it ends with the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.graph.placement import (
    REPLICATE,
    Placement,
    divides,
    is_partial,
    is_shard,
    local_numel,
    local_shape,
    reordered,
    restored,
    shard,
    shard_dim,
)
from planner.machine.cluster import Collective, LinkSpec
from planner.machine.known_costs import KnownCosts

BUCKETED = frozenset({Collective.ALL_GATHER, Collective.ALL_REDUCE, Collective.REDUCE_SCATTER})
"""Collectives of which several may be one, over a flat buffer."""

_LINEAR = frozenset({"Psum", "Pavg"})
_TICKS_PER_SECOND = 10**12


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a path.

    Parameters
    ----------
    axis
        Mesh axis whose axis placement changes.
    collective
        The collective on that axis; None for a local slice.
    source_dim, target_dim
        Tensor dimension that the axis shards before and after; None where it shards none.
    """

    axis: int
    collective: Collective | None
    source_dim: int | None = None
    target_dim: int | None = None


@dataclass(frozen=True, slots=True)
class ReshardPath:
    """A path with its time and its peak memory.

    Parameters
    ----------
    placements
        From the source's placement to the target's; one placement where they are equal.
    seconds
        Predicted time.
    first_bytes, peak_bytes
        Most bytes alive on one rank beyond the source buffer, the target included, during the first step and during
        the whole path; 0 where source and target are equal, since then there is no second buffer.
    """

    placements: tuple[Placement, ...]
    seconds: float
    first_bytes: int
    peak_bytes: int

    def peak_without(self, source: int) -> int:
        """Most bytes beyond a source of so many bytes that ends with the first step; may be less than the target's."""
        return max(self.first_bytes, self.peak_bytes - source)


@dataclass(frozen=True, slots=True)
class _Move:
    """A step with its time in picoseconds and the bytes beyond its input at its worst."""

    target: Placement
    ticks: int
    peak_bytes: int


def step_between(source: Placement, target: Placement) -> Step | None:
    """Single step from ``source`` to ``target``; None where there is none."""
    changed = [axis for axis, (old, new) in enumerate(zip(source, target, strict=True)) if old != new]
    if len(changed) != 1:
        return None
    axis = changed[0]
    old, new = source[axis], target[axis]
    old_dim = shard_dim(old) if is_shard(old) else None
    new_dim = shard_dim(new) if is_shard(new) else None
    inner = source[axis + 1 :]
    if any(entry in inner for entry in (old, new) if is_shard(entry)) or is_partial(new):
        return None
    if is_partial(old):
        if new_dim is None:
            return Step(axis, Collective.ALL_REDUCE)
        return Step(axis, Collective.REDUCE_SCATTER, target_dim=new_dim) if old in _LINEAR else None
    if new_dim is None:
        return Step(axis, Collective.ALL_GATHER, source_dim=old_dim)
    return Step(axis, None if old_dim is None else Collective.ALL_TO_ALL, source_dim=old_dim, target_dim=new_dim)


def step_of(shape: Sequence[int], mesh: Sequence[int], source: Placement, target: Placement) -> Step | None:
    """As :func:`step_between`, with a dimension that is the outermost one in the ranks' memory as dimension 0.

    Parameters
    ----------
    shape
        Global shape in the order of memory.
    mesh
        Size of each mesh axis.
    source, target
        Lawful placements of it.
    """
    step = step_between(source, target)
    if step is None or step.collective is None:
        return step
    joined, split = local_shape(shape, target, mesh), local_shape(shape, source, mesh)
    return replace(step, source_dim=_place(step.source_dim, joined), target_dim=_place(step.target_dim, split))


def _place(dim: int | None, sizes: Sequence[int]) -> int | None:
    return 0 if dim is not None and all(size == 1 for size in sizes[:dim]) else dim


def _flat(step: Step) -> Step:
    """The step of flat buffers."""
    dims = (None if dim is None else 0 for dim in (step.source_dim, step.target_dim))
    return Step(step.axis, step.collective, *dims)


def step_peak_bytes(step: Step, before: int, after: int, *, owned: bool = False) -> int:
    """Most bytes alive during a step beyond its input (table of the module), which is the path's own if ``owned``."""
    if step.collective is Collective.ALL_REDUCE and owned:
        return 0
    if step.collective is Collective.ALL_GATHER:
        return after if step.source_dim == 0 else 2 * after
    if step.collective is Collective.REDUCE_SCATTER:
        return after if step.target_dim == 0 else before + after
    if step.collective is Collective.ALL_TO_ALL:
        return 2 * after if step.source_dim or step.target_dim else after
    return after


def step_copies(step: Step, before: int, after: int, *, owned: bool = False) -> list[int]:
    """Bytes of each local copy of a step (table of the module), whose input is the path's own if ``owned``."""
    match step.collective:
        case Collective.ALL_REDUCE if owned:
            return []
        case Collective.ALL_GATHER:
            return [after] if step.source_dim else []
        case Collective.REDUCE_SCATTER:
            return [before] if step.target_dim else []
        case Collective.ALL_TO_ALL:
            return [after] * (bool(step.source_dim) + bool(step.target_dim))
        case _:
            return [after]


def reductions_commute(placement: Placement) -> bool:
    """Whether the pending reductions of a placement may be done in any order (max of sums is no sum of maxima)."""
    partial = {entry for entry in placement if is_partial(entry)}
    return len(partial) <= 1 or partial <= _LINEAR


class ReshardPlanner:
    """Cheapest paths on one mesh, memoised per (shape, item size, source).

    Cheapest by seconds, then by peak bytes, then by placements; so the same input always gives the same path.

    Parameters
    ----------
    links
        Link of each mesh axis.
    mesh
        Size of each mesh axis.
    memory_bandwidth
        Bytes/s, read plus written, of a local copy.
    launch_seconds
        Overhead of each collective and of each local copy.
    known
        Costs that were measured, if any.
    """

    def __init__(
        self,
        links: Sequence[LinkSpec],
        mesh: Sequence[int],
        memory_bandwidth: float,
        launch_seconds: float,
        known: KnownCosts | None = None,
    ) -> None:
        if len(links) != len(mesh):
            raise ValueError(f"{len(links)} links for a mesh of {len(mesh)} axes: give one link per axis")
        self.links = tuple(links)
        self.mesh = tuple(mesh)
        self.memory_bandwidth = memory_bandwidth
        self.launch_seconds = launch_seconds
        self.known = known
        self._trees: dict[tuple[tuple[int, ...], int, Placement], dict[Placement, ReshardPath]] = {}
        self._moves: dict[tuple[tuple[int, ...], int, Placement, bool], tuple[_Move, ...]] = {}
        self._tables: dict[object, tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]] = {}

    def path(
        self,
        shape: Sequence[int],
        item_bytes: int,
        source: Placement,
        target: Placement,
        order: Sequence[int] | None = None,
    ) -> ReshardPath | None:
        """Cheapest path between two placements of a global tensor.

        Parameters
        ----------
        shape
            Global shape.
        item_bytes
            Bytes per element.
        source, target
            Placements, one entry per mesh axis.
        order
            Dimensions from the outermost to the innermost in memory; None: as they are numbered.

        Returns
        -------
        ReshardPath or None
            None where no path exists: the target is partial where the source is not equally so, it newly
            shards a dimension on an axis of one rank, a dimension does not divide, or the source's pending
            reductions do not commute.
        """
        if order is None or tuple(order) == tuple(range(len(shape))):
            return self.paths(tuple(shape), item_bytes, source).get(target)
        lying = tuple(shape[dim] for dim in order)
        found = self.paths(lying, item_bytes, reordered(source, order)).get(reordered(target, order))
        if found is None:
            return None
        return replace(found, placements=tuple(restored(placement, order) for placement in found.placements))

    def tables(
        self, shape: Sequence[int], item_bytes: int, sources: Sequence[Placement], targets: Sequence[Placement]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """Cost and memory of every (source, target) pair.

        Returns
        -------
        seconds
            (sources, targets), inf where there is no path.
        target_bytes
            (targets,), local bytes of the target.
        peak_bytes
            (sources, targets), see :class:`ReshardPath`; 0 where there is no path.

        Notes
        -----
        The arrays are shared between calls and read-only.
        """
        key = (tuple(shape), item_bytes, tuple(sources), tuple(targets))
        if key not in self._tables:
            self._tables[key] = self._build_tables(*key)
        return self._tables[key]

    def step_seconds(
        self, shape: Sequence[int], item_bytes: int, source: Placement, target: Placement, *, owned: bool = False
    ) -> float:
        """Seconds of the single step from ``source`` to ``target``; ``owned`` if it is not the first of a path.

        Raises
        ------
        ValueError
            It is not a step.
        """
        modelled = self.modelled_step_seconds(shape, item_bytes, source, target, owned=owned)
        if self.known is None:
            return modelled
        kind, signature = self.step_signature(self.known, shape, item_bytes, source, target, owned=owned)
        return self.known.seconds(kind, signature, modelled)

    def step_signature(
        self,
        known: KnownCosts,
        shape: Sequence[int],
        item_bytes: int,
        source: Placement,
        target: Placement,
        *,
        owned: bool = False,
    ) -> tuple[str, str]:
        """Kind and signature of a single step among ``known`` costs; arguments as for :meth:`step_seconds`."""
        step = step_of(shape, self.mesh, source, target)
        assert step is not None, f"{source} -> {target} is not one collective"
        before = local_numel(shape, source, self.mesh) * item_bytes
        after = local_numel(shape, target, self.mesh) * item_bytes
        return self._signature(known, step, before, after, owned=owned)

    def _signature(
        self, known: KnownCosts, step: Step, before: int, after: int, *, owned: bool = False
    ) -> tuple[str, str]:
        dims = [
            ("-" if dim is None else "first" if dim == 0 else "later") for dim in (step.source_dim, step.target_dim)
        ]
        own = ["in place"] * (owned and step.collective is Collective.ALL_REDUCE)
        kind = "local slice" if step.collective is None else str(step.collective)
        return kind, known.signature((f"of {self.mesh[step.axis]}", before, "->", after, *dims, *own))

    def modelled_step_seconds(
        self, shape: Sequence[int], item_bytes: int, source: Placement, target: Placement, *, owned: bool = False
    ) -> float:
        """Seconds of a single step by the rates of the links alone; arguments as for :meth:`step_seconds`."""
        step = step_of(shape, self.mesh, source, target)
        if step is None:
            raise ValueError(f"{source} -> {target} is not one collective")
        before = local_numel(shape, source, self.mesh) * item_bytes
        after = local_numel(shape, target, self.mesh) * item_bytes
        return self._modelled_seconds(step, before, after, owned=owned)

    def _modelled_seconds(self, step: Step, before: int, after: int, *, owned: bool = False) -> float:
        seconds = sum(map(self.copy_seconds, step_copies(step, before, after, owned=owned)))
        if step.collective is not None:
            ranks, larger = self.mesh[step.axis], max(before, after)
            seconds += self.links[step.axis].collective_seconds(step.collective, ranks, larger) + self.launch_seconds
        return seconds

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds of a local copy of so many bytes."""
        return 2 * nbytes / self.memory_bandwidth + self.launch_seconds

    def flat_part(self, step: Step, before: int, after: int) -> tuple[str, str, float]:
        """Kind, signature and modelled seconds of a step from one flat buffer to another.

        Parameters
        ----------
        step
            A gather or a reduction; an all-reduce is done in place.
        before, after
            Bytes of the buffers.
        """
        flat = _flat(step)
        seconds = self._modelled_seconds(flat, before, after, owned=True)
        kind, signature = str(step.collective), ""
        if self.known is not None:
            kind, signature = self._signature(self.known, flat, before, after, owned=True)
        return kind, signature, seconds

    def flat_seconds(self, step: Step, before: int, after: int) -> float:
        """Seconds of a step from one flat buffer to another; arguments as for :meth:`flat_part`."""
        kind, signature, seconds = self.flat_part(step, before, after)
        return seconds if self.known is None else self.known.seconds(kind, signature, seconds)

    def least_seconds(self, step: Step, before: int, after: int) -> float:
        """Least share in the time of a flat collective, however large, of a part whose local tensors have these bytes.

        Parameters
        ----------
        step
            A gather or a reduction.
        before, after
            Bytes of the part's local tensors.
        """
        assert step.collective is not None, "a local slice has no share in a collective"
        ranks, larger = self.mesh[step.axis], max(before, after)
        seconds = self.links[step.axis].transfer_seconds(step.collective, ranks, larger)
        if self.known is None:
            return seconds
        kind, _, modelled = self.flat_part(step, before, after)
        return seconds * self.known.least_ratio(kind, modelled)

    def _build_tables(
        self, shape: tuple[int, ...], item_bytes: int, sources: tuple[Placement, ...], targets: tuple[Placement, ...]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        seconds = np.full((len(sources), len(targets)), inf)
        peak_bytes = np.zeros((len(sources), len(targets)), dtype=np.int64)
        sizes = [local_numel(shape, p, self.mesh) if divides(shape, p, self.mesh) else 0 for p in targets]
        target_bytes = np.array(sizes, dtype=np.int64) * item_bytes
        for row, source in enumerate(sources):
            tree = self.paths(shape, item_bytes, source)
            for column, target in enumerate(targets):
                found = tree.get(target)
                if found is not None:
                    seconds[row, column] = found.seconds
                    peak_bytes[row, column] = found.peak_bytes
        for array in (seconds, target_bytes, peak_bytes):
            array.setflags(write=False)
        return seconds, target_bytes, peak_bytes

    def paths(self, shape: tuple[int, ...], item_bytes: int, source: Placement) -> Mapping[Placement, ReshardPath]:
        """Cheapest paths from one placement to every other; ``shape`` is in memory order, outermost first."""
        key = (shape, item_bytes, source)
        if key not in self._trees:
            self._trees[key] = self._shortest_paths(shape, item_bytes, source)
        return self._trees[key]

    def _shortest_paths(
        self, shape: tuple[int, ...], item_bytes: int, source: Placement
    ) -> dict[Placement, ReshardPath]:
        """Dijkstra over placements; time in integer picoseconds, so that equal sums compare equal."""
        done: dict[Placement, ReshardPath] = {}
        if not divides(shape, source, self.mesh) or not reductions_commute(source):
            return done
        heap: list[tuple[int, int, tuple[Placement, ...], int]] = [(0, 0, (source,), 0)]
        while heap:
            ticks, peak, path, first = heappop(heap)
            current = path[-1]
            if current in done:
                continue
            done[current] = ReshardPath(path, ticks / _TICKS_PER_SECOND, first, peak)
            owned = len(path) > 1
            alive = local_numel(shape, current, self.mesh) * item_bytes if owned else 0
            for move in self._moves_from(shape, item_bytes, current, owned):
                if move.target not in done:
                    here = max(peak, alive + move.peak_bytes)
                    heappush(heap, (ticks + move.ticks, here, (*path, move.target), first if owned else here))
        return done

    def _moves_from(self, shape: tuple[int, ...], item_bytes: int, source: Placement, owned: bool) -> tuple[_Move, ...]:
        """Steps that leave a placement, priced once for the paths of all sources."""
        key = (shape, item_bytes, source, owned)
        if key not in self._moves:
            before = local_numel(shape, source, self.mesh) * item_bytes
            moves = []
            for target, step in self._steps_from(shape, source):
                after = local_numel(shape, target, self.mesh) * item_bytes
                seconds = self.step_seconds(shape, item_bytes, source, target, owned=owned)
                peak_bytes = step_peak_bytes(step, before, after, owned=owned)
                moves.append(_Move(target, round(seconds * _TICKS_PER_SECOND), peak_bytes))
            self._moves[key] = tuple(moves)
        return self._moves[key]

    def _steps_from(self, shape: tuple[int, ...], source: Placement) -> Iterator[tuple[Placement, Step]]:
        choices = (REPLICATE, *(shard(dim) for dim in range(len(shape))))
        for axis, size in enumerate(self.mesh):
            # On an axis of one rank every placement is R.
            for entry in choices if size > 1 else choices[:1]:
                target = (*source[:axis], entry, *source[axis + 1 :])
                if divides(shape, target, self.mesh):
                    step = step_of(shape, self.mesh, source, target)
                    if step is not None:
                        yield target, step

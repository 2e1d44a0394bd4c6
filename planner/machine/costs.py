"""Predicted seconds of operators, collectives and optimizer steps on a cluster.

An operator is a roofline (Williams, Waterman, Patterson 2009) on its local tensors: the longer of
``local FLOP / FLOP per second`` and ``local bytes / bytes per second``, plus the launch, the
allocation of large results where the device prices it, and the collectives inside the strategy.
Rates differ per class of operator (:mod:`planner.graph.operator_classes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.graph.operator_classes import ARITHMETIC, OperatorClass, memory_passes, operator_class, operator_name
from planner.graph.operator_graph import ITEM_BYTES, Operator, OperatorGraph, TensorSpec
from planner.graph.operator_workspaces import attention_shapes
from planner.graph.optimizers import optimizer_named
from planner.graph.placement import REPLICATE, Placement, local_numel, local_shape
from planner.machine.cluster import ClusterSpec, Collective
from planner.machine.known_costs import KnownCosts, local_signature
from planner.machine.resharding import ReshardPlanner

_FLOATING = ("float64", "float32", "float16", "bfloat16")
_UNALIGNED, _ALIGNED_BYTES = "unaligned", 16
"""Key of products on CUDA with a tensor whose rows are not so many bytes apart, which other kernels compute."""


class InnerCollective(Protocol):
    """A collective inside a strategy; ``nbytes`` as in :meth:`LinkSpec.collective_seconds`."""

    @property
    def axis(self) -> int:
        """Mesh axis."""

    @property
    def kind(self) -> str:
        """Value of a :class:`Collective`."""

    @property
    def nbytes(self) -> int:
        """Bytes on one rank."""


class StrategyLike(Protocol):
    """Attributes of a strategy that the cost model reads."""

    @property
    def outputs(self) -> tuple[Placement | None, ...]:
        """Placement per returned tensor, None where the operator returns none there."""

    @property
    def inputs(self) -> tuple[Placement, ...]:
        """Placement per tensor argument."""

    @property
    def collectives(self) -> Sequence[InnerCollective]:
        """Collectives that the operator itself runs under this strategy."""


class CostModel:
    """Costs on one mesh of one cluster, memoised by operator target and shapes.

    Parameters
    ----------
    cluster
        The cluster.
    mesh
        Size of each mesh axis.
    micro_batches
        Of a step. Costs are those of one micro-batch, with its share of the update and its part of the sum of
        gradients.

    Attributes
    ----------
    device, links, host_link
        Device, per-axis link and link to the host's memory as a rank of this mesh finds them.
    host_copies
        How copies over the host link run.
    overlap
        What computation and collectives that run at once take from each other.
    device_kind
        As :attr:`ClusterSpec.device_kind`.
    known
        Costs of single instructions that were measured with as many processes.
    resharding
        Paths between placements on this mesh.

    Raises
    ------
    ClusterError
        The mesh does not fit on the cluster.
    """

    def __init__(self, cluster: ClusterSpec, mesh: Sequence[int], micro_batches: int = 1) -> None:
        self.mesh, self._micro_batches = tuple(mesh), micro_batches
        self.device = cluster.device_for(self.mesh)
        self.links = cluster.mesh_links(self.mesh)
        self.host_link = cluster.host_link_for(self.mesh)
        self.host_copies = cluster.host_copies
        self.overlap = cluster.overlap
        self.device_kind = cluster.device_kind
        self.known = KnownCosts(cluster.costs, prod(self.mesh))
        self.resharding = ReshardPlanner(
            self.links,
            self.mesh,
            self.bandwidth_of(OperatorClass.COPY),
            self.device.launch_seconds,
            self.known,
        )
        self._memo: dict[object, NDArray[np.float64]] = {}

    def bandwidth_of(self, kind: OperatorClass, name: str = "") -> float:
        """Bytes/s, read plus written, of the operator of this ATen name, else of its class."""
        known = self.device.bandwidth_by_class
        return known.get(name) or known.get(kind.value) or self.device.memory_bandwidth

    def flops_of(self, kind: OperatorClass, dtype: str, kernel: str = "") -> float:
        """FLOP/s that a kernel of this class, or the one of this name, reaches in ``dtype``."""
        known = self.device.efficiency
        return self.device.flops_of(dtype) * known.get(f"{kernel}_{kind.value}", known.get(kind.value, 1.0))

    def operator_seconds(
        self, graph: OperatorGraph, operator: Operator, strategies: Sequence[StrategyLike]
    ) -> NDArray[np.float64]:
        """Seconds of one execution of an operator under each strategy.

        Parameters
        ----------
        graph, operator
            The operator and the graph that holds its tensors.
        strategies
            Its strategies; every placement divides its tensor.

        Returns
        -------
        ndarray
            (strategies,), read-only. Views cost 0.
        """
        inputs, outputs = _specs(graph, operator)
        key = (operator.target, operator.is_view, operator.flops, inputs, outputs, tuple(strategies))
        if key not in self._memo:
            seconds = (
                np.zeros(len(strategies))
                if operator.is_view
                else self._known_or_roofline(operator.target, operator.flops, inputs, outputs, strategies)
            )
            seconds.setflags(write=False)
            self._memo[key] = seconds
        return self._memo[key]

    def update_seconds(self, numel_local: int, dtype: str, gradient: str, optimizer: str) -> float:
        """Seconds of the optimizer step of one parameter on one rank; of several micro-batches each has its share.

        Parameters
        ----------
        numel_local
            Elements of the parameter on the rank.
        dtype, gradient
            Dtype of the parameter and of its gradient.
        optimizer
            A name of :data:`planner.graph.optimizers.OPTIMIZERS`.

        Raises
        ------
        ValueError
            Unknown optimizer.
        """
        modelled = self.modelled_update_seconds(numel_local, dtype, gradient, optimizer)
        seconds = self.known.seconds(optimizer, self.update_signature(numel_local, dtype, gradient), modelled)
        if self._micro_batches == 1:
            return seconds
        item_bytes = optimizer_named(optimizer, self._micro_batches).state(dtype).item_bytes
        moved = numel_local * (2 * item_bytes + ITEM_BYTES[gradient])  # the sum is read and written, the gradient read
        added = moved / self.bandwidth_of(OperatorClass.OPTIMIZER, optimizer) + self.device.launch_seconds
        return seconds / self._micro_batches + added

    def modelled_operator_seconds(self, graph: OperatorGraph, operator: Operator, strategy: StrategyLike) -> float:
        """Seconds of one execution of an operator by the rates of the cluster alone."""
        inputs, outputs = _specs(graph, operator)
        return float(self._roofline(operator.target, operator.flops, inputs, outputs, (strategy,))[0])

    def update_signature(self, numel_local: int, dtype: str, gradient: str) -> str:
        """Signature of the optimizer step of one parameter."""
        by = () if gradient == dtype else (f"by {gradient}",)
        return self.known.signature((f"{dtype}[{numel_local}]", *by))

    def operator_signature(self, graph: OperatorGraph, operator: Operator, strategy: StrategyLike) -> str:
        """Signature of one execution of an operator under a strategy."""
        inputs, outputs = _specs(graph, operator)
        return self._signature(operator.flops, inputs, outputs, strategy)

    def _signature(
        self,
        flops: int,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec | None, ...],
        strategy: StrategyLike,
    ) -> str:
        read = [local_signature(spec, at, self.mesh) for spec, at in zip(inputs, strategy.inputs, strict=True)]
        written = [
            "-" if spec is None or at is None else local_signature(spec, at, self.mesh)
            for spec, at in zip(outputs, strategy.outputs, strict=True)
        ]
        inside = [f"{inner.kind} of {self.mesh[inner.axis]} {inner.nbytes}" for inner in strategy.collectives]
        return self.known.signature([*read, "->", *written, f"{flops / self._parts(strategy):.0f} FLOP", *inside])

    def modelled_update_seconds(self, numel_local: int, dtype: str, gradient: str, optimizer: str) -> float:
        """Seconds of an update by the rates of the cluster alone; arguments as for :meth:`update_seconds`."""
        spec = optimizer_named(optimizer)
        seconds = spec.moved_bytes(dtype, numel_local, gradient) / self.bandwidth_of(OperatorClass.OPTIMIZER, optimizer)
        return seconds + self.device.launch_seconds

    def _known_or_roofline(
        self,
        target: str,
        flops: int,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec | None, ...],
        strategies: Sequence[StrategyLike],
    ) -> NDArray[np.float64]:
        modelled = self._roofline(target, flops, inputs, outputs, strategies)
        if not self.known.covers(target):
            return modelled
        return np.array(
            [
                self.known.seconds(target, self._signature(flops, inputs, outputs, strategy), seconds)
                for strategy, seconds in zip(strategies, modelled.tolist(), strict=True)
            ]
        )

    def _roofline(
        self,
        target: str,
        flops: int,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec | None, ...],
        strategies: Sequence[StrategyLike],
    ) -> NDArray[np.float64]:
        kind = operator_class(target)
        reads_inputs, output_passes = memory_passes(kind)
        moved = np.zeros(len(strategies))
        for position, spec in enumerate(inputs):
            if reads_inputs or spec.dtype not in _FLOATING:
                moved += self._local_bytes(spec, [strategy.inputs[position] for strategy in strategies])
        for position, output in enumerate(outputs):
            if output is not None:
                placements = [strategy.outputs[position] for strategy in strategies]
                written = self._local_bytes(output, placements)
                moved += output_passes * written
        seconds = moved / self.bandwidth_of(kind, operator_name(target))
        if flops:
            shapes = attention_shapes(target, inputs) if self.device_kind == "cuda" else None
            kernel = "" if shapes is None else shapes.kernel().value
            dtype = _arithmetic_dtype(inputs, outputs)
            rate = self.flops_of(kind, dtype, kernel) if kind in ARITHMETIC else self.device.flops_of("float32")
            rates = np.full(len(strategies), rate)
            slower = self.flops_of(kind, dtype, _UNALIGNED)
            if kind is OperatorClass.MATMUL and slower != rate:
                rates[[self._unaligned(strategy, inputs, outputs) for strategy in strategies]] = slower
            parts = np.array([self._parts(strategy) for strategy in strategies], dtype=np.float64)
            seconds = np.maximum(seconds, flops / parts / rates)
        inside = np.array([self._collective_seconds(strategy) for strategy in strategies], dtype=np.float64)
        return np.asarray(seconds + inside + self.device.launch_seconds, dtype=np.float64)

    def _unaligned(
        self, strategy: StrategyLike, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec | None, ...]
    ) -> bool:
        """Whether rows of a matrix of this rank begin where kernels of 16 bits cannot read them at once."""
        placed = zip((*inputs, *outputs), (*strategy.inputs, *strategy.outputs), strict=True)
        rows = [
            local_shape(spec.shape, placement, self.mesh)[spec.memory_order[-1]] * spec.item_bytes
            for spec, placement in placed
            if spec is not None and placement is not None and len(spec.shape) > 1 and spec.item_bytes == 2
        ]
        return any(size % _ALIGNED_BYTES for size in rows)

    def _local_bytes(self, spec: TensorSpec, placements: Sequence[Placement | None]) -> NDArray[np.float64]:
        sizes = {
            placement: 0 if placement is None else local_numel(spec.shape, placement, self.mesh) * spec.item_bytes
            for placement in set(placements)
        }
        return np.array([sizes[placement] for placement in placements], dtype=np.float64)

    def _parts(self, strategy: StrategyLike) -> int:
        """Ranks that share the arithmetic: an axis on which nothing is sharded or partial repeats it."""
        placements = [placement for placement in (*strategy.inputs, *strategy.outputs) if placement is not None]
        return prod(
            size for axis, size in enumerate(self.mesh) if any(placement[axis] != REPLICATE for placement in placements)
        )

    def _collective_seconds(self, strategy: StrategyLike) -> float:
        return sum(
            self.links[inner.axis].collective_seconds(Collective(inner.kind), self.mesh[inner.axis], inner.nbytes)
            + self.device.launch_seconds
            for inner in strategy.collectives
        )


def _specs(graph: OperatorGraph, operator: Operator) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec | None, ...]]:
    """Tensors that an operator reads and returns; None where it returns none."""
    inputs = tuple(graph.values[value].spec for value in operator.inputs)
    return inputs, tuple(None if value is None else graph.values[value].spec for value in operator.outputs)


def to_quanta(seconds: ArrayLike) -> NDArray[np.int64]:
    """Seconds as whole nanoseconds, rounded up; shape as given.

    Raises
    ------
    ValueError
        A time is negative or not finite: forbidden entries are flags, never large numbers.
    """
    array = np.asarray(seconds, dtype=np.float64)
    if not np.all(np.isfinite(array)) or np.any(array < 0):
        raise ValueError("seconds must be finite and not negative: mask forbidden entries before counting quanta")
    # A millionth of a quantum is rounding noise of the division, not time.
    return np.asarray(np.ceil(np.round(array * 1e9, 6)), dtype=np.int64)


def _arithmetic_dtype(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec | None]) -> str:
    """Dtype that the arithmetic runs in: the first floating-point input's, else output's."""
    for spec in (*inputs, *outputs):
        if spec is not None and spec.dtype in _FLOATING:
            return spec.dtype
    return "float32"

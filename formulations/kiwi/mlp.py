"""The multilayer perceptron of KIWI's Table 1: 7 layers, 26 operators, one mesh axis.

The paper gives neither its sizes nor its cost tables, so costs come from a plain model of roofline and
alpha-beta terms on devices like its V100s in single precision, and only ratios can be compared. Operators:
7 fused linear layers with activation (the last one with the loss, so that its output is the first gradient);
backward per layer a weight gradient, and below the top one an input gradient and the activation's mask.

Every tensor is a matrix in one of three layouts: replicated, or split over the devices by rows or columns. A
product is computed whole on every device, or split along one of its three dimensions; split along the dimension that
is summed over, it ends with an all-reduce or a reduce-scatter. Weight gradients are brought to the layout of their
weights and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil

import numpy as np

from formulations.kiwi.graph import KiwiEdge, KiwiGraph, KiwiOperator
from formulations.problem.strategy_problem import IntArray
from formulations.step.training_step import NodeKind

SECONDS_PER_COST = 1e-7
WIDTHS = (2048, 4096, 3072, 4096, 2048, 4096, 3072, 1024)


class Layout(IntEnum):
    """How a matrix lies on the devices."""

    REPLICATED = 0
    ROWS = 1
    COLUMNS = 2


@dataclass(frozen=True, slots=True)
class MlpInstance:
    """Sizes and hardware of the instance.

    Parameters
    ----------
    devices
        Devices along the mesh axis.
    bandwidth
        Bytes per second of a link; slow by default, as between nodes, because with fast links everything is split
        at hardly any cost and a fifth of the peak does not exist.
    latency
        Seconds of one step of a collective.
    batch
        Rows of the input.
    widths
        Columns of the input, and outputs of every layer.
    element_bytes
        Bytes of a number.
    flops
        Floating point operations per second of one device.
    memory_bandwidth
        Bytes per second of one device's memory.
    launch
        Seconds of starting an operator.
    """

    devices: int = 8
    bandwidth: float = 1e9
    latency: float = 8e-6
    batch: int = 8192
    widths: tuple[int, ...] = WIDTHS
    element_bytes: int = 4
    flops: float = 15e12
    memory_bandwidth: float = 800e9
    launch: float = 4e-6

    def __str__(self) -> str:
        return (
            f"multilayer perceptron, {len(self.widths) - 1} layers, widths {'-'.join(map(str, self.widths))}, batch "
            f"{self.batch}, {self.element_bytes} bytes a number, {self.devices} devices, links of "
            f"{self.bandwidth / 1e9:g} GB/s and {self.latency * 1e6:g} us, {self.flops / 1e12:g} TFLOP/s, memory of "
            f"{self.memory_bandwidth / 1e9:g} GB/s"
        )

    def graph(self) -> KiwiGraph:
        """Build the instance.

        Raises
        ------
        ValueError
            If there are fewer than two devices or layers.
        """
        if self.devices < 2 or len(self.widths) < 3:
            raise ValueError(f"{self}: give at least two devices and two layers")
        return _MlpBuilder(self).build()


@dataclass(frozen=True, slots=True)
class _Strategy:
    """Seconds, the layout of the output, and the layouts of the inputs."""

    seconds: float
    output: Layout
    inputs: tuple[Layout, ...]


@dataclass(slots=True)
class _Tensor:
    """An operator with its output's shape, its strategies and what it reads."""

    name: str
    kind: NodeKind
    shape: tuple[int, int]
    strategies: list[_Strategy]
    inputs: list[_Tensor] = field(default_factory=list)
    gradient_of: _Tensor | None = None
    position: int = -1


class _MlpBuilder:
    """Makes tensors in order of execution; residents are put first at the end."""

    def __init__(self, instance: MlpInstance) -> None:
        self.instance = instance
        self.residents: list[_Tensor] = []
        self.operators: list[_Tensor] = []

    def build(self) -> KiwiGraph:
        batch, widths = self.instance.batch, self.instance.widths
        layers = range(len(widths) - 1)
        values = [self.resident("x", NodeKind.INPUT, (batch, widths[0]))]
        weights = [self.resident(f"W{k}", NodeKind.PARAMETER, (widths[k], widths[k + 1])) for k in layers]
        for k in layers:
            sizes = {"b": batch, "i": widths[k], "o": widths[k + 1]}
            values.append(self.product(f"linear{k}", NodeKind.FORWARD, [values[k], weights[k]], "bi,io->bo", sizes))
        gradient = values[-1]
        for k in reversed(layers):
            sizes = {"b": batch, "i": widths[k], "o": widths[k + 1]}
            made = self.product(f"dW{k}", NodeKind.BACKWARD, [values[k], gradient], "bi,bo->io", sizes)
            made.gradient_of = weights[k]
            if k:
                below = self.product(f"dh{k}", NodeKind.BACKWARD, [gradient, weights[k]], "bo,io->bi", sizes)
                gradient = self.elementwise(f"dz{k}", NodeKind.BACKWARD, [below, values[k]])
        return self.assemble()

    def resident(self, name: str, kind: NodeKind, shape: tuple[int, int]) -> _Tensor:
        """Add an input or a parameter in any layout."""
        self.residents.append(_Tensor(name, kind, shape, [_Strategy(0.0, layout, ()) for layout in Layout]))
        return self.residents[-1]

    def elementwise(self, name: str, kind: NodeKind, inputs: list[_Tensor]) -> _Tensor:
        """Add an operator that is bound by memory and wants its inputs as its output lies."""
        shape = inputs[0].shape
        seconds = (len(inputs) + 1) * self.bytes_of(shape) / self.instance.memory_bandwidth
        strategies = [
            _Strategy(self.instance.launch + seconds / self.parts(layout), layout, tuple(layout for _ in inputs))
            for layout in Layout
        ]
        self.operators.append(_Tensor(name, kind, shape, strategies, inputs))
        return self.operators[-1]

    def product(
        self, name: str, kind: NodeKind, inputs: list[_Tensor], subscripts: str, sizes: dict[str, int]
    ) -> _Tensor:
        """Add a matrix product, whole or split along one of its dimensions."""
        left, right, output = subscripts.replace("->", ",").split(",")
        shape = sizes[output[0]], sizes[output[1]]
        whole = 2 * sizes["b"] * sizes["i"] * sizes["o"] / self.instance.flops
        everywhere = _Strategy(self.instance.launch + whole, Layout.REPLICATED, (Layout.REPLICATED, Layout.REPLICATED))
        strategies = [everywhere]
        for letter in sorted(sizes):
            wanted = _split(left, letter), _split(right, letter)
            seconds = self.instance.launch + whole / self.instance.devices
            if letter in output:
                strategies.append(_Strategy(seconds, _split(output, letter), wanted))
                continue
            amount = self.bytes_of(shape)
            for layout in Layout:
                reduction = self.gather(amount) * (2 if layout is Layout.REPLICATED else 1)
                strategies.append(_Strategy(seconds + reduction, layout, wanted))
        self.operators.append(_Tensor(name, kind, shape, strategies, inputs))
        return self.operators[-1]

    def assemble(self) -> KiwiGraph:
        """Number everything, residents first, and make the edges."""
        tensors = [*self.residents, *self.operators]
        for position, tensor in enumerate(tensors):
            tensor.position = position
        edges = []
        for tensor in tensors:
            for slot, source in enumerate(tensor.inputs):
                wanted = [strategy.inputs[slot] for strategy in tensor.strategies]
                lies = [strategy.output for strategy in source.strategies]
                table = [[self.reshard(source.shape, a, b) for b in wanted] for a in lies]
                edges.append(KiwiEdge(source.position, tensor.position, _quanta(table)))
            if tensor.gradient_of is not None:
                wanted = [strategy.output for strategy in tensor.gradient_of.strategies]
                lies = [strategy.output for strategy in tensor.strategies]
                table = [[self.reshard(tensor.shape, b, a) for b in lies] for a in wanted]
                edges.append(KiwiEdge(tensor.gradient_of.position, tensor.position, _quanta(table)))
        operators = tuple(
            KiwiOperator(
                tensor.name,
                tensor.kind,
                _quanta([strategy.seconds for strategy in tensor.strategies]),
                np.array([self.local_bytes(tensor.shape, s.output) for s in tensor.strategies], dtype=np.int64),
                stays=tensor.gradient_of is not None,
            )
            for tensor in tensors
        )
        return KiwiGraph(f"mlp-{len(self.instance.widths) - 1}", operators, tuple(edges), SECONDS_PER_COST)

    # ------------------------------------------------------------- hardware

    def parts(self, layout: Layout) -> int:
        """Parts that a matrix is split into."""
        return 1 if layout is Layout.REPLICATED else self.instance.devices

    def bytes_of(self, shape: tuple[int, int]) -> int:
        """Bytes of a whole matrix."""
        return shape[0] * shape[1] * self.instance.element_bytes

    def local_bytes(self, shape: tuple[int, int], layout: Layout) -> int:
        """Bytes on one device."""
        return ceil(self.bytes_of(shape) / self.parts(layout))

    def gather(self, amount: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``amount`` bytes in a ring."""
        others = self.instance.devices - 1
        return others * (self.instance.latency + amount / self.instance.devices / self.instance.bandwidth)

    def reshard(self, shape: tuple[int, int], source: Layout, target: Layout) -> float:
        """Seconds to bring a matrix to another layout."""
        if source in (target, Layout.REPLICATED):
            return 0.0
        amount = self.bytes_of(shape)
        if target is Layout.REPLICATED:
            return self.gather(amount)
        others, devices = self.instance.devices - 1, self.instance.devices
        return others * (self.instance.latency + amount / devices**2 / self.instance.bandwidth)


def _split(letters: str, letter: str) -> Layout:
    """Layout of a matrix whose dimensions are named, split along one of them."""
    return Layout(1 + letters.index(letter)) if letter in letters else Layout.REPLICATED


def _quanta(seconds: Sequence[float] | Sequence[Sequence[float]]) -> IntArray:
    return np.rint(np.array(seconds) / SECONDS_PER_COST).astype(np.int64)

r"""H3T: seven switches for every layer of a model trained by sharded data parallelism (Wang et al., NeurIPS 2023).

Each device holds a shard of every layer's parameters; a layer's parameters are gathered before it runs, its gradient is
reduced and scattered behind it, and gradients and optimizer states wait in host memory. Seven switches of each layer
trade memory for time (:class:`~formulations.h3t.operations.Switch`). Equation (3) asks for the sequence
:math:`s_1, \dots, s_N` of sets of switches with the least time of a step under a memory limit, both given by a
simulator (:func:`simulate`).

Where every segment synchronizes, the step is a sum. Forward segment ``i`` depends on :math:`s_i` and on whether layer
``i + 1`` prefetches lazily, backward segment ``i`` on :math:`s_i` and on three switches :math:`r_{i-1}` of the layer
before. Between its two segments a layer keeps :math:`\Delta_i(s_i)` bytes, and :math:`\rho_i(s_i)` all the time. So

.. math::

    T = \sum_{i=0}^{N} f_i(s_i, s_{i+1}) + \sum_{i=0}^{N+1} b_i(s_i, s_{i-1}) + \sum_i l_i(s_i) + T_0, \qquad
    M = M_0 + \sum_i \rho_i + \max_{x} \Bigl(\sum_{j \prec x} \Delta_j + m_x\Bigr)

over segments ``x`` with peaks ``m_x`` of their own, where :math:`j \prec x` are the layers below that of ``x``. Layers
0 and N + 1 are the borders, :math:`l_i` reloads a resident shard behind the optimizer. These tables are in
:mod:`formulations.h3t.segments`, the canonical problem in :mod:`formulations.h3t.canonical`.

What the paper leaves open, and what is done here:

- The order of operations is that of :mod:`formulations.h3t.operations`, borders included.
- The optimizer is part of the calculation stream in words and runs on the CPU in fact: :class:`Optimizer`.
- Embedding and loss are no layers: they take fixed time, and memory at fixed moments.
- A resident shard takes memory all the time; it is loaded behind the optimizer, outside of segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np

from formulations.h3t.operations import SETS, Operation, Switch, Tensor
from formulations.h3t.simulator import simulate_runs
from formulations.problem.strategy_problem import IntArray

__all__ = ["H3tBorders", "H3tError", "H3tLayer", "H3tStep", "Optimizer", "Outcome", "simulate", "simulate_sequences"]


class H3tError(ValueError):
    """A layer, a machine or a sequence that makes no sense; the message names it and the remedy."""


class Optimizer(StrEnum):
    """How the optimizer's time counts.

    OVERLAPPED: it updates a layer as soon as that layer's gradient is in host memory, in a stream of its own.
    AT_THE_END: it updates all layers behind the step's last segment, as the paper's calculation stream.
    LEFT_OUT: not at all.
    """

    OVERLAPPED = "overlapped"
    AT_THE_END = "at_the_end"
    LEFT_OUT = "left_out"


def _check_numbers(owner: str, part: H3tLayer | H3tBorders) -> None:
    for field in fields(part):
        value = getattr(part, field.name)
        if value < 0:
            raise H3tError(f"{owner}: {field.name} is {value}; bytes and quanta must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class H3tLayer:
    """One layer on one device: bytes, and quanta of its operations.

    Parameters
    ----------
    parameter_bytes, shard_bytes
        Of all parameters and of this device's part; gradients are as large.
    hidden_bytes
        Of the input; its gradient is as large.
    activation_bytes
        What forward leaves for backward.
    forward_bytes, backward_bytes
        What is there besides while forward and backward run.
    forward, backward
        Computation; forward again, for rematerialization, takes as long. At least one quantum.
    gather, scatter
        All-gather of the parameters, reduce-scatter of their gradient.
    hidden_copy, shard_copy
        Copies of the input, and of a shard, between device and host, in either direction.
    update
        The optimizer's work on the shard.

    Raises
    ------
    H3tError
        If a number is negative, or computation takes no time.
    """

    parameter_bytes: int
    shard_bytes: int
    hidden_bytes: int
    activation_bytes: int
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward: int
    backward: int
    gather: int
    scatter: int
    hidden_copy: int
    shard_copy: int
    update: int = 0

    def __post_init__(self) -> None:
        _check_numbers("layer", self)
        if not (self.forward and self.backward):
            raise H3tError(
                f"layer: forward takes {self.forward} and backward {self.backward} quanta; computation takes one at "
                "least, use a shorter quantum"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class H3tBorders:
    """Embedding and loss, which have no switches.

    Parameters
    ----------
    fixed_bytes
        What they hold during the whole step.
    output_bytes
        The last layer's output; its gradient is as large.
    embedding_bytes, loss_bytes
        What is there besides while the embedding's forward, and the loss with its gradient, run.
    embedding_forward, embedding_backward, loss
        Quanta.

    Raises
    ------
    H3tError
        If a number is negative.
    """

    fixed_bytes: int = 0
    output_bytes: int = 0
    embedding_bytes: int = 0
    loss_bytes: int = 0
    embedding_forward: int = 0
    embedding_backward: int = 0
    loss: int = 0

    def __post_init__(self) -> None:
        _check_numbers("borders", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class H3tStep:
    """A training step whose switches are to be chosen.

    Parameters
    ----------
    layers
        In the order in which they run.
    borders
        What is around them.
    device_link
        Whether communication between devices has a link of its own, beside the one to the host.
    memory_limit
        Bytes on one device.
    optimizer
        How its time counts.

    Raises
    ------
    H3tError
        If there is no layer, or the limit is negative.
    """

    layers: tuple[H3tLayer, ...]
    borders: H3tBorders
    device_link: bool
    memory_limit: int
    optimizer: Optimizer = Optimizer.OVERLAPPED

    def __post_init__(self) -> None:
        if not self.layers:
            raise H3tError("a step needs at least one layer, got none")
        if self.memory_limit < 0:
            raise H3tError(f"memory limit {self.memory_limit} is negative; give bytes")

    @property
    def final_cost(self) -> int:
        """Quanta behind the last segment, whatever the switches."""
        return sum(layer.update for layer in self.layers) if self.optimizer is Optimizer.AT_THE_END else 0

    def durations(self) -> IntArray:
        """Quanta of every operation, shape ``(operations, N + 2)``, -1 where there is none; borders outermost."""
        found = np.full((len(Operation), len(self.layers) + 2), -1, dtype=np.int64)
        for i, layer in enumerate(self.layers, start=1):
            found[[Operation.GATHER, Operation.GATHER_AGAIN], i] = layer.gather
            found[[Operation.FORWARD, Operation.RECOMPUTE], i] = layer.forward
            found[Operation.BACKWARD, i] = layer.backward
            found[[Operation.OFFLOAD_HIDDEN, Operation.FETCH_HIDDEN], i] = layer.hidden_copy
            found[[Operation.FETCH, Operation.FETCH_AGAIN, Operation.OFFLOAD_GRADIENT], i] = layer.shard_copy
            found[Operation.SCATTER, i] = layer.scatter
            found[Operation.UPDATE, i] = layer.update if self.optimizer is Optimizer.OVERLAPPED else 0
        found[Operation.FORWARD, 0] = self.borders.embedding_forward
        found[Operation.BACKWARD, 0] = self.borders.embedding_backward
        found[Operation.BACKWARD, -1] = self.borders.loss
        return found

    def sizes(self) -> IntArray:
        """Bytes of every tensor, shape ``(tensors, N + 2)``, borders outermost."""
        found = np.zeros((len(Tensor), len(self.layers) + 2), dtype=np.int64)
        for i, layer in enumerate(self.layers, start=1):
            found[Tensor.HIDDEN, i] = layer.hidden_bytes
            found[Tensor.ACTIVATIONS, i] = layer.activation_bytes
            found[Tensor.PARAMETERS, i] = layer.parameter_bytes
            found[Tensor.SHARD, i] = layer.shard_bytes
            found[Tensor.FORWARD_WORKSPACE, i] = layer.forward_bytes
            found[Tensor.BACKWARD_WORKSPACE, i] = layer.backward_bytes
        found[Tensor.HIDDEN, -1] = self.borders.output_bytes
        found[Tensor.FORWARD_WORKSPACE, 0] = self.borders.embedding_bytes
        found[Tensor.BACKWARD_WORKSPACE, -1] = self.borders.loss_bytes
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a sequence of switches costs: quanta of a step, and the most bytes on one device."""

    cost: int
    peak: int


def simulate(step: H3tStep, sequence: Sequence[int]) -> Outcome:
    """Run a step with one set of switches per layer.

    Raises
    ------
    H3tError
        If the sequence has not one set per layer.
    """
    if len(sequence) != len(step.layers):
        raise H3tError(f"{len(sequence)} sets of switches for {len(step.layers)} layers; give one for each")
    ((cost, peak),) = simulate_sequences(step, np.array([sequence], dtype=np.int64)).tolist()
    return Outcome(cost, peak)


def simulate_sequences(step: H3tStep, sequences: IntArray) -> IntArray:
    """Run a step with each of several sequences.

    Parameters
    ----------
    step
        What runs.
    sequences
        Sets of switches, shape ``(count, N)``.

    Returns
    -------
    numpy.ndarray
        Cost in quanta and peak in bytes, shape ``(count, 2)``.

    Raises
    ------
    H3tError
        If something is no set of switches.
    """
    if sequences.min(initial=0) < 0 or sequences.max(initial=0) >= SETS:
        raise H3tError(f"sets of switches are 0 .. {SETS - 1}; the sequences hold others")
    width = len(step.layers) + 2
    found = simulate_runs(
        step.durations(), step.sizes(), step.device_link, with_borders(sequences), (0, 2 * width - 1), (0, width)
    )
    resident = sequences & int(Switch.LAZY_PREFETCH) == 0
    found[:, 0] += step.final_cost + resident @ np.array([layer.shard_copy for layer in step.layers])
    found[:, 1] += step.borders.fixed_bytes + resident @ np.array([layer.shard_bytes for layer in step.layers])
    return found


def with_borders(sequences: IntArray) -> IntArray:
    """Sequences with the switches of the borders, which synchronize and have no others, shape ``(count, N + 2)``."""
    found = np.full((len(sequences), sequences.shape[1] + 2), int(Switch.SEGMENT_SYNC), dtype=np.int64)
    found[:, 1:-1] = sequences
    return found

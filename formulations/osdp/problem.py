r"""OSDP: every operator replicated (DP) or sharded (ZDP), as in Jiang et al., IJCAI 2023, section 3.1.

An operator is a layer of :mod:`formulations.layers.layer`; in the paper's Table 1 it is an attention or an MLP module,
or the embedding, or the head (2 * layers + 2 of them). ``N`` devices each train ``b`` samples; operator ``i`` is cut
into ``g`` equal slices, of which ``k`` are ZDP and the others DP (section 3.3), so that plain DP is ``(1, 0)`` and
plain ZDP ``(1, 1)``. Which of the slices are ZDP does not matter, as they are equal. The numbers ``g`` to choose from
are a setting, and the model chooses per operator, which the paper leaves open.

Equation (1) chooses modes and ``b`` with the least :math:`\frac1b \sum_i T_i(p_i, b)` such that
:math:`\sum_i M_i(p_i, b) \le M_{limit}`. With ``S_i`` bytes of parameters:

.. math::

    T_i = (N-1)\,(2(g-k) + 3k)\,(\alpha + \tfrac{S_i}{gN}\beta) + b\gamma_i \qquad
    M_i = M^{model}_i (\tfrac{g-k}{g} + \tfrac{k}{gN}) + b M^{act}_i + M^{extra}_i

whose cases ``(1, 0)`` and ``(1, 1)`` are the paper's two cases of each (:func:`operator_table`). With checkpointing
(section 2.3) ``3k`` becomes ``4k``, as ZDP slices are gathered once more, :math:`\gamma_i` has another forward, and
:math:`M^{act}_i` is the operator's input. :func:`build_osdp` makes the canonical problem at one ``b``.

What the paper leaves open, and what is done here:

- ``b`` is per device: the equations make sense for nothing else. Throughput is ``N b / T``.
- Model states are parameters, gradients and optimizer states: ``state_multiple * S_i`` bytes, 4 for Adam in one type.
- :math:`M^{extra}` holds the operator's workspaces, ``b`` times those of one sample. Gathered parameters of a ZDP
  operator are in no formula of the paper; :class:`Accounting` defines where they count, as ``S_i / g``.
- Equation (1) adds up temporaries, though one operator runs at a time. :attr:`Accounting.PUBLISHED` keeps that;
  :attr:`Accounting.PEAK` has one time for each operator instead. Cutting saves memory at the peak; in a sum it
  mainly makes the choice finer.
- The cost of a checkpointed operator is not given; here it has one more all-gather for each ZDP slice, and one more
  forward. While it is recomputed its activations exist; only the peak counts them, since a sum of them would be no
  saving.
- Operators that share a parameter (tied weights) have the mode of the first of them, the embedding, since a parameter
  is stored once. Where gathers count, the first one's lasts for the whole step, from its use there to that in the
  head.
- Communication and computation do not overlap, as in the paper's model (its implementation overlaps them).
- A slice granularity of 0 in the paper's figures means uncut, which is ``g = 1``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from formulations.layers.layer import LayerChain, LayerProfile, tied_layers
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm

SECONDS_PER_COST = 1e-9
"""Time quantum of costs."""

COLLECTIVES_DP, COLLECTIVES_ZDP = 2, 3
"""Collectives of a step for a replicated operator, and for a sharded one (section 3.1)."""

_MOST_NANOSECONDS = 2**50


class OsdpError(ValueError):
    """An invalid machine, setting or plan; the message names it, its value and the remedy."""


class Slicing(NamedTuple):
    """The mode of an operator: cut into ``slices``, of which ``sharded`` are ZDP and the others DP."""

    slices: int
    sharded: int

    def __str__(self) -> str:
        if self.slices == 1:
            return "ZDP" if self.sharded else "DP"
        return f"{self.sharded}/{self.slices} ZDP"


DP = Slicing(1, 0)
"""Replicated: parameters, gradients and optimizer states are whole on every device."""

ZDP = Slicing(1, 1)
"""Sharded: they are divided among all devices and gathered where they are needed."""


ANY_SLICES = (1, 2, 4, 8, 16)
"""Numbers of slices that figure 7 tries."""

PUBLISHED_SLICES = (1, 4)
"""Whole operators, and the granularity that the paper takes by default (section 4.1)."""


class Accounting(StrEnum):
    """Count of temporary memory.

    PUBLISHED: summed, as in equation (1), without gathered parameters, which are in no formula of the paper.
    PEAK: at each operator its own, gathered parameters and recomputed activations included.
    """

    PUBLISHED = "published"
    PEAK = "peak"


@dataclass(frozen=True, slots=True)
class OsdpMachine:
    """Equal devices on a ring: the paper's device information without computation, which is in the layers.

    Parameters
    ----------
    devices
        ``N``, all of which share the data.
    latency_seconds, seconds_per_byte
        Alpha and beta of one step of the ring.
    memory_bytes
        Limit of tensors on one device, in bytes.

    Raises
    ------
    OsdpError
        If a value is out of range.
    """

    devices: int
    latency_seconds: float
    seconds_per_byte: float
    memory_bytes: int

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise OsdpError(f"devices is {self.devices}; at least one device must train")
        for name in ("latency_seconds", "seconds_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise OsdpError(f"{name} is {value}; it must be finite and not negative")
        if self.memory_bytes < 0:
            raise OsdpError(f"memory_bytes is {self.memory_bytes}; it must not be negative")


@dataclass(frozen=True, slots=True)
class OsdpSettings:
    """Choices of an operator, and the count of memory.

    Parameters
    ----------
    slices
        Numbers of slices that any operator may be cut into; 1 is always among them.
    accounting
        See :class:`Accounting`.
    checkpointing
        Whether every operator keeps only its input and runs again in backward.
    state_multiple
        Bytes of parameters, gradients and optimizer states for one byte of parameters: 4 for Adam, 2 for plain SGD.
    gathered_tensors
        Tensors of a ZDP slice's full size that exist at once, where they count: 1 for its parameters, as in the paper;
        2 where its gradient exists beside them before it is reduced, as in torch's FSDP2.
    replica_tensors
        The same of a DP slice, beyond its states: 0 in the paper; 2 where replicas are gathered and reduced as shards
        are, as by FSDP2 on a mesh with one shard.
    products_only
        Whether only operators whose matrix products can be divided are cut, in numbers that divide their heads or
        width (:class:`formulations.layers.layer.SplitPart`): a table or a convolution is not.

    Raises
    ------
    OsdpError
        If a value is out of range.
    """

    slices: tuple[int, ...] = (1,)
    accounting: Accounting = Accounting.PUBLISHED
    checkpointing: bool = False
    state_multiple: int = 4
    gathered_tensors: int = 1
    replica_tensors: int = 0
    products_only: bool = False

    def __post_init__(self) -> None:
        if not self.slices or min(self.slices) < 1:
            raise OsdpError(f"slices is {self.slices}; give numbers of at least 1")
        if self.replica_tensors < 0:
            raise OsdpError(f"replica_tensors is {self.replica_tensors}; it must not be negative")
        for name in ("state_multiple", "gathered_tensors"):
            if getattr(self, name) < 1:
                raise OsdpError(f"{name} is {getattr(self, name)}; it must be at least 1, for the parameters")

    def modes(self, layer: LayerProfile) -> tuple[Slicing, ...]:
        """All modes of an operator: DP and ZDP first, then cut ones, at least one slice of which is ZDP.

        A cut operator with DP slices only would take longer than plain DP and as much memory, unless replicas are
        gathered too.
        """
        divisor = layer.split.divisor
        cut = sorted(g for g in set(self.slices) - {1} if not self.products_only or (divisor and divisor % g == 0))
        return (DP, ZDP, *(Slicing(g, k) for g in cut for k in range(1, g + 1)))


@dataclass(frozen=True, slots=True, eq=False)
class OperatorTable:
    """Costs of one operator in every mode, with those that depend on the batch apart.

    Parameters
    ----------
    name
        Of the operator.
    modes
        Its ``M`` possible modes.
    communication
        Nanoseconds of its collectives in each mode, shape ``(M,)``.
    fixed_resident
        Bytes of model states on one device, and bytes that a batch of any size saves for backward, shape ``(M,)``.
    gathered
        Bytes that are gathered at once, as far as they count, shape ``(M,)``.
    sample_seconds, fixed_seconds
        Gamma: computation of one sample; and of a batch of any size, once.
    sample_resident
        Bytes of one sample that are saved for backward.
    temporary
        Temporary bytes of one sample, and of a batch of any size, in forward and in backward.
    """

    name: str
    modes: tuple[Slicing, ...]
    communication: IntArray
    fixed_resident: IntArray
    gathered: IntArray
    sample_seconds: float
    fixed_seconds: float
    sample_resident: int
    temporary: tuple[tuple[int, int], ...]

    def computation(self, batch: int) -> int:
        """Nanoseconds of computation for a batch on one device."""
        return round((batch * self.sample_seconds + self.fixed_seconds) / SECONDS_PER_COST)

    def resident(self, batch: int) -> IntArray:
        """Bytes that count at every moment, in each mode."""
        return self.fixed_resident + batch * self.sample_resident

    def extra(self, batch: int) -> IntArray:
        """Temporary bytes in each mode."""
        return self.gathered + self.workspace(batch)

    def workspace(self, batch: int) -> int:
        """Temporary bytes in any mode."""
        return max(fixed + batch * sample for sample, fixed in self.temporary)

    def among(self, modes: Sequence[Slicing]) -> OperatorTable:
        """The same operator with some of its modes."""
        at = [self.modes.index(mode) for mode in modes]
        return replace(
            self,
            modes=tuple(modes),
            communication=self.communication[at],
            fixed_resident=self.fixed_resident[at],
            gathered=self.gathered[at],
        )


def operator_table(
    layer: LayerProfile,
    following: LayerProfile | None,
    machine: OsdpMachine,
    settings: OsdpSettings,
    *,
    lends: bool = False,
) -> OperatorTable:
    """Evaluate the memory and time cost of section 3.1 for one operator.

    Bytes of shards and slices are rounded up. Communication and computation are rounded to nanoseconds apart, so that
    the former is the same for every batch.

    Parameters
    ----------
    layer, following
        The operator, and the one behind it, if any.
    machine, settings
        The machine and the possible choices.
    lends
        Whether later operators use its parameters too, so that they stay gathered.
    """
    devices, size, again = machine.devices, layer.parameter_bytes, settings.checkpointing
    kept = 0 if again else layer.saved_bytes - layer.unread_input_bytes
    collectives = COLLECTIVES_ZDP + again
    communication, states, gathered = [], [], []
    modes = settings.modes(layer)
    for g, k in modes:
        steps = (devices - 1) * (COLLECTIVES_DP * (g - k) + collectives * k)
        seconds = steps * (machine.latency_seconds + size / (g * devices) * machine.seconds_per_byte)
        communication.append(round(seconds / SECONDS_PER_COST))
        states.append(-(-settings.state_multiple * size * ((g - k) * devices + k) // (g * devices)))
        gathered.append(_tensors_at_once(settings, g, k) * -(-size // g))
    resident = np.array(states, dtype=np.int64) + (0 if again else layer.fixed_saved_bytes)
    at_once = np.array(gathered, dtype=np.int64)
    return OperatorTable(
        name=layer.name,
        modes=modes,
        communication=np.array(communication, dtype=np.int64),
        fixed_resident=resident + at_once if lends else resident,
        gathered=np.zeros_like(at_once) if lends else at_once,
        sample_seconds=(1 + again) * layer.forward_seconds + layer.backward_seconds,
        fixed_seconds=(1 + again) * layer.forward_fixed_seconds + layer.backward_fixed_seconds,
        sample_resident=layer.input_bytes + kept,
        temporary=_temporary(layer, following, settings),
    )


def _tensors_at_once(settings: OsdpSettings, slices: int, sharded: int) -> int:
    """Tensors as large as a slice that exist while one is worked on, as far as they count."""
    if settings.accounting is not Accounting.PEAK:
        return 0
    return max(settings.gathered_tensors if sharded else 0, settings.replica_tensors if sharded < slices else 0)


def _temporary(
    layer: LayerProfile, following: LayerProfile | None, settings: OsdpSettings
) -> tuple[tuple[int, int], ...]:
    """Temporary bytes of a sample, and of any batch, in forward and backward.

    Input and output exist in forward as a whole, including parts that are not saved for backward: of the output the
    part that the next operator does not keep. A recomputed operator has its activations in both.
    """
    unread = 0 if settings.checkpointing else layer.unread_input_bytes
    if following is None:
        unread += layer.output_bytes
    elif not settings.checkpointing:
        unread += following.unread_input_bytes
    recomputed = settings.checkpointing and settings.accounting is Accounting.PEAK
    saved, fixed = (layer.saved_bytes, layer.fixed_saved_bytes) if recomputed else (0, 0)
    return (
        (layer.forward_workspace_bytes + unread + saved, layer.forward_fixed_workspace_bytes + fixed),
        (layer.backward_workspace_bytes + saved, layer.backward_fixed_workspace_bytes + fixed),
    )


def operator_tables(chain: LayerChain, machine: OsdpMachine, settings: OsdpSettings) -> tuple[OperatorTable, ...]:
    """Evaluate :func:`operator_table` for every operator of a model.

    Raises
    ------
    OsdpError
        If the collectives of a step may take longer than the searches reach (13 days).
    """
    tied = tied_layers(chain)
    tables = tuple(
        operator_table(layer, following, machine, settings, lends=bool(tied) and layer is chain.layers[0])
        for layer, following in zip_longest(chain.layers, chain.layers[1:])
    )
    longest = sum(int(table.communication.max()) for table in tables)
    if longest > _MOST_NANOSECONDS:
        seconds = longest * SECONDS_PER_COST
        raise OsdpError(f"model {chain.name} may communicate for {seconds:g} s a step; check the machine's link")
    return tables


def build_osdp(chain: LayerChain, machine: OsdpMachine, settings: OsdpSettings, batch: int) -> StrategyProblem:
    """Build the canonical problem at one batch size: a node for each operator, a strategy for each mode.

    Operators that share a parameter are joined by factors that forbid different modes. All memory is used at one time,
    as equation (1) adds it up; at the peak there is one time for each operator, when its own temporary bytes are added
    to the resident bytes of all.

    Parameters
    ----------
    chain, machine, settings
        The model, the machine, and the possible choices.
    batch
        Samples on one device.

    Returns
    -------
    StrategyProblem
        Costs are nanoseconds of a step, strategies those of :meth:`OsdpSettings.modes`, operator by operator.

    Raises
    ------
    OsdpError
        If the batch is not positive.
    """
    if batch < 1:
        raise OsdpError(f"batch is {batch}; at least one sample is trained on each device")
    peak = settings.accounting is Accounting.PEAK
    horizon = len(chain) if peak else 1
    tables = operator_tables(chain, machine, settings)
    nodes = []
    for i, table in enumerate(tables):
        resident, extra = table.resident(batch), table.extra(batch)
        at_once = (UsageTerm(0, 0, 1, resident + extra),)
        over_time = (UsageTerm(0, 0, horizon, resident), UsageTerm(0, i, i + 1, extra))
        cost = table.communication + table.computation(batch)
        nodes.append(Node(table.name, cost, usage=over_time if peak else at_once))
    return StrategyProblem(
        name=f"{chain.name}-{batch}",
        nodes=tuple(nodes),
        factors=tuple(_alike(tables, borrower) for borrower in tied_layers(chain)[1:]),
        resources=(Resource("memory", machine.memory_bytes),),
        horizon=horizon,
        seconds_per_cost=SECONDS_PER_COST,
        time_names=tuple(layer.name for layer in chain.layers) if peak else ("step",),
    )


def _alike(tables: Sequence[OperatorTable], borrower: int) -> Factor:
    """Forbid an operator's modes that are not the first one's."""
    unlike = np.array([[mine != other for other in tables[borrower].modes] for mine in tables[0].modes])
    return Factor((0, borrower), np.zeros(unlike.shape, dtype=np.int64), unlike)


def step_cost(tables: Sequence[OperatorTable], choices: Sequence[int], batch: int) -> int:
    """Nanoseconds of a step, by the index of every operator's mode."""
    return sum(
        int(table.communication[choice]) + table.computation(batch)
        for table, choice in zip(tables, choices, strict=True)
    )


def step_bytes(tables: Sequence[OperatorTable], choices: Sequence[int], batch: int, accounting: Accounting) -> int:
    """Bytes on one device, by the index of every operator's mode; temporaries are summed or at their maximum."""
    chosen = list(zip(tables, choices, strict=True))
    extra = [int(table.extra(batch)[choice]) for table, choice in chosen]
    resident = sum(int(table.resident(batch)[choice]) for table, choice in chosen)
    return resident + (max(extra) if accounting is Accounting.PEAK else sum(extra))

"""KIWI with chains and offload: a third thing to do with an activation is to let it wait in host memory.

An activation that backward reads leaves the device after its last forward use and comes back before its first
backward use. The problem that finds plans has two modes of it (:class:`OffloadMode`):

- *hidden*: time is cut into slots of equal length, at the least time that events can take. The activation leaves
  in a whole slot behind its last forward use and comes back in a whole slot before its first backward use, the
  nearest ones or (*patient*) those next to them. The copies of a slot and direction together take no longer than the
  slot (in permille of it), so they cost no time;
- *exposed*: the computation waits for both copies, so its device memory is free at once.

Slots are sufficient, not necessary, and they trust the least times: what a plan costs is known from the replay of
its schedule. The bound comes from a relaxation with three other modes, in which copies take no time of their own:

- *early*: away when forward ends. All such copies together have left by then, so they take no longer than the step of
  the best plan known leaves for forward;
- *late*: it leaves when forward has ended;
- *brief*: it is away in forward only, so that its copies weigh as those of *early* and nothing on the way back.

In the first two it comes back in backward, and all copies inward together take no longer than that step leaves for
backward. A rerun that reads an offloaded activation before its first backward use is in neither problem.
Where copies cannot run beside the computation at all, only the exposed mode exists, and there is nothing to relax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from formulations.models.counting import Counting
from formulations.models.kiwi_chain import decode_kiwi_chain, encode_kiwi_chain
from formulations.models.liveness import LastUse
from formulations.models.modes import Modes
from formulations.models.recompute import RecomputeProblemBuilder
from formulations.models.sharding import UNREAD
from formulations.models.step import HostStay, NodeKind, StepDecision, StepModel
from formulations.models.timeline import EventKind
from formulations.problem import BoolArray, IntArray, Resource, StrategyProblem, UsageTerm

PERMILLE = 1000
SLOTS = 64
"""Slots of a step. Copies that are longer than a slot cannot be hidden in the problem."""

HOST, OUTWARD, INWARD = 1, 2, 3
"""Indices of the resources besides device memory; inward is outward where both directions share one link."""


class OffloadMode(StrEnum):
    """How an activation waits on the host; see the module docstring."""

    HIDDEN = "hidden"
    PATIENT = "patient"
    EXPOSED = "exposed"
    EARLY = "early"
    LATE = "late"
    BRIEF = "brief"


@dataclass(frozen=True, slots=True)
class Links:
    """What the host offers.

    Parameters
    ----------
    host_bytes
        Pinned host memory for one device, or None.
    blocking
        Whether the computation waits for every copy.
    shared
        Whether both directions share one link.
    best_known
        Cost of a plan, in quanta: builds the relaxation, whose optimum is a bound on all plans that are no worse;
        None builds the problem that finds plans.
    """

    host_bytes: int | None = None
    blocking: bool = False
    shared: bool = False
    best_known: int | None = None

    @property
    def relaxed(self) -> bool:
        """Whether copies take no time of their own."""
        return self.best_known is not None and not self.blocking

    @property
    def modes(self) -> tuple[OffloadMode, ...]:
        """Modes of offload that there are."""
        if self.blocking:
            return (OffloadMode.EXPOSED,)
        if self.relaxed:
            return (OffloadMode.EARLY, OffloadMode.LATE, OffloadMode.BRIEF)
        return (OffloadMode.HIDDEN, OffloadMode.PATIENT, OffloadMode.EXPOSED)


def offload_candidates(model: StepModel) -> frozenset[int]:
    """Operators whose outputs may wait on the host: made in forward, read in backward, worth a copy, no result."""
    return frozenset(
        i
        for i in np.flatnonzero(model.rerunnable).tolist()
        if model.first_backward_use[i] >= 0 and model.nodes[i].transfer_cost is not None
    )


@dataclass(frozen=True, eq=False)
class OffloadProblem:
    """The joint problem of sharding, recomputation of chains and offload.

    Parameters
    ----------
    problem
        Its first nodes are the model's nodes; strategy ``mode * S + layout`` with mode 0 keep, then the operator's
        modes of running again, then offload (:attr:`Links.modes`). Hold nodes follow.
    model, modes
        What it was built from.
    stays
        By node and mode, what a mode of offload means.
    """

    problem: StrategyProblem
    model: StepModel
    modes: Modes
    stays: Mapping[tuple[int, int], HostStay]

    def decode(self, choices: tuple[int, ...]) -> StepDecision:
        """Read layouts, reruns and offloads from a solution."""
        chain = list(choices)
        offloaded: dict[int, HostStay] = {}
        for i, node in enumerate(self.model.nodes):
            mode, layout = divmod(choices[i], node.size)
            if (i, mode) in self.stays:
                chain[i] = layout
                offloaded[i] = self.stays[i, mode]
        return replace(decode_kiwi_chain(self.model, self.modes, tuple(chain)), offloaded=offloaded)

    def encode(self, decision: StepDecision) -> tuple[int, ...]:
        """Strategies of the model's nodes that mean a decision, without the hold nodes.

        Raises
        ------
        ValueError
            If the problem leaves one of its reruns or stays out.
        """
        choices = list(encode_kiwi_chain(self.model, self.modes, decision))
        mode_of = {(i, stay): mode for (i, mode), stay in self.stays.items()}
        for i, stay in decision.offloaded.items():
            if (i, stay) not in mode_of:
                raise ValueError(f"{self.model.nodes[i].name} cannot be away in this problem as the decision says")
            choices[i] = mode_of[i, stay] * self.model.nodes[i].size + decision.layouts[i]
        return tuple(choices)


def build_offload(
    model: StepModel,
    memory_limit: int | None,
    modes: Modes,
    links: Links,
    counting: Counting,
) -> OffloadProblem:
    """Build the joint problem of sharding, recomputation of chains and offload.

    Parameters
    ----------
    model
        The step's tables, with ``transfer_cost``.
    memory_limit
        Bytes on one device, or None.
    modes
        How operators may run again.
    links
        The host.
    counting
        How bytes are counted where they depend on three decisions.
    """
    builder = OffloadProblemBuilder(model, modes, counting, links)
    problem = builder.build("kiwi_offload", memory_limit)
    return OffloadProblem(problem, model, modes, builder.stays)


class OffloadProblemBuilder(RecomputeProblemBuilder):
    """Adds to recomputation the modes of offload."""

    def __init__(self, model: StepModel, modes: Modes, counting: Counting, links: Links) -> None:
        self.links = links
        self.offloads = offload_candidates(model)
        self.stays: dict[tuple[int, int], HostStay] = {}
        super().__init__(model, modes, counting, chains=True)
        begins = [0]
        for event in self.timeline.events:
            least = int(model.nodes[event.index].cost.min()) if event.kind is EventKind.COMPUTE else 0
            begins.append(begins[-1] + least)
        self._begins = np.array(begins, dtype=np.int64)
        self._slot = max(1, -(-begins[-1] // SLOTS))
        # First event of every slot; a last, empty one follows the step.
        self._slots = np.searchsorted(self._begins, np.arange(begins[-1] // self._slot + 2) * self._slot)

    def further_modes(self, node: int) -> int:
        """Number of modes of offload of a node."""
        return len(self.links.modes) if node in self.offloads else 0

    def resources(self, memory_limit: int | None) -> tuple[Resource, ...]:
        """Device memory, host memory and the links."""
        memory = super().resources(memory_limit)
        host = Resource("host memory (bytes)", self.links.host_bytes)
        if not self.links.relaxed:
            links = Resource("outward link (permille)", PERMILLE), Resource("inward link (permille)", PERMILLE)
            return (*memory, host, *links)
        best = self.links.best_known
        assert best is not None
        forward = int(self._begins[self._boundary])
        backward = int(self._begins[-1]) - forward
        outward = Resource("outward link (quanta)", max(0, best - backward))
        return (*memory, host, outward, Resource("inward link (quanta)", max(0, best - forward)))

    @cached_property
    def _boundary(self) -> int:
        """The first event of backward."""
        kinds = [node.kind for node in self.model.nodes]
        if NodeKind.BACKWARD not in kinds:
            return len(self.timeline.events)
        first = kinds.index(NodeKind.BACKWARD)
        return int(np.searchsorted(self.timeline.start, self.timeline.burst[first]))

    def add_operators(self) -> None:
        """Add the lives of offloaded outputs, the links and the host."""
        super().add_operators()
        for i in sorted(self.offloads):
            for k, way in enumerate(self.links.modes):
                self._add_offload(i, 1 + len(self.reruns.get(i, ())) + k, way)

    def _add_offload(self, i: int, mode: int, way: OffloadMode) -> None:
        """Add one mode of one operator: what it costs, reserves, and holds on either side."""
        node, size = self.model.nodes[i], self.model.nodes[i].size
        assert node.transfer_cost is not None
        waiting = [self.lifetimes.get((i, k), UNREAD).backward is not None for k in range(node.output_bytes.shape[1])]
        copies = node.transfer_cost[:, waiting].sum(axis=1)
        first = self.model.first_backward_use[i]
        on_host = node.output_bytes[:, waiting].sum(axis=1)
        boundary, burst = self.timeline.start[self._boundary], self.timeline.burst[first]
        computes = self.timeline.compute[first]
        gone, back = 0, self.timeline.start[computes]
        held = self.timeline.start[self._left(i)], self.timeline.last_time(computes) + 1
        match way:
            case OffloadMode.HIDDEN | OffloadMode.PATIENT:
                gone, back = self._carry(i, mode, int(way is OffloadMode.PATIENT), copies)
            case OffloadMode.EXPOSED:
                left = self._left(i)
                gone, back = self._stay(i, mode, left, left, self._arrives(i))
                self.cost[i][mode * size : (mode + 1) * size] += 2 * copies
            case OffloadMode.EARLY:
                self._spend(i, mode, OUTWARD, 0, copies)
                self._spend(i, mode, INWARD, 0, copies)
                held = boundary, burst + 1
            case OffloadMode.LATE:
                self._spend(i, mode, INWARD, 0, copies)
                gone, held = boundary, (burst, burst + 1)
            case OffloadMode.BRIEF:
                self._spend(i, mode, OUTWARD, 0, copies)
                back, held = boundary, (0, 0)
                if self.links.host_bytes is not None:
                    self.forbid(i, self.in_mode(i, mode, (on_host > self.links.host_bytes).astype(np.int64)) > 0)
        for output, waits in enumerate(waiting):
            amount = self.in_mode(i, mode, node.output_bytes[:, output])
            made = self.timeline.last_time(self.timeline.compute[i])
            life = self.lifetimes.get((i, output), UNREAD)
            if waits and gone:
                self.node_usage[i] += self.term(made, max(gone, made + 1), amount)
            else:
                self.add_life(i, made, life.forward, amount)
            if waits:
                self.add_life(i, back, self.last_life(i, output), amount)
        if held[0] < held[1]:
            self.node_usage[i].append(UsageTerm(HOST, *held, self.in_mode(i, mode, on_host)))

    def _spend(self, i: int, mode: int, resource: int, time: int, amount: IntArray) -> None:
        """Use a link at a time that stands for a slot, or for all copies of a direction."""
        self.node_usage[i].append(UsageTerm(resource, time, time + 1, self.in_mode(i, mode, amount)))

    @property
    def _inward(self) -> int:
        return OUTWARD if self.links.shared else INWARD

    def _carry(self, i: int, mode: int, patience: int, copies: IntArray) -> tuple[int, int]:
        """Put both copies into slots; return when the activation has gone and when its memory is taken again."""
        timeline, arrives = self.timeline, self._arrives(i)
        out = int(-(-self._begins[self._left(i)] // self._slot)) + patience
        back = int(self._begins[arrives] // self._slot) - 1 - patience
        none = out >= back or out + 1 >= len(self._slots)
        share = -(-PERMILLE * copies // self._slot)
        too_long = np.ones_like(share) if none else (share > PERMILLE).astype(np.int64)
        self.forbid(i, self.in_mode(i, mode, too_long) > 0)
        if none:
            return 0, timeline.start[arrives]
        # Operators that take no time may stand between a slot's begin and the last use.
        leaves = max(int(self._slots[out]), self._left(i))
        self._spend(i, mode, OUTWARD, timeline.start[self._slots[out]], share)
        self._spend(i, mode, self._inward, timeline.start[self._slots[back]], share)
        return self._stay(i, mode, leaves, int(self._slots[out + 1]), int(self._slots[back]))

    def _stay(self, i: int, mode: int, leaves: int, gone: int, returns: int) -> tuple[int, int]:
        """Write down what a mode means, as nodes whose computation comes before these events.

        Returns when its memory is free and when it is taken again.
        """
        after = []
        for event in (leaves, gone, returns):
            while self.timeline.events[event - 1].kind is not EventKind.COMPUTE:
                event -= 1
            after.append(self.timeline.events[event - 1].index)
        self.stays[i, mode] = HostStay(*after)
        ends = [self.timeline.last_time(self.timeline.compute[node]) + 1 for node in after]
        return ends[1], ends[2]

    def _arrives(self, i: int) -> int:
        """The event before which an activation must be back: the burst of its first backward use."""
        return int(np.searchsorted(self.timeline.start, self.timeline.burst[self.model.first_backward_use[i]]))

    def _left(self, i: int) -> int:
        """The event behind an operator's last use in forward."""
        uses = [edge.consumer for edge in self.model.edges_from[i] if self._is_forward(edge.consumer)]
        return self.timeline.compute[max(uses, default=i)] + 1

    def _is_forward(self, node: int) -> bool:
        return self.model.nodes[node].kind is NodeKind.FORWARD

    def out_of_order(self, u: int, v: int) -> BoolArray:
        """Also pairs where ``v`` would run again before ``u`` has come back."""
        late = super().out_of_order(u, v)
        if u in self.offloads:
            first = self.model.first_backward_use[u]
            sizes = self.model.nodes[u].size, self.model.nodes[v].size
            away = slice((1 + len(self.reruns.get(u, ()))) * sizes[0], None)
            for b, moments in enumerate(self.reruns.get(v, ()), start=1):
                if moments[0] < first:
                    late[away, b * sizes[1] : (b + 1) * sizes[1]] = True
        return late

    def further_lives(self, u: int, output: int) -> list[LastUse | None]:
        """Last direct use of an output: what backward does not read stays on the device."""
        return [self.lifetimes.get((u, output), UNREAD).last] * self.further_modes(u)

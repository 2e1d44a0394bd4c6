"""Pins: decisions of a user as restrictions of the problem of a step.

A pin says of an operator or of all operators of a module how their outputs are held (``keep``, ``recompute``,
``offload``) or how they are placed on the mesh; or it forbids this. Pins of one operator hold together. What they
leave becomes forbidden strategies of the canonical problem (:mod:`formulations.step.solving.pinned`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from formulations.encodings.arc_consistency import group_factors, supported_strategies
from formulations.problem.solution import Progress
from formulations.problem.strategy_problem import BoolArray
from formulations.step.solving.pinned import Allowed, Holding, Pins, holding_of, pinned
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import NodeKind
from planner.common.infeasibility import InfeasibleError
from planner.explore.errors import ExploreError
from planner.explore.targets import node_name, nodes_of
from planner.plan.decision import Pin, is_placed
from planner.plan.document import Plan
from planner.session.planning import PlanningSession
from planner.session.request import PlanRequest
from planner.strategies.space import StrategySpace

_HOLDINGS = {str(holding): holding for holding in Holding}
_LONG_NAMES = re.compile(r"(?:Shard\((?:dim=)?(\d+)\)|S\((\d+)\)|(Replicate\(?\)?))")
_SHORT_NAME = re.compile(r"R|S\d+|P(?:sum|avg|max|min)|\*")


def pin_of(target: str, decision: str | Sequence[str], mesh: tuple[int, ...], forbids: bool = False) -> Pin:
    """Pin of what a user wrote.

    Parameters
    ----------
    target
        As in :class:`Pin`.
    decision
        As in :class:`Pin`; placements may be a sequence, and be written as ``Shard(0)`` or ``Replicate()``.
    mesh
        Size of each mesh axis.
    forbids
        As in :class:`Pin`.

    Raises
    ------
    ExploreError
        The decision is none, or a placement does not have one entry per mesh axis.
    """
    if isinstance(decision, str) and decision in _HOLDINGS:
        return Pin(target=target, decision=decision, forbids=forbids)
    entries = decision.replace(" ", "").split(",") if isinstance(decision, str) else [str(part) for part in decision]
    short = [_LONG_NAMES.sub(lambda m: "R" if m[3] else f"S{m[1] or m[2]}", entry) for entry in entries]
    wrong = [entry for entry in short if not _SHORT_NAME.fullmatch(entry)]
    if wrong:
        raise ExploreError(
            f"decision {wrong[0]!r} is unknown: write keep, recompute, offload, or a placement per mesh axis out of "
            "R, S0, S1, ..., Psum and * (any)"
        )
    if len(short) != len(mesh):
        example = ",".join(["S0", *["R"] * (len(mesh) - 1)])
        raise ExploreError(
            f"placement {','.join(short)} has {len(short)} entries and mesh {'x'.join(map(str, mesh))} has "
            f"{len(mesh)} axes: write one per axis, such as {example}"
        )
    return Pin(target=target, decision=",".join(short), forbids=forbids)


def allowed_by(space: StrategySpace, built: StepProblem, pins: Sequence[Pin]) -> Pins:
    """What pins leave to the nodes of a step.

    Parameters
    ----------
    space
        The step.
    built
        Its problem without pins.
    pins
        They hold together.

    Returns
    -------
    Mapping
        Of the nodes that have less than the problem leaves them.

    Raises
    ------
    ExploreError
        A target is unknown, or nothing is left to an operator; the message names it, the pin and what is possible.
    """
    resolver = _Resolver(space, built)
    for pin in pins:
        resolver.add(pin)
    resolver.check_neighbours(pins)
    return resolver.left


def overlapped_plan(
    session: PlanningSession,
    request: PlanRequest,
    pins: Sequence[Pin],
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Plan with pins and with communication beside the computation; the bound is over the plans that keep the pins.

    Raises
    ------
    ExploreError
        As for :func:`allowed_by`.
    InfeasibleError
        No plan within the limit keeps the pins, or none was found.
    """

    def keeping(built: StepProblem) -> StepProblem:
        return pinned(built, allowed_by(session.space, built, pins))

    try:
        return session.plan_overlapped(request, progress, pins, keeping)
    except InfeasibleError as error:
        raise with_pins_named(error, pins) from None


def with_pins_named(error: InfeasibleError, pins: Iterable[Pin]) -> InfeasibleError:
    """The error of a search with pins, which names them."""
    return InfeasibleError(f"with {', '.join(sorted(map(str, pins)))} pinned: {error}")


class _Resolver:
    def __init__(self, space: StrategySpace, built: StepProblem) -> None:
        self.space, self.built = space, built
        self.left: dict[int, Allowed] = {}
        self._by: dict[int, list[Pin]] = {}

    def add(self, pin: Pin) -> None:
        """Restrict the nodes of one pin."""
        nodes = nodes_of(self.space, pin.target)
        concerned = [k for k in nodes if self._concerns(k, pin)]
        if not concerned:
            self._refuse(nodes[0], pin)
        for k in concerned:
            known = self.left.get(k) or Allowed(np.ones(self.built.layouts[k], dtype=np.bool_))
            chosen = self._chosen(k, pin)
            left = Allowed(known.layouts & chosen.layouts, known.holdings & chosen.holdings)
            if not self._possible(k, left).any():
                self._refuse(k, pin)
            self.left[k] = left
            self._by.setdefault(k, []).append(pin)

    def _concerns(self, node: int, pin: Pin) -> bool:
        """Whether a pin is about a node: of a module, how to hold outputs is about those that backward reads."""
        entry = self.space.nodes[node]
        if pin.decision not in _HOLDINGS:
            return entry.operator is None or bool(self.space.graph.operators[entry.operator].outputs)
        if self.space.model.nodes[node].kind is not NodeKind.FORWARD:
            return False
        if pin.decision == Holding.KEEP and not pin.forbids:
            return True
        return self._waits(node) and bool(self._possible(node, self._chosen(node, pin)).any())

    def _waits(self, node: int) -> bool:
        """Whether backward itself reads the outputs of an operator, so that they are held for it."""
        return self.space.model.first_backward_use[node] >= 0

    def _chosen(self, node: int, pin: Pin) -> Allowed:
        """What one pin alone leaves to a node."""
        size = self.built.layouts[node]
        holding = _HOLDINGS.get(pin.decision)
        if holding is not None:
            others = frozenset(Holding) - {holding}
            return Allowed(np.ones(size, dtype=np.bool_), others if pin.forbids else frozenset({holding}))
        wanted = tuple(pin.decision.split(","))
        placed = np.array([is_placed(found, wanted) for found in self._placements(node)], dtype=np.bool_)
        return Allowed(~placed if pin.forbids else placed)

    def _placements(self, node: int) -> list[tuple[str, ...]]:
        """Placement of the first output under each layout."""
        found = []
        for strategy in self.space.strategies[node]:
            first = next((placement for placement in strategy.outputs if placement is not None), ())
            found.append(tuple(first))
        return found

    def _possible(self, node: int, left: Allowed | None = None) -> BoolArray:
        """Strategies of a node that the problem itself does not forbid, and of these what is left."""
        entry = self.built.problem.nodes[node]
        flags = np.ones(entry.size, dtype=np.bool_) if entry.forbidden is None else ~entry.forbidden
        return flags if left is None else flags & left.flags(entry.size, len(self.built.modes.get(node, ())))

    def _refuse(self, node: int, pin: Pin) -> None:
        others = [str(other) for other in self._by.get(node, ())]
        because = f" together with {', '.join(map(repr, others))}" if others else ""
        raise ExploreError(
            f"pin {str(pin)!r}: nothing is left to {node_name(self.space, node)}{because}; possible there: "
            f"{self._describe(node)}"
        )

    def _describe(self, node: int) -> str:
        """What a node may do in the problem without pins."""
        size, reruns = self.built.layouts[node], len(self.built.modes.get(node, ()))
        choices = np.flatnonzero(self._possible(node)).tolist()
        placements = self._placements(node)
        placed = dict.fromkeys(",".join(placements[choice % size]) for choice in choices)
        words = [f"placement {' or '.join(placed)}"] if any(placed) else []
        if self.space.model.nodes[node].kind is NodeKind.FORWARD:
            held = dict.fromkeys(str(holding_of(choice // size, reruns)) for choice in choices)
            unread = "" if self._waits(node) else " (backward does not read its outputs)"
            words.append(" or ".join(held) + unread)
        return "; ".join(words)

    def check_neighbours(self, pins: Sequence[Pin]) -> None:
        """Refuse pins that leave an operator no strategy that joins those of its neighbours."""
        if not self.left:
            return
        problem = pinned(self.built, self.left).problem
        _, node = supported_strategies(problem, group_factors(problem))
        if node is None:
            return
        name = node_name(self.space, node) if node < len(self.space.nodes) else problem.nodes[node].name
        raise ExploreError(
            f"pins {', '.join(repr(str(pin)) for pin in pins)}: no plan keeps all of them, because {name} has no "
            "strategy left that joins those of its neighbours; unpin one"
        )

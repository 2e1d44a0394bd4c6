"""An exploration of plans of layers: the present plan, and what changes to it cost.

The layers of the step are found once. A search over layers takes seconds, so that every question is a search of its own
for a plan of the whole step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self

from formulations.problem.solution import Progress, Status
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.explore.changes import ClusterChange, Recosted, WhatIf
from planner.explore.errors import ExploreError
from planner.explore.memory_prices import NOT_SOLVED, MemoryPrice
from planner.explore.pinning import PinnedPlans
from planner.explore.tables import seconds_of
from planner.layers.plan.document import LayerPlan, LayerRecord, LayerSettings
from planner.layers.plan.pins import layer_pin
from planner.layers.planning import LAYER_FORMULATIONS, layers_of, plan_layers
from planner.machine.cluster import ClusterSpec, DeviceSpec, load_cluster
from planner.models.references import ModelReference, reference_of
from planner.plan.decision import Pin
from planner.plan.notes import INTERRUPTED


@dataclass(frozen=True)
class LayerQuestion:
    """What plans of layers are asked for, but for limits and pins.

    Parameters
    ----------
    reference, cluster, devices, formulation, optimizer, time_limit, as_published, slips, choices
        As for :func:`planner.layers.planning.plan_layers`.
    """

    reference: ModelReference
    cluster: ClusterSpec
    devices: int
    formulation: str
    optimizer: str | None = None
    time_limit: float = 30.0
    as_published: bool = False
    slips: str | None = None
    choices: Mapping[str, str | None] = field(default_factory=dict)


class LayerExploration(PinnedPlans):
    """A step that is planned by layers, changed and planned again.

    Parameters
    ----------
    question
        What every plan is asked for.
    memory
        Bytes of one device, the cluster's reserve included; None for all that it has.
    progress
        Called with every better incumbent or bound of searches that may take long.

    Raises
    ------
    ValueError
        The formulation plans no layers, or the model cannot be divided into layers.
    """

    def __init__(
        self,
        question: LayerQuestion,
        memory: int | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        super().__init__()
        if question.formulation not in LAYER_FORMULATIONS:
            known = ", ".join(LAYER_FORMULATIONS)
            raise PlanError(f"formulation {question.formulation!r} plans no layers; choose one of {known}")
        self.question, self.memory, self.progress = question, memory, progress
        started = time.perf_counter()
        self.chain = layers_of(question.reference, question.cluster, question.formulation)
        self._traced_seconds = time.perf_counter() - started
        self._plans: dict[tuple[int | None, frozenset[Pin]], LayerPlan] = {}
        self._searched_seconds: dict[tuple[int | None, frozenset[Pin]], float] = {}

    @classmethod
    def of_plan(
        cls,
        plan: LayerPlan,
        cluster: ClusterSpec | str | None = None,
        time_limit: float = 30.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Self:
        """An exploration whose present plan is a finished one, which is not searched again.

        Parameters
        ----------
        plan
            The plan, whose model may be loaded.
        cluster
            The cluster where it is not known by the name in the plan.
        time_limit
            Seconds for every other search.
        progress
            As for the exploration.

        Raises
        ------
        ExploreError
            The plan was written by hand: nothing says what was asked for.
        """
        record, machine = plan.record, plan.machine
        if record is None or machine is None:
            raise ExploreError("plan: it was written by hand and names neither formulation nor cluster: plan the model")
        found = load_cluster(cluster or machine.cluster) if isinstance(cluster, str | None) else cluster
        question = LayerQuestion(
            reference_of(plan.model),
            found,
            plan.devices,
            record.formulation,
            plan.optimizer,
            time_limit,
            record.as_published,
            ",".join(record.slips) if record.as_published and record.slips else None,
            dict(record.choices),
        )
        here = cls(question, record.tensor_bytes + found.device.reserve_bytes, progress)
        here.pins, here.first_seconds = record.pins, record.seconds
        here._plans[here._present] = plan
        here._searched_seconds[here._present] = 0.0 if INTERRUPTED in record.notes else record.seconds
        return here

    @property
    def plan(self) -> LayerPlan:
        """The present plan; searched when it is first asked for, and :meth:`improve` searches on.

        Raises
        ------
        InfeasibleError
            No plan fits.
        """
        return self._plans.get(self._present) or self._planned(self.memory, self.pins)

    @property
    def _present(self) -> tuple[int | None, frozenset[Pin]]:
        return self.memory, frozenset(self.pins)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that can be pinned."""
        return tuple(layer.name for layer in self.chain.layers)

    def whatif(self, change: ClusterChange) -> WhatIf:
        """Plan for a changed cluster, with the same pins, and put the present layers' settings beside it.

        Of the present plan the settings of all layers stay; where the formulation decides stages and micro-batches, the
        best ones with these settings are taken.

        Parameters
        ----------
        change
            Of the cluster, the limit, or the number of devices, which is the product of the mesh.

        Raises
        ------
        InfeasibleError
            No plan fits there.
        ValueError
            The devices do not fit the changed cluster, or a pin cannot be kept there.
        """
        present = self.plan
        cluster = change.of(self.question.cluster)
        devices = self.question.devices if change.mesh is None else prod(change.mesh)
        memory = self.memory if change.memory is None else change.memory
        question = replace(self.question, cluster=cluster, devices=devices)
        there = LayerExploration(question, memory, self.progress)
        there.pins = self.pins
        return WhatIf(change, cluster, present, there.recosted(present), there.plan)

    def recosted(self, plan: LayerPlan) -> Recosted:
        """The best plan here in which every layer has its settings of another plan."""
        settings = {layer.name: layer for layer in plan.layers}
        try:
            same = self._solve(self.memory, (), settings)
        except (InfeasibleError, PlanError) as error:
            return Recosted(None, None, False, str(error))
        return Recosted(same.objective_seconds, same.peak_bytes, True)

    def _reach(self) -> tuple[int, DeviceSpec]:
        return self.plan.peak_bytes, self.question.cluster.device

    def _prices(
        self, limits: Sequence[int], time_limit: float | None, noticed: threading.Event
    ) -> Iterator[MemoryPrice]:
        cheapest: LayerPlan | None = None
        for memory in limits:
            if noticed.is_set():
                yield MemoryPrice(memory, None, None, NOT_SOLVED)
                continue
            try:
                found = self._planned(memory, self.pins, time_limit)
            except InfeasibleError as error:
                yield MemoryPrice(memory, None, None, str(error))
                continue
            bound = found.bound_seconds
            if cheapest is not None and seconds_of(cheapest) < seconds_of(found):
                found = cheapest  # it fits here too
            cheapest = found
            yield MemoryPrice(memory, found, bound)

    def within(self, memory: int, pins: Sequence[Pin], progress: Callable[[Progress], None] | None = None) -> LayerPlan:
        """The plan within a limit on a device's bytes, the reserve included, with pins that were checked before."""
        return self._planned(memory, pins, progress=progress)

    def _pin_of(self, target: str, decision: str | Sequence[str], forbids: bool) -> Pin:
        return layer_pin(target, decision, self.layers, forbids)

    def _planned_with(self, pins: tuple[Pin, ...]) -> LayerPlan:
        return self._planned(self.memory, pins)

    def _replanned(self, pins: tuple[Pin, ...], time_limit: float | None) -> tuple[LayerPlan, LayerPlan, float]:
        before = self.plan
        started = time.perf_counter()
        after = self._planned(self.memory, pins, time_limit)
        return before, after, time.perf_counter() - started

    def _planned(
        self,
        memory: int | None,
        pins: Sequence[Pin],
        time_limit: float | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> LayerPlan:
        """A plan that is known, where it is optimal or another search as long would find no other; else a new one."""
        key = memory, frozenset(pins)
        known, searched = self._plans.get(key), self._searched_seconds.get(key, 0.0)
        is_enough = searched > 0 if time_limit is None else searched >= time_limit
        if known is not None and (is_enough or _record(known).status == Status.OPTIMAL):
            return known
        started = time.perf_counter()
        try:
            found = self._solve(memory, pins, None, time_limit, progress)
        except InfeasibleError:
            if known is None:
                raise
            return known  # Ctrl-C ended the new search before it had found any plan
        if INTERRUPTED not in _record(found).notes:
            limit = self.question.time_limit if time_limit is None else time_limit
            self._searched_seconds[key] = max(searched, limit)
        self._plans[key] = found if known is None else _better(known, found)
        if not self.first_seconds:
            self.first_seconds = self._traced_seconds + time.perf_counter() - started
        return self._plans[key]

    def _solve(
        self,
        memory: int | None,
        pins: Sequence[Pin],
        settings: Mapping[str, LayerSettings] | None = None,
        time_limit: float | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> LayerPlan:
        asked = self.question
        return plan_layers(
            asked.reference,
            cluster=asked.cluster,
            devices=asked.devices,
            formulation=asked.formulation,
            memory=memory,
            optimizer=asked.optimizer,
            as_published=asked.as_published,
            time_limit=asked.time_limit if time_limit is None else time_limit,
            slips=asked.slips,
            pins=[(pin.target, pin.decision) for pin in pins if not pin.forbids],
            forbidden=[(pin.target, pin.decision) for pin in pins if pin.forbids],
            chain=self.chain,
            settings=settings,
            choices=asked.choices,
            progress=progress or self.progress,
        )

    def __repr__(self) -> str:
        asked = self.question
        known = self._plans.get(self._present)
        plan = "not planned yet" if known is None else repr(known)
        where = f"{asked.reference.source} by {asked.formulation} on {asked.devices} devices of {asked.cluster.name}"
        return f"<exploration of {where}, {len(self.pins)} pins: {plan}>"


def _record(plan: LayerPlan) -> LayerRecord:
    assert plan.record is not None, "an exploration begins with no plan that was written by hand"
    return plan.record


def _better(known: LayerPlan, found: LayerPlan) -> LayerPlan:
    """The better of two plans of one question, the found one where they are alike, with the higher of their bounds."""
    best = known if _cost(known) < _cost(found) else found
    record, objective = _record(best), seconds_of(best)
    bounds = [bound for bound in (known.bound_seconds, found.bound_seconds) if bound is not None]
    bound = max(bounds, default=None)
    if bound is None or bound == record.bound_seconds:
        return best
    gap = max(0.0, objective - bound) / objective
    status = Status.OPTIMAL if bound >= objective else record.status
    proven = {"bound_seconds": bound, "gap": gap, "status": status}
    return best.model_copy(update={"record": record.model_copy(update=proven)})


def _cost(plan: LayerPlan) -> float:
    """What a search made as small as it could: bytes of the fullest device, or seconds of a step."""
    return plan.peak_bytes if _record(plan).choices.get("objective") == "peak" else seconds_of(plan)

"""Changes of a cluster, and what becomes of a plan on the changed one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from formulations.step.training_step import StepDecision
from planner.common.units import format_bytes, format_seconds
from planner.explore.errors import ExploreError
from planner.explore.tables import AnyPlan, Table, plan_row, seconds_of, signed_seconds, without_unused
from planner.explore.targets import node_name
from planner.machine.cluster import ClusterSpec, LinkSpec
from planner.plan.decision import NANOSECONDS
from planner.session.planning import PlanningSession
from planner.strategies.space import StrategySpace


@dataclass(frozen=True, slots=True)
class ClusterChange:
    """A change of a cluster or of the mesh on it; the defaults change nothing.

    Parameters
    ----------
    bandwidth, inter_node_bandwidth, host_bandwidth
        Factors of the rates of the links inside a node, between nodes, and to the host.
    flops, memory_bandwidth
        Factors of the rates of a device: matrix products, and reading and writing of memory.
    memory
        Bytes of one device that the plan may use, the reserve included; None for as many as before.
    mesh
        Size of each mesh axis, with as many axes as before; None for the same.
    cluster
        Another cluster, to which the factors apply; None for the same.

    Raises
    ------
    ExploreError
        A factor is not above 0.
    """

    bandwidth: float = 1.0
    inter_node_bandwidth: float = 1.0
    host_bandwidth: float = 1.0
    flops: float = 1.0
    memory_bandwidth: float = 1.0
    memory: int | None = None
    mesh: tuple[int, ...] | None = None
    cluster: ClusterSpec | None = None

    def __post_init__(self) -> None:
        for name, factor in self.factors.items():
            if not (math.isfinite(factor) and factor > 0):
                raise ExploreError(f"{name} {factor}: give a factor above 0, such as 2 for twice the rate")

    @property
    def factors(self) -> dict[str, float]:
        """Factors by name."""
        return {
            "bandwidth": self.bandwidth,
            "inter_node_bandwidth": self.inter_node_bandwidth,
            "host_bandwidth": self.host_bandwidth,
            "flops": self.flops,
            "memory_bandwidth": self.memory_bandwidth,
        }

    def of(self, cluster: ClusterSpec) -> ClusterSpec:
        """The changed cluster. Measured costs of instructions are left out where a rate changes."""
        base = self.cluster or cluster
        device, update = base.device, {}
        if self.flops != 1.0 or self.memory_bandwidth != 1.0:
            by_class = {name: rate * self.memory_bandwidth for name, rate in device.bandwidth_by_class.items()}
            update = {
                "flops": {name: rate * self.flops for name, rate in device.flops.items()},
                "memory_bandwidth": device.memory_bandwidth * self.memory_bandwidth,
                "bandwidth_by_class": by_class,
            }
        if self.memory is not None and self.memory > device.memory_bytes:
            update["memory_bytes"] = self.memory
        changed = self.memory is not None or self.cluster is not None or any(f != 1.0 for f in self.factors.values())
        rates = any(factor != 1.0 for factor in self.factors.values())
        return base.model_copy(
            update={
                "name": f"{base.name}, changed" if changed and self.cluster is None else base.name,
                "device": device.model_copy(update=update),
                "intra_node": _scaled(base.intra_node, self.bandwidth),
                "inter_node": None if base.inter_node is None else _scaled(base.inter_node, self.inter_node_bandwidth),
                "host_link": _scaled(base.host_link, self.host_bandwidth),
                "costs": {} if rates else base.costs,
            }
        )

    def __str__(self) -> str:
        words = [f"{factor:g} x {name.replace('_', ' ')}" for name, factor in self.factors.items() if factor != 1.0]
        if self.memory is not None:
            words.append(f"memory {format_bytes(self.memory)}")
        if self.mesh is not None:
            words.append(f"mesh {'x'.join(map(str, self.mesh))}")
        if self.cluster is not None:
            words.append(f"cluster {self.cluster.name}")
        return ", ".join(words) or "no change"


def _scaled(link: LinkSpec, factor: float) -> LinkSpec:
    return link.model_copy(update={"bandwidth": link.bandwidth * factor})


@dataclass(frozen=True, slots=True)
class Recosted:
    """A plan's decision on another cluster.

    Parameters
    ----------
    seconds, peak_bytes
        Predicted by the replay of its schedule there; None where it is no plan there.
    fits
        Whether it is one, within the limit.
    reason
        Why not.
    """

    seconds: float | None
    peak_bytes: int | None
    fits: bool
    reason: str = ""


def recosted(session: PlanningSession, decision: StepDecision | str, limit: int, host_limit: int | None) -> Recosted:
    """Replay a decision within a limit in bytes of tensors; a string is the reason why there is none."""
    if isinstance(decision, str):
        return Recosted(None, None, False, decision)
    report = session.replay(session.schedule(decision, limit), None, host_limit)
    if report.violations:
        return Recosted(None, report.peak_bytes, False, str(report.violations[0]))
    assert report.total_quanta is not None
    over = report.peak_bytes - limit
    reason = f"it needs {format_bytes(over)} more than there are" if over > 0 else ""
    return Recosted(
        report.total_quanta * session.optimizer.micro_batches / NANOSECONDS, report.peak_bytes, over <= 0, reason
    )


def translated(old: StrategySpace, new: StrategySpace, decision: StepDecision) -> StepDecision | str:
    """The decision with the same placements in another space of the same graph, or why there is none."""
    if len(old.mesh) != len(new.mesh):
        return f"its placements are for {len(old.mesh)} mesh axes, the new mesh has {len(new.mesh)}"
    layouts = []
    for k, layout in enumerate(decision.layouts):
        wanted = old.strategies[k][layout]
        found = next(
            (j for j, s in enumerate(new.strategies[k]) if (s.outputs, s.inputs) == (wanted.outputs, wanted.inputs)),
            None,
        )
        if found is None:
            placed = " ".join(",".join(placement) for placement in wanted.outputs if placement is not None)
            return f"{node_name(old, k)} cannot be placed as {placed} on the new mesh"
        layouts.append(found)
    return StepDecision(tuple(layouts), decision.recomputed, decision.offloaded)


@dataclass(frozen=True, repr=False)
class WhatIf(Table):
    """A plan before a change of the cluster, the same plan after it, and the new plan.

    Parameters
    ----------
    change, cluster
        The change, and the changed cluster: :func:`planner.api.explain` takes it for the new plan.
    before, same, after
        The present plan, its decision under the change, and the plan made for the change.
    """

    change: ClusterChange
    cluster: ClusterSpec
    before: AnyPlan
    same: Recosted
    after: AnyPlan

    @property
    def gain_seconds(self) -> float | None:
        """Seconds a step that planning anew saves over the present decision; None where that is no plan there."""
        seconds = self.same.seconds
        return seconds - seconds_of(self.after) if self.same.fits and seconds is not None else None

    def title(self) -> str:
        """The change, and the step's time before and after."""
        before, after = format_seconds(seconds_of(self.before)), format_seconds(seconds_of(self.after))
        return f"{self.change}: {before} a step now, {after} then"

    def rows(self) -> list[dict[str, Any]]:
        """The three plans."""
        same = plan_row("present plan, changed cluster", self.before) | {
            "seconds": self.same.seconds,
            "bound_seconds": None,
            "gap": None,
            "peak_bytes": self.same.peak_bytes,
        }
        rows = [plan_row("present plan", self.before), same, plan_row("new plan, changed cluster", self.after)]
        fits = (True, self.same.fits, True)
        return without_unused([row | {"fits": does} for row, does in zip(rows, fits, strict=True)])

    def notes(self) -> Sequence[str]:
        """What planning anew is worth, and why the present plan is none there."""
        lines = [f"the present plan does not do there: {self.same.reason}"] if not self.same.fits else []
        if self.gain_seconds is not None:
            lines.append(f"planning anew: {signed_seconds(-self.gain_seconds)} a step")
        return lines

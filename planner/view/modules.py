"""A plan folded by module: seconds, bytes at the peak, placements and counts of every module, and its instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from planner.graph.operator_graph import OperatorGraph
from planner.graph.placement import Placement, placement_kind
from planner.replay.report import Category
from planner.schedule.instructions import Compute, Free, Offload, Reshard, Schedule, Update
from planner.view.opened import OpenedPlan

STATE = frozenset({Category.PARAMETERS, Category.MODULE_BUFFERS, Category.OPTIMIZER})
"""Categories of what lives for the whole step."""


@dataclass(slots=True)
class Figures:
    """Figures of a module.

    Parameters
    ----------
    compute_ns, again_ns, collective_ns, update_ns
        Nanoseconds that the computation's stream spends in first executions, recomputation, collectives and copies
        (waits included), and the optimizer.
    state_bytes, other_bytes
        Bytes on one device at the peak: parameters, module buffers and optimizer state; and all else.
    operators, recomputed, reshards, offloaded
        Numbers of first executions (views left out), recomputing executions, reshardings, and offloaded tensors.
    placements
        Number of results of first executions by placement.
    """

    compute_ns: int = 0
    again_ns: int = 0
    collective_ns: int = 0
    update_ns: int = 0
    state_bytes: int = 0
    other_bytes: int = 0
    operators: int = 0
    recomputed: int = 0
    reshards: int = 0
    offloaded: int = 0
    placements: Counter[Placement] = field(default_factory=Counter)

    @property
    def total_ns(self) -> int:
        """Nanoseconds of the step."""
        return self.compute_ns + self.again_ns + self.collective_ns + self.update_ns

    @property
    def peak_bytes(self) -> int:
        """Bytes on one device at the peak."""
        return self.state_bytes + self.other_bytes

    def add(self, other: Figures) -> None:
        """Add the figures of another module."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))

    @property
    def placement_kinds(self) -> Counter[str]:
        """Number of results that are sharded, partial or replicated."""
        kinds: Counter[str] = Counter()
        for placement, count in self.placements.items():
            kinds[placement_kind(placement)] += count
        return kinds


@dataclass(slots=True)
class Module:
    """A module with those inside it.

    Parameters
    ----------
    name, path
        Last name of its path, and the whole path; the root has the path "".
    own, all
        Figures of its own instructions, and with those of the modules inside.
    children
        By name, in order of execution.
    instructions
        Positions of its own instructions.
    """

    name: str
    path: str
    own: Figures = field(default_factory=Figures)
    all: Figures = field(default_factory=Figures)
    children: dict[str, Module] = field(default_factory=dict)
    instructions: list[int] = field(default_factory=list)

    def at(self, path: str) -> Module:
        """Module of a path below this one, made where it does not exist."""
        found = self
        for name in path.split(".") if path else ():
            inner = f"{found.path}.{name}".lstrip(".")
            found = found.children.setdefault(name, Module(name, inner))
        return found

    def walk(self) -> Iterator[Module]:
        """Yield the module and all inside it, outer ones first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def module_tree(opened: OpenedPlan) -> Module:
    """Modules of a plan's step, those of the whole step in the root; seconds add up to the plan's objective."""
    root = Module("whole step", "")
    for at, (entry, nanoseconds) in enumerate(zip(opened.schedule.instructions, opened.time.durations, strict=True)):
        module = root.at(opened.module(at))
        if nanoseconds or not _is_silent(opened.graph, entry):
            module.instructions.append(at)
        _count(module.own, opened.graph, opened.schedule, entry, nanoseconds)
    for tensor in opened.report.alive_at_peak:
        figures = root.at(opened.module_of_tensor(tensor)).own
        if tensor.category in STATE:
            figures.state_bytes += tensor.nbytes
        else:
            figures.other_bytes += tensor.nbytes
    _total(root)
    return root


def figures_by_path(root: Module) -> Mapping[str, Figures]:
    """Own figures of every module that has instructions or bytes of its own, in order of execution."""
    return {module.path: module.own for module in root.walk() if module.instructions or module.own.peak_bytes}


def _is_silent(graph: OperatorGraph, entry: object) -> bool:
    return isinstance(entry, Free) or (isinstance(entry, Compute) and graph.operators[entry.operator].is_view)


def _count(figures: Figures, graph: OperatorGraph, schedule: Schedule, entry: object, nanoseconds: int) -> None:
    match entry:
        case Compute(operator, _, outputs, recompute):
            if recompute:
                figures.again_ns += nanoseconds
                figures.recomputed += 1
                return
            figures.compute_ns += nanoseconds
            if graph.operators[operator].is_view:
                return
            figures.operators += 1
            figures.placements.update(schedule.buffers[buffer].placement for buffer in outputs if buffer is not None)
        case Update():
            figures.update_ns += nanoseconds
        case _:
            figures.collective_ns += nanoseconds
            figures.reshards += isinstance(entry, Reshard)
            figures.offloaded += isinstance(entry, Offload)


def _total(module: Module) -> None:
    module.all.add(module.own)
    for child in module.children.values():
        _total(child)
        module.all.add(child.all)

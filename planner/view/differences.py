"""What differs between two plans, module by module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

from planner.graph.placement import Placement
from planner.replay.wording import placement_text
from planner.schedule.instructions import Compute
from planner.view.modules import Figures, Module, figures_by_path
from planner.view.opened import OpenedPlan

NOTHING = Figures()
NUMBER = r"\b\d+\b"
"""Number of a layer in a path."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Modules that two plans treat differently, all in the same way.

    Parameters
    ----------
    paths
        Paths of the modules, which differ in numbers of layers only; that of the root is empty.
    left, right
        Own figures of each of them in both plans.
    placements
        Changes of the placements of results of first executions, with their numbers.
    """

    paths: tuple[str, ...]
    left: Figures
    right: Figures
    placements: str

    @property
    def count(self) -> int:
        """Number of the modules."""
        return len(self.paths)

    @property
    def name(self) -> str:
        """Path with a star for the number where there are several."""
        return _starred(self.paths[0]) if self.count > 1 else self.paths[0] or "whole step"

    @property
    def numbers(self) -> str:
        """Numbers of the layers where there are several."""
        return ", ".join(".".join(re.findall(NUMBER, path)) for path in self.paths) if self.count > 1 else ""

    @property
    def nanoseconds(self) -> int:
        """Seconds of the right plan beyond the left one's in each module, in nanoseconds."""
        return self.right.total_ns - self.left.total_ns


def differences(left: OpenedPlan, right: OpenedPlan, left_tree: Module, right_tree: Module) -> list[Difference]:
    """Modules whose seconds, bytes at the peak, placements or counts differ, the largest difference of time first.

    Parameters
    ----------
    left, right
        Two plans, of one step or of two.
    left_tree, right_tree
        Their modules.
    """
    ours, theirs = figures_by_path(left_tree), figures_by_path(right_tree)
    results = [_result_placements(opened) for opened in (left, right)]
    equal: dict[str, list[Difference]] = {}
    for path in dict.fromkeys(chain(ours, theirs)):
        one, other = ours.get(path, NOTHING), theirs.get(path, NOTHING)
        moved = _moved(results[0].get(path, {}), results[1].get(path, {}))
        if one != other or moved:
            found = Difference((path,), one, other, moved)
            equal.setdefault(repr((_starred(path), one, other, moved)), []).append(found)
    joined = [replace(group[0], paths=tuple(entry.paths[0] for entry in group)) for group in equal.values()]
    return sorted(joined, key=lambda entry: -entry.count * abs(entry.nanoseconds))


def _starred(path: str) -> str:
    return re.sub(NUMBER, "*", path)


def _result_placements(opened: OpenedPlan) -> dict[str, dict[str, tuple[Placement, ...]]]:
    """By module and operator, the placements of the operator's results in its first execution."""
    buffers = opened.schedule.buffers
    found: dict[str, dict[str, tuple[Placement, ...]]] = {}
    for entry in opened.schedule.instructions:
        if isinstance(entry, Compute) and not entry.recompute and not opened.graph.operators[entry.operator].is_view:
            operator = opened.graph.operators[entry.operator]
            made = tuple(buffers[buffer].placement for buffer in entry.outputs if buffer is not None)
            found.setdefault(operator.module_path, {})[operator.identity] = made
    return found


def _moved(left: Mapping[str, tuple[Placement, ...]], right: Mapping[str, tuple[Placement, ...]]) -> str:
    """Changes of placements, equal ones counted, the most frequent first."""
    counts: dict[str, int] = {}
    for identity in left.keys() & right.keys():
        for before, after in zip(left[identity], right[identity], strict=False):
            if before != after:
                way = f"{placement_text(before)} → {placement_text(after)}"
                counts[way] = counts.get(way, 0) + 1
    return ", ".join(f"{count} x {way}" for way, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))

"""Predicted memory as a snapshot of torch's allocator, which https://pytorch.org/memory_viz opens.

A snapshot is what ``torch.cuda.memory._dump_snapshot`` writes: a pickle of dictionaries, lists, strings and integers.
``python -m torch.cuda._memory_viz`` reads the same. Every storage of the replay is allocated by the instruction that
creates it and freed by the one that drops its last alias; the workspace of an instruction is there while it runs.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from planner.replay.checker import OptimizerMemory, lifetimes_of_tensors
from planner.replay.report import AliveTensor
from planner.replay.wording import placement_text
from planner.view.opened import OpenedPlan

BASE = 0x7F0000000000
"""Address at which the memory begins; any would do."""
PROTOCOL = 4
"""Of the pickle; what the visualizer's own reader knows."""


def snapshot_bytes(opened: OpenedPlan) -> bytes:
    """The pickled snapshot of a plan; it is data for the visualizer, and nothing here reads it again."""
    return pickle.dumps(memory_snapshot(opened), protocol=PROTOCOL)


def memory_snapshot(opened: OpenedPlan) -> dict[str, Any]:
    """The snapshot: every allocation and release of a step in order, and what is left when it has ended.

    Parameters
    ----------
    opened
        The plan; its peak is that of the snapshot.
    """
    writer = _Writer(opened)
    count = len(opened.schedule.instructions)
    created: dict[int, list[AliveTensor]] = defaultdict(list)
    freed: dict[int, list[AliveTensor]] = defaultdict(list)
    optimizer = OptimizerMemory(opened.session.optimizer)
    for tensor, begin, end in lifetimes_of_tensors(
        opened.graph, opened.schedule, optimizer, bool(opened.plan.decision.options.releases_sources)
    ):
        if tensor.nbytes:
            created[begin].append(tensor)
            freed[end].append(tensor)
    for at in range(-1, count):
        for tensor in freed[at]:  # by a path of several steps, whose transient bytes hold it too
            writer.free(tensor, at)
        for tensor in created[at]:
            writer.allocate(tensor, at)
        for tensor in _transients(opened, at):
            writer.allocate(tensor, at)
            writer.free(tensor, at)
    return {"segments": [writer.segment()], "device_traces": [writer.events]}


def _transients(opened: OpenedPlan, at: int) -> Iterator[AliveTensor]:
    """One tensor for all that an instruction holds only while it runs."""
    if at >= 0:
        held = {category: int(amounts[at]) for category, amounts in opened.report.profile.transient.items()}
        if any(held.values()):
            category = max(held, key=lambda name: held[name])
            yield AliveTensor(f"during {opened.label(at)}", sum(held.values()), (), category, None)


class _Writer:
    """Events of allocations, each at the lowest address where it fits."""

    def __init__(self, opened: OpenedPlan) -> None:
        self._opened = opened
        self.events: list[dict[str, Any]] = []
        self._alive: dict[AliveTensor, tuple[int, list[dict[str, Any]]]] = {}
        self._gaps: list[tuple[int, int]] = []
        """Begin and end of free addresses below the highest one used, in order."""
        self._end = BASE

    def allocate(self, tensor: AliveTensor, at: int) -> None:
        place = next((place for place, (a, b) in enumerate(self._gaps) if b - a >= tensor.nbytes), None)
        if place is None:
            address = self._end
            if self._gaps and self._gaps[-1][1] == self._end:  # the last gap grows to what is needed
                address = self._gaps.pop()[0]
            self._end = address + tensor.nbytes
        else:
            address, end = self._gaps[place]
            self._gaps[place : place + 1] = [(address + tensor.nbytes, end)] * (end - address > tensor.nbytes)
        frames = self._frames(tensor, at)
        self._alive[tensor] = address, frames
        self._event("alloc", tensor, at)

    def free(self, tensor: AliveTensor, at: int) -> None:
        for action in ("free_requested", "free_completed"):
            self._event(action, tensor, at)
        address, _ = self._alive.pop(tensor)
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self._gaps, (address, address + tensor.nbytes)]):
            if merged and merged[-1][1] == begin:
                merged[-1] = merged[-1][0], end
            else:
                merged.append((begin, end))
        self._gaps = merged

    def segment(self) -> dict[str, Any]:
        """One segment with what is alive at the end, and the gaps between."""
        blocks: list[dict[str, Any]] = [
            {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
            for tensor, (address, frames) in self._alive.items()
            for size in (tensor.nbytes,)
        ]
        blocks += [
            {"address": begin, "size": end - begin, "requested_size": 0, "state": "inactive", "frames": []}
            for begin, end in self._gaps
        ]
        active = sum(tensor.nbytes for tensor in self._alive)
        return {
            "device": 0,
            "address": BASE,
            "total_size": self._end - BASE,
            "allocated_size": active,
            "active_size": active,
            "requested_size": active,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": sorted(blocks, key=lambda block: block["address"]),
        }

    def _event(self, action: str, tensor: AliveTensor, at: int) -> None:
        address, frames = self._alive[tensor]
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": tensor.nbytes,
                "stream": 0,
                "time_us": int(self._opened.starts[max(at, 0)]) // 1000,
                "frames": frames,
                "category": str(tensor.category),
            }
        )

    def _frames(self, tensor: AliveTensor, at: int) -> list[dict[str, Any]]:
        """In place of a stack: the tensor with its placement, and the instruction that makes it."""
        placement = placement_text(tensor.placement) if tensor.placement else ""
        made_by = self._opened.label(at) if at >= 0 else "before the step"
        return [
            {"name": f"{tensor.name} {placement}".rstrip(), "filename": str(tensor.category), "line": 0},
            {"name": made_by, "filename": "instruction", "line": max(at, 0)},
        ]

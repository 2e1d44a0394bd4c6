"""The end of a step on one rank: updates of parameters, and waits for the gradients that are still under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.schedule.instructions import Compute, Free, Instruction, Reshard, Update, Wait
from planner.torch_adapter.local.buckets import PartInFlight
from planner.torch_adapter.local.collectives import InFlight

Carried = dict[int, Tensor | InFlight | PartInFlight]
"""Tensors and collectives under way, by buffer."""


@dataclass(frozen=True, eq=False)
class StepEnd:
    """Instructions of a schedule from its first update on: updates, and the rest of the way of gradients.

    Parameters
    ----------
    instructions, first
        The instructions, and the position of the first of them.
    carried
        Buffers that they take over from forward and backward, and those of gradients without an update.
    functions
        Function of each view and resharding by its place among the instructions; an overlapped one starts there, and a
        bucket with its last part.
    buckets
        Parts of each bucket by the place of the last one; the others have no function.
    parameter_of
        Name of the parameter by its buffer.
    gradient_of
        Buffer of the gradient by name of the parameter; two parameters may have one.
    tick
        Called with the position of each instruction when it has ended.
    """

    instructions: tuple[Instruction, ...]
    first: int
    carried: tuple[int, ...]
    functions: Mapping[int, Callable[..., Any]]
    buckets: Mapping[int, tuple[Reshard, ...]]
    parameter_of: Mapping[int, str]
    gradient_of: Mapping[str, int]
    tick: Callable[[int], None] | None = None

    @property
    def updated(self) -> tuple[str, ...]:
        """Names of the parameters in the order of their updates."""
        return tuple(self.parameter_of[entry.parameter] for entry in self.instructions if isinstance(entry, Update))

    @property
    def only_updates(self) -> bool:
        """Whether the step ends with updates alone, and nothing is on its way any more."""
        return all(isinstance(entry, (Update, Free, Compute)) for entry in self.instructions)

    def run(self, carried: Carried, update: Callable[[str, Tensor], None]) -> None:
        """Run the instructions; all ranks of the mesh must call it.

        Parameters
        ----------
        carried
            What the step's forward and backward left; it is emptied as the schedule frees it.
        update
            Called with the name of each parameter and its local gradient.
        """
        with torch.no_grad():
            for at, instruction in enumerate(self.instructions):
                match instruction:
                    case Wait(buffer):
                        under_way = carried[buffer]
                        assert not isinstance(under_way, Tensor)
                        carried[buffer] = under_way.wait()
                        del under_way
                    case Reshard() if at in self.buckets:
                        self._start_bucket(carried, at)
                    case Reshard(source, target) if at in self.functions:
                        following = self.instructions[at + 1] if at + 1 < len(self.instructions) else None
                        is_last = isinstance(following, Free) and source in following.buffers
                        # A source that is passed on ends with the first step of a path, as the replay counts it.
                        carried[target] = self.functions[at](carried.pop(source) if is_last else carried[source])
                    case Compute(_, inputs, outputs):
                        results = self.functions[at](*(carried[buffer] for buffer in inputs))
                        results = results if isinstance(results, (tuple, list)) else (results,)
                        carried.update(
                            (buffer, tensor)
                            for buffer, tensor in zip(outputs, results, strict=True)
                            if buffer is not None
                        )
                        del results
                    case Update(parameter, gradient):
                        tensor = carried[gradient]
                        assert isinstance(tensor, Tensor)
                        update(self.parameter_of[parameter], tensor)
                        del tensor
                    case Free(buffers):
                        for buffer in buffers:
                            carried.pop(buffer, None)
                if self.tick is not None:
                    self.tick(self.first + at)

    def _start_bucket(self, carried: Carried, at: int) -> None:
        parts = self.buckets[at]
        started = self.functions[at](*(carried[part.source] for part in parts))
        carried.update((part.target, found) for part, found in zip(parts, started, strict=True))

    def gradients(self, carried: Carried) -> dict[str, Tensor]:
        """Local gradients by name of the parameter, in the order of their updates; waits for all of them."""
        found: dict[str, Tensor] = {
            name: tensor
            for name, buffer in self.gradient_of.items()
            if isinstance(tensor := carried.get(buffer), Tensor)
        }
        updated: dict[str, Tensor] = {}
        self.run(carried, updated.__setitem__)
        return {**updated, **{name: tensor for name, tensor in found.items() if name not in updated}}

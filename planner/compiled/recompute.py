"""Which kernels of the forward run again in the backward, under a limit in bytes: the canonical problem, solved.

The kernels are the operators of a :class:`~formulations.step.training_step.StepModel` with one layout each, so the
problem is that of ``kiwi_chain``: chains of kernels may run again, each once, and memory is true at every moment.
Inputs and parameters are resident. What is returned, gradients too, is held to the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import starmap
from types import MappingProxyType

import numpy as np

from formulations.problem.solution import SolveResult
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.peaks.minimum_peak import MinimumPeak
from formulations.step.kiwi_chain import latest_moments
from formulations.step.solving.context import Executed, SolveContext, executed
from formulations.step.solving.driver import solve_step
from formulations.step.solving.registry import kiwi_chain_problem
from formulations.step.training_step import NodeKind, ResultEdge, StepDecision, StepEdge, StepModel, StepNode
from planner.common.infeasibility import refusal
from planner.compiled.kernel_seconds import KernelSeconds
from planner.graph.kernel_graph import CompileError, Kernel, KernelGraph
from planner.machine.costs import to_quanta


class JointStep:
    """Forward and backward graph as one step.

    Parameters
    ----------
    forward, backward
        The graphs; the backward's kept values go by the names that they have in the forward.
    seconds
        Time of kernels.
    state
        Bytes that are there all the time beside parameters and inputs.
    fixed
        Whether nothing is left to decide. A returned gradient is written over a kept activation only then: what made
        the activation could not run again, since its result would be held to the end of the step.
    workspaces
        Bytes that operators hold while they run, beyond arguments and results, by name; none of the others.
    """

    def __init__(
        self,
        forward: KernelGraph,
        backward: KernelGraph,
        seconds: KernelSeconds,
        state: int = 0,
        fixed: bool = False,
        workspaces: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._forward, self._seconds, self._workspaces = forward, seconds, workspaces
        self._sizes = {**backward.sizes, **forward.sizes}
        self._made: dict[str, tuple[int, int]] = {}
        self._edges: list[StepEdge] = []
        resident = state + sum(forward.sizes[name] for name in forward.given)
        self._nodes = [StepNode("parameters and inputs", NodeKind.INPUT, _one(0), _row([]), _one(resident))]
        for kernel in forward.kernels:
            self._add(kernel, NodeKind.FORWARD)
        returned = self._results(forward)
        self._add_tangents(backward, forward.given)
        last_read = {name: k for k, kernel in enumerate(backward.kernels) for name in kernel.reads}
        for k, kernel in enumerate(backward.kernels):
            free = {name for name in kernel.reads if last_read[name] == k and name in self._made}
            free.difference_update(backward.results, forward.results)
            taken = {new: old for new, old in kernel.overwrites if old in free}
            if not fixed:
                taken = {new: old for new, old in taken.items() if not (new in backward.results and self._is_kept(old))}
            self._add(kernel, NodeKind.BACKWARD, taken)
        results = dict.fromkeys((*returned, *self._results(backward)))
        self.model = StepModel(tuple(self._nodes), tuple(self._edges), (), tuple(starmap(_result, results)))

    @property
    def resident(self) -> int:
        """Bytes that are there all the time."""
        return int(self._nodes[0].resident_bytes[0])

    def values_kept(self, again: frozenset[int]) -> dict[str, int]:
        """Values that stay between forward and backward if these kernels run again, with their bytes."""
        return {name: self._sizes[name] for kernel, name in self._read_later(again) if kernel not in again}

    def kernels_again(self, again: frozenset[int]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Operators of every kernel that runs again, and the values of it that backward or another rerun reads."""
        needed: dict[int, set[str]] = {kernel: set() for kernel in sorted(again)}
        for kernel, name in self._read_later(again):
            if kernel in needed:
                needed[kernel].add(name)
        return [(self._forward.kernels[k].operators, tuple(sorted(names))) for k, names in needed.items()]

    def _read_later(self, again: frozenset[int]) -> Iterator[tuple[int, str]]:
        """Yield forward kernels with each value of theirs that the backward, or a kernel that runs again, reads."""
        for edge in self._edges:
            is_later = self._nodes[edge.consumer].kind is NodeKind.BACKWARD or edge.consumer - 1 in again
            if is_later and self._nodes[edge.producer].kind is NodeKind.FORWARD:
                yield edge.producer - 1, self._forward.kernels[edge.producer - 1].writes[edge.output]

    def as_cut(self) -> Executed:
        """Nanoseconds and peak of both graphs as they are."""
        return executed(self.model, StepDecision((0,) * len(self._nodes), {}))

    def decide(
        self, limit: int, context: Callable[[Callable[[StepDecision], Executed]], SolveContext]
    ) -> tuple[frozenset[int], SolveResult]:
        """Find the fastest step within a limit.

        Parameters
        ----------
        limit
            Bytes.
        context
            Makes solver, options and workers for an execution of decisions.

        Returns
        -------
        again
            Forward kernels that run again, by position.
        result
            Objective and bound in nanoseconds, of forward and backward together.

        Raises
        ------
        CompileError
            Nothing fits; the message names what is alive at the peak, and what would fit.
        """
        everything = latest_moments(self.model, dict.fromkeys(np.flatnonzero(self.model.rerunnable).tolist()))
        generated = {i: at for i, at in everything.items() if self._forward.kernels[i - 1].is_generated}
        problem = kiwi_chain_problem(
            self.model, limit, (latest_moments(self.model, dict.fromkeys(generated)), everything), twice=False
        )
        found = solve_step(problem, context(partial(executed, self.model)))
        if isinstance(found, MinimumPeak):
            raise CompileError(str(refusal(found, limit, 0, "memory=")))
        return frozenset(i - 1 for i in found.decision.recomputed), found.result

    def _add(self, kernel: Kernel, kind: NodeKind, overwrites: Mapping[str, str] | None = None) -> None:
        """Add a kernel; what it writes over another value has the memory of that one, so all that reads it holds that.

        Only kernels of the backward write over values: they run once, whatever is decided.
        """
        position, taken = len(self._nodes), overwrites or {}
        for slot, name in enumerate(name for name in kernel.reads if name in self._made):
            self._edges.append(_edge(*self._made[name], position, slot))
        for output, name in enumerate(kernel.writes):
            self._made[name] = self._made[taken[name]] if name in taken else (position, output)
        workspace = sum(self._workspaces.get(name, 0) for name in kernel.operators)
        self._nodes.append(
            StepNode(
                kernel.operators[-1 if kernel.is_generated else 0],
                kind,
                to_quanta([self._seconds.of(kernel, self._sizes)]),
                _row([0 if name in taken else self._sizes[name] for name in kernel.writes]),
                _one(0),
                recomputable=kind is NodeKind.FORWARD and not kernel.is_random,
                workspace_bytes=_one(workspace) if workspace else None,
            )
        )

    def _is_kept(self, name: str) -> bool:
        return self._nodes[self._made[name][0]].kind is NodeKind.FORWARD

    def _add_tangents(self, backward: KernelGraph, given: tuple[str, ...]) -> None:
        """Gradients of the outputs, which are there when the backward begins."""
        names = [name for name in backward.given if name not in self._made and name not in given]
        self._made |= {name: (len(self._nodes), output) for output, name in enumerate(names)}
        sizes = _row([self._sizes[name] for name in names])
        self._nodes.append(StepNode("gradients of outputs", NodeKind.BACKWARD, _one(0), sizes, _one(0)))

    def _results(self, graph: KernelGraph) -> list[tuple[int, int]]:
        return [self._made[name] for name in graph.results if name in self._made]


def _one(count: int) -> IntArray:
    return np.array([count], np.int64)


def _row(counts: list[int]) -> IntArray:
    return np.array(counts, np.int64).reshape(1, -1)


def _edge(producer: int, output: int, consumer: int, slot: int) -> StepEdge:
    zero = np.zeros((1, 1), np.int64)
    return StepEdge(producer, output, consumer, slot, zero, zero, zero, np.zeros((1, 1), np.bool_))


def _result(producer: int, output: int) -> ResultEdge:
    zero = _one(0)
    return ResultEdge(producer, output, zero, zero, zero, np.zeros(1, np.bool_))

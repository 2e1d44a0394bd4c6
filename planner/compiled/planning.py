"""The plan of a joint graph: torch's own cut where that fits, else one with more recomputation, checked as it is cut.

The problem is stated on torch's own cut. What torch makes of the decision is then read again as kernels and executed:
peak and seconds of a plan are those of the two graphs that are compiled. Where they hold more than the limit, the
problem is solved for a smaller one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status, relative_gap
from formulations.solvers import SolverPool
from formulations.step.solving.context import Executed, SolveContext
from formulations.step.training_step import StepDecision
from planner.common.units import format_bytes, format_gap, format_seconds
from planner.compiled.kernel_seconds import KernelSeconds
from planner.compiled.recompute import JointStep
from planner.graph.kernel_graph import CompileError
from planner.graph.optimizers import optimizer_named
from planner.torch_adapter.joint_graph.called_workspaces import called_workspaces
from planner.torch_adapter.joint_graph.partition import Cut, cut_by, default_cut

TRIES = 6
"""Problems that are solved where torch's cuts hold more than was decided."""

LEAST_STEP = 0.005
"""Part of the limit by which the next problem has less, times the number of problems before; the excess if larger."""


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """What a compiled step may hold, and how its plan is found.

    Parameters
    ----------
    memory
        Bytes that parameters, inputs, activations, gradients and the optimizer's state may hold at any moment.
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`, whose state counts; None where none does.
    time_limit
        Seconds for a solve.
    gap
        Gap, as a share of the time of a step, at which a solve ends before.
    inlined
        Whether chains of elementwise operators leave nothing in memory, as in generated code.
    workers, seed
        As for :class:`~planner.session.request.PlanRequest`.
    progress
        Called with incumbents and bounds, in nanoseconds.
    """

    memory: int
    optimizer: str | None
    time_limit: float = 10.0
    gap: float = 1e-3
    inlined: bool = True
    workers: int | None = None
    seed: int = 0
    progress: Callable[[Progress], None] | None = None


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """The plan of one compiled graph, forward and backward.

    Parameters
    ----------
    limit
        Bytes that were allowed.
    peak
        Bytes at the fullest moment, all that counts towards the limit.
    free_peak
        The same of torch's own cut, which has no limit.
    resident
        Bytes there all the time: parameters, inputs, the optimizer's state.
    kept
        Bytes of activations between forward and backward.
    seconds, free_seconds
        Of the step and of torch's own cut, as predicted.
    kernels, again
        Forward kernels, and those of them that run again.
    status, objective, bound
        Of the problem: nanoseconds of a step in which the decided kernels run again, and below what no decision within
        the limit is. Both are of torch's own cut with kernels added, which what torch cuts may undercut a little.
    solver
        That found the decision; torch's own cut needs none.
    planning_seconds
        Time that the plan took.
    """

    limit: int
    peak: int
    free_peak: int
    resident: int
    kept: int
    seconds: float
    free_seconds: float
    kernels: int
    again: int
    status: Status
    objective: int
    bound: int
    solver: str
    planning_seconds: float

    @property
    def gap(self) -> float | None:
        """Proven gap of the problem; None for a step that takes no time."""
        return relative_gap(self.objective, self.bound)

    def __str__(self) -> str:
        slower = self.seconds / self.free_seconds - 1
        return (
            f"peak {format_bytes(self.peak)} of {format_bytes(self.limit)} (torch's own cut: "
            f"{format_bytes(self.free_peak)}), {self.again} of {self.kernels} forward kernels run again, "
            f"{format_seconds(self.seconds)} a step ({100 * slower:+.1f} %), {self.status.value}, "
            f"gap {format_gap(self.gap)}, planned in {format_seconds(self.planning_seconds)}"
        )


def plan_cut(
    joint: Any,
    inputs: Any,
    options: Mapping[str, Any],
    request: CompileRequest,
    seconds: KernelSeconds,
) -> tuple[Cut, CompiledStep]:
    """Cut a joint graph into forward and backward so that its step fits.

    Parameters
    ----------
    joint, inputs, options
        As a partitioner of ``torch.compile`` gets them.
    request
        Limit and solver.
    seconds
        Time of kernels.

    Raises
    ------
    CompileError
        Nothing fits, or shapes are symbolic.
    OptimizerError
        There is no such optimizer.
    """
    started = time.perf_counter()
    cut = default_cut(joint, inputs, options, request.inlined)
    state = _state_bytes(request.optimizer, cut.gradients)
    step_of = partial(JointStep, seconds=seconds, state=state, workspaces=called_workspaces(joint))
    step = step_of(cut.forward_kernels, cut.backward_kernels, fixed=True)
    free, again = step.as_cut(), frozenset[int]()
    executed, solver = free, "torch"
    objective = bound = free.cost  # what runs again only adds to it
    if free.peak > request.memory:
        recut = partial(cut_by, joint, inputs, options, request.inlined)
        step = step_of(cut.forward_kernels, cut.backward_kernels)
        with SolverPool() as pool:
            context = partial(_context, request, pool)
            limit = request.memory
            for tried in range(TRIES):
                again, solved = _decided(step, limit, request.memory, context)
                if tried == 0:  # bounds of problems with less memory hold for fewer plans
                    bound = max(bound, solved.bound or 0)
                cut = recut(step.values_kept(again), step.kernels_again(again))
                made = step_of(cut.forward_kernels, cut.backward_kernels, fixed=True)
                executed = made.as_cut()
                if executed.peak <= request.memory:
                    break
                limit -= max(executed.peak - request.memory, int(tried * LEAST_STEP * request.memory))
            else:
                raise CompileError(_cuts_hold_more(request.memory, f"the last one {format_bytes(executed.peak)}"))
        assert solved.objective is not None, "a decision has a cost"
        objective, solver = solved.objective, solved.solver
        step = made
    return cut, CompiledStep(
        limit=request.memory,
        peak=executed.peak,
        free_peak=free.peak,
        resident=step.resident,
        kept=sum(step.values_kept(frozenset()).values()),
        seconds=executed.cost / 1e9,
        free_seconds=free.cost / 1e9,
        kernels=len(cut.forward_kernels.kernels),
        again=len(again),
        status=Status.OPTIMAL if bound == objective else Status.FEASIBLE,
        objective=objective,
        bound=bound,
        solver=solver,
        planning_seconds=time.perf_counter() - started,
    )


def _decided(
    step: JointStep, limit: int, memory: int, context: Callable[[Callable[[StepDecision], Executed]], SolveContext]
) -> tuple[frozenset[int], SolveResult]:
    """Decide within a limit that is the user's, or less where cuts held more."""
    try:
        return step.decide(limit, context)
    except CompileError as error:
        if limit == memory:
            raise
        raise CompileError(_cuts_hold_more(memory, f"and nothing fits {format_bytes(limit)}")) from error


def _cuts_hold_more(memory: int, detail: str) -> str:
    return f"memory {format_bytes(memory)}: torch's cuts hold more than was planned, {detail}; give more memory"


def _context(
    request: CompileRequest,
    pool: SolverPool,
    execute: Callable[[StepDecision], Executed],
) -> SolveContext:
    options = SolveOptions(request.time_limit, request.seed, request.gap, workers=request.workers)
    return SolveContext(execute, options=options, pool=pool, progress=request.progress)


def _state_bytes(optimizer: str | None, gradients: Sequence[tuple[int, str]]) -> int:
    """Bytes of an optimizer's state for parameters with gradients of so many elements and dtypes."""
    if optimizer is None:
        return 0
    spec = optimizer_named(optimizer)
    return sum(spec.state(dtype).nbytes(count) for count, dtype in gradients)

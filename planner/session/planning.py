"""One step on one mesh, prepared once and planned as often as wanted.

The traced step, its rules and tables depend on the model, the cluster and the mesh, not on the memory limit or the
solver; so a session holds them, and every further plan costs only its solve.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod

from formulations.kiwi.of_step import solve_program
from formulations.problem.gc_pause import gc_paused
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SolverPool, solve
from formulations.solvers.peaks.minimum_peak import MinimumPeak
from formulations.solvers.processes.worker import Ending
from formulations.step.solving.context import Executed, FreeDecision, SolveContext, executed, one_greedy_round
from formulations.step.solving.driver import solve_step
from formulations.step.solving.second_bound import SecondBound, ranked
from formulations.step.solving.solved import SolvedStep
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision, StepModel
from planner.common.infeasibility import InfeasibleError, refusal
from planner.common.units import format_bytes
from planner.graph.operator_graph import OperatorGraph
from planner.graph.optimizers import OptimizerSpec, default_optimizer, optimizer_named
from planner.machine.cluster import ClusterError, ClusterSpec, load_cluster
from planner.machine.costs import CostModel
from planner.machine.memory_budget import MemoryBudget
from planner.models.references import ModelReference, load_step
from planner.overlap.link_costs import with_link_costs
from planner.overlap.search import solve_overlapped
from planner.overlap.task import OverlapTask
from planner.plan.decision import Fingerprints, Pin
from planner.plan.document import Plan, PlanError
from planner.replay.checker import OptimizerMemory, ReplayReport, StrategyTable, replay
from planner.schedule.instructions import Schedule
from planner.scheduling.builder import build_schedule
from planner.scheduling.offload_limit import DeviceLimit
from planner.scheduling.offload_model import links_of, offload_schedule
from planner.session.finished import plan_of
from planner.session.formulations import formulation_problem
from planner.session.request import PlanRequest
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.space import StrategySpace, build_strategy_space
from planner.strategies.traced_step import TracedStep, TraceError, trace_step

_INTERRUPTED_SECONDS = 1.0
"""Time limit of the second bound after Ctrl-C."""


class PlanningSession:
    """A traced step with its strategies and costs on a mesh of a cluster.

    Parameters
    ----------
    reference
        Which training step.
    cluster
        A cluster, or the name or file of one.
    mesh
        Size of each mesh axis.
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`.
    traced
        The traced step of another session of the same reference, which depends on neither cluster nor mesh; the model
        is loaded and traced if None.
    grad_accum
        Micro-batches of a step, each of the reference's batch; costs and bounds in here are those of one.
    fused
        Whether AdamW is one kernel, which holds less while it updates; not so in plans of earlier versions.

    Raises
    ------
    ValueError
        Unknown model, cluster or optimizer, a step that cannot be traced, a mesh that does not fit the
        cluster; the message names the remedy.
    """

    def __init__(
        self,
        reference: ModelReference,
        cluster: ClusterSpec | str,
        mesh: tuple[int, ...],
        optimizer: str | None = None,
        traced: TracedStep | None = None,
        grad_accum: int = 1,
        fused: bool = True,
    ) -> None:
        self.reference = reference
        self.cluster = load_cluster(cluster) if isinstance(cluster, str) else cluster
        self.mesh = mesh
        name = optimizer or default_optimizer(reference.dtype)
        self.optimizer: OptimizerSpec = optimizer_named(name, grad_accum, fused)
        self.costs = CostModel(self.cluster, mesh, grad_accum)
        if not self.cluster.is_shared and self.cluster.devices % prod(mesh):
            raise ClusterError(
                f"mesh {'x'.join(map(str, mesh))} has {prod(mesh)} ranks, which do not divide the "
                f"{self.cluster.devices} devices of cluster {self.cluster.name}: use a mesh that does"
            )
        self.free = FreeDecision()
        """The best decision without a limit, once a solve has proven one."""
        self.times: dict[str, float] = {}
        self.traced: TracedStep = self._trace() if traced is None else traced

    def _trace(self) -> TracedStep:
        started = time.perf_counter()
        step = load_step(self.reference, device="meta")
        self.times["load"] = time.perf_counter() - started
        try:
            traced = trace_step(
                step.module, step.example_args, step.example_kwargs, step.loss_fn, self.reference.reduce_dtype
            )
        except TraceError as error:
            raise TraceError(f"model {self.reference.source!r}: {error}") from error
        self.times["trace"] = traced.seconds
        return traced

    @property
    def graph(self) -> OperatorGraph:
        """Operators and values of the traced step."""
        return self.traced.graph

    @cached_property
    def space(self) -> StrategySpace:
        """Strategies and tables; built when first needed."""
        started = time.perf_counter()
        with gc_paused():
            space = build_strategy_space(self.traced, self.costs, self.mesh, self.optimizer)
        self.times["strategies"] = time.perf_counter() - started
        return space

    @cached_property
    def model_with_links(self) -> StepModel:
        """Tables of the step with the time on the link of each mesh axis, for plans that overlap."""
        return with_link_costs(self.space, self.costs)

    @cached_property
    def instruction_costs(self) -> InstructionCosts:
        """Prices of single instructions."""
        return InstructionCosts(self.graph, self.costs, self.space.operator_strategies, self.optimizer.name)

    @cached_property
    def allowed_strategies(self) -> StrategyTable:
        """Verified strategies per operator, in the form that the replay takes."""
        tables = self.space.operator_strategies
        return lambda operator: {(strategy.outputs, strategy.inputs) for strategy in tables[operator]}

    @cached_property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the traced step, cluster and rules of this session."""
        rules = hashlib.sha256()
        for strategies in dict.fromkeys(self.space.operator_strategies.values()):
            rules.update(repr(strategies).encode())
        measured = self.cluster.measured
        return Fingerprints(
            graph=self.traced.fingerprint,
            cluster=self.cluster.fingerprint(),
            calibration=measured.fingerprint() if measured else None,
            rules=rules.hexdigest(),
        )

    def budget(self, memory: int | None) -> MemoryBudget:
        """Memory of one device under a plan; errors as for :meth:`MemoryBudget.on`."""
        return MemoryBudget.on(self.cluster, memory)

    def problem(self, request: PlanRequest, pool: SolverPool | None = None) -> StepProblem:
        """Build the canonical problem of a request.

        Raises
        ------
        ValueError
            Unknown formulation, or a memory that the reserve uses up.
        """
        return self._problem(request, self.budget(request.memory), pool)

    def _problem(
        self, request: PlanRequest, budget: MemoryBudget, pool: SolverPool | None, model: StepModel | None = None
    ) -> StepProblem:
        options = SolveOptions(time_limit=request.time_limit, seed=request.seed, workers=request.workers)
        return formulation_problem(
            request.formulation,
            self.space if model is None else replace(self.space, model=model),
            budget.tensor_bytes,
            partial(_first_layouts, solver=request.solver, options=options, pool=pool),
            links_of(self.costs, request.host_memory),
            self.instruction_costs.copy_quanta,
        )

    def replay(
        self, schedule: Schedule, limit: int | None = None, host_limit: int | None = None, *, priced: bool = True
    ) -> ReplayReport:
        """Replay a schedule with this session's costs and rules, within bytes of a device and of its host memory.

        Where it is not ``priced``, neither its time nor its strategies are checked.
        """
        return replay(
            self.graph,
            schedule,
            optimizer=OptimizerMemory(self.optimizer),
            seconds=self.instruction_costs if priced else None,
            limit=limit,
            host_limit=host_limit,
            allowed=self.allowed_strategies if priced else None,
            counter_based_random=True,
            device=self.cluster.device_kind,
        )

    def schedule(self, decision: StepDecision, limit: int | None = None) -> Schedule:
        """Schedule of a decision.

        Parameters
        ----------
        decision
            The decision.
        limit
            Bytes of tensors that a device may hold, or None; offloaded activations stay on the host until this allows
            them back.
        """
        plain = build_schedule(self.space, decision)
        if not decision.offloaded:
            return plain
        room = None if limit is None else DeviceLimit(self.replay(plain, priced=False).profile.total_during, limit)
        return offload_schedule(self.space, decision, plain, self.instruction_costs, room)

    def execute(self, decision: StepDecision, limit: int | None = None) -> Executed:
        """Cost and peak of a decision: by replay of its tables, or of its schedule where it offloads."""
        with gc_paused():
            if not decision.offloaded:
                return executed(self.space.model, decision)
            report = self.replay(self.schedule(decision, limit))
        assert report.total_quanta is not None, report.violations
        return Executed(report.total_quanta, report.peak_bytes)

    def plan(self, request: PlanRequest, progress: Callable[[Progress], None] | None = None) -> Plan:
        """Solve, write the schedule and replay it, bound the cost by a second method, and make the plan.

        Parameters
        ----------
        request
            Limit, formulation, solver.
        progress
            Called with every better incumbent or bound.

        Returns
        -------
        Plan
            Replayed cleanly; no bound contradicts it.

        Raises
        ------
        InfeasibleError
            No plan fits, or none was found; the message names a limit that would be enough.
        PlanError
            The solvers contradict one another or the replay refuses the schedule.
        """
        if request.overlap:
            return self.plan_overlapped(request, progress)
        with SolverPool() as pool:
            started = time.perf_counter()
            solved = self.solve(request, progress, pool)
            return self.certify(request, solved, pool, {"solve": time.perf_counter() - started})

    def certify(
        self,
        request: PlanRequest,
        solved: SolvedStep,
        pool: SolverPool | None = None,
        times: Mapping[str, float] | None = None,
        second: SolveResult | None = None,
        pins: Sequence[Pin] = (),
    ) -> Plan:
        """Write and replay the schedule of a solved step, bound its cost by a second method, and make the plan.

        Parameters
        ----------
        request, solved
            What was asked for, and what :meth:`solve` found.
        pool
            Warm workers, or None.
        times
            Seconds of the stages before.
        second
            A bound by a second method that is known to hold; computed if None.
        pins
            Decisions of the user that the step was solved with.

        Raises
        ------
        PlanError
            The solvers contradict one another or the replay refuses the schedule.
        """
        budget, spent = self.budget(request.memory), dict(times or {})
        with contextlib.ExitStack() as stack:
            bounding = None
            if second is None:
                interrupted = Ending.INTERRUPTED in solved.result.message
                seconds = min(request.time_limit, _INTERRUPTED_SECONDS) if interrupted else request.time_limit
                bounding = stack.enter_context(SecondBound(solved, seconds, request.seed, pool))
            started = time.perf_counter()
            schedule = self.schedule(solved.decision, budget.tensor_bytes)
            report = self.replay(schedule, budget.tensor_bytes, request.host_memory)
            spent["replay"] = time.perf_counter() - started
            started = time.perf_counter()
            known = second if bounding is None else bounding.result()
            assert known is not None
            result, other = ranked(solved.result, known)
            spent["cross_check"] = time.perf_counter() - started
        if not report.violations and report.total_quanta != result.objective:
            raise PlanError(
                f"the model predicts a step of {result.objective} ns, the replay of its schedule gives "
                f"{report.total_quanta} ns: this is a defect of the planner, please report it"
            )
        return plan_of(self, request, budget, result, other, schedule, report, {**self.times, **spent}, pins)

    def plan_overlapped(
        self,
        request: PlanRequest,
        progress: Callable[[Progress], None] | None = None,
        pins: Sequence[Pin] = (),
        keeping: Callable[[StepProblem], StepProblem] | None = None,
    ) -> Plan:
        """Plan with communication beside the computation; the plan's replay and bound are those of its schedule.

        Parameters
        ----------
        request, progress
            As for :meth:`plan`.
        pins
            Decisions of the user that the plan keeps.
        keeping
            The part of a problem of this step whose decisions keep the pins; None where there are no pins.
        """
        with SolverPool() as pool:
            return self._plan_overlapped(request, progress, pins, keeping, pool)

    def _plan_overlapped(
        self,
        request: PlanRequest,
        progress: Callable[[Progress], None] | None,
        pins: Sequence[Pin],
        keeping: Callable[[StepProblem], StepProblem] | None,
        pool: SolverPool,
    ) -> Plan:
        started, budget = time.perf_counter(), self.budget(request.memory)
        limit = budget.tensor_bytes

        def problem(within: MemoryBudget, model: StepModel | None = None) -> StepProblem:
            built = self._problem(request, within, pool, model)
            return built if keeping is None else keeping(built)

        def solve(
            within: MemoryBudget, model: StepModel, seconds: float, gap: float, known: Sequence[StepDecision]
        ) -> SolvedStep:
            options = SolveOptions(seconds, request.seed, gap, workers=request.workers)
            execute = partial(executed, model)
            context = SolveContext(execute, request.solver, options, pool, None, known, FreeDecision())
            return self._found(problem(within, model), context, within)

        task = OverlapTask(
            self.graph,
            self.model_with_links,
            len(self.mesh),
            limit,
            self.instruction_costs,
            partial(solve, budget),
            None if request.memory is None else partial(solve, self.budget(None)),
            problem(budget).contains,
            partial(build_schedule, self.space),
            partial(self.replay, limit=limit),
        )
        found = solve_overlapped(task, request.time_limit, request.gap, progress)
        times = {"solve": time.perf_counter() - started}
        result, other = found.result, None
        if found.bounding is not None:
            started = time.perf_counter()
            solved, scale = found.bounding
            with SecondBound(solved, request.time_limit, request.seed, pool) as second:
                bound = second.result()
            value = None if bound.bound is None else -(-bound.bound // scale)
            result, other = ranked(result, replace(bound, bound=value))
            times["cross_check"] = time.perf_counter() - started
        spent = {**self.times, **times}
        return plan_of(self, request, budget, result, other, found.schedule, found.report, spent, pins)

    def solve(
        self,
        request: PlanRequest,
        progress: Callable[[Progress], None] | None = None,
        pool: SolverPool | None = None,
        known: Sequence[StepDecision] = (),
    ) -> SolvedStep:
        """Find a decision within the limit.

        Parameters
        ----------
        request
            Limit, formulation, solver.
        progress
            Called with every better incumbent or bound.
        pool
            Warm workers, or None.
        known
            Decisions to begin from, such as those of other formulations: the result is no worse than the best of them
            within the limit.

        Raises
        ------
        InfeasibleError
            The smallest peak found does not fit either.
        ValueError
            The formulation leaves a known decision out.
        """
        budget = self.budget(request.memory)
        options = SolveOptions(request.time_limit, request.seed, request.gap, workers=request.workers)
        execute = partial(self.execute, limit=budget.tensor_bytes)
        context = SolveContext(execute, request.solver, options, pool, progress, known, self.free)
        if request.counts is not None:
            made = solve_program(self.space.model, budget.tensor_bytes, request.formulation, context, request.counts)
            if isinstance(made, SolveResult):
                raise InfeasibleError(
                    f"memory {format_bytes(budget.tensor_bytes)} for tensors: {request.formulation} finds no plan "
                    f"({made.status}: {made.message}); use more memory, more time, or kiwi_chain"
                )
            return made
        return self._found(self._problem(request, budget, pool), context, budget)

    @staticmethod
    def _found(built: StepProblem, context: SolveContext, budget: MemoryBudget) -> SolvedStep:
        """Solve a problem; raises what :meth:`solve` raises where nothing fits."""
        context.warm_up()
        found = solve_step(built, context)
        if isinstance(found, MinimumPeak):
            raise refusal(found, budget.tensor_bytes, budget.reserve_bytes)
        return found


def _first_layouts(
    problem: StrategyProblem, solver: str, options: SolveOptions, pool: SolverPool | None
) -> SolveResult:
    """Solve a problem without a limit whose layouts another problem needs: past the time limit if nothing is known."""
    found = solve(problem, solver, options, None, pool)
    if found.status not in (Status.NO_SOLUTION, Status.BOUND_ONLY):
        return found
    return one_greedy_round(problem, options, pool)

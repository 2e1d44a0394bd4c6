"""Plans of small steps as a page shows them: serial, recomputing, overlapped, and with offload."""

from __future__ import annotations

from functools import cache

from support.steps.planned_steps import plan_of, strategy_space, traced_step
from support.steps.random_schedules import random_offload

from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.overlap.serial import SerialSchedule
from planner.overlap.timetable import Room, overlapped
from planner.replay.checker import OptimizerMemory, replay
from planner.replay.clocks import step_time
from planner.replay.memory import LocalBytes
from planner.scheduling.builder import build_schedule
from planner.session import PlanningSession, session_of
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.random_decision import random_decision
from planner.view.opened import OpenedPlan

KINDS = ("serial", "overlapped", "offloaded")


@cache
def opened_plan(kind: str, name: str = "gpt2", mesh: tuple[int, ...] = (2,), seed: int = 1) -> OpenedPlan:
    """A random plan of a kind of :data:`KINDS`, which most often recomputes."""
    space, graph = strategy_space(name, mesh), traced_step(name).graph
    schedule = build_schedule(space, random_decision(space, seed))
    costs = InstructionCosts(graph, CostModel(load_cluster("a100-8-nvlink"), mesh), space.operator_strategies, "adamw")
    if kind == "overlapped":
        report = replay(graph, schedule, optimizer=OptimizerMemory(optimizer_named("adamw")), counter_based_random=True)
        schedule = overlapped(SerialSchedule(graph, schedule, costs), Room(report.profile.total_during, None))
    if kind == "offloaded":
        schedule, costs = random_offload(name, schedule, seed)
    plan = plan_of(name, schedule, costs)
    report = replay(
        graph, schedule, optimizer=OptimizerMemory(optimizer_named("adamw")), seconds=costs, counter_based_random=True
    )
    time, _ = step_time(graph, schedule, costs, LocalBytes(graph, mesh))
    assert time is not None
    assert report.ok
    return OpenedPlan(f"{kind}.json", plan, _session(name, mesh), schedule, report, time)


@cache
def _session(name: str, mesh: tuple[int, ...]) -> PlanningSession:
    space = strategy_space(name, mesh)
    schedule = build_schedule(space, random_decision(space, 0))
    costs = InstructionCosts(
        traced_step(name).graph, CostModel(load_cluster("a100-8-nvlink"), mesh), space.operator_strategies, "adamw"
    )
    return session_of(plan_of(name, schedule, costs))

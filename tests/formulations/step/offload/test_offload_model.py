"""Offload on random small steps: what its problem counts, and its bound below every plan that can be executed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from support.steps.offload_steps import (
    Execution,
    HostStay,
    Stays,
    execute,
    executions,
    last_forward_use,
    offload_step,
    waiting_outputs,
)

from formulations.problem.checker import ViolationKind, check
from formulations.problem.strategy_problem import StrategyProblem
from formulations.step.counting import Counting
from formulations.step.kiwi_chain import build_kiwi_chain, chain_moments
from formulations.step.modes import once_or_twice
from formulations.step.offload import relaxation as offload_relaxation
from formulations.step.offload.builder import HOST, INWARD, OUTWARD
from formulations.step.offload.model import OffloadProblem, build_offload, shortest_wait
from formulations.step.offload.modes import AtMost, Links
from formulations.step.offload.relaxation import LEAVING
from formulations.step.replay import BrokenDecisionError, replay_decision
from formulations.step.sharding import MEMORY
from formulations.step.training_step import NodeKind, ResultEdge, StepDecision, StepEdge, StepModel, StepNode

HOSTS = [(False, False), (True, False), (False, True)]
"""Whether both directions share one link, and whether the computation waits for every copy."""

SIZES = [(3, 1), (2, 2)]
"""Forward operators and most layouts of a node."""


Complete = Callable[[OffloadProblem, tuple[int, ...]], Iterable[tuple[int, ...]]]
"""From choices of the model's nodes to choices of a whole problem."""


@dataclass(frozen=True)
class Assignment:
    """Choices that nothing forbids, their cost and the peak of every resource."""

    choices: tuple[int, ...]
    cost: int
    peaks: tuple[int, ...]


def assignments(model: StepModel, built: OffloadProblem, complete: Complete | None = None) -> list[Assignment]:
    """All of a problem, whatever its limits, with the shortest holds and the shortest waiting, or as they are given."""
    found, problem = [], built.problem
    for choices in product(*(range(problem.nodes[i].size) for i in range(len(model.nodes)))):
        for completed in [built.complete(problem, choices)] if complete is None else complete(built, choices):
            report = check(problem, completed)
            if all(violation.kind is ViolationKind.OVER_LIMIT for violation in report.violations):
                peaks = tuple(peak.usage for peak in report.peaks)
                found.append(Assignment(completed, report.objective, peaks))
    return found


def all_waiting(built: OffloadProblem, choices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every head start and all longer waiting in backward, while that lets more of a relaxation's activations leave."""
    problem, names = built.problem, [node.name for node in built.problem.nodes]
    shortest = list(built.complete(problem, choices))
    yield tuple(shortest)
    leaving = [node for node, link in built.waiting.items() if link == LEAVING]
    if not any(shortest[node] for node in leaving):
        return
    waits = {link: node for node, link in built.waiting.items() if link != LEAVING}
    backward = waits.get(INWARD, 0)
    for head_start in range(problem.nodes[names.index("head start")].size):
        complete = list(shortest)
        complete[names.index("head start")] = head_start
        if OUTWARD in waits:
            complete[waits[OUTWARD]] = shortest_wait(problem, complete, waits[OUTWARD], OUTWARD)
        for wait in range(complete[backward], problem.nodes[backward].size):
            complete[backward] = wait
            for node in leaving:
                complete[node] = shortest_wait(problem, complete, node, LEAVING)
            yield tuple(complete)
            if not any(complete[node] for node in leaving):
                break


def optimum(found: Sequence[Assignment], limits: Sequence[int | None]) -> int | None:
    costs = [
        entry.cost
        for entry in found
        if all(limit is None or peak <= limit for peak, limit in zip(entry.peaks, limits, strict=False))
    ]
    return min(costs, default=None)


def built(model: StepModel, links: Links, counting: Counting) -> OffloadProblem:
    return build_offload(model, once_or_twice(model, chain_moments(model)), links, counting)


def at_once(model: StepModel, decision: StepDecision) -> Stays:
    """Stays of a decision's activations that hold the least: away behind the last forward use, back for the first."""
    stays = {}
    for i in decision.offloaded:
        waiting = waiting_outputs(model, i)
        readers = [edge.consumer for edge in model.edges_from[i] if edge.output in waiting]
        moments = [decision.recomputed[v][0] for v in readers if v in decision.recomputed]
        left = last_forward_use(model, i)
        stays[i] = HostStay(left, left, min([model.first_backward_use[i], *moments]) - 1)
    return stays


def assignments_that_agree(model: StepModel, blocking: bool) -> int:
    """Execute every assignment of the problem that finds plans; return how many offload."""
    problem, offloading = built(model, Links(blocking=blocking), Counting.OVER), 0
    problem.problem.validate()
    for entry in assignments(model, problem):
        decision = problem.decode(entry.choices)
        if problem.encode(decision) != entry.choices[: len(model.nodes)]:
            continue  # it asks for a rerun, or for an early return, that nobody needs
        replay = replay_decision(model, replace(decision, offloaded=frozenset()))
        execution = execute(model, decision, at_once(model, decision), replay, shared=False, blocking=blocking)
        assert execution.peak <= entry.peaks[MEMORY]
        assert execution.host_peak <= entry.peaks[HOST]
        assert execution.cost == replay.cost + execution.stall
        assert entry.cost == execution.cost if blocking else entry.cost >= replay.cost
        offloading += bool(decision.offloaded)
    return offloading


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_every_assignment_can_be_executed_within_what_it_counts(size, blocking):
    assert sum(assignments_that_agree(offload_step(seed, *size), blocking) > 0 for seed in range(40)) >= 5


@dataclass(frozen=True)
class Space:
    """Every plan of a step, executed."""

    model: StepModel
    blocking: bool
    plans: list[Execution]

    @classmethod
    def of(cls, model: StepModel, shared: bool = False, blocking: bool = False) -> Space:
        found = executions(model, shared=shared, blocking=blocking)
        return cls(model, blocking, [execution for _, _, execution in found])

    def limits(self, most: int = 5) -> Iterator[tuple[int, int | None]]:
        """Limits of the device and the host where something changes."""
        peaks, hosts = ({getattr(e, name) for e in self.plans} for name in ("peak", "host_peak"))
        for host in (None, *_some(sorted(hosts | {0}), most)):
            for memory in _some(sorted(peaks), most):
                yield memory, host

    def best(self, memory: int, host: int | None) -> int | None:
        costs = (e.cost for e in self.plans if e.peak <= memory and (host is None or e.host_peak <= host))
        return min(costs, default=None)

    def check_bounds(self) -> int:
        """Compare the relaxation with the best plan under many limits; return how many comparisons were made."""
        compared = 0
        relaxations: dict[Links, tuple[StrategyProblem, list[Assignment]]] = {}
        for memory, host in self.limits():
            best = self.best(memory, host)
            if best is None:
                continue
            for known in (best, best + 2, best + best // 4 + 3):
                links = Links(host, self.blocking, AtMost(known, memory if known == best else None))
                if links not in relaxations:
                    offload = built(self.model, links, Counting.UNDER)
                    relaxations[links] = offload.problem, assignments(self.model, offload)
                problem, found = relaxations[links]
                limits = (memory, *(resource.limit for resource in problem.resources[1:]))
                bound = optimum(found, limits)
                if bound is None or bound > best:
                    offload = built(self.model, links, Counting.UNDER)
                    bound = optimum(assignments(self.model, offload, all_waiting), limits)
                assert bound is not None, (memory, host, best)
                assert bound <= best, (memory, host)
                compared += 1
        return compared


def _some(values: list[int], most: int) -> list[int]:
    return values[:: max(1, len(values) // most)]


def check_random_bounds(seeds: range, size: tuple[int, int], host: tuple[bool, bool]) -> None:
    assert sum(Space.of(offload_step(seed, *size), *host).check_bounds() for seed in seeds) > len(seeds)


@pytest.mark.slow_cases("size1-host1", "size1-host0")
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("size", SIZES)
def test_the_bound_is_below_every_plan(size, host):
    check_random_bounds(range(16), size, host)


@pytest.mark.fuzz
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("size", [*SIZES, (4, 1), (3, 2)])
@pytest.mark.parametrize("part", range(6))
def test_many_bounds_are_below_every_plan(part, size, host):
    count = 50 if sum(size) < 5 else 5
    check_random_bounds(range(1000 + part * count, 1000 + (part + 1) * count), size, host)


def chain_of(*operators: tuple[NodeKind, int, int, tuple[int, ...]]) -> StepModel:
    """A step of one layout: kind, cost, bytes and inputs of every operator; copies take 5 and reruns 100 more.

    The last forward operator makes the result; the step's data is node 0.
    """
    zero, nothing = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    nodes = [StepNode("data", NodeKind.INPUT, zero, nothing, zero)]
    edges = []
    for v, (kind, cost, amount, inputs) in enumerate(operators, start=1):
        copies = np.array([[5]]) if cost >= 100 else None
        size = np.array([[amount]])
        nodes.append(StepNode(f"n{v}", kind, np.array([cost]), size, zero, None, None, cost >= 100, copies))
        for slot, u in enumerate(inputs):
            edges.append(StepEdge(u, 0, v, slot, nothing, nothing, nothing, np.zeros((1, 1), np.bool_)))
    last = max(i for i, node in enumerate(nodes) if node.kind is NodeKind.FORWARD)
    result = ResultEdge(last, 0, zero, zero, zero, np.zeros(1, np.bool_))
    return StepModel(tuple(nodes), tuple(edges), (), (result,))


F, B = NodeKind.FORWARD, NodeKind.BACKWARD


def test_an_activation_may_be_away_in_forward_only():
    """Backward takes no time, so the copy back has to be hidden in forward."""
    operators = [(F, 100, 10, (0,)), (F, 10, 1, (1,)), (F, 10, 1, (2,)), (F, 10, 30, (3,))]
    model = chain_of(*operators, (F, 10, 1, (4,)), (F, 10, 1, (5,)), (B, 0, 1, (6, 1)))
    space = Space.of(model)
    assert space.best(35, None) == 150
    assert space.check_bounds()


LEAVES = [(F, 100, 10, (0,)), (F, 3, 1, (1,)), (B, 2, 1, (2,)), (B, 1, 10, (3,)), (B, 5, 1, (4,)), (B, 6, 1, (5,))]
"""A copy of 5 begins in forward and ends in backward, when the operator of 10 bytes begins."""


def test_a_copy_may_begin_before_the_boundary_and_end_behind_it():
    space = Space.of(chain_of(*LEAVES, (B, 1, 1, (6, 1))))
    assert space.best(13, None) == 118 == space.best(22, None)
    assert space.check_bounds()


@pytest.mark.parametrize("size", SIZES)
def test_the_bound_is_below_every_plan_where_units_are_coarse(monkeypatch, size):
    monkeypatch.setattr(offload_relaxation, "MOST_UNITS", 4)
    assert Space.of(chain_of(*LEAVES, (B, 1, 1, (6, 1)))).check_bounds()
    check_random_bounds(range(100, 103), size, HOSTS[0])


@pytest.mark.fuzz
def test_what_is_leaving_may_be_waited_for():
    """One quantum too little lies between the first use and the tightest moment; all numbers a hundred times."""
    model = chain_of(LEAVES[0], (F, 2, 1, (1,)), *LEAVES[2:], (B, 1, 1, (6, 1)))
    space = Space.of(replace(model, nodes=tuple(map(a_hundred_times, model.nodes))))
    assert (space.best(1300, None), space.best(2200, None)) == (11800, 11700)
    assert space.check_bounds()


def a_hundred_times(node: StepNode) -> StepNode:
    copies = None if node.transfer_cost is None else 100 * node.transfer_cost
    return replace(node, cost=100 * node.cost, output_bytes=100 * node.output_bytes, transfer_cost=copies)


def test_host_memory_may_be_used_by_one_after_the_other():
    """The second activation leaves when the first has come back."""
    forward = [(F, 100, 10, (0,)), (F, 100, 10, (1,)), (F, 50, 1, (2,)), (F, 50, 30, (2, 3))]
    backward = [(B, 50, 1, (1, 6)), (B, 50, 1, (7,)), (B, 50, 40, (8,)), (B, 50, 1, (9,)), (B, 50, 1, (10,))]
    model = chain_of(*forward, (F, 50, 1, (4,)), (F, 50, 1, (5,)), *backward, (B, 9, 1, (2, 11)))
    space = Space.of(model)
    assert space.best(45, 10) == 659 == space.best(45, 20)
    assert space.check_bounds()


@pytest.mark.parametrize("blocking", [False, True])
def test_more_of_anything_never_costs_more_and_no_host_is_kiwi_chain(blocking):
    binding, links = 0, Links(blocking=blocking)
    for seed in range(30):
        model = offload_step(seed, 3, 1)
        modes = once_or_twice(model, chain_moments(model))
        alone = OffloadProblem(build_kiwi_chain(model, modes, Counting.OVER), model, modes, links, {})
        chain = assignments(model, alone)
        offload = assignments(model, built(model, links, Counting.OVER))
        memories = sorted({entry.peaks[MEMORY] for entry in chain + offload})
        hosts = sorted({entry.peaks[HOST] for entry in offload} | {0})
        links_free = built(model, links, Counting.OVER).problem.resources[2:]
        costs = [
            [optimum(offload, (memory, host, *(r.limit for r in links_free))) for host in hosts] for memory in memories
        ]
        for memory, row in zip(memories, costs, strict=True):
            assert row[0] == optimum(chain, (memory,))
            assert row == sorted(row, key=_descending)
            binding += row[0] != row[-1]
        for column in zip(*costs, strict=True):
            assert list(column) == sorted(column, key=_descending)
    assert binding > 0


def _descending(cost: int | None) -> float:
    return -float("inf") if cost is None else -cost


def test_a_rerun_that_reads_what_is_away_is_refused():
    model = chain_of((F, 100, 4, (0,)), (F, 100, 4, (1,)), (F, 1, 1, (2,)), (B, 1, 1, (3, 2)), (B, 1, 1, (4, 1)))
    decision, away = next(
        (d, a) for d, a, _ in executions(model) if 1 in a and a[1].returns_after == 4 and not d.recomputed
    )
    again = replace(decision, recomputed={2: (4,)})
    replay = replay_decision(model, replace(again, offloaded=frozenset()))
    with pytest.raises(BrokenDecisionError, match="reads what is away"):
        execute(model, again, away, replay, shared=False, blocking=False)


def test_a_rerun_may_read_what_has_come_back_for_it():
    """The first activation is away and the second, made of it, is made again: a checkpoint that is offloaded."""
    forward = [(F, 100, 10, (0,)), (F, 100, 10, (1,)), (F, 10, 1, (2,)), (F, 10, 30, (3,)), (F, 10, 1, (4,))]
    model = chain_of(*forward, (B, 50, 1, (5,)), (B, 1, 1, (6, 2)), (B, 1, 1, (7, 1)))
    problem = built(model, Links(), Counting.OVER)
    decision = StepDecision((0,) * len(model.nodes), {2: (7,)}, frozenset({1}))
    entry = check(problem.problem, problem.complete(problem.problem, problem.encode(decision)))
    assert all(violation.kind is ViolationKind.OVER_LIMIT for violation in entry.violations)
    assert entry.objective == 382
    replay = replay_decision(model, replace(decision, offloaded=frozenset()))
    execution = execute(model, decision, at_once(model, decision), replay, shared=False, blocking=False)
    assert execution.peak <= entry.peaks[MEMORY].usage < replay.peak
    assert Space.of(model).check_bounds()

"""OSDP's searches: brute force agrees, the exact plan is never worse, and every status is earned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.problems.osdp_chains import (
    Case,
    best_by_enumeration,
    operator,
    random_case,
    reference_bytes,
    reference_nanoseconds,
)
from support.tiers import fuzz, only, slow

from formulations.layers.layer import LayerChain
from formulations.osdp import knapsack as osdp_knapsack
from formulations.osdp.problem import DP, ZDP, Accounting, OsdpError, OsdpMachine, OsdpSettings, build_osdp
from formulations.osdp.scheduler import Method, OsdpPlan, least_bytes, plan_osdp
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import SolverPool, solve

SEARCHES = (Method.DFS, Method.DFS_SHARDED_FIRST, Method.DFS_GROUPED, Method.DFS_LOOK_AHEAD)
RULES = (Method.REPLICATED, Method.SHARDED)


def planned(case: Case, method: Method = Method.KNAPSACK) -> OsdpPlan:
    return plan_osdp(case.chain, case.machine, case.settings, method, batch=case.batch, time_limit=60.0)


def assert_counted(case: Case, plan: OsdpPlan) -> int:
    """Check a plan's figures against the paper's equations; return its nanoseconds."""
    modes = tuple(plan.modes.values())
    assert list(plan.modes) == [layer.name for layer in case.chain.layers]
    cost = plan.candidates[0].cost
    assert cost == reference_nanoseconds(case, modes)
    assert plan.memory_bytes == reference_bytes(case.chain, case.machine, case.settings, modes, case.batch)
    assert plan.memory_bytes <= case.machine.memory_bytes
    at_peak = replace(case.settings, accounting=Accounting.PEAK)
    assert plan.peak_bytes == reference_bytes(case.chain, case.machine, at_peak, modes, case.batch)
    return cost


def compare(seed: int) -> Status:
    """Assert that everything agrees with enumeration on one case."""
    case = random_case(seed)
    best = best_by_enumeration(case)
    exact = planned(case)
    needed = least_bytes(case.chain, case.machine, case.settings, case.batch)
    assert (best is None) == (needed > case.machine.memory_bytes)
    if best is None:
        assert exact.status is Status.INFEASIBLE
    else:
        assert (exact.status, assert_counted(case, exact), exact.gap) == (Status.OPTIMAL, best, 0.0)
    for method in SEARCHES:
        found = planned(case, method)
        assert found.status is exact.status
        if best is not None:
            assert assert_counted(case, found) == best
    for method in RULES:
        found = planned(case, method)
        if found.status is Status.FEASIBLE:
            assert best is not None
            assert assert_counted(case, found) >= best
        else:
            assert found.status is Status.NO_SOLUTION
    return exact.status


def test_everything_agrees_with_enumeration() -> None:
    statuses = [compare(seed) for seed in range(150)]
    assert statuses.count(Status.OPTIMAL) > 50
    assert statuses.count(Status.INFEASIBLE) > 20


def test_operators_that_hold_nothing_take_their_cheapest_mode_each() -> None:
    """A table over units of memory that is written in place counts such an operator twice or never."""
    empty = [operator(f"empty{k}", forward_seconds=1e-6) for k in range(3)]
    full = operator("full", parameter_bytes=8000)
    chain = LayerChain("mostly-empty", (empty[0], full, *empty[1:]))
    machine = OsdpMachine(8, 1e-6, 1e-9, 4000)  # no more than the states of a ZDP operator
    for settings in (OsdpSettings(), OsdpSettings(slices=(1, 4))):
        plan = plan_osdp(chain, machine, settings, batch=1)
        assert (plan.status, list(plan.modes.values())) == (Status.OPTIMAL, [DP, ZDP, DP, DP])
        assert plan.candidates[0].cost == 3 * (2 * 7 * 1000 + 1000) + 3 * 7 * (1000 + 1000)
        assert plan.memory_bytes == 4000


@pytest.mark.fuzz
@pytest.mark.parametrize("block", range(15))
def test_everything_agrees_with_enumeration_on_many(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        compare(seed)


def deep_case(seed: int, settings: OsdpSettings, operators: int = 20) -> Case:
    """Operators of four kinds, with a limit that binds."""
    rng = np.random.default_rng(seed)
    kinds = [
        {
            "parameter_bytes": int(rng.integers(1, 60)) * 4096 + int(rng.integers(3)) * 512,
            "input_bytes": 4096,
            "saved_bytes": int(rng.integers(1, 9)) * 4096,
            "backward_workspace_bytes": int(rng.integers(1, 9)) * 4096,
            "forward_seconds": 1e-5,
        }
        for _ in range(4)
    ]
    layers = tuple(operator(f"o{i}", **kinds[int(rng.integers(4))]) for i in range(operators))
    chain = LayerChain(f"deep-{seed}", layers)
    machine = OsdpMachine(8, 2e-8, 1e-9, 0)
    low, high = (reference_bytes(chain, machine, settings, [mode] * operators, 2) for mode in (ZDP, DP))
    limit = low + int((high - low) * rng.uniform(0.1, 0.9))
    return Case(chain, replace(machine, memory_bytes=max(limit, low)), settings, 2)


@pytest.mark.parametrize(
    ("seeds", "operators"), [(range(3), 8), slow(range(2), 14), fuzz(range(2, 4), 14)], ids=["few", "more", "many"]
)
@pytest.mark.parametrize("accounting", only((Accounting.PUBLISHED,), Accounting))
def test_branch_and_cut_finds_the_same_optimum_on_larger_problems(
    accounting: Accounting, seeds: range, operators: int, pool: SolverPool
) -> None:
    cut = 0
    for seed in seeds:
        settings = OsdpSettings(slices=(1, 4), accounting=accounting, checkpointing=seed % 2 == 1)
        case = deep_case(seed, settings, operators)
        exact = planned(case)
        problem = build_osdp(case.chain, case.machine, case.settings, case.batch)
        result = solve(problem, "highs", SolveOptions(time_limit=10), pool=pool)
        # Equal layers in one knapsack make long trees: HiGHS's claim may be all there is in this time.
        assert result.status is Status.OPTIMAL or result.claimed == result.objective
        assert exact.status is Status.OPTIMAL
        assert result.objective == assert_counted(case, exact)
        cut += sum(mode.slices > 1 for mode in exact.modes.values())
    assert cut


def test_lists_cut_short_leave_an_honest_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [deep_case(seed, OsdpSettings(slices=(1, 2, 4))) for seed in range(12)]
    best = [planned(case).candidates[0].cost for case in cases]
    monkeypatch.setattr(osdp_knapsack, "MOST_POINTS", 2)
    monkeypatch.setattr(osdp_knapsack, "_FIRST_SHARE", 1)
    found = [planned(case) for case in cases]
    for case, optimum, plan in zip(cases, best, found, strict=True):
        bound = plan.candidates[0].bound
        assert optimum is not None
        assert bound is not None
        assert bound <= optimum <= assert_counted(case, plan)
        assert (plan.status is Status.OPTIMAL) == (plan.gap == 0)
    assert Status.FEASIBLE in {plan.status for plan in found}


def test_the_scheduler_takes_the_best_batch_which_is_not_the_last() -> None:
    """Three samples leave room for DP; with a fourth, ZDP's third collective costs more than the sample brings."""
    layer = operator("all", parameter_bytes=8000, input_bytes=20_000, forward_seconds=1e-6)
    chain, machine = LayerChain("one", (layer,)), OsdpMachine(8, 0.0, 1e-9, 92_000)
    plan = plan_osdp(chain, machine)
    dp, zdp = 2 * 7 * 1000, 3 * 7 * 1000
    assert [(each.batch, each.modes, each.cost) for each in plan.candidates] == [
        *((b, (DP,), dp + b * 1000) for b in (1, 2, 3)),
        (4, (ZDP,), zdp + 4000),
    ]
    assert (plan.status, plan.batch, plan.objective) == (Status.OPTIMAL, 3, -(-17_000_000 // 3))
    assert plan.step_seconds == pytest.approx(17e-6)
    assert plan.samples_per_second == pytest.approx(8 * 3 / 17e-6)
    replicated, sharded = (plan_osdp(chain, machine, method=method) for method in RULES)
    assert (replicated.batch, sharded.batch) == (3, 4)
    assert replicated.status is sharded.status is Status.FEASIBLE


def test_a_search_that_runs_out_of_time_says_so() -> None:
    """DP first runs into the limit half way, and never comes back to the operators that it began with."""
    case = deep_case(0, OsdpSettings())
    layers = tuple(replace(layer, name=f"{layer.name}-{k}") for k in range(4) for layer in case.chain.layers)
    chain, machine = LayerChain("eighty", layers), replace(case.machine, memory_bytes=4 * case.machine.memory_bytes)
    published = plan_osdp(chain, machine, method=Method.DFS, batch=2, time_limit=0.2)
    assert published.status in (Status.NO_SOLUTION, Status.FEASIBLE)
    assert published.bound is None
    sharded_first = plan_osdp(chain, machine, method=Method.DFS_SHARDED_FIRST, batch=2, time_limit=0.2)
    exact = plan_osdp(chain, machine, batch=2)
    assert sharded_first.status is Status.FEASIBLE
    assert exact.status is Status.OPTIMAL
    assert sharded_first.objective is not None
    assert exact.objective is not None
    assert exact.objective <= sharded_first.objective


def test_one_device_has_nothing_to_shard() -> None:
    layer = operator("all", parameter_bytes=8000, input_bytes=100, forward_seconds=1e-5, backward_fixed_seconds=1e-5)
    plan = plan_osdp(LayerChain("one", (layer,)), OsdpMachine(1, 1e-6, 1e-9, 33_000))
    assert (plan.status, plan.batch, plan.objective) == (Status.OPTIMAL, 10, 11_000_000)


@pytest.mark.parametrize(
    ("settings", "method", "batch", "seconds", "words"),
    [
        (OsdpSettings(), Method.KNAPSACK, 0, 1.0, "batch is 0"),
        (OsdpSettings(), Method.DFS, 1, 0.0, "time_limit is 0.0"),
        (OsdpSettings(), Method.KNAPSACK, None, 1.0, "keeps no activations"),
    ],
)
def test_impossible_requests_are_refused(
    settings: OsdpSettings, method: Method, batch: int | None, seconds: float, words: str
) -> None:
    chain = LayerChain("one", (operator("all", parameter_bytes=8),))
    with pytest.raises(OsdpError, match=words):
        plan_osdp(chain, OsdpMachine(2, 0.0, 0.0, 100), settings, method, batch=batch, time_limit=seconds)

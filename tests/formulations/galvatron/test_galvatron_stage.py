"""One stage: the canonical problem, the exact labels and the published dynamic program against enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.problems.galvatron_problems import best_by_enumeration, plans, random_stage

from formulations.galvatron import prices
from formulations.galvatron.dynamic_program import DEFAULT_UNIT_BYTES, search_stage, unit_for
from formulations.galvatron.labels import _undominated, _undominated_in_time, solve_stage
from formulations.galvatron.slips import AS_PRINTED, REPAIRED, Slip
from formulations.galvatron.stage import StageProblem, build_galvatron_stage
from formulations.problem.checker import check
from formulations.solvers import solve_in_process

SEEDS = range(300)
SAMPLE_AND_FUZZ = [SEEDS, pytest.param(range(300, 2000), marks=pytest.mark.fuzz)]
DP_SLIPS = (Slip.EQ4_STATE, Slip.EQ4_BORDERS, Slip.ALG3_BREAK, Slip.ALG3_UNSET)


def small_stage(**tables: list[list[int]] | int) -> StageProblem:
    """Two strategies, each a layout of its own, free to change between; everything that is not named is 0."""
    limit = tables.pop("memory_limit")
    arrays = {name: np.array(rows, dtype=np.int64) for name, rows in tables.items()}
    shape = next(iter(arrays.values())).shape
    empty = np.zeros(shape, dtype=np.int64)
    names = ("cost", "repeated", "forward", "backward", "states")
    return StageProblem(
        **{name: arrays.get(name, empty) for name in names},
        allowed=np.ones(shape, dtype=np.bool_),
        layouts=np.arange(shape[1]),
        transformation=arrays.get("transformation", np.zeros((shape[0], shape[1], shape[1]), dtype=np.int64)),
        memory_limit=limit,
    )


@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_labels_find_the_optimum_and_prove_it(seeds: range) -> None:
    feasible = 0
    for seed in seeds:
        stage = random_stage(seed)
        best = best_by_enumeration(stage)
        found = solve_stage(stage)
        assert found.cost == best, seed
        assert found.bound == best, seed
        if best is not None:
            feasible += 1
            assert stage.is_feasible(found.choices)
            assert stage.cost_of(found.choices) == best
    assert 0.3 * len(seeds) < feasible < len(seeds)


def test_weights_of_backward_steps_only_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers at the end that hold little, as those of a short decoder, an earlier step is the fullest one."""
    stages = []
    for seed in SEEDS:
        stage = random_stage(seed)
        light = np.arange(stage.layers) >= stage.layers // 2
        stages.append(replace(stage, backward=np.where(light[:, None], 0, stage.backward)))
    weighted = [bound_by_price(stage) for stage in stages]
    monkeypatch.setattr(prices, "_ROUNDS", 1)
    raised = 0
    for stage, bound in zip(stages, weighted, strict=True):
        last, best = bound_by_price(stage), best_by_enumeration(stage)
        if bound is None or last is None:
            assert best is None
        elif best is not None:
            assert last <= bound <= best
            raised += last < bound
    assert raised > 5


def bound_by_price(stage: StageProblem) -> int | None:
    """Quanta; None where it is proven that there is no plan."""
    if not stage.allowed.any(axis=1).all():
        return None
    found = prices.best_priced(stage, None, lambda plan: None)
    return None if found is None else -((-found[1]) >> found[0].shift)


@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_labels_keep_a_limit_on_micro_batches(seeds: range) -> None:
    binding = 0
    for seed in seeds:
        stage = random_stage(seed)
        if seed % 3:  # what is cheap is slow
            stage = replace(stage, cost=stage.cost.max() - stage.cost, memory_limit=2**40)
        times = sorted({stage.repeated_of(plan) for plan in plans(stage)} or {0})
        limit = times[len(times) // 3]
        best = best_by_enumeration(stage, limit)
        found = solve_stage(stage, limit)
        assert (found.cost, found.bound) == (best, best), seed
        assert found.choices is None or stage.is_feasible(found.choices, limit)
        binding += best != best_by_enumeration(stage)
    assert binding > 0.15 * len(seeds)


def test_labels_that_an_earlier_one_beats_or_equals_are_dropped() -> None:
    rng = np.random.default_rng(0)
    dropped = 0
    for _ in range(200):
        labels = rng.integers(0, int(rng.choice([2, 5, 1000])), (int(rng.integers(0, 40)), 7))
        labels[:, 4] = rng.integers(0, 4, len(labels))
        layouts = rng.integers(0, 3, 4)
        layout = layouts[labels[:, 4]]
        for undominated, fields in ((_undominated, 2), (_undominated_in_time, 3)):
            numbers = labels[:, 1 : 1 + fields]
            expected = [
                not any(layout[j] == layout[i] and (numbers[j] <= numbers[i]).all() for j in range(i))
                for i in range(len(labels))
            ]
            assert undominated(labels, layouts, 3).tolist() == expected
            dropped += expected.count(False)
    assert dropped > 1000


def test_a_gap_is_kept_and_few_labels_claim_nothing_false() -> None:
    for seed in SEEDS[:150]:
        stage = random_stage(seed)
        best = best_by_enumeration(stage)
        loose = solve_stage(stage, relative_gap=0.2)
        narrow = solve_stage(stage, label_limit=1)
        if best is None:
            assert loose.is_infeasible
            assert narrow.cost is None
            continue
        assert loose.bound <= best <= loose.cost
        assert loose.cost - loose.bound <= 0.2 * loose.cost
        assert narrow.bound is not None
        assert narrow.bound <= best
        assert narrow.cost is None or narrow.cost >= best


def test_a_start_is_never_lost() -> None:
    for seed in SEEDS[:100]:
        stage = random_stage(seed)
        start = max((plan for plan in plans(stage) if stage.is_feasible(plan)), key=stage.cost_of, default=None)
        if start is not None:
            found = solve_stage(stage, deadline=0.0, start=start)
            assert found.bound <= found.cost <= stage.cost_of(start), seed
        assert solve_stage(stage, start=start).cost == best_by_enumeration(stage), seed


@pytest.mark.parametrize("seeds", [range(560, 620), *SAMPLE_AND_FUZZ[1:]], ids=["sample", "more"])
def test_bounds_hold_whatever_gap_or_cutoff_is_asked_for(seeds: range) -> None:
    """A plan that costs more than what was looked for proves nothing, as with seed 596 and a gap of 5 %."""
    for seed in seeds:
        stage = random_stage(seed)
        best = best_by_enumeration(stage)
        if best is None:
            continue
        for gap, cutoff in [(0.05, None), (0.3, None), (0.0, best - 1), (0.05, 9 * best // 10), (0.0, best)]:
            found = solve_stage(stage, relative_gap=gap, cutoff=cutoff)
            assert found.bound is not None
            assert found.bound <= best, (seed, gap, cutoff)
            if cutoff is None:
                assert found.bound <= best <= found.cost <= best / (1 - gap), (seed, gap)


def test_the_canonical_problem_is_the_stage() -> None:
    rng = np.random.default_rng(0)
    for seed in SEEDS[:150]:
        stage = random_stage(seed)
        limit = int(rng.integers(0, 40)) if seed % 2 else None
        problem = build_galvatron_stage(stage, limit)
        problem.validate()
        plan = [int(rng.integers(len(row))) for row in stage.allowed]
        report = check(problem, plan)
        assert report.objective == stage.cost_of(plan)
        assert report.peaks[0].usage == stage.peak(plan)
        assert report.ok == stage.is_feasible(plan, limit)
        assert solve_in_process(problem, "brute_force").objective == best_by_enumeration(stage, limit)


def test_the_repaired_program_is_exact_where_backward_needs_nothing() -> None:
    """Then the forward budget is the peak; layers that use nothing are among them."""
    found = 0
    for seed in SEEDS:
        stage = random_stage(seed)
        stage = replace(stage, backward=np.zeros_like(stage.backward), memory_limit=min(stage.memory_limit, 500))
        best = best_by_enumeration(stage)
        plan = search_stage(stage, unit_bytes=1)
        assert (None if plan is None else plan.cost) == best, seed
        found += plan is not None
    assert found > 100


@pytest.mark.parametrize("slips", [REPAIRED, Slip.EQ4_STATE], ids=str)
def test_layers_that_hold_nothing_need_no_budget(slips: Slip) -> None:
    """Both tables are exact where handing over is free and backward needs nothing."""
    binding = 0
    for seed in SEEDS[:150]:
        stage = random_stage(seed)
        weight = np.random.default_rng(seed).integers(0, 2, (stage.layers, 1))
        stage = replace(
            stage,
            forward=weight * stage.forward,
            states=weight * stage.states,
            backward=np.zeros_like(stage.backward),
            transformation=np.zeros_like(stage.transformation),
            memory_limit=min(stage.memory_limit, 20),
        )
        plan = search_stage(stage, 1, slips)
        best = best_by_enumeration(stage)
        assert (None if plan is None else plan.cost) == best, seed
        binding += best != best_by_enumeration(replace(stage, memory_limit=2**40))
    assert binding > 20


@pytest.mark.parametrize("slips", [REPAIRED, *DP_SLIPS, AS_PRINTED], ids=str)
def test_no_program_beats_the_optimum(slips: Slip) -> None:
    worse = 0
    for seed in SEEDS[:100]:
        stage = random_stage(seed)
        unit = max(1, stage.memory_limit // 40)
        plan = search_stage(stage, unit, slips)
        best = best_by_enumeration(stage)
        if plan is None or plan.choices is None:
            worse += best is not None
            continue
        assert plan.cost == stage.cost_of(plan.choices)
        assert stage.is_feasible(plan.choices)
        assert plan.cost >= best
        worse += plan.cost > best
    assert worse > 0


def test_the_state_of_equation_4() -> None:
    """The cheap strategy of layer 0 makes layer 1 pay 10; the printed table has forgotten the other one."""
    change = [[[0, 0], [0, 0]], [[10, 10], [0, 0]]]
    stage = small_stage(cost=[[0, 1], [0, 0]], transformation=change, memory_limit=10)
    assert search_stage(stage, 1).cost == 1
    assert search_stage(stage, 1, Slip.EQ4_STATE).cost == 10


def test_the_borders_of_equation_4() -> None:
    exact = small_stage(cost=[[5, 1]], forward=[[0, 3]], memory_limit=3)
    assert search_stage(exact, 1).cost == 1
    assert search_stage(exact, 1, Slip.EQ4_BORDERS).cost == 5
    nothing = small_stage(cost=[[5, 1]], forward=[[0, 3]], memory_limit=0)
    assert search_stage(nothing, 1).cost == 5
    assert search_stage(nothing, 1, Slip.EQ4_BORDERS) is None


def test_the_break_of_algorithm_3() -> None:
    """Within 2 units the only plan peaks at 12, within 3 a cheaper one at 4."""
    stage = small_stage(cost=[[3, 2]], forward=[[2, 3]], backward=[[10, 1]], memory_limit=5)
    assert search_stage(stage, 1).cost == 2
    assert search_stage(stage, 1, Slip.ALG3_BREAK) is None


def test_the_unset_plan_of_algorithm_3() -> None:
    """The one plan fits without being looked at, and the cheaper one does not fit."""
    stage = small_stage(cost=[[3, 2]], forward=[[1, 3]], backward=[[0, 3]], memory_limit=4)
    kept = search_stage(stage, 1)
    lost = search_stage(stage, 1, Slip.ALG3_UNSET | Slip.ALG3_BREAK)
    assert (kept.choices, kept.cost) == ((0,), 3)
    assert lost.choices == (0,) or lost.choices is None
    unset = small_stage(cost=[[3, 2]], forward=[[1, 2]], backward=[[0, 3]], memory_limit=4)
    lost = search_stage(unset, 1, Slip.ALG3_UNSET | Slip.ALG3_BREAK)
    assert (lost.choices, lost.cost) == (None, 3)


def test_a_coarse_unit_never_breaks_the_limit() -> None:
    stage = small_stage(cost=[[9, 1], [9, 1]], forward=[[1, 6], [1, 6]], memory_limit=15)
    assert search_stage(stage, 1).cost == 2
    assert search_stage(stage, 5).cost == 10
    with pytest.raises(ValueError, match="unit of 0 bytes"):
        search_stage(stage, 0)


def test_the_unit_is_never_coarser_beside_the_limit_than_in_the_paper() -> None:
    for limit in (8 * 2**30, 16 * 2**30, 2**40):
        assert unit_for(limit) == DEFAULT_UNIT_BYTES
    for limit in (0, 1, 10**6, 10**9):
        assert limit // unit_for(limit) >= min(limit, 256)

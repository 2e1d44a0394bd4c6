"""Uniform strategies: exact among all partitions, and never better than the whole problem."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from formulations.galvatron.costs import CostModel, DeviceLinks
from formulations.galvatron.joint import solve_joint
from formulations.galvatron.pipeline import MicroBatchRule, PipelinePlan, PipelineProblem, pipeline_problem, renumbered
from formulations.galvatron.strategies import Dimension
from formulations.galvatron.uniform import (
    baselines,
    solve_uniform,
    three_dimensions,
    uniform_problem,
    with_any_degree,
)
from formulations.layers.layer import LayerChain, LayerProfile, SplitPart

LINKS = DeviceLinks(4, 10e9, 2e9)
BATCHES = (4, 8, 16)


def random_chain(seed: int, layers: int = 7) -> LayerChain:
    """Layers of unequal size that four devices can share."""
    random = np.random.default_rng(seed)

    def layer(number: int) -> LayerProfile:
        parameters, saved = int(random.integers(1, 9)) * 10**6, int(random.integers(1, 9)) * 10**6
        seconds = float(random.integers(1, 20)) * 1e-4
        return LayerProfile(
            name=f"layer {number}",
            kind="block",
            parameter_bytes=parameters,
            input_bytes=10**5,
            output_bytes=10**5,
            saved_bytes=saved,
            forward_workspace_bytes=0,
            backward_workspace_bytes=int(random.integers(0, 5)) * 10**5,
            forward_seconds=seconds,
            backward_seconds=2 * seconds,
            split=SplitPart(
                divisor=4,
                parameter_bytes=parameters,
                saved_bytes=saved // 2,
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                reduced_bytes=10**5,
            ),
            bytes_source="preset",
            seconds_source="preset",
        )

    return LayerChain("random", tuple(layer(number) for number in range(layers)), "float32", ())


def brute_force(problem: PipelineProblem) -> Fraction | None:
    """Least time per sample of all partitions, batches and micro-batches."""
    found = []
    for stages in problem.usable_degrees:
        for batch in problem.batches:
            for count in problem.rule.counts(batch, stages):
                for inner in combinations(range(1, problem.layers), stages - 1):
                    plan = PipelinePlan(batch, count, (0, *inner, problem.layers), (0,) * problem.layers)
                    cost = problem.evaluate(plan)
                    if cost.fits:
                        found.append(Fraction(cost.cost, batch))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(20))
def test_a_uniform_plan_is_the_best_partition_and_never_better_than_the_whole_problem(seed: int) -> None:
    chain = random_chain(seed)
    limit = int(np.random.default_rng(seed).integers(30, 200)) * 10**6
    model = CostModel(LINKS)
    whole = pipeline_problem(chain, 4, limit, BATCHES, model)
    exact = solve_joint(whole, Fraction(0), time_limit=20.0)
    for name, uniform in baselines(4).items():
        problem = uniform_problem(chain, limit, BATCHES, model, uniform)
        found = solve_uniform(problem)
        assert found.quanta_per_sample == brute_force(problem), name
        if found.plan is None:
            assert found.bound is None
            continue
        assert found.bound == found.quanta_per_sample
        assert problem.evaluate(found.plan).cost == found.cost
        in_whole = whole.evaluate(renumbered(found.plan, problem, whole))
        assert in_whole.cost == found.cost  # one evaluator
        assert in_whole.fits
        assert exact.bound is not None
        assert exact.bound <= found.quanta_per_sample


def test_the_baselines_of_eight_devices() -> None:
    found = {name: (each.stages, *map(str, each.strategies), str(each.schedule)) for name, each in baselines(8).items()}
    assert found == {
        "ddp": (1, "dp8", "1f1b"),
        "fsdp": (1, "sdp8", "1f1b"),
        "tp": (1, "tp8", "1f1b"),
        "gpipe": (8, "one", "gpipe"),
        "1f1b": (8, "one", "1f1b"),
        "3d": (2, "dp2-tp2", "1f1b"),
    }
    assert "3d" not in baselines(6)
    both = three_dimensions(2, 2, 2, (Dimension.DATA, Dimension.SHARDED))
    assert list(map(str, both.strategies)) == ["dp2-tp2", "sdp2-tp2"]
    assert list(map(str, three_dimensions(4, 1, 2, tuple(Dimension)[:2]).strategies)) == ["tp2"]


def test_a_choice_of_strategies_is_refused() -> None:
    both = three_dimensions(1, 4, 1, (Dimension.DATA, Dimension.SHARDED))
    problem = uniform_problem(random_chain(0), 10**9, BATCHES, CostModel(LINKS), both)
    with pytest.raises(ValueError, match="2 strategies; a uniform plan has one, use the joint search"):
        solve_uniform(problem)


def test_any_degree_allows_heads_that_it_does_not_divide() -> None:
    chain = random_chain(0)
    uniform = baselines(8)["tp"]
    refused = uniform_problem(chain, 10**12, BATCHES, CostModel(LINKS), uniform, MicroBatchRule.DIVISORS)
    assert solve_uniform(refused).plan is None
    allowed = uniform_problem(with_any_degree(chain, 8), 10**12, BATCHES, CostModel(LINKS), uniform)
    assert solve_uniform(allowed).plan is not None

"""Small random stages and pipelines of Galvatron-BMW, and their best plans by enumeration."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import numpy as np

from formulations.galvatron.costs import LayerTables
from formulations.galvatron.pipeline import MicroBatchRule, PipelinePlan, PipelineProblem, is_faster
from formulations.layers.pipeline_schedule import Schedule

SCALES = (1, 1, 1, 1_000_003)


def random_kinds(rng, layers):
    return rng.integers(0, int(rng.integers(1, layers + 1)), layers)


def random_tables(rng, kinds_of_layers, strategies, borrowers=()):
    """Tables of layers that are often alike, with zeros, ties and strategies that are not possible."""
    kinds = int(kinds_of_layers.max()) + 1
    layouts = int(rng.integers(1, strategies + 1))
    scale = int(rng.choice(SCALES))
    zeros = rng.random() < 0.4

    def numbers(high, shape):
        values = rng.integers(0, high, shape) * scale
        return np.where(rng.random(shape) < 0.4, 0, values) if zeros else values

    shape = (kinds, strategies)
    repeated = numbers(12, shape)
    transformation = numbers(6, (kinds, layouts, layouts))
    transformation[:, np.arange(layouts), np.arange(layouts)] = 0
    borrowed = np.zeros(shape, dtype=np.int64)
    if borrowers:
        rows = kinds_of_layers[list(borrowers)]
        borrowed[rows] = numbers(6, (len(rows), strategies))
    return LayerTables(
        strategies=(),
        kinds=kinds_of_layers,
        synchronised=repeated + numbers(6, shape),
        repeated=repeated,
        forward=numbers(8, shape),
        backward=numbers(10, shape),
        states=numbers(6, shape),
        borrowed=borrowed,
        allowed=rng.random(shape) > (0.15 if rng.random() < 0.5 else 0.0),
        layouts=rng.integers(0, layouts, strategies),
        transformation=transformation,
    )


def random_stage(seed):
    """A stage of up to five layers; the limit is often exactly what some plan needs."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 6))
    tables = random_tables(rng, random_kinds(rng, layers), int(rng.integers(1, 5)))
    free = tables.stage(0, layers, int(rng.integers(1, 4)), 2**40, int(rng.integers(0, 3)))
    peaks = sorted({free.peak(choices) for choices in plans(free)} or {0})
    limit = int(rng.choice(peaks)) - int(rng.random() < 0.2)
    return tables.stage(0, layers, 1, max(limit, 0), free.repeats - 1)


def plans(stage):
    """All plans of possible strategies, whatever they use."""
    return product(*(np.flatnonzero(row).tolist() for row in stage.allowed))


def best_by_enumeration(stage, repeated_limit=None):
    """Cost of the cheapest feasible plan, or None."""
    return min((stage.cost_of(p) for p in plans(stage) if stage.is_feasible(p, repeated_limit)), default=None)


def random_pipeline(seed, ties=False):
    """A model of up to four layers for up to three stages, with tables of their own for each micro-batch size.

    With `ties` one or two layers borrow a parameter of the first, and all of these need one strategy.
    """
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2 if ties else 1, 5))
    strategies = int(rng.integers(1, 4))
    kinds = random_kinds(rng, layers)
    borrowers = ()
    if ties:
        borrowers = tuple(sorted(rng.choice(range(1, layers), min(layers - 1, int(rng.integers(1, 3))), replace=False)))
        kinds[[0, *borrowers]] = kinds.max() + 1 + np.arange(1 + len(borrowers))
        kinds = np.unique(kinds, return_inverse=True)[1]
    shapes = np.random.SeedSequence(seed).generate_state(2)

    @cache
    def tables(stages, micro_batch):
        return random_tables(np.random.default_rng([*shapes, stages, micro_batch]), kinds, strategies, borrowers)

    limit = int(rng.integers(0, 30)) * int(rng.choice(SCALES))
    return PipelineProblem(
        layers,
        tables,
        (1, 2, 3),
        tuple(sorted({int(batch) for batch in rng.integers(1, 7, 2)})),
        limit,
        Schedule(rng.choice(list(Schedule))),
        MicroBatchRule.TWICE_THE_STAGES if rng.random() < 0.3 else MicroBatchRule.DIVISORS,
        (0, *borrowers) if ties else (),
    )


def fastest_by_enumeration(problem):
    """Batch and cost of the plan with most samples per quantum, or None."""
    best = None
    for batch, stages in product(problem.batches, problem.usable_degrees):
        for count in problem.rule.counts(batch, stages):
            for inner in combinations(range(1, problem.layers), stages - 1):
                borders = (0, *inner, problem.layers)
                for choices in product(
                    range(len(problem.tables(stages, batch // count).layouts)), repeat=problem.layers
                ):
                    plan = PipelinePlan(batch, count, borders, choices)
                    found = problem.evaluate(plan)
                    if found.fits and (best is None or is_faster(batch, found.cost, *best)):
                        best = (batch, found.cost)
    return best


def by_cpsat(seeds):
    """Cost per sample, bound and whether the plan fits, by CP-SAT; for a process of its own."""
    from formulations.galvatron.restated import solve_joint_by_cpsat

    rows = []
    for seed in seeds:
        problem = random_pipeline(seed)
        found = solve_joint_by_cpsat(problem)
        plan = found.plan
        fits = plan is None or (problem.evaluate(plan).fits and problem.evaluate(plan).cost == found.cost)
        rows.append((found.quanta_per_sample, found.bound, fits))
    return rows

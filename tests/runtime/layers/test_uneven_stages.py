"""Pipelines whose stages have different numbers of devices: who sends what, in which order, and against one process."""

from __future__ import annotations

from random import Random

import pytest
from support.layers.layer_runs import check_layer_run, names_of, planned_model
from support.tiers import fuzz

from planner.common.plan_error import PlanError
from planner.layers.plan.check import check_layer_plan, divisors
from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan
from planner.models.references import load_step
from runtime.layers.check import check_model
from runtime.layers.families.registry import model_family
from runtime.layers.reference import model_reference
from runtime.layers.uneven_pipeline import micro_batch_order, transfers

SIZES = [(1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 3), (3, 1)]
TIED = {"gpt2": [(1, 2, 1)], "bert": [(1, 2, 1)]}


def layer(name: str, data: int, tensor: int = 1, **more) -> LayerSettings:
    return LayerSettings(name=name, data_parallel=data, tensor_parallel=tensor, **more)


@pytest.mark.parametrize("source", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (3, 1), (1, 4)])
@pytest.mark.parametrize("target", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (3, 1), (1, 4)])
def test_every_place_gets_its_rows_once_from_places_that_have_them(source, target) -> None:
    rows = 12
    given, taken = layer("a", *source), layer("b", *target)
    ways = transfers(rows, given, taken)
    for place in range(taken.devices):
        first = place // taken.tensor_parallel * rows // taken.data_parallel
        got = sorted((way.first, way.end) for way in ways if way.target == place)
        assert [row for begin, end in got for row in range(begin, end)] == list(
            range(first, first + rows // taken.data_parallel)
        )
    for way in ways:
        first = way.source // given.tensor_parallel * rows // given.data_parallel
        assert first <= way.first < way.end <= first + rows // given.data_parallel


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
def test_orders_of_all_stages_fit_together(schedule: str, stages: int, micro_batches: int) -> None:
    """Run by stages that wait for one another, they end, and hold no more micro-batches than the schedule says."""
    orders = [list(micro_batch_order(schedule, micro_batches, stages - 1 - stage)) for stage in range(stages)]
    done: list[set[tuple[bool, int]]] = [set() for _ in range(stages)]
    places = [0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            if places[stage] == len(order):
                continue
            is_forward, number = order[places[stage]]
            neighbour = stage - 1 if is_forward else stage + 1
            ready = not 0 <= neighbour < stages or (is_forward, number) in done[neighbour]
            if ready and (is_forward or (True, number) in done[stage]):
                done[stage].add((is_forward, number))
                places[stage] += 1
                moved = True
                held = sum(forward for forward, _ in done[stage]) * 2 - len(done[stage])
                assert held <= (micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage))
        assert moved, "the stages wait for one another"
    assert all(len(found) == 2 * micro_batches for found in done)


def uneven_plan(name: str, sizes: tuple[int, ...], seed: int) -> LayerPlan:
    """A plan whose stages have these numbers of devices; the seed says the rest."""
    random = Random(f"{name} {sizes} {seed}")
    model = planned_model(name, 3).model_copy(update={"batch": 12})
    names = names_of(model)
    schedule = random.choice(["gpipe", "1f1b"])
    parts = [count for count in (1, 2, 4) if schedule == "gpipe" or count >= len(sizes)]
    micro_batches = random.choice(parts)
    rows = model.batch // micro_batches
    cuts = [0, *sorted(random.sample(range(1, len(names)), len(sizes) - 1)), len(names)]
    most = max(sizes)
    stages = []
    for size, first, end in zip(sizes, cuts, cuts[1:], strict=False):
        tensor = random.choice([t for t in divisors(size) if t in (1, 2) and rows % (size // t) == 0])
        data = size // tensor
        if most % data:
            data, tensor = size, 1
        ties = name in TIED
        sharding = random.choice(["none", "zero2", "zero3"])
        layers = tuple(
            layer(
                unit,
                data,
                tensor,
                sharding="none" if ties and unit in ("embedding", "head") else sharding,
                undivided=tensor > 1 and unit in ("embedding", "head"),
                checkpoint=random.random() < 0.3,
                sequence_parallel=tensor > 1 and unit not in ("embedding", "head") and name != "vit" and seed % 2 == 0,
            )
            for unit in names[first:end]
        )
        stages.append(StagePlan(layers=layers, devices=size))
    plan = LayerPlan(
        model=model, devices=sum(sizes), stages=tuple(stages), micro_batches=micro_batches, schedule=schedule
    )
    check_layer_plan(plan)
    return plan


CASES = [
    ("gpt2", (1, 2, 1), 0),
    ("vit", (1, 3), 1),
    ("vit", (2, 1, 1), 2),
    fuzz("llama", (2, 1, 1), 0),
    *(fuzz(name, sizes, seed) for name in ("vit", "llama") for sizes in SIZES for seed in range(3, 7)),
    *(fuzz(name, (1, 2, 1), seed) for name in ("gpt2", "bert") for seed in range(1, 6)),
]


@pytest.mark.parametrize(("name", "sizes", "seed"), CASES)
def test_stages_of_different_sizes_train_as_one_process(name, sizes, seed, four_ranks) -> None:
    check_layer_run(four_ranks, uneven_plan(name, sizes, seed))


def test_what_cannot_be_uneven_is_refused_by_name() -> None:
    plan = uneven_plan("vit", (1, 3), 1)
    half = plan.model_copy(update={"stages": (plan.stages[0].model_copy(update={"devices": None}), plan.stages[1])})
    with pytest.raises(PlanError, match=r"stages with no, 3 devices are not all of the plan's 4: give every stage"):
        check_layer_plan(half)
    more = plan.model_copy(update={"devices": 5})
    with pytest.raises(PlanError, match=r"stages with 1, 3 devices are not all of the plan's 5"):
        check_layer_plan(more)
    tied = uneven_plan("gpt2", (1, 2, 1), 0)
    wider = tuple(one.model_copy(update={"data_parallel": 2, "tensor_parallel": 1}) for one in tied.stages[2].layers)
    other = tied.model_copy(
        update={
            "stages": (*tied.stages[:2], StagePlan(layers=wider, devices=2)),
            "devices": 5,
            "schedule": "gpipe",
            "micro_batches": 2,
        }
    )
    check_layer_plan(other)
    step = load_step(model_reference(other), "meta")
    with pytest.raises(PlanError, match=r"embedding, head share a parameter and are in stages with 1, 2 devices"):
        check_model(other, model_family(step), step.example_kwargs)

"""Merged moments on random steps: every assignment of a problem is one of its relaxation, and divisions count times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from support.steps.offload_steps import offload_step
from support.steps.random_steps import random_step
from support.tiers import first, only

from formulations.problem.checker import check
from formulations.solvers.peaks.minimum_peak import without_limit
from formulations.step.kiwi_chain import chain_moments
from formulations.step.modes import Modes, once, once_or_twice
from formulations.step.moment_classes import MomentClasses
from formulations.step.offload.modes import Links
from formulations.step.sharding import MEMORY
from formulations.step.solving import registry
from formulations.step.solving.merged_moments import MergedMoments
from formulations.step.solving.registry import kiwi_chain_problem, kiwi_offload_problem
from formulations.step.solving.step_problem import StepProblem
from formulations.step.timeline import Timeline, build_timeline
from formulations.step.training_step import StepDecision, StepModel

AMPLE = 10**9
DRAWS = 120

Build = Callable[[StepModel, int | None], StepProblem]


@pytest.fixture(autouse=True)
def small_problems_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator runs again twice, bytes may be counted too low, and relaxations are there."""
    monkeypatch.setattr(registry, "LARGEST_TWICE", -1)
    monkeypatch.setattr(registry, "LARGEST_EXACT", -1)


def with_offload(model: StepModel, limit: int | None) -> StepProblem:
    return kiwi_offload_problem(model, limit, Links(blocking=True))


KINDS: dict[str, tuple[Callable[..., StepModel], Build]] = {
    "chain": (random_step, kiwi_chain_problem),
    "offload": (offload_step, with_offload),
}


def random_classes(model: StepModel, modes: Modes, rng: random.Random) -> MomentClasses:
    classes = MomentClasses.widest(model, modes)
    return classes.divided_before(m for m in classes.moments if rng.random() < 0.4)


def random_assignments(
    built: StepProblem, model: StepModel, rng: random.Random
) -> Iterator[tuple[StepDecision, int, int]]:
    """Decisions of a problem with their costs and peaks in it."""
    unlimited = without_limit(built.problem, MEMORY)
    sizes = [unlimited.nodes[i].size for i in range(len(model.nodes))]
    for _ in range(DRAWS):
        decision = built.decode(tuple(rng.randrange(size) for size in sizes))
        report = check(unlimited, built.complete(unlimited, built.encode(decision)))
        if report.ok:
            assert report.objective is not None
            yield decision, report.objective, report.peaks[MEMORY].usage


def merged_of(built: StepProblem) -> MergedMoments | None:
    """The relaxations of a problem, if operators have layouts to choose and moments to merge."""
    return built.merged if built.merged is not None and built.merged.modes else None


@pytest.mark.parametrize("seed", first(12, range(200), 28))
@pytest.mark.parametrize("kind", KINDS)
def test_every_assignment_is_one_of_the_relaxation_at_the_same_cost(kind: str, seed: int) -> None:
    make, build = KINDS[kind]
    rng = random.Random(seed)
    model = make(seed, forward=4, layouts=2)
    built = build(model, AMPLE)
    merged = merged_of(built)
    if merged is None:
        return
    for decision, cost, peak in random_assignments(built, model, rng):
        classes = random_classes(model, merged.modes, rng)
        relaxed = replace(merged, memory_limit=peak).relaxation(classes)
        report = check(relaxed.problem, relaxed.encoded(decision))
        assert report.ok, report.violations
        assert report.objective == cost


def test_random_assignments_are_many() -> None:
    """The test before this one compares something."""
    for make, build in KINDS.values():
        counts = []
        for seed in range(12):
            model = make(seed, forward=4, layouts=2)
            built = build(model, AMPLE)
            if merged_of(built) is not None:
                found = list(random_assignments(built, model, random.Random(seed)))
                counts.append(sum(bool(decision.recomputed) for decision, _, _ in found))
        assert sum(counts) > 100


@pytest.mark.parametrize("seed", first(12, range(100), 28))
def test_a_time_that_divides_classes_counts(seed: int) -> None:
    rng = random.Random(seed)
    model = random_step(seed, forward=5)
    modes = once(chain_moments(model))
    if not modes:
        return
    for _ in range(20):
        chosen = {i: rng.choice(of_node) for i, of_node in modes.items() if rng.random() < 0.5}
        timeline = build_timeline(model, chosen)
        t = rng.randrange(timeline.horizon)
        classes = random_classes(model, modes, rng)
        finer = classes.divided(timeline, [t])
        assert set(classes.firsts) <= set(finer.firsts) <= set(classes.moments)
        of_classes = build_timeline(model, {i: [m for (m,) in of] for i, of in finer.merged(modes).items()})
        assert finer.counted(of_classes)[same_time(timeline, t, of_classes)]


def same_time(timeline: Timeline, t: int, other: Timeline) -> int:
    """The time of another timeline that is a time of this one: that of the same event."""
    event = max(k for k, start in enumerate(timeline.start[:-1]) if start <= t)
    what, moments = timeline.events[event], timeline.recompute
    for moment, place in moments[what.index].items() if what.index < len(moments) else ():
        if place == event:
            return other.start[other.recompute[what.index][moment]] + t - timeline.start[event]
    return other.start[other.events.index(what)] + t - timeline.start[event]


@pytest.mark.parametrize("seed", first(8, range(60), 12))
def test_moments_in_classes_are_those_of_modes_in_order(seed: int) -> None:
    rng = random.Random(seed)
    model = random_step(seed, forward=5)
    modes = once(chain_moments(model))
    if not modes:
        return
    classes = random_classes(model, modes, rng)
    merged = classes.merged(modes)
    for _ in range(20):
        wanted = {i: rng.choice(of_node) for i, of_node in merged.items() if rng.random() < 0.6}
        found = classes.within(modes, model, wanted)
        for i, (moment,) in found.items():
            assert classes.first(moment) <= wanted[i][0]
            if (moment,) not in modes[i]:
                assert moment == wanted[i][0]
                continue
            for edge in model.edges_from[i]:
                if edge.consumer in found and wanted[i][0] <= wanted[edge.consumer][0]:
                    assert moment <= found[edge.consumer][0]


def test_single_moments_leave_no_time_out() -> None:
    for seed in range(20):
        model = random_step(seed, forward=4)
        modes = once(chain_moments(model))
        if modes:
            widest = MomentClasses.widest(model, modes)
            finest = widest.divided_before(widest.moments)
            timeline = build_timeline(model, {i: [m for (m,) in of] for i, of in finest.merged(modes).items()})
            assert finest.counted(timeline).all()
            assert finest.merged(modes) == modes


def test_a_second_rerun_is_refused() -> None:
    for seed in range(50):
        model = random_step(seed, forward=4)
        modes = once_or_twice(model, chain_moments(model))
        if any(len(mode) > 1 for of_node in modes.values() for mode in of_node):
            with pytest.raises(ValueError, match="give modes of one moment"):
                MomentClasses.widest(model, modes)
            return
    raise AssertionError("no step has an operator that may run again twice")


def assignments_that_leave_classes(
    seed: int,
) -> Iterator[tuple[MergedMoments, StepProblem, MomentClasses, StepDecision]]:
    """Assignments of relaxations in which a rerun is needed before any of its moments in its class."""
    rng = random.Random(seed)
    model = random_step(seed, forward=6)
    # Only the first and the last moment of an operator are possible, so that there are gaps between them.
    plan = {i: moments[0] for i, moments in chain_moments(model).items()}
    built = kiwi_chain_problem(model, AMPLE, [plan], reach=1)
    merged = merged_of(built)
    if merged is None:
        return
    for _ in range(200):
        classes = random_classes(model, merged.modes, rng)
        relaxation = merged.relaxation(classes)
        sizes = [node.size for node in relaxation.problem.nodes[: len(model.nodes)]]
        relaxed = relaxation.decode(tuple(rng.randrange(size) for size in sizes))
        if len(relaxed.recomputed) > 1 and check(relaxation.problem, relaxation.encoded(relaxed)).ok:
            moved = merged.moved(classes, relaxed)
            if any(moment < relaxed.recomputed[i][0] for i, (moment,) in moved.recomputed.items()):
                yield merged, built, classes, relaxed


@pytest.mark.parametrize("seed", only((3, 13), range(40)))
def test_a_rerun_that_leaves_its_class_divides_it(seed: int) -> None:
    """Also where the moved decision fits, since memory may be short where it is moved to."""
    for merged, built, classes, relaxed in assignments_that_leave_classes(seed):
        finer = merged.divided(classes, built, relaxed)
        assert set(finer.firsts) > set(classes.firsts)
        relaxation = merged.relaxation(finer)
        # The same reruns, each in the last of the classes that its own was divided into.
        last = {
            i: max(m for (m,) in merged.modes[i] if classes.first(m) == first)
            for i, (first,) in relaxed.recomputed.items()
        }
        same = replace(relaxed, recomputed={i: (finer.first(moment),) for i, moment in last.items()})
        moved = merged.moved(finer, same)
        assert not check(relaxation.problem, relaxation.encoded(same)).ok or all(
            moment >= same.recomputed[i][0] for i, (moment,) in moved.recomputed.items()
        )


def test_reruns_that_leave_their_classes_are_some() -> None:
    """The test before this one looks at something."""
    assert any(True for seed in (3, 13) for _ in assignments_that_leave_classes(seed))

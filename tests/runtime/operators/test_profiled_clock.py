"""Times of instructions by torch's profiler, of operators on the CPU."""

from __future__ import annotations

import pytest
import torch

from runtime.gpu_check.plans import required
from runtime.gpu_check.training import Subject
from runtime.measure.steps import train_and_measure
from runtime.operators.instruction_clock import InstructionClock
from runtime.operators.profiled_clock import ProfiledClock, clock_of
from runtime.rank_main import instruction_times

CPU = torch.device("cpu")


def product(size: int) -> torch.Tensor:
    return torch.ones(size, size) @ torch.ones(size, size)


@pytest.mark.parametrize("sizes", [(600,), (1, 600), (1, 600, 2)])
def test_times_are_of_the_second_step_or_the_only_one(sizes):
    clock = ProfiledClock(3, CPU)
    for size in sizes:
        clock.begin()
        for position in (0, 2, 2):
            product(size)
            clock.tick(position)
        clock.end()
    first, missing, last = clock.typical()
    assert missing == 0
    assert min(first, last) > 50_000  # a product of 600 takes longer, one of 1 does not


def test_steps_before_are_not_profiled():
    clock = ProfiledClock(1, CPU, 2)
    for size in (1500, 1500, 1, 1):
        clock.begin()
        product(size)
        clock.tick(0)
        clock.end()
    assert 0 < clock.typical()[0] < 5_000_000  # a product of 1500 takes longer


def test_the_clock_follows_the_device():
    assert type(clock_of(1, CPU, 3)) is InstructionClock
    assert type(clock_of(1, torch.device("cuda", 0), 3)) is ProfiledClock


def profiled_after(steps: int) -> tuple[list[float], tuple[int, ...]]:
    """Losses of a run, and times of its instructions in steps behind it."""
    plan = required("gpt2-half")
    subject = Subject(plan, CPU)
    clock = ProfiledClock(len(subject.schedule(plan).instructions), CPU, steps)
    step, batches = subject.step()
    training = subject.planned(plan, step, clock)
    measured = train_and_measure(training, batches, steps, CPU)
    times = instruction_times(training, batches, steps, clock)
    assert training.optimizer.step_count == steps + ProfiledClock.more_steps
    return list(measured.losses), times


def test_a_run_is_profiled_behind_its_steps(one_rank):
    ((losses, times),) = one_rank.run(profiled_after, 2)
    assert len(losses) == 2
    assert sum(time > 0 for time in times) > len(times) / 10

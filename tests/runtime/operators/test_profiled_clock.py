"""Times of instructions by torch's profiler, of operators on the CPU."""

from __future__ import annotations

import pytest
import torch

from runtime.operators.instruction_clock import InstructionClock
from runtime.operators.profiled_clock import ProfiledClock, clock_of

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

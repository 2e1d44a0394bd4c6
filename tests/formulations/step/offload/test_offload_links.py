"""Rows of links: who uses which, how long they are, and how long something may wait."""

from __future__ import annotations

import random

import numpy as np
import pytest

from formulations.step.offload.links import Rows, Span, levels


def random_rows(seed: int) -> Rows:
    """Rows at some events."""
    rng = random.Random(seed)
    events = sorted(rng.sample(range(100), rng.randint(1, 30)))
    return Rows(2, np.array(events), np.array([rng.randint(0, 99) for _ in events]))


@pytest.mark.parametrize("seed", range(50))
def test_a_copy_uses_the_rows_of_the_events_that_it_lies_behind(seed):
    rows = random_rows(seed)
    for event in range(101):
        before, behind = rows.up_to(event), rows.since(event)
        assert rows.events[before.first : before.end].tolist() == [e for e in rows.events.tolist() if e <= event]
        assert rows.events[behind.first : behind.end].tolist() == [e for e in rows.events.tolist() if e >= event]


@pytest.mark.parametrize("seed", range(50))
def test_every_row_has_its_length_and_what_the_choice_adds(seed):
    rng, rows = random.Random(seed), random_rows(seed)
    lengths, count = rows.lengths.copy(), len(rows.events)
    longer = np.array([rng.randint(0, 50) for _ in range(4)])
    span = Span(rng.randint(0, count - 1), rng.randint(1, count))
    decided = rows.lengthen(span, 60, 60 - longer)
    clock = {term.start: int(term.amount[0]) for term in rows.clock()}
    for choice, more in enumerate(longer.tolist()):
        used = np.zeros(count, dtype=np.int64)
        for term in decided:
            used[term.start : term.end] += term.amount[choice]
        for row in range(count):
            expected = lengths[row] + (more if span.first <= row < span.end else 0)
            assert rows.limit - used[row] - clock.get(row, 0) == expected


@pytest.mark.parametrize("most", [0, 1, 2, 7, 1000, 123_456_789, 10**15])
def test_levels_grow_by_a_factor_up_to_the_most(most):
    found = levels(most)
    assert found[-1] == most
    assert (np.diff(found) > 0).all()
    assert (found[1:] <= 1.06 * found[:-1] + 1).all()
    assert most == 0 or 0 < found[0] <= most / 1024 + 1

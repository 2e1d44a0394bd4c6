"""Rows of links: who uses which, how long they are, and how long something may wait."""

from __future__ import annotations

import random

import numpy as np
import pytest

from formulations.models.offload_links import ROWS, LinkRows, waits


def random_rows(seed: int) -> LinkRows:
    """Rows of some events, many of which take no time."""
    rng = random.Random(seed)
    least = [rng.choice([0, 0, 1, rng.randint(1, 500)]) for _ in range(rng.randint(1, 400))]
    return LinkRows(np.concatenate(([0], np.cumsum(least, dtype=np.int64))), rng.randint(0, len(least)))


@pytest.mark.parametrize("seed", range(50))
def test_a_copy_uses_the_rows_of_the_events_that_it_lies_behind(seed):
    rows = random_rows(seed)
    for event in range(rows.boundary + 1):
        span = rows.leaving(event)
        assert rows.outward[span.first : span.end].tolist() == [e for e in rows.outward.tolist() if e <= event]
    for event in range(rows.boundary, len(rows.begins)):
        span = rows.returning(event)
        assert rows.inward[span.first : span.end].tolist() == [e for e in rows.inward.tolist() if e >= event]


@pytest.mark.parametrize("seed", range(50))
def test_the_clock_leaves_every_row_the_time_between_its_event_and_the_boundary(seed):
    rows = random_rows(seed)
    used = {(term.resource, term.start): int(term.amount[0]) for term in rows.clock(outward=2, inward=3)}
    boundary = rows.begins[rows.boundary]
    for row, event in enumerate(rows.outward.tolist()):
        assert rows.forward_time - used.get((2, row), 0) == boundary - rows.begins[event]
    for row, event in enumerate(rows.inward.tolist()):
        assert rows.backward_time - used.get((3, row), 0) == rows.begins[event] - boundary
    assert max(len(rows.outward), len(rows.inward)) <= ROWS + 2
    assert (rows.outward[0], rows.outward[-1]) == (0, rows.boundary)
    assert (rows.inward[0], rows.inward[-1]) == (rows.boundary, len(rows.begins) - 1)


@pytest.mark.parametrize("most", [0, 1, 2, 7, 1000, 123_456_789, 10**15])
def test_waiting_grows_by_a_factor_up_to_the_most(most):
    times = waits(most)
    assert times[-1] == most
    assert (np.diff(times) > 0).all()
    assert (times[1:] <= 1.2 * times[:-1] + 1).all()
    assert most == 0 or times[0] > 0

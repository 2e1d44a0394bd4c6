"""Nothing is worse than what it contains: kiwi_chain than every baseline, kiwi_offload than kiwi_chain."""

from __future__ import annotations

import sys

import pytest
from support.steps.never_worse import (
    CONTAINS,
    NARROW_FIRST,
    Case,
    Found,
    random_case,
    solve_all,
    solve_each,
    violations,
)
from support.steps.real_steps import LIMITS, STEPS, real_session, requests_within
from support.tiers import slow

from formulations.kiwi.of_step import PROGRAMS
from formulations.solvers import SolverPool
from planner.session.formulations import FORMULATIONS

ORDERED = ("sharding", "kiwi_reduced", "kiwi_chain", "kiwi_offload")
"""Each contains the one before."""

ON_THE_DEVICE = tuple(name for name in NARROW_FIRST if name != "kiwi_offload")


def check_case(case: Case, seconds: float, pool: SolverPool, formulations: tuple[str, ...] = NARROW_FIRST) -> None:
    found = solve_all(case, seconds, pool, formulations)
    assert violations(found) == [], case
    assert not found["kiwi_chain"].proved_impossible, case


@pytest.mark.parametrize(
    "case",
    [
        slow(Case("conv_net", 1, 8, 16, "titan-rtx-8-pcie", (2,), 0.3)),
        Case("gpt2", 1, 4, 64, "a100-8-nvlink", (2,), 0.3),
        slow(Case("vit", 1, 4, 16, "v100-2x4-gcp", (2,), 0.5)),
    ],
    ids=lambda case: case.network,
)
def test_small_cases(case, pool):
    check_case(case, 0.4, pool)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(200))
def test_random_cases(seed, pool):
    check_case(random_case(seed), 0.5, pool, ON_THE_DEVICE)


LARGE = (
    ("gpt2", 12, (2,), 0.1),
    ("gpt2", 12, (2, 2), 0.3),
    ("bert", 12, (4,), 0.3),
    ("bert", 12, (2, 4), 0.1),
    ("vit", 12, (2,), 0.3),
    ("vit", 12, (2, 2), 0.1),
    ("t5", 12, (2,), 0.1),
    ("t5", 12, (4,), 0.3),
    ("llama", 8, (4,), 0.1),
    ("llama", 8, (2, 4), 0.3),
)


@pytest.mark.fuzz
@pytest.mark.parametrize(("network", "layers", "mesh", "room"), LARGE)
def test_large_cases(network, layers, mesh, room, pool):
    case = Case(network, layers, 8, 64, "a100-8-nvlink", mesh, room)
    check_case(case, 2.0, pool, ON_THE_DEVICE)


@pytest.mark.fuzz
@pytest.mark.parametrize("share", LIMITS)
@pytest.mark.parametrize("name", STEPS)
def test_real_steps_are_in_order(name, share, pool):
    """Independent searches of the same length: no wider formulation ends above a narrower one (``-s`` shows them)."""
    session = real_session(name)
    found = solve_each(session, requests_within(session, share, ORDERED, pool), pool, from_contained=False)
    for each, row in found.items():
        gap = "" if row.cost is None else f"{row.cost / 1e6:.3f} ms, gap {1 - row.bound / row.cost:.2%}"
        sys.stdout.write(f"{name} at {share:.0%}, {each}: {gap or 'no plan'}\n")
    assert violations(found) == []
    assert found["kiwi_offload"].cost is not None


def test_what_counts_as_a_violation():
    """KIWI's own programs have a size of their own and are compared in `test_same_problem`."""
    assert sorted([*NARROW_FIRST, *PROGRAMS]) == sorted(FORMULATIONS)
    plain = {name: Found(100, 100) for pair in CONTAINS for name in pair}
    assert violations(plain) == []
    assert violations({**plain, "kiwi_chain": Found(99, 90)}) == [
        "kiwi_offload costs 100, kiwi_chain 99",
        "bound 100 of kiwi_offload is above the plan 99 of kiwi_chain",
    ]
    assert len(violations({**plain, "kiwi_chain": Found(101, 90)})) == 6
    assert len(violations({**plain, "kiwi_chain": Found(101, 101)})) == 2 * 6
    assert len(violations({**plain, "kiwi_offload": Found(None, None, proved_impossible=True)})) == 2
    assert violations({**plain, "sharding": Found(None, None)}) == []

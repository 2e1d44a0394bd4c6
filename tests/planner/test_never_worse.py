"""Nothing is worse than what it contains: kiwi_chain than every baseline, kiwi_offload than kiwi_chain.

Where time ran out a formulation may still have found less; then its bound must be below what it contains.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.never_worse import CONTAINS, Case, Found, random_case, solve_all, violations, worse

from formulations.solvers import SolverPool


@pytest.fixture(scope="module")
def pool() -> Iterator[SolverPool]:
    with SolverPool() as pool:
        yield pool


def check_case(case: Case, seconds: float, pool: SolverPool, record) -> None:
    found = solve_all(case, seconds, pool)
    assert violations(found) == [], case
    assert found["kiwi_chain"].cost is not None or not found["kiwi_chain"].proved_impossible, case
    for wide, narrow, excess in worse(found):
        record(f"{wide} ran out of time above {narrow}", f"{excess:.2%}")


@pytest.mark.parametrize(
    "case",
    [
        Case("conv_net", 1, 8, 16, "titan-rtx-8-pcie", (2,), 0.0),
        Case("gpt2", 1, 4, 64, "a100-8-nvlink", (2,), 0.1),
        Case("vit", 1, 4, 16, "v100-2x4-gcp", (2,), 0.3),
    ],
    ids=lambda case: case.network,
)
def test_small_cases(case, pool, record_property):
    check_case(case, 0.75, pool, record_property)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(200))
def test_random_cases(seed, pool, record_property):
    check_case(random_case(seed), 5.0, pool, record_property)


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
def test_large_cases(network, layers, mesh, room, pool, record_property):
    case = Case(network, layers, 8, 64, "a100-8-nvlink", mesh, room)
    check_case(case, 30.0, pool, record_property)


def test_what_counts_as_a_violation():
    plain = {name: Found(100, 100) for pair in CONTAINS for name in pair}
    assert violations(plain) == []
    assert violations({**plain, "kiwi_chain": Found(101, 90)}) == []
    assert [wide for wide, _, _ in worse({**plain, "kiwi_chain": Found(101, 90)})] == ["kiwi_chain"] * 6
    assert len(violations({**plain, "kiwi_chain": Found(101, 101)})) == 2 * 6
    assert len(violations({**plain, "kiwi_offload": Found(None, None, proved_impossible=True)})) == 1
    assert violations({**plain, "sharding": Found(None, None)}) == []

from collections.abc import Iterator

import pytest
from support.rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()

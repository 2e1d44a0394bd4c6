"""Ranks that stay alive between tests, and the command line as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.processes.command_line import Outcome
from support.processes.rank_pool import RankPool

from runtime.commands import main as cli


@pytest.fixture(autouse=True)
def _launched_warm(warm_python: None) -> None:
    """For all tests here."""


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


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


@pytest.fixture
def meshwright(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    # Outcomes are compared line by line, on a busy machine too.
    monkeypatch.setattr("runtime.commands.tables.progress.FIRST_LINE_SECONDS", 3600.0)

    def call(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        return Outcome(int(left.value.code or 0), printed.out, printed.err)

    return call

"""In which order files of tests begin, which have fast tests, and what is shown when all are over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.layers.peak_ratios import PROPERTY, PeakRatio, summary
from support.processes.warm_workers import WarmWorkers
from support.tiers import mark_slow_cases

from formulations.solvers import SolverPool

LONGEST = (
    "test_notebooks",
    "test_solvers_differential",
    "test_session",
    "test_launch",
    "test_random_plans",
    "test_layer_executor",
    "test_layer_random",
    "test_metamorphic",
    "test_schedule_builder",
    "test_portfolio",
    "test_step_beside",
    "test_worker",
    "test_changes_and_prices",
    "test_checkpoints",
)
"""Files that take half a minute or more, in `make test-all`; one process runs a file, so these begin first."""

NOT_FAST = ("slow", "fuzz", "bench")
"""Marks of what `make test` leaves out."""
FAST_TESTS = pytest.StashKey[dict[Path, int]]()
"""How many tests of each collected file `make test` runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, count the fast tests before any are left out, and put the longest files first."""
    mark_slow_cases(items)
    fast: dict[Path, int] = defaultdict(int)
    for item in items:
        fast[item.path] += not any(item.get_closest_marker(mark) for mark in NOT_FAST)
    config.stash[FAST_TESTS] = dict(fast)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session")
def fast_tests(pytestconfig: pytest.Config) -> dict[Path, int]:
    """How many tests of each file `make test` runs; none are known where single tests were asked for."""
    return {} if any("::" in argument for argument in pytestconfig.args) else pytestconfig.stash[FAST_TESTS]


@pytest.fixture(scope="session")
def _warm_workers() -> Iterator[WarmWorkers]:
    workers = WarmWorkers()
    yield workers
    workers.close()


@pytest.fixture(scope="module", autouse=True)
def _solver_processes(request: pytest.FixtureRequest, _warm_workers: WarmWorkers) -> Iterator[None]:
    """Files share processes of solvers, but for those marked ``cold_workers``."""
    if request.node.get_closest_marker("cold_workers"):
        yield
    else:
        with _warm_workers.lent():
            yield


@pytest.fixture(scope="module")
def pool() -> Iterator[SolverPool]:
    """Processes of solvers for the tests of a file."""
    with SolverPool() as shared:
        yield shared


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show how far measured peaks of layer plans were from predicted ones."""
    properties = [
        value
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    found = [PeakRatio(*ratio) for ratios in properties for ratio in ratios]
    for line in summary(found) if found else ():
        terminalreporter.write_line(line)

"""In which order files of tests begin, which have fast tests, and what is shown when all are over."""

from __future__ import annotations

import signal
import sys
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
    "operators",
    "library",
    "test_notebooks",
    "test_two_hosts",
    "test_older_plans",
    "test_solvers_differential",
    "test_session",
    "test_launch",
    "test_layer_executor",
    "test_layer_random",
    "test_metamorphic",
    "test_schedule_builder",
    "test_portfolio",
    "test_step_beside",
    "test_timetable",
    "test_worker",
    "test_changes_and_prices",
)
"""What takes half a minute or more in `make test-all`; one process runs a file or folder, so these begin first."""

TOGETHER = ("tests/runtime/operators/", "tests/runtime/library/")
"""Folders that one process runs: each of its ranks traces a model once for all files."""

NOT_FAST = ("slow", "fuzz", "bench")
"""Marks of what `make test` leaves out."""
FAST_TESTS = pytest.StashKey[dict[Path, int]]()
"""How many tests of each collected file `make test` runs."""


def pytest_configure() -> None:
    """Let SIGINT interrupt, which a shell that starts the tests in the background has had ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, count the fast tests before any are left out, and put the longest files first."""
    mark_slow_cases(items)
    fast: dict[Path, int] = defaultdict(int)
    for item in items:
        fast[item.path] += not any(item.get_closest_marker(mark) for mark in NOT_FAST)
    config.stash[FAST_TESTS] = dict(fast)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: min(order.get(name, len(LONGEST)) for name in (item.path.stem, item.path.parent.name)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run a file, or a folder of :data:`TOGETHER`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return Scheduling(config, log)


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


@pytest.fixture(scope="session")
def _warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from support.processes.warm_python import WarmPython

    warm = WarmPython(tmp_path_factory.mktemp("python"))
    yield warm.executable
    warm.close()


@pytest.fixture
def warm_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched processes begin with torch imported, but for tests marked ``cold_python``."""
    if not request.node.get_closest_marker("cold_python"):
        monkeypatch.setattr(sys, "executable", str(request.getfixturevalue("_warm_python")))


@pytest.fixture(scope="session", autouse=True)
def _sessions_trace_once() -> Iterator[None]:
    """Sessions of the planner share traced steps of equal references; tests of mathematics alone load no torch."""
    with pytest.MonkeyPatch.context() as patch:
        if "planner.session" in sys.modules:
            from support.steps.traced_once import traced_once

            from planner.session import PlanningSession

            def trace(session: PlanningSession) -> Any:
                traced = traced_once(session.reference)
                session.times |= {"load": 0.0, "trace": traced.seconds}
                return traced

            patch.setattr(PlanningSession, "_trace", trace)
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

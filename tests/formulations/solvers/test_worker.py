"""Workers: isolation, hard limits, what survives a killed solver, and honest statuses."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.problems.fake_solvers import GRANULE, HOARDED_GRANULES
from support.problems.random_problems import random_problem, training_step_problem
from support.tiers import only, slow

from formulations.problem.checker import check, check_result
from formulations.problem.solution import Progress, Proof, SolveOptions, Status
from formulations.problem.strategy_problem import Factor, Node, ProblemError, Resource, StrategyProblem
from formulations.solvers import (
    SOLVERS,
    SolveOptionsError,
    SolverContradiction,
    SolverInputError,
    SolverPool,
    UnknownSolverError,
    WorkerStartError,
    find_solver,
    solve,
    solve_in_process,
)
from formulations.solvers.columns.repeated_blocks import find_repeats
from formulations.solvers.processes import worker
from formulations.solvers.processes.preparation import small_problem
from formulations.solvers.processes.transfer import share, unpack
from formulations.solvers.processes.worker_process import read_status_bytes

ROOT = Path(__file__).resolve().parents[3]
FAKE = "support.problems.fake_solvers:"
pytestmark = pytest.mark.cold_workers


def two_nodes() -> StrategyProblem:
    nodes = (Node("a", np.array([3, 1])), Node("b", np.array([2, 5, 4])))
    factor = Factor((0, 1), np.array([[0, 9, 9], [9, 0, 9]]))
    return StrategyProblem("two nodes", nodes, (factor,), (), 1)


def test_solves_and_reports_use(pool: SolverPool) -> None:
    seen: list[Progress] = []
    result = solve(two_nodes(), "highs", SolveOptions(time_limit=20), seen.append, pool)
    assert result.status is Status.OPTIMAL
    assert (result.objective, result.bound, result.gap) == (5, 5, 0.0)
    assert check_result(two_nodes(), result).ok
    assert result.seconds > 0
    assert result.peak_rss_bytes > 10_000_000
    assert tuple(seen) == result.history
    bounds = [p.bound for p in seen if p.bound is not None]
    assert bounds == sorted(bounds)
    assert result.proof is Proof.EXACT


@pytest.mark.parametrize("name", ["hang", "crash", "eat", "fail"])
def test_a_killed_worker_leaves_its_incumbent(name: str) -> None:
    options = SolveOptions(time_limit=0.3 if name == "hang" else 20, memory_limit_bytes=200 * 1024 * 1024)
    started = time.monotonic()
    result = solve(two_nodes(), FAKE + name, options)
    assert time.monotonic() - started < 15
    assert result.status is Status.FEASIBLE
    assert result.objective == check(two_nodes(), (1, 0)).objective == 12
    expected = {"hang": "time limit", "crash": "last words", "eat": "bytes resident", "fail": "a bug in the solver"}
    assert expected[name] in result.message
    if name == "hang":
        assert (result.bound, result.claimed, result.claimed_by) == (None, 0, FAKE + "hang")
    if name == "eat":
        assert result.peak_rss_bytes > 200 * 1024 * 1024


def test_the_pool_survives_its_workers(pool: SolverPool) -> None:
    for _ in range(2):
        assert solve(two_nodes(), FAKE + "crash", SolveOptions(time_limit=5), pool=pool).objective == 12


def test_hanging_worker_is_killed_soon_after_its_limit() -> None:
    for limit in (0.2, 1.0):
        result = solve(two_nodes(), FAKE + "hang", SolveOptions(time_limit=limit))
        assert limit <= result.seconds < limit + worker.grace_seconds(limit) + 5


@pytest.mark.parametrize("name", ["highs", slow("cpsat")])
def test_time_limit_is_respected(name: str, pool: SolverPool) -> None:
    problem = training_step_problem(1, operators=300, strategies=6, memory=0.25)
    result = solve(problem, name, SolveOptions(time_limit=3), pool=pool)
    assert result.seconds < 3 + worker.grace_seconds(3) + 10
    assert (result.claimed if result.bound is None else result.bound) is not None
    if result.choices is not None:
        assert check_result(problem, result).ok
        assert result.bound is None or result.bound <= result.objective


def test_interrupt_returns_the_best_so_far() -> None:
    result = solve(two_nodes(), FAKE + "interrupt_parent", SolveOptions(time_limit=30))
    assert result.status is Status.FEASIBLE
    assert result.objective == 12
    assert "interrupted" in result.message


def test_a_solver_that_refuses_speaks_to_the_user(pool: SolverPool) -> None:
    with pytest.raises(SolverInputError, match="at most two nodes; use another solver"):
        solve(two_nodes(), FAKE + "refuse", pool=pool)


def test_a_claim_above_a_checked_objective_does_not_count(pool: SolverPool) -> None:
    result = solve(two_nodes(), FAKE + "wrong_bound", pool=pool)
    assert (result.status, result.objective, result.bound, result.claimed) == (Status.FEASIBLE, 12, None, None)
    assert "1000000000000000" in result.message
    assert "costs 12" in result.message


def test_an_exact_bound_above_a_checked_objective_is_a_contradiction(
    pool: SolverPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOLVERS, "ours", FAKE + "wrong_bound")
    with pytest.raises(SolverContradiction, match=r"1000000000000000.*costs 12"):
        solve(two_nodes(), "ours", pool=pool)


def test_a_claimed_optimum_is_proved_or_refuted(pool: SolverPool) -> None:
    result = solve(two_nodes(), FAKE + "claim_optimal", SolveOptions(time_limit=20), pool=pool)
    assert (result.status, result.objective, result.proof) == (Status.OPTIMAL, 5, Proof.EXACT)
    assert "claimed a bound of 12" in result.message


def test_wrong_assignments_never_reach_the_result(pool: SolverPool) -> None:
    result = solve(two_nodes(), FAKE + "wrong_assignment", pool=pool)
    assert result.status is Status.FEASIBLE
    assert result.choices == (1, 0)
    assert "does not hold" in result.message


def test_a_wrong_claim_of_infeasibility_does_not_count(pool: SolverPool) -> None:
    result = solve(two_nodes(), FAKE + "wrong_infeasible", pool=pool)
    assert result.status is Status.FEASIBLE
    assert "claims that nothing is feasible, but peak_prices found" in result.message
    started = SolveOptions(initial_choices=(0, 0))
    result = solve(two_nodes(), FAKE + "wrong_infeasible", started, pool=pool)
    assert result.status is Status.FEASIBLE
    assert "claims that nothing is feasible, but an assignment" in result.message


def in_a_new_process(code: str) -> str:
    """What code prints where nothing is loaded that other tests needed."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.strip()


@pytest.mark.parametrize("name", ["highs", "cpsat", "pyomo"])
def test_libraries_that_exclude_each_other_stay_apart(name: str) -> None:
    code = f"""
        import sys
        from support.problems.fake_solvers import environment
        from support.problems.random_problems import random_problem
        from formulations.problem.solution import SolveOptions
        from formulations.solvers import find_solver
        spec = find_solver({name!r})
        spec.load()(random_problem(3), SolveOptions(), lambda p: None, lambda c: None)
        print(sorted({{"highspy", "ortools"}} & set(sys.modules)))
    """
    assert in_a_new_process(code) == ("['ortools']" if name == "cpsat" else "['highspy']")


def test_solving_loads_no_solver_library_into_this_process(pool: SolverPool) -> None:
    code = """
        import sys
        from support.problems.random_problems import random_problem
        from formulations.solvers import solve
        statuses = [str(solve(random_problem(3), name).status) for name in ("highs", "cpsat")]
        print(statuses, sorted({"highspy", "ortools"} & set(sys.modules)))
    """
    assert in_a_new_process(code) == "['optimal', 'optimal'] []"
    message = solve(two_nodes(), FAKE + "environment", pool=pool).message
    assert "loaded=[]" in message
    assert f"pid={os.getpid()}" not in message


def test_a_warm_worker_is_reused_and_measured_afresh(pool: SolverPool) -> None:
    first, second = (solve(two_nodes(), FAKE + "environment", pool=pool) for _ in range(2))
    assert first.message == second.message
    burnt = solve(two_nodes(), FAKE + "burn")
    assert burnt.cpu_seconds >= 0.45
    assert burnt.peak_rss_bytes > 64 * 1024 * 1024
    assert second.cpu_seconds < 0.3


def test_workers_are_shared_by_solvers_that_do_not_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[worker.Worker] = []

    class Counted(worker.Worker):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    monkeypatch.setattr(worker, "Worker", Counted)
    with SolverPool() as own:
        for name, workers in {"tree_dp": 1, "greedy": 1, "highs": 1, "cpsat": 2, "brute_force": 2, "blocks": 2}.items():
            solve(two_nodes(), name, SolveOptions(time_limit=20), pool=own)
            assert len(started) == workers, name
        assert [each.library for each in started] == ["highspy", "ortools"]
        solve(two_nodes(), FAKE + "environment", pool=own)
        assert len(started) == 3
    with SolverPool() as own:
        own.warm_soon(find_solver("greedy"))
        for name, workers in {"highs": 4, "greedy": 4, "cpsat": 5}.items():
            solve(two_nodes(), name, SolveOptions(time_limit=20), pool=own)
            assert len(started) == workers, name
    with SolverPool() as own:
        own.warm_soon(find_solver("greedy"), find_solver("highs"))
        for name in ("greedy", "highs", "tree_dp"):
            solve(two_nodes(), name, SolveOptions(time_limit=20), pool=own)
            own.warm_soon(find_solver("greedy"), find_solver("highs"))
        assert len(started) == 7, "a solve waits for what is being started, and nothing is while one that suits is idle"
        own.warm_soon(find_solver("pyomo"))
    assert not any(each.alive for each in started), "also what was started last"


def test_a_solver_is_found_where_the_caller_has_it_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was started before the caller's path changed would not find it."""
    (tmp_path / "found_later.py").write_text(
        "from formulations.problem.solution import Claim\n"
        "def solve(problem, options, report, incumbent):\n"
        "    return Claim((0,) * len(problem.nodes), None)\n"
    )
    with SolverPool() as own:
        solve(two_nodes(), "greedy", SolveOptions(time_limit=20), pool=own)
        with pytest.raises(SolverInputError, match="No module named 'found_later'"):
            solve(two_nodes(), "found_later:solve", SolveOptions(time_limit=20), pool=own)
        monkeypatch.syspath_prepend(str(tmp_path))
        found = solve(two_nodes(), "found_later:solve", SolveOptions(time_limit=20), pool=own)
    assert found.objective == 5


PREPARED = ["blocks", "lagrangian", "highs", "cpsat", "brute_force", FAKE + "fail"]


@pytest.mark.parametrize("name", only(("blocks", "cpsat", FAKE + "fail"), PREPARED))
def test_a_prepared_worker_solves_as_any_other(name: str) -> None:
    problem, options = two_nodes(), SolveOptions(time_limit=20)
    with SolverPool() as fresh, SolverPool() as prepared:
        expected = solve(problem, name, options, pool=fresh)
        prepared.warm_soon(find_solver(name))
        found = solve(problem, name, options, pool=prepared)
    assert (found.status, found.objective, found.choices) == (expected.status, expected.objective, expected.choices)


def test_preparation_solves_something_that_repeats_and_is_tight() -> None:
    problem = small_problem()
    problem.validate()
    assert find_repeats(problem).count > 0
    assert not check(problem, [0] * len(problem.nodes)).ok, "the cheap strategies do not fit"
    found = solve(problem, "blocks", SolveOptions(time_limit=20))
    assert found.choices is not None
    assert "patterns" in found.message


def test_what_is_prepared_for_one_library_is_not_used_for_another() -> None:
    with SolverPool() as own:
        own.warm_soon(find_solver("large_neighbourhood"))
        found = solve(two_nodes(), "large_neighbourhood:cpsat", SolveOptions(time_limit=20), pool=own)
    assert "failed" not in found.message
    assert found.objective == solve_in_process(two_nodes(), "brute_force").objective


def test_preparation_loads_the_library_and_the_compiled_loops() -> None:
    script = (
        "import sys; from formulations.solvers import find_solver; from formulations.solvers.prices import trws; "
        "from formulations.solvers.processes.preparation import prepare; "
        "assert 'highspy' not in sys.modules; assert not trws.sweep.signatures; prepare(find_solver('blocks')); "
        "assert 'highspy' in sys.modules; assert trws.sweep.signatures"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_what_a_job_leaves_behind_is_freed(pool: SolverPool) -> None:
    hoard = solve(two_nodes(), FAKE + "hoard", pool=pool)
    pid = int(hoard.message.partition("pid=")[2].split()[0])
    hoarded = HOARDED_GRANULES * GRANULE
    assert hoard.peak_rss_bytes > hoarded
    deadline = time.monotonic() + 20
    while read_status_bytes(pid, "VmRSS") > hoard.peak_rss_bytes - hoarded // 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert read_status_bytes(pid, "VmRSS") > 0, "the worker lives on"


def test_workers_end_when_the_pool_closes() -> None:
    with SolverPool() as own:
        message = solve(two_nodes(), FAKE + "environment", pool=own).message
    pid = int(message.partition("pid=")[2].split()[0])
    assert not Path(f"/proc/{pid}").exists()


def test_scripts_without_a_main_guard_can_solve(tmp_path: Path) -> None:
    script = tmp_path / "user_script.py"
    script.write_text(
        "import numpy as np\n"
        "from formulations.problem.strategy_problem import Node, StrategyProblem\n"
        "from formulations.solvers import solve\n"
        "print(solve(StrategyProblem('p', (Node('a', np.array([7, 4])),), (), (), 1), 'highs').objective)\n"
    )
    finished = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.stdout.strip() == "4", finished.stderr


def test_a_worker_that_cannot_start_is_told_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_COMMAND", "raise SystemExit('no such library here')")
    with pytest.raises(WorkerStartError, match="no such library here"):
        solve(two_nodes(), "highs")
    monkeypatch.setattr(worker, "STARTUP_SECONDS", 0.3)
    monkeypatch.setattr(worker, "_COMMAND", "import time; time.sleep(60)")
    with pytest.raises(WorkerStartError, match="did not answer"):
        solve(two_nodes(), "highs")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerStartError, match="/no/such/python"):
        solve(two_nodes(), "highs")


def test_workers_end_with_their_parent() -> None:
    code = (
        "import os; from formulations.solvers.processes.worker import Worker; w = Worker(); "
        "print(w.process_id, flush=True); os._exit(0)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pid = int(finished.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (SolveOptions(time_limit=0), "time_limit"),
        (SolveOptions(time_limit=float("nan")), "time_limit"),
        (SolveOptions(relative_gap=-0.1), "relative_gap"),
        (SolveOptions(memory_limit_bytes=0), "memory_limit_bytes"),
        (SolveOptions(initial_choices=(0,)), "initial_choices"),
        (SolveOptions(initial_choices=(0, 3)), "initial_choices"),
    ],
)
def test_options_that_make_no_sense(options: SolveOptions, field: str) -> None:
    with pytest.raises(SolveOptionsError, match=field):
        solve(two_nodes(), "highs", options)


def test_names_of_solvers(pool: SolverPool) -> None:
    with pytest.raises(UnknownSolverError, match="'higs'; known are blocks, branch_and_bound, brute"):
        solve(two_nodes(), "higs")
    assert find_solver("pyomo:glpk").keywords == {"solver_name": "glpk"}
    with pytest.raises(SolveOptionsError, match="process of its own"):
        solve_in_process(two_nodes(), "pyomo:glpk")
    with pytest.raises(SolverInputError, match="no working solver 'nosuchsolver'"):
        solve(two_nodes(), "pyomo:nosuchsolver", pool=pool)


def test_malformed_problems_are_refused() -> None:
    problem = replace(two_nodes(), factors=(Factor((0, 5), np.zeros((2, 3), dtype=np.int64)),))
    with pytest.raises(ProblemError, match="only 2 nodes"):
        solve(problem, "highs")


def test_initial_choices_count_as_incumbent(pool: SolverPool) -> None:
    result = solve(two_nodes(), FAKE + "fail", SolveOptions(initial_choices=(0, 0)), pool=pool)
    assert (result.status, result.objective) == (Status.FEASIBLE, 5)


@pytest.mark.parametrize("name", ["nosuch.module:function", "json:nosuch", "os:getcwd"])
def test_what_is_no_solver_is_refused(name: str, pool: SolverPool) -> None:
    with pytest.raises(SolverInputError, match="is no solver"):
        solve(two_nodes(), name, pool=pool)


@pytest.mark.parametrize("name", ["highs", "cpsat"])
def test_relative_gap_is_the_contracts(name: str, pool: SolverPool) -> None:
    problem = training_step_problem(4, operators=16, strategies=4, memory=0.6)
    exact = solve(problem, "highs", SolveOptions(time_limit=60), pool=pool)
    assert exact.status is Status.OPTIMAL
    loose = solve(problem, name, SolveOptions(time_limit=60, relative_gap=0.2), pool=pool)
    assert loose.status is Status.OPTIMAL
    assert 0 <= loose.gap <= 0.2
    assert loose.bound <= exact.objective <= loose.objective


@pytest.mark.parametrize("seed", range(40))
def test_problems_survive_the_way_to_the_worker(seed: int) -> None:
    problem = replace(random_problem(seed), seconds_per_cost=1e-9, time_names=("a", "b"))
    back = _sent(problem)
    for field in ("name", "resources", "horizon", "seconds_per_cost", "time_names"):
        assert getattr(back, field) == getattr(problem, field)
    assert [n.name for n in back.nodes] == [n.name for n in problem.nodes]
    assert [f.scope for f in back.factors] == [f.scope for f in problem.factors]
    for mine, theirs in zip((*problem.nodes, *problem.factors), (*back.nodes, *back.factors), strict=True):
        for left, right in zip(_arrays(mine), _arrays(theirs), strict=True):
            np.testing.assert_array_equal(left, right)
        assert [(t.resource, t.start, t.end) for t in mine.usage] == [
            (t.resource, t.start, t.end) for t in theirs.usage
        ]


def test_shared_tables_travel_once() -> None:
    table = np.arange(6, dtype=np.int64).reshape(2, 3)
    problem = replace(two_nodes(), factors=(Factor((0, 1), table),) * 100)
    assert share(problem).packed.integer_shapes == [(2,), (3,), (2, 3)]
    factors = _sent(problem).factors
    assert factors[0].cost is factors[99].cost


def test_what_a_worker_writes_stays_its_own() -> None:
    problem = two_nodes()
    shared = share(problem)
    first, second = (unpack(shared.packed, shared.memory.fileno()) for _ in range(2))
    first.nodes[0].cost[:] = -1
    for node, other in zip(problem.nodes, second.nodes, strict=True):
        np.testing.assert_array_equal(node.cost, other.cost)


def test_files_in_memory_have_no_name_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has none, a temporary file without a name takes their place."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    np.testing.assert_array_equal(_sent(two_nodes()).nodes[0].cost, two_nodes().nodes[0].cost)


def _sent(problem: StrategyProblem) -> StrategyProblem:
    shared = share(problem)
    return unpack(shared.packed, shared.memory.fileno())


def _arrays(table: Node | Factor) -> list[np.ndarray]:
    flags = [] if table.forbidden is None else [table.forbidden]
    return [table.cost, *flags, *(t.amount for t in table.usage)]


def test_an_entry_point_is_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from formulations.solvers.protocol import registry

    points = (EntryPoint("mine", "support.problems.fake_solvers:environment", registry.ENTRY_POINT_GROUP),)
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.ENTRY_POINT_GROUP else ())
    assert "pid=" in solve(two_nodes(), "mine").message


def test_a_problem_without_nodes(pool: SolverPool) -> None:
    empty = StrategyProblem("empty", (), (), (Resource("memory", 5),), 1)
    for result in (solve(empty, "highs", pool=pool), solve_in_process(empty, "brute_force")):
        assert check_result(empty, result).ok
        assert (result.status, result.objective, result.choices) == (Status.OPTIMAL, 0, ())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc, which Linux has")
def test_jobs_leave_no_file_open() -> None:
    """Neither here nor in the workers, also where the solver fails."""
    with SolverPool() as own:

        def open_files() -> list[int]:
            for name in ("environment", "fail"):
                solve(two_nodes(), FAKE + name, SolveOptions(initial_choices=(0, 0)), pool=own)
            workers = [str(worker.process_id) for worker in own._idle]
            return [len(list(Path(f"/proc/{process}/fd").iterdir())) for process in ("self", *sorted(workers))]

        before = open_files()
        assert open_files() == before

"""Benchmarks: rows of the contract, ratios, what survives, and solvers of others."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from formulations.instances.random_families import FAMILIES, family_problem
from formulations.problem.checker import check
from formulations.problem.solution import Progress, Status
from formulations.problem.strategy_problem import ProblemError, StrategyProblem
from formulations.solvers.protocol.registry import SOLVERS, UnknownSolverError
from formulations.solvers.running.run import SolverInputError
from planner import benchmarks
from planner.benchmarks import (
    BenchError,
    BenchInstance,
    BenchResult,
    BenchRow,
    Observer,
    Suite,
    SuiteError,
    bench,
    contest_suite,
    load_best_known,
    random_suite,
)
from planner.benchmarks.rows import Moment, RowError

CONTRACT = [
    "instance",
    "formulation",
    "solver",
    "status",
    "objective",
    "bound",
    "gap",
    "seconds",
    "cpu_seconds",
    "peak_rss_bytes",
]
FAKE = "support.problems.fake_solvers:"
# Of the four assignments (0, 0) needs 11 and (0, 1) needs 15 at time 1; (1, 0) costs 15 and (1, 1) costs 10.
CONTEST: dict[str, Any] = {
    "problem": {
        "name": "inner name",
        "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[5, 9], [4, 1]], "usages": [[8, 2], [3, 7]]},
        "edges": {"nodes": [[0, 1]], "costs": [[0, 3, 2, 0]]},
        "usage_limit": 10,
    }
}
OWN_SOLVER = """
from formulations.problem.solution import Claim

def first_fit(problem, options, report, incumbent):
    return Claim((0,) * len(problem.nodes), None, message="first fit was here")
"""


def small(*families: str) -> Suite:
    instances = [
        BenchInstance(family, "random", lambda family=family: family_problem(family, "small")) for family in families
    ]
    return Suite("small", tuple(instances), 10.0)


def made_row(**changes: object) -> BenchRow:
    row = BenchRow("a", "random", "x", Status.FEASIBLE, 10, 9, 0.1, 2.0, 1.0, 5, 0.0, 6, 3.0, 0, None, "", "", ())
    return replace(row, **changes)


@pytest.fixture
def contest_file(tmp_path: Path) -> Path:
    path = tmp_path / "two nodes.v2.json.gz"
    path.write_bytes(gzip.compress(json.dumps(CONTEST).encode()))
    return path


def test_rows_are_those_of_the_contract_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    result = bench(small("trees", "infeasible"), ["brute_force", "greedy"], json_path=path)
    document = json.loads(path.read_text())
    assert [list(row)[: len(CONTRACT)] for row in document] == [CONTRACT] * 4
    assert [(row["instance"], row["solver"]) for row in document] == [
        ("trees", "brute_force"),
        ("trees", "greedy"),
        ("infeasible", "brute_force"),
        ("infeasible", "greedy"),
    ]
    exact, heuristic, nothing, _ = result.rows
    assert exact.status is Status.OPTIMAL
    assert exact.gap == 0.0
    assert heuristic.objective is not None
    assert exact.objective is not None
    assert heuristic.objective >= exact.objective
    assert nothing.status in (Status.INFEASIBLE, Status.INFEASIBLE_UNCONFIRMED)
    assert nothing.objective is None
    assert exact.peak_rss_bytes > 10_000_000
    assert exact.parent_peak_rss_bytes > 10_000_000
    assert exact.parse_seconds == 0.0
    assert exact.history[-1][1:] == (exact.objective, exact.bound, "brute_force")
    assert [m.seconds for m in exact.history] == sorted(m.seconds for m in exact.history)
    assert exact.history[-1].seconds <= exact.seconds
    assert BenchResult.load(path) == result
    assert result.contradictions() == []


def test_contest_files_count_reading(contest_file: Path) -> None:
    suite = contest_suite([contest_file.parent, contest_file])
    (instance,) = suite.instances

    def slowly() -> StrategyProblem:
        time.sleep(0.3)
        return instance.load()

    slow = replace(suite, instances=(replace(instance, load=slowly),))
    (row,) = bench(slow, ["brute_force"], time_limit=20.0, best_known={instance.name: 8}).rows
    assert (row.instance, row.formulation, row.objective, row.best_known) == ("two nodes.v2", "contest", 10, 8)
    assert row.parse_seconds >= 0.3
    assert row.seconds > row.parse_seconds
    assert row.history[0].seconds > row.parse_seconds
    assert "+25.000 %" in BenchResult((row,)).to_markdown()
    (late,) = bench(slow, ["brute_force"], time_limit=0.2).rows
    assert (late.status, late.objective) == (Status.NO_SOLUTION, None)
    assert "reading" in late.message


def test_files_that_share_a_name_are_told_apart(contest_file: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin" / contest_file.name
    twin.parent.mkdir()
    twin.write_bytes(contest_file.read_bytes())
    assert [i.name for i in contest_suite([contest_file, twin]).instances] == [str(contest_file), str(twin)]


def test_the_random_suite_has_every_family_and_brute_force_where_it_can() -> None:
    suite = random_suite(["small", "middle"], seed=3)
    assert [instance.name for instance in suite.instances] == [
        f"{family}-{size}-3" for size in ("small", "middle") for family in FAMILIES
    ]
    assert {i.references for i in suite.instances if "-small-" in i.name} == {("brute_force",)}
    assert {i.references for i in suite.instances if "-middle-" in i.name} == {()}
    assert suite.instances[0].load().name == suite.instances[0].name


def test_a_solver_of_an_installed_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed as pip does it: the module, and a folder of metadata with the entry point beside it."""
    (tmp_path / "first_fit_solver.py").write_text(OWN_SOLVER)
    metadata = tmp_path / "first_fit_solver-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-solver\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[meshwright.solvers]\nfirst_fit = first_fit_solver:first_fit\n")
    with pytest.raises(UnknownSolverError, match="first_fit"):
        bench(small("trees"), ["first_fit"])
    monkeypatch.syspath_prepend(tmp_path)
    suite = Suite("loose", (BenchInstance("loose", "random", loose),), 10.0)
    by_name, by_path = bench(suite, ["first_fit", "first_fit_solver:first_fit"]).rows
    first = (0,) * len(loose().nodes)
    assert by_name.objective == by_path.objective == check(loose(), first).objective
    assert (by_name.solver, by_path.solver) == ("first_fit", "first_fit_solver:first_fit")
    assert "first fit was here" in by_name.message


def loose() -> StrategyProblem:
    problem = family_problem("trees", "small")
    return replace(problem, resources=(replace(problem.resources[0], limit=None),))


def test_a_solver_that_lies_fails_or_refuses_has_a_row() -> None:
    suite = Suite("loose", (BenchInstance("loose", "random", loose),), 10.0, as_one_command=True)
    rows = bench(suite, ["brute_force", FAKE + "fail", FAKE + "wrong_assignment"]).rows
    assert [row.status for row in rows] == [Status.OPTIMAL, Status.FEASIBLE, Status.FEASIBLE]
    assert "a bug in the solver" in rows[1].message
    large = Suite("large", (BenchInstance("large", "random", lambda: family_problem("trees", "middle")),), 10.0)
    (refused,) = bench(large, ["brute_force"]).rows
    assert (refused.status, refused.contradiction) == (Status.NO_SOLUTION, "")
    assert "use another solver" in refused.message


def test_a_bound_above_what_was_found_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOLVERS, "liar", FAKE + "wrong_bound")
    suite = Suite("loose", (BenchInstance("loose", "random", loose),), 10.0, as_one_command=True)
    result = bench(suite, ["liar"])
    (told,) = result.contradictions()
    assert "lower bound of 1000000000000000" in told
    assert "contradiction" in result.to_markdown()


def test_solvers_that_contradict_each_other_are_told() -> None:
    sound = made_row(solver="sound")
    bound = made_row(solver="bold", objective=None, bound=11, status=Status.BOUND_ONLY, gap=None)
    none = made_row(solver="shy", objective=None, bound=None, status=Status.INFEASIBLE, gap=None)
    elsewhere = replace(bound, instance="b")
    assert BenchResult((sound, elsewhere)).contradictions() == []
    first, second = BenchResult((sound, bound, none)).contradictions()
    assert "bold reports the bound 11, but sound found 10" in first
    assert "shy reports infeasible, but sound found 10" in second


def test_ratios_are_to_the_best_of_the_instance() -> None:
    rows = (
        made_row(solver="slow and best", objective=10, seconds=4.0),
        made_row(solver="best", objective=10, seconds=2.0),
        made_row(solver="quick", objective=15, seconds=1.0),
        made_row(solver="nothing", objective=None, seconds=0.5, status=Status.NO_SOLUTION),
        made_row(instance="b", objective=20, seconds=8.0),
        made_row(instance="c", objective=None, seconds=3.0, status=Status.INFEASIBLE),
        made_row(instance="c", objective=None, seconds=1.5, status=Status.NO_SOLUTION),
    )
    ratios = BenchResult(rows).ratios()
    assert [r.objective for r in ratios] == [1.0, 1.0, 1.5, None, 1.0, None, None]
    assert [r.seconds for r in ratios] == [2.0, 1.0, 0.5, 0.25, 1.0, 1.0, 0.5]


def test_it_shows_itself_as_a_table() -> None:
    result = BenchResult((made_row(instance="<a>"), made_row(solver="y|z", objective=None)))
    html = result._repr_html_()
    assert html.count("<tr>") == 3
    assert "&lt;a&gt;" in html
    assert "best known" not in html
    lines = result.to_markdown().splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "y\\|z" in lines[-1]


class Interrupter(Observer):
    """Presses Ctrl-C when a solve on a given instance begins or improves."""

    def __init__(self, instance: str, when: str) -> None:
        self.instance, self.when, self.here = instance, when, False
        self.rows: list[BenchRow] = []

    def begins(self, instance: str, solver: str) -> None:
        self.here = instance == self.instance
        if self.here and self.when == solver:
            raise KeyboardInterrupt

    def row(self, row: BenchRow) -> None:
        self.rows.append(row)


def test_an_interrupt_keeps_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    observer = Interrupter("grids", "reading")
    result = bench(small("trees", "grids", "hubs"), ["brute_force"], json_path=path, observer=observer)
    assert result.interrupted
    assert [row.instance for row in result.rows] == ["trees"]
    assert tuple(observer.rows) == result.rows == BenchResult.load(path).rows


def test_an_interrupt_during_a_solve_keeps_what_it_had_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOLVERS, "interrupting", FAKE + "interrupt_parent")
    suite = Suite("loose", tuple(BenchInstance(name, "random", loose) for name in "ab"), 30.0, as_one_command=True)
    before = signal.getsignal(signal.SIGINT)
    result = bench(suite, ["interrupting"])
    assert result.interrupted
    assert [row.instance for row in result.rows] == ["a"]
    assert result.rows[0].status is Status.FEASIBLE
    assert "interrupted" in result.rows[0].message
    assert signal.getsignal(signal.SIGINT) is before
    in_rehearsal = bench(suite, [FAKE + "interrupt_parent"])
    assert (in_rehearsal.rows, in_rehearsal.interrupted) == ((), True)


def test_other_threads_may_bench() -> None:
    found: list[BenchResult] = []
    thread = threading.Thread(target=lambda: found.append(bench(small("trees"), ["brute_force"])))
    thread.start()
    thread.join()
    assert found[0].rows[0].status is Status.OPTIMAL


def test_progress_is_heard() -> None:
    heard: list[object] = []

    class Ear(Observer):
        def begins(self, instance: str, solver: str) -> None:
            heard.append((instance, solver))

        def progress(self, progress: Progress) -> None:
            heard.append(Moment(progress.seconds, progress.incumbent, progress.bound, progress.source))

    (row,) = bench(small("trees"), ["brute_force"], observer=Ear()).rows
    assert heard[:3] == [("rehearsal", "brute_force"), ("trees", "reading"), ("trees", "brute_force")]
    assert tuple(heard[3:]) == row.history


@pytest.mark.parametrize(
    ("solvers", "options", "error", "words"),
    [
        ([], {}, BenchError, "no solver"),
        (["greedy", "greedy"], {}, BenchError, "greedy is named twice"),
        (["oracle"], {}, UnknownSolverError, "oracle"),
        (["math:nothing"], {}, SolverInputError, "math:nothing"),
        (["greedy"], {"time_limit": 0.0}, BenchError, "time limit is 0.0"),
        (["greedy"], {"time_limit": float("nan")}, BenchError, "time limit is nan"),
        (["greedy"], {"best_known": {"elsewhere": 3}}, BenchError, r"elsewhere.*trees"),
    ],
)
def test_what_makes_no_sense_is_refused(
    solvers: list[str], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        bench(small("trees"), solvers, **options)


def test_paths_that_hold_no_problem_are_refused(contest_file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for paths, words in ([], "at least one"), ([tmp_path / "absent"], "absent"), ([empty], "no .json"):
        with pytest.raises(SuiteError, match=words):
            contest_suite(paths)
    (tmp_path / "z.json").write_text("{")
    with pytest.raises(ProblemError, match=r"z\.json"):
        bench(contest_suite([tmp_path]), ["brute_force"], json_path=tmp_path / "rows.out")
    assert [row.instance for row in BenchResult.load(tmp_path / "rows.out").rows] == ["two nodes.v2"]


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1.5}', '{"a": true}', '{"a": "1"}'])
def test_best_known_costs_are_integers_by_instance(tmp_path: Path, text: str) -> None:
    path = tmp_path / "best.json"
    path.write_text(text)
    with pytest.raises(SuiteError, match=r"best\.json"):
        load_best_known(path)
    path.write_text('{"a": 12345678901234567890}')
    assert load_best_known(path) == {"a": 12345678901234567890}


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = made_row(objective=10**30, bound=None, gap=None, history=(Moment(0.5, 10**30, None, "é"),), best_known=7)
    BenchResult((row,)).save(path)
    assert BenchResult.load(path).rows == (row,)
    document = json.loads(path.read_text())
    for spoilt in (
        {"rows": []},
        [1],
        [{k: v for k, v in document[0].items() if k != "gap"}],
        [document[0] | {"status": "fine"}],
        [document[0] | {"history": [[1, 2]]}],
    ):
        path.write_text(json.dumps(spoilt))
        with pytest.raises(RowError):
            BenchResult.load(path)
    assert [field.name for field in fields(BenchRow)][: len(CONTRACT)] == CONTRACT


def test_files_of_the_contest_are_solved_without_importing_torch() -> None:
    code = "import sys; from planner import benchmarks; benchmarks.contest_suite; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
    assert all(callable(getattr(benchmarks, name)) for name in benchmarks.__all__ if name.endswith("_suite"))
    with pytest.raises(AttributeError, match="no_such_suite"):
        benchmarks.no_such_suite  # noqa: B018

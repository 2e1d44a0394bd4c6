"""Suites of benchmarks: generated problems and files of the solver contest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from formulations.instances.contest import read_contest_problem
from formulations.instances.random_families import FAMILIES, Size, family_problem
from formulations.problem.solution import Progress, SolveOptions, SolveResult
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.worker import SolverPool
from planner.benchmarks.rows import BenchRow

DEFAULT_SIZES: tuple[Size, ...] = ("small", "middle")
DEFAULT_SOLVERS = ("portfolio", "lagrangian", "highs")
RANDOM_SECONDS = 2.0
CONTEST_SECONDS = 60.0

_SUFFIXES = (".json.gz", ".json")

ReportProgress = Callable[[Progress], None]

OwnSolver = Callable[[SolveOptions, ReportProgress, SolverPool | None], SolveResult]
"""Solves one instance that is no canonical problem, or solves it in another form than that."""


class SuiteError(ValueError):
    """A suite that cannot be made; the message names the path or value and the remedy."""


@dataclass(frozen=True, slots=True)
class BenchInstance:
    """A problem by name.

    Parameters
    ----------
    name, formulation
        For the rows; names are unique within a suite.
    load
        Returns the problem; called once, when its turn comes. None where only its own solvers can solve it.
    references
        Solvers that run on it in addition to the requested ones.
    own_solvers
        Solvers of this instance alone, by name; they run first.
    time_limit
        Default of the seconds for each solver; the suite's if None.
    """

    name: str
    formulation: str
    load: Callable[[], StrategyProblem] | None
    references: tuple[str, ...] = ()
    own_solvers: Mapping[str, OwnSolver] = field(default_factory=dict)
    time_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Suite:
    """Instances of a benchmark, with their solvers and time limits.

    Parameters
    ----------
    name
        For titles.
    instances
        In the order in which they are solved.
    time_limit
        Default of the seconds for one instance and solver.
    as_one_command
        Whether seconds and limit also cover loading the problem and starting the solver's processes, as one command
        does. If not, they cover the solve alone, in warm processes.
    solvers
        Solvers that run by default.
    notes
        Lines that describe the instances.
    summarize
        Makes the lines that summarize the rows, or None.
    """

    name: str
    instances: tuple[BenchInstance, ...]
    time_limit: float = CONTEST_SECONDS
    as_one_command: bool = False
    solvers: tuple[str, ...] = DEFAULT_SOLVERS
    notes: tuple[str, ...] = ()
    summarize: Callable[[Sequence[BenchRow]], list[str]] | None = None


def random_suite(sizes: Sequence[Size] = DEFAULT_SIZES, seed: int = 0) -> Suite:
    """Make one problem of every family of :mod:`formulations.instances.random_families` in every size.

    Small ones can be enumerated, so brute force is always among their solvers.

    Raises
    ------
    FamilyError
        For an unknown size or a negative seed, when the problem is made.
    """
    instances = tuple(
        BenchInstance(
            f"{family}-{size}-{seed}",
            "random",
            partial(family_problem, family, size, seed),
            ("brute_force",) if size == "small" else (),
        )
        for size in sizes
        for family in FAMILIES
    )
    return Suite("random", instances, RANDOM_SECONDS)


def contest_suite(paths: Sequence[str | Path]) -> Suite:
    """Make a suite of contest files.

    Parameters
    ----------
    paths
        Files, and folders, of which the ``.json`` and ``.json.gz`` files are taken in order of their names.
        The name of an instance is that of its file without these endings, or its path where two files share a name.

    Raises
    ------
    SuiteError
        There is no path, or no file at one, or a folder holds no such file.
    """
    if not paths:
        raise SuiteError("suite contest: name at least one file, or a folder with contest files")
    files = list(dict.fromkeys(file for path in paths for file in _contest_files(Path(path))))
    count = Counter(map(_stem, files))
    instances = tuple(
        BenchInstance(
            _stem(file) if count[_stem(file)] == 1 else str(file), "contest", partial(read_contest_problem, file)
        )
        for file in files
    )
    return Suite("contest", instances, CONTEST_SECONDS, as_one_command=True)


def check_names(suite: str, kind: str, names: Collection[str], known: Collection[str]) -> None:
    """Refuse names that a suite does not have.

    Parameters
    ----------
    suite
        Its name.
    kind
        Kind of the names: a part, a model.
    names, known
        Requested names and known names.

    Raises
    ------
    SuiteError
        There is no such thing.
    """
    for name in names:
        if name not in known:
            raise SuiteError(f"suite {suite}: {name!r} is no {kind}; use {', '.join(known)}")


def load_best_known(path: str | Path) -> dict[str, int]:
    """Read best known objectives: a JSON object, instance -> integer.

    Raises
    ------
    SuiteError
        The file cannot be read or holds anything else.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise SuiteError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SuiteError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise SuiteError(f"{path}: must be an object that maps instances to best known objectives")
    for instance, objective in document.items():
        if type(objective) is not int:
            raise SuiteError(f"{path}: the objective of {instance} must be an integer, got {objective!r:.60}")
    return document


def _contest_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SuiteError(f"suite contest: there is no file or folder {str(path)!r}")
    found = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file())
    if not found:
        raise SuiteError(f"suite contest: the folder {str(path)!r} has no .json or .json.gz file")
    return found


def _stem(file: Path) -> str:
    for suffix in _SUFFIXES:
        if file.name.endswith(suffix):
            return file.name.removesuffix(suffix)
    return file.name

"""Solves instances in a process of its own, whose constants were replaced before anything was imported.

:mod:`planner.benchmarks.ablation.run` starts it with ``python -m``. Its argument is an :class:`Instances` as JSON; it
answers with the names of the instances. Every line of its input is then a name, and every line of its output is what
the solve found.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from formulations.instances.random_families import SIZES, Size
from formulations.solvers import DEFAULT_SOLVER, SolverPool
from planner import papers
from planner.benchmarks.ablation.results import FAILED, Outcome
from planner.benchmarks.ablation.variants import AblationError
from planner.benchmarks.runner import Observer, SuiteRun
from planner.benchmarks.suites import BenchInstance, Suite, contest_suite, random_suite

SUITES = ("random", "contest", "kiwi-mlp", "kiwi-transformer")


@dataclass(frozen=True, slots=True)
class Instances:
    """What an ablation solves.

    Parameters
    ----------
    suites
        Names of :data:`SUITES`.
    sizes
        Of ``random``.
    paths
        Files and folders of ``contest``.
    parts
        Of ``kiwi-transformer``.
    only
        Names of instances; all of the suites if empty.
    time_limit
        Seconds of a solve; the instance's or the suite's own if None.
    seed
        Of generated problems and of the solver.
    """

    suites: tuple[str, ...] = ("random",)
    sizes: tuple[str, ...] = ("small",)
    paths: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("encoder", "decoder", "llama")
    only: tuple[str, ...] = ()
    time_limit: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be made, as far as that shows without a solve.

        Raises
        ------
        AblationError, SuiteError
            A suite, size, part or file does not exist.
        """
        if unknown := [size for size in self.sizes if size not in SIZES]:
            raise AblationError(f"--size: {unknown[0]!r} is no size; use {', '.join(SIZES)}")
        if "kiwi-mlp" not in self.suites:
            self.made()

    def made(self) -> list[Suite]:
        """Return the suites with the instances that are wanted.

        Raises
        ------
        AblationError
            A suite or instance does not exist.
        """
        suites = [self._suite(name) for name in self.suites]
        names = {instance.name for suite in suites for instance in suite.instances}
        if unknown := [name for name in self.only if name not in names]:
            raise AblationError(f"--instances: {unknown[0]!r} is no instance of {', '.join(self.suites)}")
        if not self.only:
            return suites
        return [replace(suite, instances=tuple(i for i in suite.instances if i.name in self.only)) for suite in suites]

    def _suite(self, name: str) -> Suite:
        if name == "random":
            return random_suite([cast("Size", size) for size in self.sizes], self.seed)
        if name == "contest":
            return contest_suite(self.paths)
        if name == "kiwi-mlp":
            return papers.kiwi_mlp_suite()
        if name == "kiwi-transformer":
            return papers.kiwi_transformer_suite(self.parts)
        raise AblationError(f"--suite: {name!r} is no suite of an ablation; use {', '.join(SUITES)}")


def solves(wanted: Instances) -> Generator[Outcome | list[str], str, None]:
    """Yield the names of the instances; then, for every name that is sent, the outcome of a solve."""
    suites = wanted.made()
    with ExitStack() as stack:
        places: dict[str, tuple[SuiteRun, SolverPool | None, BenchInstance]] = {}
        for suite in suites:
            run = SuiteRun(suite, wanted.time_limit, wanted.seed, {}, None, Observer())
            pool = None if suite.as_one_command else stack.enter_context(SolverPool())
            run.rehearse([DEFAULT_SOLVER], pool)
            places |= {instance.name: (run, pool, instance) for instance in suite.instances}
        name = yield list(places)
        while True:
            name = yield _outcome(*places[name])


def _outcome(run: SuiteRun, pool: SolverPool | None, instance: BenchInstance) -> Outcome:
    """Solve with the default solver, or where the instance is no canonical problem, with its first own one."""
    solver = DEFAULT_SOLVER if instance.load is not None else next(iter(instance.own_solvers))
    run.add_row(instance, run.load(instance), solver, pool)
    row = run.rows.pop()
    if row.contradiction:
        return Outcome(FAILED, None, None, None, row.seconds, row.contradiction)
    return Outcome(str(row.status), row.objective, row.bound, row.gap, row.seconds)


def main() -> None:
    """Compile the engine's loops where they are compiled anew, then answer requests until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    if "NUMBA_CACHE_DIR" in os.environ:
        from formulations.warm_up import warm_up_engine

        warm_up_engine()
    document = json.loads(sys.argv[1])
    wanted: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in document.items()}
    solving = solves(Instances(**wanted))
    print(json.dumps(next(solving)), file=answers, flush=True)
    for line in sys.stdin:
        outcome = solving.send(json.loads(line))
        assert isinstance(outcome, Outcome), "names come once"
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


if __name__ == "__main__":
    main()

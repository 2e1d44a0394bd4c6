"""Runs the engine with and without each change, in turn, and keeps every pair that was finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from formulations.tuning.inventory import code_digest
from formulations.tuning.overrides import VARIABLE, as_variable
from planner.benchmarks.ablation.results import FAILED, AblationResult, Outcome, Pair, load_pairs
from planner.benchmarks.ablation.variants import BASELINE, AblationError, Variant
from planner.benchmarks.ablation.worker import Instances

STARTUP_SECONDS = 1200.0
"""Time for imports, the suites and the compilation of loops; then a process that does not answer is killed."""

SOLVE_SECONDS = 3600.0
"""Time after which a process that does not answer is killed, whatever limit its suite has."""

VARIANTS_A_BASELINE = 4
"""Variants that solve an instance beside one solve of the engine as it is. More would save little and take memory."""

_WORKER = "planner.benchmarks.ablation.worker"
_TAIL = 400


class EngineError(RuntimeError):
    """A process that ended before it answered; the message has the end of what it printed."""


@dataclass(frozen=True, slots=True)
class AblationRun:
    """What an ablation solves, how often, and where the pairs are kept.

    Parameters
    ----------
    instances
        The instances and limits.
    repeats
        Pairs of solves for each variant and instance; their medians count.
    path
        File of the pairs, written after each; pairs in it are not solved again. None to keep none.
    observe
        Called with the variant and every finished pair.
    """

    instances: Instances = field(default_factory=Instances)
    repeats: int = 1
    path: Path | None = None
    observe: Callable[[Variant, Pair], None] = field(default=lambda _, __: None)


def ablate(variants: Sequence[Variant], run: AblationRun) -> AblationResult:
    """Compare variants with the engine as it is.

    The engine as it is solves every instance again beside every few variants, before them or after them in turn. So
    whatever slows the machine down for a while meets all.

    Parameters
    ----------
    variants
        Each runs in a process of its own; no two solve at the same time.
    run
        What is solved.

    Returns
    -------
    AblationResult
        All pairs of the file and those that were added. Ctrl-C ends the run early.

    Raises
    ------
    AblationError
        An instance does not exist, or the file holds something else.
    EngineError
        The engine as it is does not start or ends.
    """
    code = code_digest()
    pairs = {} if run.path is None else {pair.key: pair for pair in load_pairs(run.path)}
    interrupted = False
    try:
        with ExitStack() as stack:
            baseline: _Engine | None = None
            for first in range(0, len(variants), VARIANTS_A_BASELINE):
                batch = variants[first : first + VARIANTS_A_BASELINE]
                if baseline is not None and not any(_missing(pairs, code, each, baseline.names, run) for each in batch):
                    continue
                if baseline is None:
                    baseline = stack.enter_context(_Engine(BASELINE, run.instances))
                for variant, pair in _pairs(code, batch, baseline, run, pairs):
                    pairs[pair.key] = pair
                    if run.path is not None:
                        AblationResult(tuple(pairs.values()), code).save(run.path)
                    run.observe(variant, pair)
    except KeyboardInterrupt:
        interrupted = True
    return AblationResult(tuple(pairs.values()), code, interrupted)


def _missing(
    pairs: Mapping[Any, Pair], code: str, variant: Variant, names: Sequence[str], run: AblationRun
) -> list[tuple[str, int]]:
    """Return the instances and repeats of a variant that are not among the pairs."""
    settings = run.instances.time_limit, run.instances.seed
    wanted = [(name, repeat) for repeat in range(run.repeats) for name in names]
    return [(name, k) for name, k in wanted if (code, variant.name, name, k, *settings) not in pairs]


def _pairs(
    code: str, batch: Sequence[Variant], baseline: _Engine, run: AblationRun, known: Mapping[Any, Pair]
) -> Iterator[tuple[Variant, Pair]]:
    missing = {variant.name: _missing(known, code, variant, baseline.names, run) for variant in batch}
    limit, seed = run.instances.time_limit, run.instances.seed
    with ExitStack() as stack:
        engines = {
            variant.name: stack.enter_context(
                _Changed(variant, run.instances, stack.enter_context(_numba_cache(variant)))
            )
            for variant in batch
            if missing[variant.name]
        }
        wanted = [(name, repeat) for repeat in range(run.repeats) for name in baseline.names]
        for number, (name, repeat) in enumerate(wanted):
            lacking = [variant for variant in batch if (name, repeat) in missing[variant.name]]
            if not lacking:
                continue
            before = None if number % 2 else baseline.solve(name)
            after = [engines[variant.name].solve(name) for variant in lacking]
            before = before or baseline.solve(name)
            for variant, outcome in zip(lacking, after, strict=True):
                yield variant, Pair(code, variant.name, name, repeat, limit, seed, before, outcome)


@contextmanager
def _numba_cache(variant: Variant) -> Iterator[dict[str, str]]:
    """Yield the environment of a variant: compiled loops that read what is changed have a cache of their own."""
    if not variant.is_compiled:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="meshwright-ablation-") as folder:
        yield {"NUMBA_CACHE_DIR": folder}


class _Engine:
    """A process that solves with one variant.

    Parameters
    ----------
    variant
        What is changed.
    instances
        What it can solve.
    environment
        Variables beside those of this process.

    Attributes
    ----------
    names
        Of all instances, in order.

    Raises
    ------
    EngineError
        It does not start.
    """

    def __init__(self, variant: Variant, instances: Instances, environment: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER, json.dumps(asdict(instances))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            env=inherited | {"PYTHONPATH": path} | as_variable(variant.overrides) | dict(environment or {}),
            start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
        )
        self.names: list[str] = []
        try:
            self.names = self._answer(STARTUP_SECONDS)
        except BaseException:
            self.close()
            raise

    def solve(self, name: str) -> Outcome:
        """Solve an instance.

        Raises
        ------
        EngineError
            The process ended or was killed.
        """
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps(name) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise EngineError(self._tail()) from None
        return Outcome(**self._answer(SOLVE_SECONDS))

    def close(self) -> None:
        """End the process; solvers that it started end with it."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue
        self._process.wait()
        self._printed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, seconds: float) -> Any:
        assert self._process.stdout is not None, "it is a pipe"
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self._process.wait()
            raise EngineError(self._tail())
        return json.loads(line)

    def _tail(self) -> str:
        self._printed.seek(0)
        text = " ".join(self._printed.read().decode(errors="replace").split())
        return f"the process of the engine ended: {text[-_TAIL:] or 'it printed nothing'}"


class _Changed:
    """A variant's engine; where it does not start or ends, that is the outcome."""

    def __init__(self, variant: Variant, instances: Instances, environment: Mapping[str, str]) -> None:
        self._arguments = variant, instances, environment
        self._engine: _Engine | None = None
        self._never_starts = ""

    def solve(self, name: str) -> Outcome:
        if self._never_starts:
            return _failed(self._never_starts)
        try:
            if self._engine is None:
                self._engine = _Engine(*self._arguments)
        except EngineError as error:
            self._never_starts = str(error)
            return _failed(self._never_starts)
        try:
            return self._engine.solve(name)
        except EngineError as error:
            self.close()
            return _failed(str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _failed(message: str) -> Outcome:
    return Outcome(FAILED, None, None, None, 0.0, message)


__all__ = ["AblationError", "AblationRun", "EngineError", "ablate"]

"""Pairs of solves with and without a change, and what the change loses."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from formulations.problem.files import write_text_atomically
from formulations.problem.solution import Status
from planner.benchmarks.ablation.variants import AblationError

NEGLIGIBLE_PERCENT = 0.02
"""Loss of objective or bound, in per cent of the objective, below which nothing is lost."""

NEGLIGIBLE_SLOWDOWN = 1.05
"""Ratio of times up to which nothing is lost."""

LEAST_SECONDS = 0.05
"""Differences of time below this are the scheduler's and count as none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one solve found.

    Parameters
    ----------
    status
        A :class:`formulations.problem.solution.Status`, or ``failed`` where the process ended or a check failed.
    objective, bound
        Checked; in the units of the instance's costs.
    gap
        Relative.
    seconds
        Wall time of the solve.
    message
        Why it failed, or what the solver reported beside no assignment; else empty.
    """

    status: str
    objective: int | None
    bound: int | None
    gap: float | None
    seconds: float
    message: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """One solve of an instance by the engine as it is and one by a variant, shortly after each other.

    Parameters
    ----------
    code
        Digest of the code in ``formulations``.
    variant, instance, repeat
        What was solved, for which time.
    time_limit
        Seconds that were asked for; None for the suite's own.
    seed
        Of the solver.
    baseline, changed
        What both found.
    """

    code: str
    variant: str
    instance: str
    repeat: int
    time_limit: float | None
    seed: int
    baseline: Outcome
    changed: Outcome

    @property
    def key(self) -> tuple[str, str, str, int, float | None, int]:
        """What makes another run of it unnecessary."""
        return self.code, self.variant, self.instance, self.repeat, self.time_limit, self.seed


@dataclass(frozen=True, slots=True)
class Summary:
    """What a variant loses over all instances.

    Parameters
    ----------
    code
        Digest of the code in ``formulations``.
    variant
        Its name.
    instances
        How many were compared.
    objective_percent, bound_percent
        Largest loss of an instance, in per cent of the baseline's objective; negative where all gain. Infinite where
        an assignment, a bound or a proof of infeasibility is missing.
    time_median, time_worst
        Ratio of times, of the median and of the worst instance.
    verdict
        ``loses nothing``, or what it loses beyond the noise, and where.
    """

    code: str
    variant: str
    instances: int
    objective_percent: float
    bound_percent: float
    time_median: float
    time_worst: float
    verdict: str

    @property
    def loses_nothing(self) -> bool:
        """Whether no loss counts."""
        return self.verdict == LOSES_NOTHING


LOSES_NOTHING = "loses nothing"


@dataclass(frozen=True)
class AblationResult:
    """Pairs of one or several runs.

    Parameters
    ----------
    pairs
        In the order in which they were finished; of several versions of the code, perhaps.
    code
        Digest of the version that :meth:`summaries` is about.
    interrupted
        Whether Ctrl-C ended the run.
    """

    pairs: tuple[Pair, ...]
    code: str
    interrupted: bool = False

    def summaries(self) -> list[Summary]:
        """Return the summary of every variant of this version, in order of their first pairs."""
        return self._summaries_of(self.code)

    def _summaries_of(self, code: str) -> list[Summary]:
        pairs = [pair for pair in self.pairs if pair.code == code]
        names = dict.fromkeys(pair.variant for pair in pairs)
        return [summarize(name, [pair for pair in pairs if pair.variant == name], pairs) for name in names]

    def to_json(self) -> str:
        """Return pairs and the summaries of every version as JSON, a line each."""
        pairs = ",\n".join(json.dumps(asdict(pair)) for pair in self.pairs)
        versions = dict.fromkeys(pair.code for pair in self.pairs)
        found = [summary for code in versions for summary in self._summaries_of(code)]
        summaries = ",\n".join(json.dumps(_finite(asdict(summary))) for summary in found)
        return f'{{"code": "{self.code}",\n"summary": [\n{summaries}\n],\n"pairs": [\n{pairs}\n]}}\n'

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` atomically.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        write_text_atomically(path, self.to_json())


def load_pairs(path: str | Path) -> tuple[Pair, ...]:
    """Read the pairs that :meth:`AblationResult.save` wrote; none where there is no file.

    Raises
    ------
    AblationError
        The file holds something else.
    """
    try:
        document = json.loads(Path(path).read_bytes())
        pairs = document["pairs"]
        return tuple(
            Pair(**pair | {"baseline": Outcome(**pair["baseline"]), "changed": Outcome(**pair["changed"])})
            for pair in pairs
        )
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError, KeyError) as error:
        raise AblationError(f"{path}: holds no ablation, so that it cannot go on from there: {error}") from None


def load_verdicts(path: str | Path) -> dict[str, str]:
    """Return what each variant loses by its last summary in a file of :meth:`AblationResult.save`.

    Raises
    ------
    AblationError
        There is no such file, or it holds something else.
    """
    pairs = load_pairs(path)
    if not pairs:
        raise AblationError(f"{path}: holds no ablation; run one with --json first")
    versions = dict.fromkeys(pair.code for pair in pairs)
    found = [summary for code in versions for summary in AblationResult(pairs, code).summaries()]
    return {summary.variant: summary.verdict for summary in found}


def summarize(variant: str, pairs: Sequence[Pair], others: Sequence[Pair] = ()) -> Summary:
    """Compare a variant with the baseline; of repeats of an instance, medians count.

    Parameters
    ----------
    variant
        Its name.
    pairs
        Its pairs.
    others
        Pairs of other variants. The baseline solved the same instances in them, which shows how much two solves of an
        instance differ: a loss counts where the variant is worse than the baseline ever was.
    """
    instances = dict.fromkeys(pair.instance for pair in pairs)
    objective, bound, times = {}, {}, {}
    beyond = {name: _beyond_noise(name, pairs, others) for name in instances}
    failed = {pair.instance: pair.changed.message for pair in pairs if pair.changed.status == FAILED}
    for name in instances:
        before = [pair.baseline for pair in pairs if pair.instance == name]
        after = [pair.changed for pair in pairs if pair.instance == name]
        objective[name] = _objective_loss(before, after)
        bound[name] = _bound_loss(before, after)
        times[name] = _time_ratio(_median(each.seconds for each in before), _median(each.seconds for each in after))
    measured = objective, bound, times
    failures = [f"fails on {name}: {message}" for name, message in failed.items()][:1]
    worst = [{name: values[name] for name in instances if beyond[name][k]} for k, values in enumerate(measured)]
    losses = _worst(worst[0], NEGLIGIBLE_PERCENT, "{:.3f} % of objective", "the assignment")
    losses += _worst(worst[1], NEGLIGIBLE_PERCENT, "{:.3f} % of bound", "the bound or proof")
    losses += _worst(worst[2], NEGLIGIBLE_SLOWDOWN, "{:.2f} times the time", "")
    return Summary(
        pairs[0].code,
        variant,
        len(instances),
        max(objective.values()),
        max(bound.values()),
        statistics.median(times.values()),
        max(times.values()),
        "; ".join([*failures, *([f"loses {'; '.join(losses)}"] if losses else [])]) or LOSES_NOTHING,
    )


FAILED = "failed"


def _worst(values: dict[str, float], negligible: float, finite: str, infinite: str) -> list[str]:
    if not values:
        return []
    name = max(values, key=lambda each: values[each])
    worst = values[name]
    if worst <= negligible:
        return []
    return [f"{finite.format(worst) if math.isfinite(worst) else infinite} on {name}"]


def _beyond_noise(name: str, pairs: Sequence[Pair], others: Sequence[Pair]) -> tuple[bool, bool, bool]:
    """Whether the variant's objective, bound and time on an instance are worse than any of the baseline's."""
    after = [pair.changed for pair in pairs if pair.instance == name]
    before = [pair.baseline for pair in (*pairs, *others) if pair.instance == name]
    return (
        _median(map(_cost, after)) > max(map(_cost, before)),
        _median(map(_proven, after)) < min(map(_proven, before)),
        _median(each.seconds for each in after) > max(each.seconds for each in before),
    )


def _objective_loss(before: Sequence[Outcome], after: Sequence[Outcome]) -> float:
    first, second = (_median(map(_cost, outcomes)) for outcomes in (before, after))
    return _percent(first, second, first)


def _bound_loss(before: Sequence[Outcome], after: Sequence[Outcome]) -> float:
    """Loss of bound; a proof of infeasibility is a bound above everything."""
    first, second = (_median(map(_proven, outcomes)) for outcomes in (before, after))
    cost = _median(map(_cost, before))
    return _percent(-first, -second, cost if math.isfinite(cost) else first)


def _cost(outcome: Outcome) -> float:
    return math.inf if outcome.objective is None else outcome.objective


def _proven(outcome: Outcome) -> float:
    if outcome.status == Status.INFEASIBLE:
        return math.inf
    return -math.inf if outcome.bound is None else outcome.bound


def _percent(first: float, second: float, unit: float) -> float:
    """Return what ``second`` exceeds ``first`` by, in per cent of a unit."""
    if first == second:
        return 0.0
    if math.isinf(first) or math.isinf(second):
        return math.inf if second > first else -math.inf
    return 100.0 * (second - first) / max(1.0, abs(unit))


def _time_ratio(before: float, after: float) -> float:
    return 1.0 if abs(after - before) < LEAST_SECONDS else after / max(before, LEAST_SECONDS)


def _median(values: Iterable[float]) -> float:
    """Return the lower median, which exists for infinite values and large integers too."""
    return statistics.median_low(list(values))


def _finite(document: dict[str, Any]) -> dict[str, Any]:
    """Write infinite numbers as text, which JSON has no numbers for."""
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in document.items()}

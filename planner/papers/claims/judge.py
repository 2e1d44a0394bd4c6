"""Verdicts: numbers within a tolerance, cells of tables, facts of our code, and what cannot be reproduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from planner.papers.claims.claim import Answer, Claim, Results, Rule, Verdict

__all__ = [
    "TOLERANCE",
    "fact",
    "judge_cells",
    "judge_number",
    "no_figure",
    "not_reproduced",
    "number",
    "percent",
    "remark",
    "same",
]

TOLERANCE = 0.1
"""Relative difference up to which a number of ours agrees with one that a paper measured on its machine."""

_UNIT_DIGITS = 3


def not_reproduced(pattern: str, reason: str) -> Rule:
    """Rule for claims of which there is no number of ours."""
    return Rule(pattern, lambda results, claim: Answer("", Verdict.NOT_REPRODUCED, reason))


def same(pattern: str, ours: Callable[[], Any], reason: str) -> Rule:
    """Rule for a setting or a count that must be equal.

    Parameters
    ----------
    pattern
        Of keys.
    ours
        Returns ours, to be compared with what is printed.
    reason
        Where ours comes from.
    """

    def answer(results: Results, claim: Claim) -> Answer:
        found = ours()
        return Answer(str(found), Verdict.HOLDS if found == claim.printed else Verdict.DIFFERS, reason)

    return Rule(pattern, answer)


def fact(pattern: str, judged: Callable[[Results, Claim], tuple[bool, str]], reason: str, *needs: str) -> Rule:
    """Rule for a statement: a function says whether it is true of our results, and with which number."""

    def answer(results: Results, claim: Claim) -> Answer:
        holds, ours = judged(results, claim)
        return Answer(ours, Verdict.HOLDS if holds else Verdict.DIFFERS, reason)

    return Rule(pattern, answer, needs)


def number(
    pattern: str, ours: Callable[[Results, Claim], float | Sequence[float] | None], reason: str, *needs: str
) -> Rule:
    """Rule for a number, or several, that a paper prints; ``ours`` returns as many, None where there is none."""

    def answer(results: Results, claim: Claim) -> Answer:
        return judge_number(ours(results, claim), claim.printed, reason)

    return Rule(pattern, answer, needs)


def judge_number(ours: float | Sequence[float] | None, printed: Any, reason: str) -> Answer:
    """Answer with one number or several, which hold within :data:`TOLERANCE` of the printed ones."""
    if ours is None:
        return Answer("none", Verdict.NOT_REPRODUCED, reason)
    found = [float(value) for value in ([ours] if isinstance(ours, int | float) else ours)]
    wanted = [float(value) for value in (printed if isinstance(printed, list) else [printed])]
    close = len(found) == len(wanted) and all(
        abs(value - other) <= TOLERANCE * abs(other) for value, other in zip(found, wanted, strict=True)
    )
    text = ", ".join(f"{value:.{_UNIT_DIGITS}g}" if abs(value) < 1000 else f"{value:,.0f}" for value in found)
    return Answer(text, Verdict.HOLDS if close else Verdict.DIFFERS, "within 10 %" if close else reason)


def judge_cells(ours: Sequence[float | None], printed: Sequence[float | str | None], reason: str) -> Answer:
    """Answer with a row of a table: rates or seconds, None of ours for out of memory, None printed for not readable.

    The row holds where the same cells are out of memory, and all others are within :data:`TOLERANCE`.
    """
    pairs = [(found, wanted) for found, wanted in zip(ours, printed, strict=True) if wanted is not None]
    if not pairs:
        return Answer(
            ", ".join("OOM" if found is None else f"{found:.4g}" for found in ours),
            Verdict.NOT_REPRODUCED,
            "the printed row cannot be read",
        )
    alike = sum((found is None) == (wanted == "OOM") for found, wanted in pairs)
    ratios = [found / wanted for found, wanted in pairs if found is not None and isinstance(wanted, int | float)]
    close = all(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
    text = ", ".join("OOM" if found is None else f"{found:.4g}" for found, _ in pairs)
    memory = f"memory as printed in {alike} of {len(pairs)} cells"
    factors = ""
    if ratios:
        factors = f"; ours {min(ratios):.2f} to {max(ratios):.2f} times the paper's, median {median(ratios):.2f}"
    holds = alike == len(pairs) and close
    why = f"{memory}{factors}{'' if holds else f'; {reason}'}"
    return Answer(text, Verdict.HOLDS if holds else Verdict.DIFFERS, why)


def remark(pattern: str) -> Rule:
    """Rule for a remark on a printed text: it makes no claim of its own."""
    return not_reproduced(pattern, "a remark on the printed text, which claims nothing by itself")


def no_figure(pattern: str) -> Rule:
    """Rule for a plot without printed numbers."""
    return not_reproduced(pattern, "the paper has a plot here and prints no number")


def percent(ratio: float) -> float:
    """Gain in per cent of a ratio."""
    return 100 * (ratio - 1)

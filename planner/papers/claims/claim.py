"""Claims of the papers as data, and what we say about each: the rows of the table *claims*.

``printed/`` has one JSON file per paper: nested names, and at their ends what the paper prints. The path of names is
the claim's key, ``table_2/rows/8G/pytorch_ddp``. Rules of a paper answer keys by patterns; the first whose pattern
matches gives the one answer of a key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from planner.papers.printed import printed

__all__ = ["PAPERS", "Answer", "Claim", "ClaimRow", "Results", "Rule", "Verdict", "claim_rows", "printed_claims"]

PAPERS = ("kiwi", "osdp", "galvatron", "h3t", "capture")

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Tables of one paper by name, each a list of rows; those that have not been run are absent."""


class Verdict(StrEnum):
    """What our number says about a claim.

    HOLDS: ours agrees, within the tolerance that the reason names.
    DIFFERS: ours disagrees; the reason says why.
    NOT_REPRODUCED: there is no number of ours; the reason says why.
    """

    HOLDS = "holds"
    DIFFERS = "differs"
    NOT_REPRODUCED = "not reproduced"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a paper.

    Parameters
    ----------
    paper
        One of :data:`PAPERS`.
    key
        Its names, joined by ``/``.
    printed
        What the paper prints; None where it prints a figure without numbers.
    """

    paper: str
    key: str
    printed: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """Ours, the verdict, and the reason for it."""

    ours: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Rule:
    """How claims are answered.

    Parameters
    ----------
    pattern
        Shell pattern of keys.
    answer
        From the results and the claim to the answer.
    needs
        Tables without which there is no answer yet.
    """

    pattern: str
    answer: Callable[[Results, Claim], Answer]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """A row of the table *claims*."""

    claim: Claim
    answer: Answer

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """Paper, claim, printed, ours, verdict, reason."""
        value = "no figure" if self.claim.printed is None else _text(self.claim.printed)
        answer = self.answer
        return self.claim.paper, self.claim.key, value, answer.ours, answer.verdict.value, answer.reason


@cache
def printed_claims(paper: str) -> tuple[Claim, ...]:
    """All claims of a paper.

    Raises
    ------
    ValueError
        If there is no such paper.
    """
    if paper not in PAPERS:
        raise ValueError(f"paper {paper!r} is not known; use {', '.join(PAPERS)}")
    return tuple(Claim(paper, "/".join(names), value) for names, value in _leaves(printed(paper), ()))


def claim_rows(paper: str, rules: Sequence[Rule], results: Results) -> list[ClaimRow]:
    """Answer every claim of a paper.

    Parameters
    ----------
    paper
        Whose claims.
    rules
        In the order in which they are tried.
    results
        The paper's tables, as far as they were run.

    Raises
    ------
    LookupError
        No rule answers a claim.
    """
    rows = []
    for claim in printed_claims(paper):
        rule = next((rule for rule in rules if fnmatchcase(claim.key, rule.pattern)), None)
        if rule is None:
            raise LookupError(f"{paper}: no rule answers the claim {claim.key}")
        missing = [table for table in rule.needs if table not in results]
        if missing:
            reason = f"not run yet: tables {', '.join(missing)} of `meshwright bench papers --paper {paper}`"
            rows.append(ClaimRow(claim, Answer("", Verdict.NOT_REPRODUCED, reason)))
        else:
            rows.append(ClaimRow(claim, rule.answer(results, claim)))
    return rows


def _leaves(value: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*names, name))
    else:
        yield names, value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

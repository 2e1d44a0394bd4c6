"""One row of a benchmark: a solver's result on an instance, and how it got there."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, NamedTuple

from formulations.problem.solution import Proof, Status


class RowError(ValueError):
    """Something that is no row of a benchmark; the message names the key and the value."""


class Moment(NamedTuple):
    """An improvement during a solve: the best checked incumbent and the best bound from ``seconds`` on."""

    seconds: float
    objective: int | None
    bound: int | None
    source: str


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Result of one solver on one instance; the first ten fields are those of the contest's contract, in its order.

    Parameters
    ----------
    instance, formulation, solver
        Name of the instance, the formulation that made it (``random`` and ``contest`` for the two suites), the solver.
    status, objective, bound, gap
        As :class:`formulations.problem.solution.SolveResult` has them, checked in exact integers.
    seconds
        Wall time from the start of the solve to its checked result. Included are the transfer to the solver's
        process, presolve, every check, and the confirmation of an infeasible answer. For instances that are
        read from files, reading and parsing the file and the start of the solver's processes count too, so
        that the figure is that of one command, less the start of Python. Problems that are made in memory and
        meet warm processes count neither.
    cpu_seconds
        Processor time of the solver, and of parsing where that counts.
    peak_rss_bytes
        Largest resident size of the solver's processes, together where there are several. A warm process may
        still hold memory of an earlier instance; processes for files are new for every row.
    parse_seconds
        Part of ``seconds`` that went into reading and parsing; 0 where that does not count. A file is parsed
        once and its time is part of every solver's row.
    parent_peak_rss_bytes
        Largest resident size, so far, of the process that parses and checks (and presolves for ``portfolio``).
    time_limit
        Seconds that were given for ``seconds``.
    seed
        Seed of the solver.
    best_known
        Best known objective, where one was given.
    message
        Message of the solver.
    contradiction
        A claim of the solver that the checks refute; empty for a sound row.
    proof, claimed
        How the bound (or infeasibility) is known, and a bound beyond it that one kind of solver claims, as in
        :class:`formulations.problem.solution.SolveResult`; None where there is none.
    nodes
        Nodes of the canonical problem; None where the instance is none, and in rows of earlier versions.
    history
        Improvements in order; their seconds count from the same moment as ``seconds``.
    """

    instance: str
    formulation: str
    solver: str
    status: Status
    objective: int | None
    bound: int | None
    gap: float | None
    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    parse_seconds: float
    parent_peak_rss_bytes: int
    time_limit: float
    seed: int
    best_known: int | None
    message: str
    contradiction: str
    history: tuple[Moment, ...]
    proof: Proof | None = None
    claimed: int | None = None
    nodes: int | None = None

    def as_document(self) -> dict[str, Any]:
        """Return the row as JSON holds it; keys in the order of the fields, moments as lists."""
        proof = None if self.proof is None else str(self.proof)
        history = [list(moment) for moment in self.history]
        return asdict(self) | {"status": str(self.status), "history": history, "proof": proof}


def row_from_document(document: Any) -> BenchRow:
    """Read what :meth:`BenchRow.as_document` wrote.

    Raises
    ------
    RowError
        A key is missing or unknown, the status is none, or a moment has not four entries.
    """
    if not isinstance(document, dict):
        raise RowError(f"a row must be an object, got {document!r:.60}")
    names = {field.name for field in fields(BenchRow)}
    optional = {field.name for field in fields(BenchRow) if field.default is not MISSING}
    wrong = sorted((names - optional - document.keys()) | (document.keys() - names))
    if wrong:
        raise RowError(f"a row must have exactly the keys of BenchRow; missing or unknown: {', '.join(wrong)}")
    try:
        history = tuple(Moment(*moment) for moment in document["history"])
        proof = None if document.get("proof") is None else Proof(document["proof"])
        return BenchRow(**document | {"status": Status(document["status"]), "history": history, "proof": proof})
    except (TypeError, ValueError) as error:
        raise RowError(f"a row of {document['instance']} by {document['solver']} is malformed: {error}") from None

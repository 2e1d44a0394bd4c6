"""Types of a plan file, from which the published schema is generated.

A plan has a *decision*, which is the same for the same inputs byte for byte and which its digest covers, and a
*record* of how it was found (times, solvers, machine), which differs from run to run. Numbers are whole
nanoseconds and whole bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from formulations.problem.solution import Proof, Status, relative_gap
from planner.common.units import format_bytes, format_gap, format_limit, format_seconds
from planner.plan.decision import NANOSECONDS, Decision, Fingerprint, Part, ReshardStep
from planner.plan.rendering import html_table, text_table
from planner.replay.structure import communicating_steps

if TYPE_CHECKING:
    import pandas as pd

PLAN_VERSION: Literal[2] = 2
"""Version of the file format; a file of another version is refused."""


COSTS = "costs of the step: "
"""Begins the note that says how the costs of a step are known, which is a figure of its own."""


class CrossCheck(Part):
    """Bound, or in older plans the result, of another method on the same problem."""

    solver: str
    status: Status
    objective_ns: NonNegativeInt | None = None
    bound_ns: NonNegativeInt | None = None
    seconds: NonNegativeFloat = 0.0


class Certificate(Part):
    """The solvers that found the plan and proved its bound.

    ``proof`` is how the bound is known; None in plans without a bound, and in those written before proofs had names.
    ``method`` is what an exact bound is an evaluation of, empty where that is not known.
    ``claimed_ns`` is a bound beyond it that one kind of solver, ``claimed_by``, claims.
    """

    solver: str
    status: Status
    seconds: NonNegativeFloat
    proof: Proof | None = None
    method: str = ""
    claimed_ns: NonNegativeInt | None = None
    claimed_by: str = ""
    cross_checks: tuple[CrossCheck, ...] = ()


class Record(Part):
    """Record of how the plan was found; it differs from run to run.

    ``times`` is seconds per stage, ``hardware`` the machine of the planner, ``notes`` the omissions of the planner:
    operators without a rule, dimensions that an axis does not divide, and the time that these may cost.
    """

    certificate: Certificate
    notes: tuple[str, ...] = ()
    times: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    hardware: dict[str, str] = Field(default_factory=dict)


class Plan(Part):
    """A plan: the decision, the SHA-256 of its canonical JSON, and the record of how it was found.

    ``part_digests`` holds the same per field of the decision, so that an edit can be named.
    """

    version: Literal[2]
    decision: Decision
    digest: Fingerprint
    part_digests: dict[str, Fingerprint] = Field(default_factory=dict)
    record: Record

    @property
    def objective_seconds(self) -> float:
        """Predicted seconds of one optimizer step."""
        return self.decision.predicted.objective_ns * self.decision.options.grad_accum / NANOSECONDS

    @property
    def bound_seconds(self) -> float | None:
        """Proven lower bound of the objective."""
        bound = self.decision.predicted.bound_ns
        return None if bound is None else bound * self.decision.options.grad_accum / NANOSECONDS

    @property
    def gap(self) -> float | None:
        """``(objective - bound) / objective``; None without a bound."""
        return relative_gap(self.decision.predicted.objective_ns, self.decision.predicted.bound_ns)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of each device."""
        return self.decision.predicted.peak_bytes

    def rows(self) -> list[tuple[str, str]]:
        """Main figures of the plan, as (name, value)."""
        options, predicted = self.decision.options, self.decision.predicted
        model, certificate = self.decision.model, self.record.certificate
        bound, limit, parts = self.bound_seconds, options.limit_bytes, options.grad_accum
        return [
            ("model", model.text(parts)),
            ("mesh", f"{'x'.join(map(str, options.mesh))} on {options.cluster}"),
            ("formulation", f"{options.formulation}, {options.optimizer}"),
            *((("memory model", options.memory_model),) if options.memory_model else ()),
            *(("pinned", str(pin)) for pin in options.pins),
            ("status", str(certificate.status)),
            ("objective", f"{format_seconds(self.objective_seconds)} per step"),
            ("bound", "-" if bound is None else f"{format_seconds(bound)}{_known(certificate)}"),
            *_claim_row(certificate, parts),
            ("gap", format_gap(self.gap)),
            ("solver", f"{certificate.solver}, {format_seconds(certificate.seconds)}"),
            ("second bound", _second_bound(certificate, predicted.objective_ns, parts)),
            ("peak memory", format_bytes(predicted.peak_bytes)),
            ("memory limit", "-" if limit is None else format_limit(limit, options.reserve_bytes)),
            *self._host_rows(),
            ("recomputed operators", str(self.recomputed)),
            ("collectives", str(self.collectives)),
            *(("costs", note.removeprefix(COSTS)) for note in self.record.notes if note.startswith(COSTS)),
            *(("note", note) for note in self.record.notes if not note.startswith(COSTS)),
        ]

    def _host_rows(self) -> list[tuple[str, str]]:
        host, limit = self.decision.predicted.host, self.decision.options.host_memory_bytes
        if not host.offloaded_bytes:
            return []
        copied = host.offloaded_bytes + host.prefetched_bytes
        tensors = sum(instruction.op == "offload" for instruction in self.decision.schedule.instructions)
        return [
            ("offloaded tensors", f"{tensors}, {format_bytes(host.offloaded_bytes)} per step"),
            ("peak host memory", format_bytes(host.peak_bytes)),
            ("host memory limit", "-" if limit is None else format_bytes(limit)),
            ("copied to and from host", f"{format_bytes(copied)}, {host.hidden_bytes / copied:.0%} of it hidden"),
            ("waiting for copies", f"{format_seconds(host.stall_ns / NANOSECONDS)} per step"),
        ]

    @property
    def recomputed(self) -> int:
        """Further executions of operators that already ran."""
        return sum(step.op == "recompute" for step in self.decision.schedule.instructions)

    @property
    def collectives(self) -> int:
        """Collectives between operators, local slices not counted."""
        schedule = self.decision.schedule
        steps = (step for step in schedule.instructions if isinstance(step, ReshardStep))
        paths = (step.path for step in steps if step.op != "join")
        return sum(communicating_steps([schedule.placements[position] for position in path]) for path in paths)

    def summary(self) -> str:
        """Rows of text."""
        return text_table(self.rows())

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a data frame; needs pandas, which the extra ``notebooks`` installs."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=["figure", "value"]).set_index("figure")

    def save(self, path: Path | str) -> None:
        """Write the plan; as :func:`planner.plan.document.save_plan`."""
        from planner.plan.document import save_plan

        save_plan(self, Path(path))

    def __repr__(self) -> str:
        options = self.decision.options
        return (
            f"<plan of {self.decision.model.source} on {'x'.join(map(str, options.mesh))} of {options.cluster}: "
            f"{format_seconds(self.objective_seconds)} per step, gap {format_gap(self.gap)}, "
            f"peak {format_bytes(self.peak_bytes)}>"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def plan_schema() -> dict[str, Any]:
    """JSON schema of a plan file."""
    schema = Plan.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Meshwright plan"}


def _known(certificate: Certificate) -> str:
    method = f" by {certificate.method}" if certificate.method else ""
    return "" if certificate.proof is None else f", {certificate.proof}{method}"


def _second_bound(certificate: Certificate, objective_ns: int, micro_batches: int) -> str:
    words = [
        f"{format_seconds(check.bound_ns * micro_batches / NANOSECONDS)} by {check.solver}, "
        f"gap {format_gap(relative_gap(objective_ns, check.bound_ns))}"
        for check in certificate.cross_checks
        if check.bound_ns is not None
    ]
    return ", ".join(words) or "none: the bound is from one method"


def _claim_row(certificate: Certificate, micro_batches: int) -> list[tuple[str, str]]:
    if certificate.claimed_ns is None:
        return []
    claimed = format_seconds(certificate.claimed_ns * micro_batches / NANOSECONDS)
    return [("claimed bound", f"{claimed} by {certificate.claimed_by}, not proven")]

"""One training step planned by all five papers: GPT-2 on four TITAN RTX, under the same limits of one device's memory.

KIWI is here as its reduced problem and as ``kiwi_chain``, which also recomputes chains. Each of the other four decides
three times: as published; exactly on the same problem, so that the distance is due to the search alone; and exactly
beyond it: with the last value of every choice of :data:`planner.layers.plan.choices.CHOICES`, but for CAPTURE the
fastest step, with any degrees.

Beside them are the programs that KIWI published, which are refused at this size, and baselines: OSDP's and
Galvatron-BMW's exact problems where every layer has the same settings.

Limits are shares of what data parallelism keeps on every device: parameters, gradients and the two moments of Adam, and
what forward leaves for backward, by the layers' profiles. The cluster's reserve comes on top of them. OSDP decides on
attention and feed-forward modules, the others on blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

from formulations.kiwi.graph import GraphError
from formulations.layers.layer import LayerChain
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.layers.plan.choices import CHOICES
from planner.layers.plan.document import LayerPlan
from planner.layers.planning import plan_layers
from planner.layers.profiles.folding import model_layers
from planner.machine.cluster import load_cluster
from planner.models.references import ModelReference
from planner.papers.cells import Cell, Row, Table
from planner.papers.page import MISSING, Rows, Section, pivot
from planner.plan.document import Plan
from planner.session import PlanningSession, PlanRequest
from planner.session.formulations import PUBLISHED

__all__ = [
    "BASELINES",
    "CLUSTER",
    "DEVICES",
    "REFERENCE",
    "SECTIONS",
    "OneModelCase",
    "beside_cases",
    "case_cells",
    "one_model",
    "one_model_cases",
]

REFERENCE = ModelReference("hf:gpt2", batch=8, sequence=512, dropout=0.0)
CLUSTER, DEVICES = "titan-rtx-8-pcie", 4
SHARES = (250, 100, 85, 70, 55, 40)
"""Limits, as per cent of what data parallelism keeps; OSDP as published, which adds up temporaries, needs the first."""

SECONDS = 5.0
"""Time limit of one search."""

KIWI = ("kiwi_reduced", "kiwi_chain")
WAYS = ("published", "exact", "beyond")
BASELINES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "osdp": {
        "ddp": ("sharding=none", "slices=1"),
        "fsdp": ("sharding=zero3", "slices=1"),
    },
    "galvatron": {
        "ddp": (f"data_parallel={DEVICES}", "sharding=none", "keep"),
        "fsdp": (f"data_parallel={DEVICES}", f"shard_degree={DEVICES}", "keep"),
        "tp": (f"tensor_parallel={DEVICES}", "keep"),
        "1f1b": ("data_parallel=1", "tensor_parallel=1", "keep"),
        "3d": ("data_parallel=1", "tensor_parallel=2", "keep"),
    },
}
"""Decisions on every layer, by planner and name, which are those of :func:`formulations.galvatron.uniform.baselines`.

The search decides the rest: where stages are cut, and how many micro-batches a pipeline has by the paper's rule.
"""

_KEPT = {("capture", "degrees")}
"""Choices that ``beyond`` leaves to the formulation."""


@dataclass(frozen=True, slots=True)
class OneModelCase:
    """One decision about the model: by a formulation of operators, or by a paper's planner of layers.

    Parameters
    ----------
    planner
        Name of the formulation.
    way
        One of :data:`WAYS`, or a name of the planner's :data:`BASELINES`; empty for operators.
    share
        Limit, as per cent of what data parallelism keeps.
    """

    planner: str
    way: str
    share: int

    @property
    def label(self) -> str:
        """Name of its cell."""
        return f"{self.share} %, {self.way or self.planner}"

    @property
    def limit(self) -> int:
        """Bytes of tensors on one device."""
        blocks = _chain(modules=False)
        whole = 4 * blocks.parameter_bytes + REFERENCE.batch // DEVICES * blocks.activation_bytes
        return whole * self.share // 100

    def plan(self) -> Plan | LayerPlan:
        """Decide.

        Raises
        ------
        PlanError, InfeasibleError
            There is no plan within the limit, or the search finds none.
        GraphError
            The step is too large for KIWI's program.
        """
        session = _session()
        memory = self.limit + session.cluster.device.reserve_bytes
        if not self.way:
            return session.plan(PlanRequest(formulation=self.planner, time_limit=SECONDS, memory=memory))
        choices = CHOICES[self.planner] if self.way == "beyond" else {}
        return plan_layers(
            reference=REFERENCE,
            cluster=session.cluster,
            devices=DEVICES,
            formulation=self.planner,
            memory=memory,
            as_published=self.way == "published",
            search_batch=False,
            time_limit=SECONDS,
            pins=[("*", decision) for decision in BASELINES.get(self.planner, {}).get(self.way, ())],
            choices={name: values[-1] for name, values in choices.items() if (self.planner, name) not in _KEPT},
            chain=_chain(modules=self.planner == "osdp"),
        )

    def row(self, plan: Plan | LayerPlan | None, note: str = "") -> Row:
        """What is predicted of its plan, or why there is none."""
        return {
            "planner": self.planner,
            "way": self.way,
            "limit_gb": self.limit / 1e9,
            "step_ms": plan and _milliseconds(plan.objective_seconds),
            "bound_ms": plan and _milliseconds(plan.bound_seconds),
            "peak_gb": plan and plan.peak_bytes / 1e9,
            "note": note,
        }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def case_cells(cases: Iterable[OneModelCase], rows: Callable[[OneModelCase], Iterable[Row]]) -> Iterator[Cell]:
    """A cell for every case, with the rows that a function has of it."""
    for case in cases:
        yield Cell(case.label, partial(rows, case))


def one_model_cases(paper: str) -> Iterator[OneModelCase]:
    """All decisions of one paper."""
    for share in SHARES:
        if paper == "kiwi":
            yield from (OneModelCase(name, "", share) for name in KIWI)
        else:
            yield from (OneModelCase(paper, way, share) for way in WAYS)


def beside_cases(paper: str) -> Iterator[OneModelCase]:
    """What stands beside the decisions of one paper: KIWI's own programs, and baselines."""
    if paper == "kiwi":  # refused for their size, whatever the limit
        yield from (OneModelCase(PUBLISHED[name], "", SHARES[0]) for name in ("kiwi_full", "kiwi_reduced"))
    for share in SHARES:
        yield from (OneModelCase(paper, name, share) for name in BASELINES.get(paper, ()))


def one_model(paper: str) -> Table:
    """The table of one paper: a row for each limit, and for each formulation or way of deciding, baselines last.

    Rows have ``planner`` and ``way``, ``limit_gb`` and ``peak_gb`` (10^9 bytes), ``step_ms`` and ``bound_ms``, and in
    ``note`` why there is no plan.

    Parameters
    ----------
    paper
        One of :data:`planner.papers.claims.claim.PAPERS`.
    """
    return Table(
        lambda: case_cells((*one_model_cases(paper), *beside_cases(paper)), _rows), frozenset({"bound_ms", "note"})
    )


def _rows(case: OneModelCase) -> Iterator[Row]:
    try:
        plan = case.plan()
    except (PlanError, InfeasibleError, GraphError) as error:
        yield case.row(None, str(error))
    else:
        yield case.row(plan)


@cache
def _chain(*, modules: bool) -> LayerChain:
    return model_layers(REFERENCE, load_cluster(CLUSTER), apart=modules)


@cache
def _session() -> PlanningSession:
    return PlanningSession(REFERENCE, CLUSTER, (DEVICES,))


def _steps(rows: Rows) -> Iterator[str]:
    """Milliseconds of a step by way and limit."""
    yield f"GPT-2 on {DEVICES} devices of {CLUSTER}, batch {REFERENCE.batch}, {REFERENCE.sequence} tokens: predicted"
    yield f"milliseconds of a step under limits of one device's tensors. {MISSING} is no plan."
    if any(row["way"] == "beyond" for row in rows["one_model"]):
        yield "`exact` decides the paper's problem, `beyond` one with choices that are not the paper's."
    if any(row["way"] in BASELINES.get(row["planner"], {}) for row in rows["one_model"]):
        yield "Baselines are plans of the paper's problem where every layer has the same settings."
    yield from dict.fromkeys(row["note"] for row in rows["one_model"] if row["planner"] in PUBLISHED.values())
    yield ""
    cells = [
        row | {"name": row["way"] or row["planner"], "limit": f"{row['limit_gb']:.2f} GB"} for row in rows["one_model"]
    ]
    yield from pivot(cells, "name", "limit", "step_ms", lambda step: f"{step:.1f}", "plan")


def _runs(table: str, rows: Rows) -> Iterator[str]:
    """Predicted and measured peaks of the plans that ran, by way and limit."""
    ran = [row for row in rows[table] if row["measured_bytes"] is not None]
    loss, gradient = (max(row[name] for row in ran) for name in ("loss_error", "gradient_error"))
    failed = sum(bool(row["failures"]) for row in ran)
    yield f"A step of each of these plans on {DEVICES} processes of a CPU: the highest peak of tensors in GB, predicted"
    yield f"and measured. {MISSING} is no plan, or one that this machine lacks the memory for. Losses are off those"
    yield f"of one process by {loss:.1e} of them at most, gradients by {gradient:.1e}: more than rounding in {failed}"
    yield f"of {len(ran)} runs."
    yield ""
    cells = [
        {
            "name": row["way"] or row["planner"],
            "limit": f"{row['limit_gb']:.2f} GB",
            "peaks": f"{row['predicted_bytes'] / 1e9:.3f}, {row['measured_bytes'] / 1e9:.3f}",
        }
        for row in ran
    ]
    yield from pivot(cells, "name", "limit", "peaks", str, "plan")


SECTIONS = (
    Section("One model planned by all five papers", ("one_model",), _steps),
    Section("The one model's plans at full size", ("one_model_runs",), partial(_runs, "one_model_runs")),
    Section("The baselines' plans at full size", ("baseline_runs",), partial(_runs, "baseline_runs")),
)
"""On the page of every paper."""

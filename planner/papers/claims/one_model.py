"""One training step planned by all five papers: GPT-2 on four TITAN RTX, under the same limits of one device's memory.

KIWI is here as its reduced problem and as ``kiwi_chain``, which also recomputes chains. Each of the other four decides
three times: as published; exactly on the same problem, so that the distance is due to the search alone; and exactly
beyond it: with the last value of every choice of :data:`planner.layers.plan.choices.CHOICES`, but for CAPTURE the
fastest step, with any degrees.

Limits are shares of what data parallelism keeps on every device: parameters, gradients and the two moments of Adam, and
what forward leaves for backward, by the layers' profiles. The cluster's reserve comes on top of them. OSDP decides on
attention and feed-forward modules, the others on blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

from formulations.layers.layer import LayerChain
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.graph.optimizers import optimizer_named
from planner.layers.plan.choices import CHOICES
from planner.layers.plan.request import LayerRequest
from planner.layers.planning import LAYER_FORMULATIONS
from planner.layers.profiles.folding import model_layers
from planner.machine.cluster import load_cluster
from planner.models.references import ModelReference
from planner.papers.cells import Cell, Row, Table
from planner.papers.page import MISSING, Rows, Section, pivot
from planner.session import PlanningSession, PlanRequest

__all__ = ["CLUSTER", "DEVICES", "REFERENCE", "SECTION", "one_model"]

REFERENCE = ModelReference("hf:gpt2", batch=8, sequence=512, dropout=0.0)
CLUSTER, DEVICES = "titan-rtx-8-pcie", 4
SHARES = (250, 100, 85, 70, 55, 40)
"""Limits, as per cent of what data parallelism keeps; OSDP as published, which adds up temporaries, needs the first."""

SECONDS = 5.0
"""Time limit of one search."""

KIWI = ("kiwi_reduced", "kiwi_chain")
WAYS = ("published", "exact", "beyond")


def one_model(paper: str) -> Table:
    """The table of one paper: a row for each limit, and for each formulation or way of deciding.

    Rows have ``planner`` and ``way``, ``limit_gb`` and ``peak_gb`` (10^9 bytes), ``step_ms`` and ``bound_ms``, and in
    ``note`` why there is no plan.

    Parameters
    ----------
    paper
        One of :data:`planner.papers.claims.claim.PAPERS`.
    """
    return Table(partial(_cells, paper), frozenset({"bound_ms", "note"}))


def _cells(paper: str) -> Iterator[Cell]:
    for share in SHARES:
        if paper == "kiwi":
            for name in KIWI:
                yield Cell(f"{share} %, {name}", partial(_operators, name, share))
        else:
            for way in WAYS:
                yield Cell(f"{share} %, {way}", partial(_layers, paper, share, way))


@cache
def _chain(*, modules: bool) -> LayerChain:
    return model_layers(REFERENCE, load_cluster(CLUSTER), apart=modules)


@cache
def _session() -> PlanningSession:
    return PlanningSession(REFERENCE, CLUSTER, (DEVICES,))


def _limit(share: int) -> int:
    """Bytes of tensors on one device."""
    blocks = _chain(modules=False)
    whole = 4 * blocks.parameter_bytes + REFERENCE.batch // DEVICES * blocks.activation_bytes
    return whole * share // 100


def _operators(name: str, share: int) -> Iterator[Row]:
    """Plan operators."""
    limit, session = _limit(share), _session()
    memory = limit + session.cluster.device.reserve_bytes
    try:
        found = session.plan(PlanRequest(formulation=name, time_limit=SECONDS, memory=memory))
    except (PlanError, InfeasibleError) as error:
        yield _row(name, "", limit, note=str(error))
    else:
        yield _row(name, "", limit, found.objective_seconds, found.bound_seconds, found.peak_bytes)


def _layers(paper: str, share: int, way: str) -> Iterator[Row]:
    """Plan layers."""
    limit, given = _limit(share), {}
    if way == "beyond":
        given = {name: values[-1] for name, values in CHOICES[paper].items() if (paper, name) != ("capture", "degrees")}
    request = LayerRequest(
        formulation=paper,
        reference=REFERENCE,
        cluster=load_cluster(CLUSTER),
        devices=DEVICES,
        tensor_bytes=limit,
        optimizer=optimizer_named("adamw"),
        as_published=way == "published",
        search_batch=False,
        time_limit=SECONDS,
        given=given,
    )
    try:
        found = LAYER_FORMULATIONS[paper](request, _chain(modules=paper == "osdp")).record
    except (PlanError, InfeasibleError) as error:
        yield _row(paper, way, limit, note=str(error))
    else:
        assert found is not None, "a plan that was just made has its record"
        yield _row(paper, way, limit, found.objective_seconds, found.bound_seconds, max(found.stage_peak_bytes))


def _row(
    name: str,
    way: str,
    limit: int,
    step: float | None = None,
    bound: float | None = None,
    peak: int | None = None,
    note: str = "",
) -> Row:
    """Seconds of the step and of its bound, and the peak in bytes; a note where there is no plan."""
    return {
        "planner": name,
        "way": way,
        "limit_gb": limit / 1e9,
        "step_ms": None if step is None else 1e3 * step,
        "bound_ms": None if bound is None else 1e3 * bound,
        "peak_gb": None if peak is None else peak / 1e9,
        "note": note,
    }


def _steps(rows: Rows) -> Iterator[str]:
    """Milliseconds of a step by way and limit."""
    yield f"GPT-2 on {DEVICES} devices of {CLUSTER}, batch {REFERENCE.batch}, {REFERENCE.sequence} tokens: predicted"
    yield f"milliseconds of a step under limits of one device's tensors. {MISSING} is no plan."
    if any(row["way"] == "beyond" for row in rows["one_model"]):
        yield "`exact` decides the paper's problem, `beyond` one with choices that are not the paper's."
    yield ""
    cells = [
        row | {"name": row["way"] or row["planner"], "limit": f"{row['limit_gb']:.2f} GB"} for row in rows["one_model"]
    ]
    yield from pivot(cells, "name", "limit", "step_ms", lambda step: f"{step:.1f}", "plan")


SECTION = Section("One model planned by all five papers", ("one_model",), _steps)
"""On the page of every paper."""

"""Bounds on the memory that one rank needs, computed without a plan.

Four figures bracket every plan: everything replicated, and everything divided by the number of ranks,
each with all values kept and with all of them recomputed. The kept figures are the liveness of the
traced graph. The recomputed figures are floors: they count the state and, at every operator, only what
that operator itself reads and writes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from formulations.problem.files import write_text_atomically
from formulations.problem.strategy_problem import IntArray
from planner.graph.operator_graph import OperatorGraph, OutputRole, ValueRole
from planner.graph.optimizers import OptimizerSpec
from planner.graph.view_chains import view_chains

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class FitsRow:
    """One figure; ``kind`` is exact for that choice, or a floor: a lower bound for all plans."""

    name: str
    kind: str
    peak_bytes: int
    fits: bool | None


@dataclass(frozen=True, slots=True)
class FitsReport:
    """Result of :func:`fits_report`.

    ``state_bytes`` is parameters, optimizer state and module buffers; ``limit`` the usable bytes of one
    device or None, beside ``reserve`` bytes.
    """

    rows: tuple[FitsRow, ...]
    parameter_count: int
    state_bytes: int
    ranks: int
    limit: int | None
    reserve: int = 0

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a data frame; needs pandas, which the extra ``notebooks`` installs."""
        import pandas as pd

        return pd.DataFrame(map(asdict, self.rows))

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, atomically.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        write_text_atomically(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td>{escape(row.name)}</td><td>{escape(row.kind)}</td>"
            f"<td style='text-align:right'>{row.peak_bytes / 2**30:.3f}</td>"
            f"<td>{'' if row.fits is None else 'fits' if row.fits else 'does not fit'}</td></tr>"
            for row in self.rows
        )
        head = "<tr><th>one rank holds</th><th>figure</th><th>GiB</th><th></th></tr>"
        return f"<table>{head}{body}</table>"


def fits_report(
    graph: OperatorGraph, ranks: int, optimizer: OptimizerSpec, limit: int | None = None, reserve: int = 0
) -> FitsReport:
    """Bracket the memory that one rank needs.

    Parameters
    ----------
    graph
        The traced step.
    ranks
        Devices that could share everything evenly.
    optimizer
        State and workspace per trainable parameter.
    limit
        Usable bytes of one device, or None.
    reserve
        Bytes of one device beside the limit, for the report.

    Returns
    -------
    FitsReport
        Four rows; "divided by the ranks" assumes that every dimension divides and nothing is copied.
    """
    state, parameters = _state(graph, optimizer)
    kept, floor = (max(peak, _update_peak(graph, state, optimizer)) for peak in _peaks(graph, state))
    rows = []
    for name, kind, peak in (
        ("everything replicated, all values kept", "exact", kept),
        ("everything replicated, all values recomputed", "floor", floor),
        (f"everything divided by {ranks}, all values kept", "without copies", -(-kept // ranks)),
        (f"everything divided by {ranks}, all values recomputed", "floor", -(-floor // ranks)),
    ):
        rows.append(FitsRow(name, kind, peak, None if limit is None else peak <= limit))
    return FitsReport(tuple(rows), parameters, state, ranks, limit, reserve)


def _state(graph: OperatorGraph, optimizer: OptimizerSpec) -> tuple[int, int]:
    """Bytes resident during the whole step and the number of parameters."""
    state = parameters = 0
    for index in graph.inputs:
        value = graph.values[index]
        state += value.spec.nbytes
        state += optimizer.state(value.spec.dtype).nbytes(value.spec.numel) if value.trainable else 0
        parameters += value.spec.numel if value.role is ValueRole.PARAMETER else 0
    return state, parameters


def _update_peak(graph: OperatorGraph, state: int, optimizer: OptimizerSpec) -> int:
    """Most bytes during the updates: all gradients are there when the first parameter is updated, then fewer."""
    trained = [
        (graph.values[o.of].spec, graph.values[o.value].spec)
        for o in graph.outputs
        if o.role is OutputRole.GRADIENT and o.of is not None
    ]
    gradients = np.array([gradient.nbytes for _, gradient in trained], dtype=np.int64)
    workspaces = np.array(
        [
            optimizer.workspace(spec.dtype, gradient.dtype, gradient.is_contiguous).nbytes(spec.numel)
            for spec, gradient in trained
        ],
        dtype=np.int64,
    )
    left = np.cumsum(gradients[::-1])[::-1]
    results = sum(graph.values[o.value].spec.nbytes for o in graph.outputs if o.role is not OutputRole.GRADIENT)
    during = left + workspaces
    return state + results + int(during.max(initial=0))


def _peaks(graph: OperatorGraph, state: int) -> tuple[int, int]:
    """Peak with every value kept to its last use, and the largest working set of one operator."""
    chains = view_chains(graph)
    count = len(graph.operators)
    gradients = {chains[o.value].base for o in graph.outputs if o.role is OutputRole.GRADIENT}
    kept_to_end = gradients | {chains[o.value].base for o in graph.outputs}
    last = np.full(len(graph.values), -1, dtype=np.int64)
    for operator in graph.operators:
        for value in operator.inputs:
            last[chains[value].base] = operator.index
    change: IntArray = np.zeros(count + 1, dtype=np.int64)
    floor: IntArray = np.zeros(count, dtype=np.int64)
    held = 0
    for operator in graph.operators:
        if operator.is_view:
            continue
        read = {chains[value].base for value in operator.inputs}
        owned = [v for v in operator.outputs if v is not None]
        working = sum(graph.values[v].spec.nbytes for v in read - gradients if graph.values[v].producer is not None)
        floor[operator.index] = held + working + sum(graph.values[v].spec.nbytes for v in owned)
        for v in owned:
            size = graph.values[v].spec.nbytes
            change[operator.index] += size
            end = count if v in kept_to_end else max(int(last[v]), operator.index) + 1
            change[end] -= size
            held += size if v in gradients else 0
    profile = np.cumsum(change[:count])
    return state + int(profile.max(initial=0)), state + int(floor.max(initial=0))

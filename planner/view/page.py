"""One HTML page about one plan or two: headline, memory and streams, seconds by kind, modules, stages, what differs.

The page holds all that it shows and loads nothing; its content policy forbids that as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from planner.common.root_name import shown
from planner.common.units import format_bytes, format_seconds
from planner.graph.operator_graph import Phase
from planner.layers.plan.document import LayerPlan
from planner.layers.plan.rendering import layer_runs
from planner.replay.wording import placement_text
from planner.schedule.instructions import Compute, Free, Offload, Prefetch, Reshard, Update, Wait
from planner.view.charts import seconds_figure, step_figure
from planner.view.differences import differences
from planner.view.flows import flows_of
from planner.view.modules import Module, module_tree
from planner.view.opened import OpenedPlan
from planner.view.peak import at_peak, placement_of
from planner.view.stages import stages_figure

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("charts", "modules", "graph")
"""Scripts of the page, each of which uses what those before it define; plans of layers need the first alone."""
TENSORS_SHOWN = 15
"""Tensors alive at the peak that are shown before the others are unfolded."""


class ViewError(ValueError):
    """A library of the page that is missing; the message names it and the remedy."""


def page(plans: Sequence[OpenedPlan | tuple[str, LayerPlan]]) -> str:
    """The page of one plan, or of two side by side.

    Parameters
    ----------
    plans
        One plan or two; plans of layers with their names.

    Returns
    -------
    str
        HTML, of which 4.8 MB are plotly.js; a plan adds about 30 kB for each layer of a transformer.

    Raises
    ------
    ViewError
        plotly or jinja2 is not installed.
    """
    check_libraries()
    from jinja2 import Environment, FileSystemLoader
    from plotly.offline import get_plotlyjs

    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(bytes=format_bytes, seconds=lambda nanoseconds: format_seconds(nanoseconds * 1e-9))
    opened = [plan for plan in plans if isinstance(plan, OpenedPlan)]
    trees = [module_tree(plan) for plan in opened]
    layered = [plan for plan in plans if not isinstance(plan, OpenedPlan)]
    stages = [stages_figure(made, [other for _, other in layered]) for _, made in layered]
    data = {
        "charts": [
            {
                "step": json.loads(step_figure(plan, opened).to_json()),
                "kinds": json.loads(seconds_figure(plan, opened).to_json()),
            }
            for plan in opened
        ]
        + [{} if figure is None else {"stages": json.loads(figure.to_json())} for figure in stages],
        "graphs": [flows_of(plan, tree).document(tree) for plan, tree in zip(opened, trees, strict=True)],
        "instructions": [_instructions(plan, tree) for plan, tree in zip(opened, trees, strict=True)],
    }
    names = [plan.name if isinstance(plan, OpenedPlan) else plan[0] for plan in plans]
    return environment.get_template("page.html").render(
        title=" and ".join(names),
        names=names,
        headline=headline([_rows(plan) for plan in plans]),
        notes=[_notes(plan) for plan in plans],
        opened=opened,
        trees=trees,
        peaks=[at_peak(plan.report, TENSORS_SHOWN) for plan in opened],
        placement_of=placement_of,
        differences=differences(opened[0], opened[1], trees[0], trees[1]) if len(opened) == 2 else None,
        layered=layered,
        stages=stages,
        layer_runs=layer_runs,
        data=_script(data),
        plotly=get_plotlyjs(),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        scripts=[(ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS[: None if opened else 1]],
    )


def check_libraries() -> None:
    """Check that the libraries of a page are there, before anything is computed for it.

    Raises
    ------
    ViewError
        plotly or jinja2 is not installed.
    """
    missing = [name for name in ("plotly", "jinja2") if find_spec(name) is None]
    if missing:
        raise ViewError(f"{' and '.join(missing)} not installed: pip install 'meshwright[view]'")


def headline(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Rows of (name, a value for each plan), a dash where a plan has none."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "-") for column in columns]) for name in names]


def _rows(plan: OpenedPlan | tuple[str, LayerPlan]) -> dict[str, str]:
    if isinstance(plan, OpenedPlan):
        certificate = plan.plan.record.certificate
        rows: dict[str, str] = {}
        for name, value in plan.plan.rows():
            if name != "note":
                rows[name] = value
            if name == "gap":
                rows["proof"] = "none" if certificate.proof is None else str(certificate.proof)
        return rows
    made, record = plan[1], plan[1].record
    rows = {
        "model": made.model.text(),
        "mesh": f"{made.devices} devices, stages of {', '.join(map(str, made.stage_sizes))}",
    }
    if record is not None:
        rows |= {
            "formulation": f"{record.formulation}, {made.optimizer}",
            "status": record.status,
            "objective": f"{format_seconds(record.objective_seconds)} per step",
            "bound": "-" if record.bound_seconds is None else format_seconds(record.bound_seconds),
            "gap": "-" if record.gap is None else f"{100 * record.gap:.2f} %",
            "solver": f"{record.solver}, {format_seconds(record.seconds)}",
            "peak memory": format_bytes(max(record.stage_peak_bytes, default=0)),
            "memory limit": format_bytes(record.tensor_bytes),
        }
    return rows


def _notes(plan: OpenedPlan | tuple[str, LayerPlan]) -> tuple[str, ...]:
    if isinstance(plan, OpenedPlan):
        return plan.plan.record.notes
    return () if plan[1].record is None else plan[1].record.notes


def _script(data: Any) -> str:
    """JSON that no text in it can end the script element of."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _instructions(opened: OpenedPlan, tree: Module) -> dict[str, Any]:
    """Instructions of every module as rows of texts, which are numbered, nanoseconds and bytes."""
    texts: dict[str, int] = {}

    def text(given: str) -> int:
        return texts.setdefault(given, len(texts))

    def row(at: int) -> list[int]:
        what, name, where = _described(opened, at)
        return [at, text(what), text(name), text(where), opened.time.durations[at], opened.created_bytes[at]]

    rows = {module.path: list(map(row, module.instructions)) for module in tree.walk() if module.instructions}
    return {"rows": rows, "texts": list(texts)}


def _described(opened: OpenedPlan, at: int) -> tuple[str, str, str]:
    """Kind, name and placements of an instruction."""
    entry, buffers, graph = opened.schedule.instructions[at], opened.schedule.buffers, opened.graph

    def placements(positions: Sequence[int | None]) -> str:
        return " ".join(placement_text(buffers[buffer].placement) for buffer in positions if buffer is not None)

    def name(buffer: int) -> str:
        return shown(graph.values[buffers[buffer].value].name)

    match entry:
        case Compute(operator, inputs, outputs, recompute):
            described = graph.operators[operator]
            phase = "forward" if described.phase is Phase.FORWARD else "backward"
            what = f"recompute {phase}" if recompute else phase
            return what, described.target, f"{placements(inputs)} → {placements(outputs)}"
        case Reshard(source, _, path, overlapped, joined, in_place):
            start = "start of reshard in place" if in_place else "start of reshard"
            what = "joined reshard" if joined else start if overlapped else "reshard"
            return what, name(source), " → ".join(map(placement_text, path))
        case Wait(buffer):
            return "wait", name(buffer), placements([buffer])
        case Update(parameter):
            return "update", name(parameter), placements([parameter])
        case Offload(source) | Prefetch(source):
            return ("offload" if isinstance(entry, Offload) else "prefetch"), name(source), placements([source])
        case Free(freed):
            return "release, after a copy", f"{len(freed)} buffers", ""

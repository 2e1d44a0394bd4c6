"""Page of KIWI's results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from planner.papers.cells import Row
from planner.papers.kiwi.headline import COMPARED, PRINTED, factors, largest, least_memory
from planner.papers.page import MISSING, Rows, Section, grid, pivot

__all__ = ["SECTIONS", "TITLE"]

TITLE = "KIWI"


def _headline(rows: Rows) -> Iterator[str]:
    yield "Time of a step of a baseline over that of `kiwi_chain` within the same memory, where both have a plan: the"
    yield "largest factor that the abstract prints, ours, and where ours is. The paper gives neither operator costs,"
    yield "links nor the sequence; what a baseline loses depends on how many bytes of activations the limit cuts off."
    yield ""
    found = factors(rows)
    lines = []
    for name, printed in PRINTED.items():
        row = largest(found, name)
        where = MISSING if row is None else _place(row)
        ours = MISSING if row is None else f"{row['factor']:.2f}"
        least = min((each["factor"] for each in found if each["formulation"] == name), default=None)
        lines.append([name, f"{printed:g}", ours, where, MISSING if least is None else f"{least:.4f}"])
    yield from grid(["baseline", "paper", "ours", "where", "least factor"], lines)


def _place(row: Row) -> str:
    return (
        f"{row['model']} on {row['mesh']}, sequence {row['sequence']}, {row['optimizer']}, links / {row['slowdown']}, "
        f"limit {row['share']} %"
    )


def _table_1(rows: Rows) -> Iterator[str]:
    yield "Cost over that of the best plan without a limit, and seconds of the solver, on our perceptron. The programs"
    yield "`published` are the paper's own, linearised as it does; they end by time, and where their solver claims an"
    yield "optimum, the second figure of seconds is until then. The others are proven. The part"
    yield "`table_1_published_long` gives the full program half an hour at each limit, as long as the paper's solver"
    yield "took at most; its rows are the last, where it was run."
    yield ""
    lines = []
    for row in [*rows["table_1"], *rows["table_1_published"], *rows.get("table_1_published_long", ())]:
        claimed, gap = row.get("claimed_seconds"), row.get("claimed_gap_percent")
        lines.append(
            [
                f"{row['formulation']}",
                f"{row['share']} %",
                _text(row["ratio"], ".3f"),
                _text(row["seconds"], ".1f"),
                _text(claimed, ".1f"),
                _text(gap, ".0f", " %"),
                row["status"],
            ]
        )
    yield from grid(["formulation", "limit", "cost", "seconds", "until claimed", "claimed gap", "status"], lines)


def _text(value: float | None, form: str, unit: str = "") -> str:
    return MISSING if value is None else f"{value:{form}}{unit}"


def _peaks(rows: Rows) -> Iterator[str]:
    yield "Least memory in GB on one device in which a plan was found: the smallest peak found, or a limit below that a"
    yield "plan keeps. In brackets what no plan of the formulation gets below:"
    yield ""
    found = []
    for model in ("encoder", "decoder"):
        held = least_memory(rows[f"figure_5_{model}"])
        for row in rows[f"figure_5_{model}"]:
            place = row["mesh"], row["formulation"]
            if row["share"] is None and place in held:
                least = "" if row["least_gb"] is None else f" ({row['least_gb']:.2f})"
                found.append({**row, "case": f"{model}, {row['mesh']}", "text": f"{held[place]:.2f}{least}"})
    yield from pivot(found, "formulation", "case", "text", str)


def _limits(table: str, columns: Sequence[str], rows: Rows, why: str = "") -> Iterator[str]:
    """Extra time and gap by formulation, one table for each value of the columns but the last."""
    *fixed, across = columns
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows[table]:
        if row["share"] is not None:
            cases.setdefault(tuple(row[name] for name in fixed), []).append(row)
    yield "Extra time of the step over the fastest sharded plan without a limit, in brackets the gap to the bound."
    yield "Limits are in per cent of that plan's peak; a formulation begins with the plans of those above it that it"
    yield f"contains.{why}"
    for case, found in cases.items():
        name = ", ".join(f"{column} {value}" for column, value in zip(fixed, case, strict=True))
        yield ""
        yield f"{name[:1].upper()}{name[1:]}:"
        yield ""
        shown = [{**row, "text": _extra(row)} for row in found]
        yield from pivot(shown, "formulation", across, "text", str)


def _extra(row: Row) -> str:
    if row["cost"] is None:
        return str(row["status"]).replace("_", " ")
    return f"{row['extra_percent']:.2f} % ({_text(row['gap_percent'], '.2g', ' %')})"


def _plans(rows: Rows) -> Iterator[str]:
    yield "What the plan of `kiwi_chain` does as links slow down:"
    yield ""
    yield from grid(
        ["links divided by", "limit", "operators that run again", "collectives", "peak (GB)"],
        (
            [
                str(row["slowdown"]),
                f"{row['share']} %",
                str(row["recomputed"]),
                str(row["collectives"]),
                f"{row['peak_gb']:.2f}",
            ]
            for row in rows["figure_6_plans"]
        ),
    )


def _seconds(rows: Rows) -> Iterator[str]:
    yield "Seconds of the solver with building the problem, in brackets the gap where it ended by time:"
    for share in dict.fromkeys(row["share"] for row in rows["figure_7"]):
        yield ""
        yield f"Limit {share} %:"
        yield ""
        shown = []
        for row in rows["figure_7"]:
            if row["share"] == share:
                gap = "" if row["status"] == "optimal" else f" ({_text(row['gap_percent'], '.2g', ' %')})"
                shown.append({**row, "text": f"{row['seconds']:.1f}{gap}"})
        yield from pivot(shown, "formulation", "layers", "text", str)


def _operators(rows: Rows) -> Iterator[str]:
    yield "Operators of the encoder's traced step, in primitives; the paper counts those of XLA:"
    yield ""
    yield from grid(["layers", "operators"], ([str(row["layers"]), str(row["operators"])] for row in rows["operators"]))


def _within(intro: str, table: str, rows: Rows) -> Iterator[str]:
    yield intro
    yield ""
    yield from pivot(({**row, "text": _extra(row)} for row in rows[table]), "formulation", "share", "text", str)


def _llama(rows: Rows) -> Iterator[str]:
    yield "A Llama as wide as Llama 3 8B on 2x4 H100, `kiwi_chain`, from the module to the checked plan:"
    yield ""
    yield from grid(
        ["layers", "for tensors (GB)", "step (ms)", "gap", "seconds", "status"],
        (
            [
                str(row["layers"]),
                f"{row['limit_gb']:.1f}",
                MISSING if row["cost"] is None else f"{row['cost'] / 1e6:.1f}",
                _text(row["gap_percent"], ".2g", " %"),
                f"{row['seconds']:.1f}",
                row["status"],
            ]
            for row in rows["llama"]
        ),
    )


_RECOMPUTE = (
    "A Llama with 32 layers on one device, head and loss in parts: recomputation alone, and with offload. Limits are "
    "in\nper cent of the dynamic memory of the plan without one: all but parameters, optimizer state, inputs and "
    "gradients:"
)
_ONE_LIMIT = (
    " One mesh and one limit, as the question is what the\nsequence and the optimizer change; other meshes and limits "
    "are in Figure 5's tables."
)
_TWENTY = (
    "`kiwi_chain` on one mesh axis of eight devices, at limits in per cent of the peak of the fastest sharded plan:"
)

SECTIONS = (
    Section("The headline of the abstract", COMPARED, _headline),
    Section(
        "Table 1: the full problem, its reductions, and the paper's programs",
        ("table_1", "table_1_published"),
        _table_1,
        ("table_1_published_long",),
    ),
    Section("Table 2: operators", ("operators",), _operators),
    Section("Figure 5: least memory", ("figure_5_encoder", "figure_5_decoder"), _peaks),
    Section(
        "Figure 5: the encoder under limits",
        ("figure_5_encoder",),
        partial(_limits, "figure_5_encoder", ("mesh", "share")),
    ),
    Section(
        "Figure 5: the decoder under limits",
        ("figure_5_decoder",),
        partial(_limits, "figure_5_decoder", ("mesh", "share")),
    ),
    Section("Figure 6: slower links", ("figure_6",), partial(_limits, "figure_6", ("slowdown", "share"))),
    Section("Figure 6: the plans", ("figure_6_plans",), _plans),
    Section(
        "What the paper leaves open: sequence and optimizer",
        ("sequence_lengths",),
        partial(_limits, "sequence_lengths", ("optimizer", "share", "sequence"), why=_ONE_LIMIT),
    ),
    Section("Figure 7: time of the solver", ("figure_7",), _seconds),
    Section("The encoder with 20 layers", ("twenty_layers",), partial(_within, _TWENTY, "twenty_layers")),
    Section(
        "Llama with 32 layers on one device", ("llama_recompute",), partial(_within, _RECOMPUTE, "llama_recompute")
    ),
    Section("Llama from the module to the plan", ("llama",), _llama),
)
"""In the order of the page."""

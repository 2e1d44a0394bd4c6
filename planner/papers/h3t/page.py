"""Page of H3T's results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from planner.papers.cells import Row
from planner.papers.h3t import paper_tables as paper
from planner.papers.hardware import Hardware
from planner.papers.page import MISSING, Rows, Section, grid, losses, pivot

__all__ = ["SECTIONS", "TITLE"]

TITLE = "H3T"

_TABLE_1 = {Hardware.PRESET: "table_1", Hardware.INFERRED: "table_1_inferred"}

SYNCHRONIZED = {
    "dp_printed": "dynamic program as printed",
    "dp_published": "the same without slips that the text contradicts",
    "dp_up": "the same, memory rounded up",
}
"""Searches of segments that synchronize: their exact solution is ``exact``."""

FREE = {
    "greedy_printed": "greedy as printed",
    "greedy": "greedy, layers spread evenly",
    "uniform": "one set for all layers",
    "random": "random",
}
"""Searches that may leave synchronization out: their exact solution is ``exact_free``."""

SHOWN = ("zero2", "zero3", "all_on", "dp_printed", "dp_published", "dp_up", "greedy", "exact", "exact_free")


def _seconds(value: float) -> str:
    return f"{value:.3g}"


def _with_free(rows: Rows, hardware: Hardware) -> list[Row]:
    return [*rows[_TABLE_1[hardware]], *(row for row in rows["exact_free"] if row["hardware"] == hardware)]


def _by_solver(rows: Sequence[Row]) -> Mapping[str, Mapping[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for row in rows:
        found.setdefault(row["solver"], {})[row["column"]] = row["seconds"]
    return found


def _losses(rows: Rows) -> Iterator[str]:
    yield "What a search loses beside the exact solution of the same problem, as a share of its time. Searches of the"
    yield "dynamic program synchronize every segment, as `exact` does; the others need not, as `exact_free` need not."
    yield "A plan over the limit, counted in bytes, is none."
    for hardware in Hardware:
        seconds = _by_solver(_with_free(rows, hardware))
        shares: dict[str, list[float | None]] = {}
        for searches, exact in ((SYNCHRONIZED, "exact"), (FREE, "exact_free")):
            for solver, name in searches.items():
                pairs = [(seconds[solver][column], best) for column, best in seconds[exact].items() if best]
                shares[name] = [None if found is None else found / best - 1 for found, best in pairs]
        yield ""
        yield f"Hardware {hardware}:"
        yield ""
        yield from losses(shares)
    fixed = [row for name in _TABLE_1.values() for row in rows[name] if row["solver"] == "exact"]
    proven = sum(row["bound"] == row["seconds"] for row in fixed)
    free = rows["exact_free"]
    gaps = [1 - row["bound"] / row["seconds"] for row in free if None not in (row["bound"], row["seconds"])]
    yield ""
    yield f"`exact` is proven in {proven} of {len(fixed)} columns, `exact_free` in"
    yield f"{sum(row['proven'] for row in free)} of {len(free)}; where its time ended, it is"
    yield f"within {100 * max(gaps):.1f} % of its bound."


def _table_1(rows: Rows) -> Iterator[str]:
    yield "Seconds of a step. ZeRO-2, ZeRO-3 and all switches on have the whole device, the others the paper's limit."
    yield "For 64 A100 nothing is inferred, as the paper does not say what is between the nodes."
    for hardware in Hardware:
        by = {(row["column"], row["solver"]): row for row in _with_free(rows, hardware)}
        shown = [by[column, solver] for column in dict.fromkeys(c for c, _ in by) for solver in SHOWN]
        yield ""
        yield f"Hardware {hardware}:"
        yield ""
        yield from pivot(shown, "column", "solver", "seconds", _seconds)
    yield ""
    yield "The paper measured:"
    yield ""
    names = {"zero2": "zero2", "zero3": "zero3", "all_on": "all_on", "dp": "dp", "greedy": "greedy"}
    printed = [
        {"column": f"{column.cluster}/{column.model}/{column.batch}", "solver": name, "seconds": paper.TABLE_1[key][k]}
        for k, column in enumerate(paper.COLUMNS)
        for name, key in names.items()
    ]
    yield from pivot(printed, "column", "solver", "seconds", _seconds)


def _optimizer(rows: Rows) -> Iterator[str]:
    yield "Seconds of the exact synchronized plan where the optimizer updates each layer as soon as its gradient is in"
    yield "host memory (`overlapped`, as in Table 1), behind the step (`at_the_end`, the default of plans), or not at"
    yield "all (`left_out`):"
    yield ""
    yield from pivot(
        [row for row in rows["optimizer"] if row["solver"] == "exact"], "column", "optimizer", "seconds", _seconds
    )


def _figure_6(rows: Rows) -> Iterator[str]:
    found = rows["figure_6"]
    yield f"The exact synchronized plan is proven at {sum(row['proven'] for row in found)} of {len(found)} limits, from"
    yield "the least memory of any such plan to that of the fastest one. Greedy, random and manual sequences may leave"
    yield "synchronization out: `exact_free` begins with the best of all, and where its time ended, its bound is in"
    yield "brackets. Seconds of a step:"
    free = {_limit_of(row): row for row in rows.get("figure_6_free", ())}
    for hardware in Hardware:
        yield ""
        yield f"Hardware {hardware}:"
        yield ""
        names = ("dp", "dp_up", "greedy", "uniform", "random", "exact")
        yield from grid(
            ["column, limit in GB", *names, *["exact_free"] * bool(free)],
            (
                [
                    f"{row['column']}, {row['limit_gb']:g}",
                    *(MISSING if row[name] is None else _seconds(row[name]) for name in names),
                    *([_with_bound(free[_limit_of(row)])] if free else []),
                ]
                for row in found
                if row["hardware"] == hardware
            ),
        )


def _limit_of(row: Row) -> tuple[str, str, float]:
    return row["hardware"], row["column"], round(row["limit_gb"], 3)


def _with_bound(row: Row) -> str:
    if row["seconds"] is None:
        return MISSING
    return _seconds(row["seconds"]) + ("" if row["proven"] else f" ({_seconds(row['bound'])})")


def _table_3(rows: Rows) -> Iterator[str]:
    yield "Gigabytes: the least that any synchronized plan needs, and what none goes below even without synchronization"
    yield "(`floor`); all switches on, which the paper measured, and ZeRO. Ours is above the paper's by three terms: a"
    yield "layer's backward has its activations beside its workspace and its gradient, and every device has embedding"
    yield "and head with their gradients (`rest` is without these)."
    yield ""
    names = ("least", "floor", "all_on", "zero2", "zero3")
    yield from grid(
        ["column", *names, "rest", "paper, all on"],
        (
            [
                row["column"],
                *(_seconds(row[name]) for name in names),
                _seconds(row["all_on"] - row["workspace"] - row["gradient"] - row["ends"]),
                _seconds(printed),
            ]
            for row, printed in zip(rows["table_3"], paper.TABLE_3, strict=True)
        ),
    )


def _table_5(rows: Rows) -> Iterator[str]:
    yield "Seconds of the solvers; the paper's minutes are of serial Python on another machine."
    yield ""
    names = ("dp", "greedy", "random")
    yield from grid(
        ["case", *names, "exact", *(f"paper, {name} (min)" for name in names)],
        (
            [
                f"{row['model']}, {row['batch']}, {row['limit_gb']:g} GB",
                *(_seconds(row[f"{name}_seconds"]) for name in (*names, "exact")),
                *(_seconds(getattr(printed, name)) for name in names),
            ]
            for row, printed in zip(rows["table_5"], paper.TABLE_5, strict=True)
        ),
    )


def _table_6(rows: Rows) -> Iterator[str]:
    keys = ("partition", "lazy_prefetch", "remat", "offload_hidden")
    ties = {(row["hardware"], row["case"], row["switch"]): row for row in rows["table_6_ties"]}
    yield "Percent of the layers with a switch on in the dynamic program's plan (`greedy` is greedy's), in brackets the"
    yield "least and the most among all fastest synchronized plans, where these are counted."
    yield ""
    lines = []
    for row in rows["table_6"]:
        cells = []
        for key in keys:
            span = ties.get((row["hardware"], row["case"], key)) if row["case"] != "greedy" else None
            between = "" if span is None else f" ({span['least']:.0f} to {span['most']:.0f})"
            cells.append(f"{row[key]:.0f}{between}")
        lines.append([f"{row['case']}, {row['hardware']}", *cells])
    lines += [[f"{case}, paper", *(f"{share}" for share in shares)] for case, shares in paper.TABLE_6.items()]
    yield from grid(["case", *keys], lines)
    yield ""
    yield "How the shares change from the default case (+ more layers, - fewer, 0 as many), ours with inferred hardware"
    yield "and the paper's:"
    yield ""
    ours = {row["case"]: row for row in rows["table_6"] if row["hardware"] == "inferred"}
    changes = []
    for case in ("pcie-slow", "compute-slow", "limit-25"):
        if {"default", case} <= ours.keys():
            printed = zip(paper.TABLE_6[case], paper.TABLE_6["default"], strict=True)
            pairs = zip(keys, printed, strict=True)
            cells = [f"{_sign(ours[case][key] - ours['default'][key])} / {_sign(a - b)}" for key, (a, b) in pairs]
            changes.append([case, *cells])
    yield from grid(["case", *keys], changes)


def _sign(change: float) -> str:
    return "0" if change == 0 else "+" if change > 0 else "-"


def _restated(rows: Rows) -> Iterator[str]:
    yield "Free synchronization in two ways: one CP-SAT model of the simulator, and a descent with bounds of a relaxed"
    yield "program by HiGHS. Steps with few layers are decided by the first, longer ones by the second."
    yield ""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows["free_restated"]:
        groups.setdefault((row["layers"], row["way"]), []).append(row)
    lines = []
    for (layers, way), group in groups.items():
        gaps = [row["gap"] for row in group if row["gap"] is not None]
        lines.append(
            [
                f"{layers} layers, {way}",
                f"{sum(row['proven'] for row in group)} of {len(group)}",
                MISSING if not gaps else f"{100 * median(gaps):.2g} %",
                MISSING if not gaps else f"{100 * max(gaps):.2g} %",
                _seconds(sum(row["seconds"] for row in group) / len(group)),
            ]
        )
    yield from grid(["steps", "proven", "median gap", "worst gap", "mean seconds"], lines)
    medians = {place: median(row["gap"] for row in group if row["gap"] is not None) for place, group in groups.items()}
    yield ""
    for way, other in (("event model", "program"), ("program", "event model")):
        ahead = [k for k, each in medians if each == way and 2 * medians[k, way] < medians[k, other]]
        yield f"The median gap of the {way} is less than half the other's with {', '.join(map(str, ahead))} layers."


def _canonical(rows: Rows) -> Iterator[str]:
    yield "Synchronized plans of columns of Table 1, inferred hardware: the exact search, and the portfolio of solvers"
    yield "on the canonical problem:"
    yield ""
    yield from grid(
        ["column", "exact (s)", "proven", "portfolio (s)", "proven", "gap of the portfolio"],
        (
            [
                row["column"],
                f"{row['exact_seconds']:.2f}",
                "yes" if row["exact_proven"] else "no",
                _seconds(row["seconds"]),
                "yes" if row["proven"] else "no",
                MISSING if row["gap"] is None else f"{100 * row['gap']:.2g} %",
            ]
            for row in rows["canonical"]
        ),
    )


def _gpt_3(rows: Rows) -> Iterator[str]:
    yield "GPT-3-175B on 64 A100 with all switches on; what the paper states of it is among the claims. Its links"
    yield "between nodes are not given. Energy (Figure 10) is not reproduced: our costs have no power."
    yield ""
    yield from grid(
        ["batch", "seconds", "peak (GB)", "host memory of a node (GB)"],
        (
            [str(row["batch"]), _seconds(row["seconds"]), _seconds(row["peak_gb"]), f"{row['host_gb']:.0f}"]
            for row in rows["gpt_3"]
        ),
    )


SECTIONS = (
    Section("What the searches lose", ("table_1", "table_1_inferred", "exact_free"), _losses),
    Section("Table 1: seconds of a step", ("table_1", "table_1_inferred", "exact_free"), _table_1),
    Section("When the optimizer runs", ("optimizer",), _optimizer),
    Section("Table 3: the least memory", ("table_3",), _table_3),
    Section("Table 5: seconds of the solvers", ("table_5",), _table_5),
    Section("Table 6: which switches are on", ("table_6", "table_6_ties"), _table_6),
    Section("Figure 6: limits", ("figure_6",), _figure_6, ("figure_6_free",)),
    Section("The exact search beside general solvers", ("canonical",), _canonical),
    Section("Free synchronization, restated", ("free_restated",), _restated),
    Section("GPT-3-175B", ("gpt_3",), _gpt_3),
)
"""In the order of the page."""

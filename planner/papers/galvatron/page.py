"""Page of Galvatron-BMW's results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from formulations.galvatron.slips import READINGS
from planner.papers.cells import Row
from planner.papers.galvatron import paper_tables as paper
from planner.papers.page import MISSING, Rows, Section, grid, losses, pivot
from planner.papers.printed import printed

__all__ = ["SECTIONS", "TITLE"]

TITLE = "Galvatron-BMW"

SEARCHED = {
    "table_2": "II",
    "table_3": "III",
    "table_3_inferred": "III, inferred",
    "table_5": "V",
    "table_5_inferred": "V, inferred",
}
"""Tables whose variants the paper's searches solve too."""

SEARCHES = {
    "printed": "the whole search as printed",
    "published": "as published: but for the two slips that its text contradicts",
    "repaired": "all slips repaired",
}


def _searches(rows: Rows) -> Iterator[str]:
    """What the paper's searches lose, and how far the exact ones are proven."""
    named = {table: text for table, text in SEARCHED.items() if table in rows}
    solved = [
        row for table in named for row in rows[table] if row["strategy"] in paper.VARIANTS and row["rate"] is not None
    ]
    yield "What the paper's search loses beside the exact plan of the same problem, as a share of the exact one's time."
    yield f"Every variant of Tables {'; '.join(named.values())} that has a plan, with the strategies that Takeaway 3"
    yield "leaves:"
    yield ""
    yield from losses(
        {
            text: [row["rate"] / found - 1 if (found := row[f"{name}_rate"]) else None for row in solved]
            for name, text in SEARCHES.items()
            if all(f"{name}_rate" in row for row in solved)
        }
    )
    yield ""
    gaps = _gaps(solved)
    yield (
        f"The exact search begins with what the others found. Its proven gap is at most {100 * max(gaps):.2f} %, "
        f"{100 * median(gaps):.2f} % in the median."
    )
    over = [row for row in solved if row.get("printed_needs_gb")]
    if over:
        most = max(row["printed_needs_gb"] / row["memory_gb"] for row in over)
        yield (
            f"As printed, Algorithm 3 returns nothing where no layer is checkpointed; {len(over)} plans that the "
            f"search returns need more than the limit, up to {most:.1f} times."
        )


def _stages(rows: Rows) -> Iterator[str]:
    """Algorithm 3 alone."""
    stages = rows["stages"]
    yield "Whole models as one stage on eight TITAN RTX, all strategies: what Algorithm 3 loses beside exact labels."
    yield ""
    yield from losses(
        {name: [row[name] / row["exact"] - 1 if row[name] else None for row in stages] for name in READINGS}
    )
    yield ""
    yield f"{sum(row['proven'] for row in stages)} of {len(stages)} exact plans are proven optimal."


def _stages_restated(rows: Rows) -> Iterator[str]:
    """Exact labels beside the portfolio."""
    yield "Whole models as one stage: exact labels, and the portfolio of solvers on the canonical problem:"
    yield ""
    yield from grid(
        ["stage", "labels (s)", "portfolio (s)", "gap of the portfolio"],
        (
            [
                f"{row['model']}, {row['memory_gb']} GB",
                f"{row['exact_seconds']:.2f}",
                f"{row['seconds']:.1f}",
                MISSING if row["gap"] is None else f"{100 * row['gap']:.2g} %",
            ]
            for row in rows["stages_restated"]
        ),
    )


def _restated(rows: Rows) -> Iterator[str]:
    """The joint search beside CP-SAT."""
    yield "The joint search and its restatement for CP-SAT, both to the optimum, on eight TITAN RTX:"
    yield ""
    yield from grid(
        ["problem", "joint (s)", "CP-SAT (s)", "gap of CP-SAT", "plan of CP-SAT over the joint one"],
        (
            [
                f"{row['model']}, {row['layers']} layers, {row['memory_gb']} GB, batch "
                f"{', '.join(map(str, row['batches']))}",
                f"{row['joint_seconds']:.2f}",
                f"{row['cpsat_seconds']:.1f}",
                MISSING if row["cpsat_gap"] is None else f"{100 * row['cpsat_gap']:.1f} %",
                MISSING if not row["cpsat_quanta"] else f"{row['cpsat_quanta'] / row['joint_quanta']:.3f}",
            ]
            for row in rows["restated"]
        ),
    )


def _gaps(rows: Iterable[Row]) -> list[float]:
    """Proven gaps of rates, as shares of the rate, where a search bounded them."""
    return [row["rate_bound"] / row["rate"] - 1 for row in rows if row["rate"] and row.get("rate_bound")]


def _rates(title: str, table: str, theirs: Mapping[str, paper.Table], models: Sequence[str]) -> Section:
    """Ours and the paper's samples per second of one table."""

    def lines(rows: Rows) -> Iterator[str]:
        for cluster, limits in theirs.items():
            for memory_gb, strategies in limits.items():
                cells = {
                    (row["strategy"], row["model"]): row
                    for row in rows[table]
                    if (row["cluster"], row["memory_gb"]) == (cluster, memory_gb)
                }
                yield f"{cluster}, {memory_gb} GB, samples per second, ours and the paper's:"
                yield ""
                names = dict.fromkeys(strategy for strategy, _ in cells)
                yield from grid(
                    ["strategy", *models],
                    (
                        [name, *(_cell(cells[name, model], strategies, place) for place, model in enumerate(models))]
                        for name in names
                    ),
                )
                yield ""

        if table == "table_2":
            yield "`3d` is 2 x 2 x 2, as in the paper."
        else:
            yield "The paper prints no degrees of `3d` on more than eight devices: here two stages and tensor"
            yield "parallelism of two stay, and replicas fill the devices."
        if gaps := _gaps(rows[table]):
            yield ""
            yield f"Proven gaps of ours that are searched: at most {100 * max(gaps):.2g} %, in the median"
            yield f"{100 * median(gaps):.2g} %."

    return Section(title, (table,), lines)


def _cell(row: Row, strategies: Mapping[str, Sequence[object]], place: int) -> str:
    """Our rate, and the printed one of the variants."""
    ours = "OOM" if row["rate"] is None else f"{row['rate']:.1f}"
    if row["strategy"] not in strategies:
        return ours
    cell = strategies[row["strategy"]][place]
    theirs = cell[0] if isinstance(cell, tuple) else None
    return f"{ours} ({MISSING if theirs is None else f'{theirs:.1f}'})"


def _partitions(rows: Rows) -> Iterator[str]:
    """Figure 4 and Table IV."""
    yield "Figure 4, the printed partitions of BERT-Huge-48 under inferred hardware:"
    yield ""
    inferred = [row for row in rows["figure_4"] if row["hardware"] == "inferred"]
    yield from grid(
        ["partition", "layers", "alpha_t", "alpha_m", "samples/s"],
        (
            [
                row["partition_name"],
                " ".join(map(str, row["partition"])),
                f"{row['alpha_t']:.3f}",
                f"{row['alpha_m']:.3f}",
                f"{row['rate']:.1f}",
            ]
            for row in inferred
        ),
    )
    yield ""
    yield "Table IV, samples per second of balanced partitions and of the exact one, inferred hardware:"
    yield ""
    cells = [row | {"cell": f"{row['model']}, {row['memory_gb']} GB"} for row in rows["table_4_inferred"]]
    yield from pivot(cells, "cell", "strategy", "rate", lambda rate: f"{rate:.1f}", "model")


def _estimator(rows: Rows) -> Iterator[str]:
    """Figure 5 on local runs."""
    yield "Steps of small models on two local processes, measured, and by the estimator with the profile of a step on"
    yield "one device:"
    yield ""
    yield from grid(
        ["plan", "measured (s)", "slowdown 1.3 (s)", "no slowdown (s)"],
        (
            [
                f"{row['model']}, {row['plan']}",
                *(f"{row[column]:.3f}" for column in ("measured", "with_slowdown", "without")),
            ]
            for row in rows["figure_5"]
        ),
    )
    yield ""
    paper_errors = printed("galvatron")["figure_5"]
    for column, text, theirs in (
        ("with_slowdown", "with the slowdown", f"below {paper_errors['mean_error_with_slowdown_pct_below']}"),
        ("without", "without it", f"above {paper_errors['mean_error_without_pct_above']}"),
    ):
        errors = [abs(row[column] / row["measured"] - 1) for row in rows["figure_5"]]
        yield f"Mean error {text}: {100 * sum(errors) / len(errors):.0f} %; the paper's is {theirs} %."
    yield ""
    yield "The link's figures are those of the machine's calibration; communication takes time of the same cores."


def _plans(rows: Rows) -> Iterator[str]:
    """Figure 7."""
    yield "Layers with one strategy, stage by stage, and what the paper says of its plan:"
    yield ""
    yield from grid(
        ["case", "search", "samples/s", "stages", "paper"],
        (
            [
                f"{row['case']}: {row['model']} on {row['cluster']}",
                row["solver"],
                f"{row['rate']:.1f}",
                " / ".join(", ".join(f"{count} {each}" for count, each in stage) for stage in row["runs"]),
                row["paper"],
            ]
            for row in rows["figure_7"]
            if row["runs"] is not None
        ),
    )


def _search_time(rows: Rows) -> Iterator[str]:
    """Figure 6."""
    yield "Seconds of the repaired search for BMW, three batches:"
    yield ""
    yield from grid(
        ["cluster", "devices", "GB", "blocks", "seconds"],
        (
            [row["cluster"], *(str(row[name]) for name in ("devices", "memory_gb", "blocks")), f"{row['seconds']:.2f}"]
            for row in rows["figure_6"]
        ),
    )


def _stage_time(rows: Rows) -> Iterator[str]:
    """Figure 6 for the search of one stage."""
    yield "Milliseconds of one stage's search on eight TITAN RTX, batch 32. Memory grows with the layers; `exact` has a"
    yield "proven gap of 0.01 %."
    yield ""
    yield from pivot(
        rows["figure_6_stages"], "layers", "search", "seconds", lambda seconds: f"{1e3 * seconds:.2f}", "layers"
    )


_TITAN_8, _TITAN_16, _A100_16, _A100_64 = (
    "titan-rtx-8-pcie",
    "titan-rtx-2x8-pcie",
    "a100-2x8-nvlink",
    "a100-8x8-nvlink",
)

SECTIONS: tuple[Section, ...] = (
    Section(
        "The paper's searches beside exact plans",
        ("table_2", "table_3"),
        _searches,
        ("table_3_inferred", "table_5", "table_5_inferred"),
    ),
    Section("Single stages", ("stages",), _stages),
    Section("Single stages beside general solvers", ("stages_restated",), _stages_restated),
    Section("The exact search beside a general solver", ("restated",), _restated),
    Section("Partitions: Figure 4 and Table IV", ("figure_4", "table_4_inferred"), _partitions),
    Section("Figure 5: errors of the estimator", ("figure_5",), _estimator),
    Section("Figure 6: time of the search", ("figure_6",), _search_time),
    Section("Figure 6: time of one stage's search", ("figure_6_stages",), _stage_time),
    Section("Figure 7: plans", ("figure_7",), _plans),
    _rates("Table II", "table_2", {_TITAN_8: paper.TABLE_2}, paper.TABLE_2_MODELS),
    _rates(
        "Table III", "table_3", {_TITAN_16: paper.TABLE_3_TITAN, _A100_16: paper.TABLE_3_A100}, paper.TABLE_3_MODELS
    ),
    _rates("Table III, inferred hardware", "table_3_inferred", {_A100_16: paper.TABLE_3_A100}, paper.TABLE_3_MODELS),
    _rates("Table V", "table_5", {_A100_64: paper.TABLE_5}, paper.TABLE_5_MODELS),
    _rates("Table V, inferred hardware", "table_5_inferred", {_A100_64: paper.TABLE_5}, paper.TABLE_5_MODELS),
)
"""In the order of the page."""

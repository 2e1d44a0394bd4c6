"""Page of CAPTURE's results."""

from __future__ import annotations

from collections.abc import Iterator

from planner.papers.capture.tables import PRINTED_PLACEMENTS
from planner.papers.cells import Row
from planner.papers.page import MISSING, Rows, Section, grid, losses

__all__ = ["SECTIONS", "TITLE"]

TITLE = "CAPTURE"

LOCAL = tuple(f"figure_7_local_{kind}_{schedule}" for kind in ("pipelines", "mixed") for schedule in ("gpipe", "1f1b"))
PREDICTORS = {
    "published": "CAPTURE's, as published",
    "repaired": "CAPTURE's, repaired",
    "engine": "formula of torch's engine",
}

_WITHIN = (2, 5, 11)


def _cases(rows: Rows, table: str) -> dict[tuple[str, str, int], dict[str, Row]]:
    """Rows of every case by solver."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows[table]:
        found.setdefault((row["schedule"], row["model"], row["batch"]), {})[row["solver"]] = row
    return found


def _searches(rows: Rows) -> Iterator[str]:
    """What the published choices lose."""
    cases = _cases(rows, "figure_6_hybrid")
    yield "What the choice of a predictor among all plans takes more than the least peak, as a share of that."
    yield "The predictor leaves out where in the pipeline a stage is, which 1F1B needs. As printed, Algorithm 4 ends"
    cut = [each["printed"] for each in cases.values() if "printed" in each and not each["printed"]["complete"]]
    yield f"after {PRINTED_PLACEMENTS:,} placements, which it reaches in {len(cut)} cases; the others see all plans."
    yield ""
    yield from losses(
        {
            f"{text}, {schedule}": [
                each[name]["peak_gb"] / each["exact"]["peak_gb"] - 1 if name in each else None
                for (of, _, _), each in cases.items()
                if of == schedule
            ]
            for schedule in dict.fromkeys(schedule for schedule, _, _ in cases)
            for name, text in (
                ("printed", "Algorithm 4 as printed"),
                ("published", "published predictor"),
                ("repaired", "repaired predictor"),
            )
        }
    )


_COMPARED = ("printed", "published", "exact")
"""Solvers beside Alpa's choice."""


def _against_alpa(rows: Rows) -> Iterator[str]:
    """Figures 6 and 8."""
    for table, what in (("figure_6_hybrid", "All plans"), ("figure_6_pipeline", "Pipelines alone")):
        yield f"{what}, on four nodes of four A100: memory saved and throughput lost against Alpa's choice, modelled:"
        yield ""
        lines = []
        for (schedule, model, batch), each in _cases(rows, table).items():
            line = [f"{model}, batch {batch}, {schedule}", f"{each['alpa']['peak_gb']:.2f}"]
            for solver in _COMPARED:
                if solver not in each:
                    line += [MISSING] * 3
                    continue
                saved = 1 - each[solver]["peak_gb"] / each["alpa"]["peak_gb"]
                lost = 1 - each[solver]["rate"] / each["alpa"]["rate"]
                line += [f"{each[solver]['peak_gb']:.2f}", f"{100 * saved:.1f} %", f"{100 * lost:.1f} %"]
            lines.append(line)
        header = ["case", "Alpa (GB)"]
        for solver in _COMPARED:
            header += [f"{solver} (GB)", "saved", "lost"]
        yield from grid(header, lines)
        yield ""


def _smaller(rows: Rows) -> Iterator[str]:
    """Figure 9."""
    yield "Wide-ResNet 1B with GPipe on fewer GPUs; plans that do not fit are marked, and searches of Algorithm 4 that"
    yield "were ended after a number of placements:"
    yield ""
    yield from grid(
        ["GPUs", "solver", "peak (GB)", "samples/s", "plan"],
        (
            [
                row["gpus"],
                row["solver"],
                f"{row['peak_gb']:.2f}" + " (does not fit)" * (not row["fits"]) + " (ended)" * (not row["complete"]),
                f"{row['rate']:.1f}",
                row["plan"],
            ]
            for row in rows["figure_9"]
            if row["solver"] in ("alpa", *_COMPARED)
        ),
    )
    yield ""
    yield "The fewest GPUs on which a model fits:"
    yield ""
    yield from grid(
        ["model", "schedule", "GPUs", "peak (GB)"],
        (
            [
                row["model"],
                row["schedule"],
                MISSING if row["gpus"] is None else str(row["gpus"]),
                MISSING if row["gpus"] is None else f"{row['peak_gb']:.2f}",
            ]
            for row in rows["fewest"]
        ),
    )


def _times(rows: Rows) -> Iterator[str]:
    """Table II."""
    yield "Simulated seconds of profiling runs, and seconds of planning; Algorithm 4 ends at a number of placements:"
    yield ""
    yield from grid(
        ["model", "layers", "runs", "profiling (s)", "Algorithm 4 (s)", "as printed (s)", "exact (s)"],
        (
            [
                row["model"],
                str(row["layers"]),
                str(row["runs"]),
                f"{row['profiling_seconds']:.0f}",
                f"{row['planning_seconds']:.2f}{_ended(row, '')}",
                f"{row['printed_planning_seconds']:.2f}{_ended(row, 'printed_')}",
                f"{row['exact_seconds']:.4f}",
            ]
            for row in rows["table_2"]
        ),
    )


def _ended(row: Row, prefix: str) -> str:
    return "" if row[f"{prefix}complete"] else f", ended at {row[f'{prefix}placements']:,}"


def _restated(rows: Rows) -> Iterator[str]:
    """The exact program beside the canonical problem."""
    yield "Seconds to the same least peak: the exact program, and the canonical problem in a bisection of its limit:"
    yield ""
    yield from grid(
        ["model", "schedule", "layers", "exact (s)", "canonical (s)", "peak (GB)"],
        (
            [
                row["model"],
                row["schedule"],
                str(row["layers"]),
                f"{row['exact_seconds']:.4f}",
                f"{row['canonical_seconds']:.3f}",
                f"{row['exact_peak_gb']:.2f}",
            ]
            for row in rows["restated"]
        ),
    )


def _laws(rows: Rows) -> Iterator[str]:
    """Memory over the degree of data parallelism."""
    yield "GB of a stage of eight layers of GPT-3 6.7B, batch 1024 with GPipe, over the degree of data parallelism."
    yield "Both laws go through degrees 2 and 4: the paper's `a + b ln n`, and `a + b / n`."
    yield ""
    yield from grid(
        ["degree", "a + b ln n", "a + b / n", "replay"],
        (
            [str(row["degree"]), *(f"{row[f'{name}_gb']:.2f}" for name in ("logarithm", "division", "replay"))]
            for row in rows["degrees"]
        ),
    )


def _errors(rows: Rows) -> Iterator[str]:
    """Figure 7 against the replay."""
    yield "Random plans of Wide-ResNet 1B: share of predictions that are within an error of what the replay holds (%):"
    yield ""
    yield from grid(
        ["predictor", *(f"{what}s within {share} %" for share in _WITHIN for what in ("GPU", "plan"))],
        (
            [
                f"{row['predictor']}, {row['schedule']}",
                *(f"{row[f'{what}_within_{share}']:.1f}" for share in _WITHIN for what in ("gpu", "plan")),
            ]
            for row in rows["figure_7"]
        ),
    )


def _local(table: str) -> Section:
    """Figure 7 on local runs of one kind of plans."""
    _, _, _, kind, schedule = table.split("_")

    def lines(rows: Rows) -> Iterator[str]:
        plans = rows[table]
        models = ", ".join(dict.fromkeys(row["model"] for row in plans))
        what = "one device a stage" if kind == "pipelines" else "data or tensor parallelism in some stage"
        yield f"{len(plans)} different plans of {models} on local processes, {schedule}, {what}: errors of predicted"
        yield "peaks against measured ones."
        yield ""
        table_rows = []
        for name, text in PREDICTORS.items():
            gpus = [abs(error) for row in plans for error in row[f"{name}_gpus"]]
            peaks = [abs(row[f"{name}_plan"]) for row in plans]
            shares = [_share(errors, limit) for limit in _WITHIN for errors in (gpus, peaks)]
            table_rows.append([text, *shares, f"{100 * max(gpus):.1f} %", f"{100 * max(peaks):.1f} %"])
        header = [f"{each}s within {share} % (%)" for share in _WITHIN for each in ("GPU", "plan")]
        yield from grid(["predictor", *header, "worst GPU", "worst plan"], table_rows)

    return Section(f"Figure 7 on local runs: {kind}, {schedule}", (table,), lines)


def _share(errors: list[float], limit: int) -> str:
    return f"{100 * sum(error <= limit / 100 for error in errors) / len(errors):.1f}"


SECTIONS: tuple[Section, ...] = (
    Section("The published choice beside the least peak", ("figure_6_hybrid",), _searches),
    Section("Figures 6 and 8: against Alpa", ("figure_6_hybrid", "figure_6_pipeline"), _against_alpa),
    Section("Memory over the degree of data parallelism", ("degrees",), _laws),
    Section("Figure 7: errors of predictions", ("figure_7",), _errors),
    *(_local(table) for table in LOCAL),
    Section("Figure 9: fewer GPUs", ("figure_9", "fewest"), _smaller),
    Section("Table II: time", ("table_2",), _times),
    Section("The exact program beside a general solver", ("restated",), _restated),
)
"""In the order of the page."""

"""Page of OSDP's results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

from planner.papers.cells import Row
from planner.papers.osdp.search_tables import LOSS_SECONDS, ended
from planner.papers.page import MISSING, Rows, Section, grid, losses, pivot

__all__ = ["SECTIONS", "TITLE"]

TITLE = "OSDP"

SEARCHES = {
    "dfs": "depth first as published",
    "dfs_sharded_first": "the same, sharded first",
    "dfs_grouped": "the same, equal operators grouped",
    "dfs_look_ahead": "the same, looking ahead",
}


def _rate(value: float) -> str:
    return f"{value:.2f}"


def _losses(rows: Rows) -> Iterator[str]:
    found = rows["losses"]
    yield "What the paper's searches lose beside the exact solution of the same problem, as a share of its time: all"
    yield f"models, limits and machines, uncut and with four slices, by equation (1), {LOSS_SECONDS:g} s a search."
    yield ""
    yield from losses({name: [row["lost"] for row in found if row["search"] == key] for key, name in SEARCHES.items()})
    exact = [row for row in found if row["search"] == "dfs"]
    proven = sum(row["exact_proven"] for row in exact)
    yield ""
    longest = max(row["exact_seconds"] for row in exact)
    yield f"The exact search proves {proven} of {len(exact)}, each in at most {longest:.2g} s."


def _limits(rows: Rows) -> Iterator[str]:
    yield "The paper's search on 8 TITAN RTX with 8 GiB, up to about as long as the paper reports: in brackets what it"
    yield "found, as extra time beside the exact plan. Its cuts look at the operators that have a mode, and at nothing"
    yield "that the others need at the least, so more seconds help by chance."
    yield ""
    shown: list[Row] = []
    for row in (*rows["search_limits"], *rows.get("search_limits_long", ())):
        missing = "nothing fits" if ended(row) else "no plan"
        lost = missing if row["lost"] is None else f"{100 * row['lost']:.3g} %"
        text = f"{'done' if ended(row) else 'cut off'} ({lost})"
        shown.append({"model": row["model"], "limit": f"{row['limit_seconds']:g} s", "found": text})
        shown.append({"model": row["model"], "limit": "exact", "found": f"{row['exact_seconds']:.2f} s"})
    yield from pivot(shown, "model", "limit", "found", str)


def _figure(rows: Sequence[Row], strategies: Sequence[str]) -> Iterator[str]:
    """Samples/s of some strategies."""
    shown = [
        {"case": f"{row['model']}, {row['memory_gib']} GiB", "strategy": row["strategy"], "rate": row["rate"]}
        for strategy in strategies
        for row in rows
        if row["strategy"] == strategy
    ]
    yield from pivot(shown, "case", "strategy", "rate", _rate)


def _gains(rows: Sequence[Row], ours: str, other: str) -> str:
    """The largest and the mean gain of a strategy over another, where both fit."""
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["rate"] is not None:
            rates.setdefault((row["model"], row["memory_gib"]), {})[row["strategy"]] = row["rate"]
    gains = [each[ours] / each[other] - 1 for each in rates.values() if ours in each and other in each]
    return f"{100 * max(gains):.1f} %, {100 * mean(gains):.1f} % on average of {len(gains)}" if gains else MISSING


PIPELINES = tuple(f"pipeline:{name}" for name in ("ddp", "fsdp", "tp", "gpipe", "1f1b", "osdp", "3d", "3d_osdp"))
PLANS = ("osdp_base:replicated", "osdp_base:sharded", "osdp_base:knapsack", "osdp:knapsack")
PEAKS = ("osdp_peak_base:sharded", "osdp_peak_base:knapsack", "osdp_peak:knapsack")


def _throughput(table: str) -> Section:
    number = table.rpartition("_")[2]

    def lines(rows: Rows) -> Iterator[str]:
        yield "Samples/s of all devices. By equation (1): replicated (DP), sharded (FSDP), the exact plan uncut and"
        yield "with four slices."
        yield ""
        yield from _figure(rows[table], PLANS)
        yield ""
        yield "At the true peak: FSDP, the exact plan uncut, and with any slices."
        yield ""
        yield from _figure(rows[table], PEAKS)
        yield ""
        yield "Uniform strategies by one evaluator, and OSDP in place of data parallelism in pipelines (`3d_osdp`):"
        yield ""
        yield from _figure(rows[table], PIPELINES)
        yield ""
        pairs = [
            ("osdp", "osdp:knapsack", "osdp:sharded"),
            ("osdp at the true peak", "osdp_peak:knapsack", "osdp_peak:sharded"),
            ("3d_osdp over 3d", "pipeline:3d_osdp", "pipeline:3d"),
        ]
        yield from grid(
            ["gain (the first two over FSDP)", "at most"],
            ([name, _gains(rows[table], ours, other)] for name, ours, other in pairs),
        )

    return Section(f"Figure {number}: throughput", (table,), lines)


def _cutting(rows: Rows) -> Iterator[str]:
    yield "What slices gain over whole operators, and what the exact plan with checkpointing gains over FSDP with it"
    yield "(Figures 8 and 9), on 8 TITAN RTX:"
    yield ""
    pairs = [
        ("Figure 8, equation (1)", "osdp:knapsack", "osdp_base:knapsack"),
        ("Figure 8, true peak", "osdp_peak:knapsack", "osdp_peak_base:knapsack"),
        ("Figure 9", "osdp_checkpointing:knapsack", "osdp_checkpointing:sharded"),
    ]
    yield from grid(
        ["figure", "gain at most"], ([name, _gains(rows["figure_5"], ours, other)] for name, ours, other in pairs)
    )
    yield ""
    yield from _figure(rows["figure_5"], ("osdp_checkpointing:sharded", "osdp_checkpointing:knapsack"))


def _pieces(rows: Rows) -> Iterator[str]:
    """Figure 7 of the paper."""
    yield "A sharded product from a hidden size to four times it, one sample on 8 TITAN RTX, bytes in GB:"
    yield ""
    yield from pivot(rows["figure_7"], "granularity", "hidden", "bytes", lambda each: f"{each / 1e9:.2f}", "slices")


def _room(rows: Rows) -> Iterator[str]:
    yield "By equation (1) an exact plan gains little over FSDP, as FSDP's own best batch leaves less memory than one"
    yield "more sample takes. Where the batch grows by the units of the authors' script, more is left and gained:"
    yield ""
    lines = []
    for formulation in dict.fromkeys(row["formulation"] for row in rows["room"]):
        of = [row for row in rows["room"] if row["formulation"] == formulation]
        lines.append(
            [
                formulation,
                str(len(of)),
                f"{mean(row['left_bytes'] for row in of) / 2**30:.2f}",
                f"{100 * max(row['possible'] for row in of):.1f} %",
                f"{100 * max(row['gained'] for row in of):.1f} %",
            ]
        )
    yield from grid(
        ["formulation", "cases", "left (GiB, mean)", "possible at FSDP's batch, at most", "gained, at most"], lines
    )
    yield ""
    yield "The profile in the authors' repository, solved exactly on the layers of its printed run, gains over FSDP:"
    yield ""
    yield from grid(["bytes", "gain"], ([row["bytes"], f"{100 * row['gained']:.1f} %"] for row in rows["profile"]))


def _opinions(rows: Rows) -> Iterator[str]:
    found = rows["second_opinion"]
    agrees = sum(row["same_cost"] for row in found)
    yield "HiGHS on the canonical problem at the exact plan's batch, for one model of each family, by equation (1) and"
    yield f"at the true peak: it found the same cost in {agrees} of {len(found)} cases within its time."


SECTIONS = (
    Section("What the searches lose", ("losses",), _losses),
    Section("Seconds of the paper's search", ("search_limits",), _limits, ("search_limits_long",)),
    _throughput("figure_5"),
    _throughput("figure_6"),
    Section("Figure 7: cut operators", ("figure_7",), _pieces),
    Section("Figures 8 and 9: cutting and checkpointing", ("figure_5",), _cutting),
    Section("Why so little over FSDP", ("room", "profile"), _room),
    Section("Second opinion", ("second_opinion",), _opinions),
)
"""In the order of the page."""

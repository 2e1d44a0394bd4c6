"""Kept rows: no exact plan is dearer than a search's or a baseline's on the same problem; what is proven stays proven.

Each kept table is compared here, or has nothing to compare and is named in :data:`NOTHING`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from planner.papers.claims.claim import PAPERS
from planner.papers.claims.one_model import BASELINES
from planner.papers.claims.results import kept_results
from planner.papers.h3t.searches import FIGURE_6_COLUMNS, FIGURE_6_SHARES
from planner.papers.hardware import Hardware
from planner.papers.kiwi.tables import FORMULATIONS
from planner.session.formulations import PUBLISHED

ROWS = {paper: kept_results(paper).rows for paper in PAPERS}
Rows = Sequence[Mapping[str, Any]]
Pairs = Iterator[tuple[object, float | None, float | None]]
"""Where; what the exact plan costs, None where there is none; what the other does. Rates are negative."""

GAP = 0.001
"""At which exact searches of the one model end."""


def across(names: Mapping[str, Sequence[str]], rows: Rows, sign: int = 1) -> Pairs:
    """Columns of one row: what is exact by name, with what it is compared."""
    for row in rows:
        for exact, others in names.items():
            for other in others:
                yield (other, row), _signed(row[exact], sign), _signed(row.get(other), sign)


def down(
    contained: Mapping[str, Sequence[str]], name: str, value: str, place: Sequence[str], rows: Rows, sign: int = 1
) -> Pairs:
    """Rows of one place: those with a name, with those whose problem theirs contains."""
    places: dict[tuple[object, ...], dict[str, float | None]] = {}
    for row in rows:
        places.setdefault(tuple(row.get(each) for each in place), {})[row[name]] = _signed(row[value], sign)
    for where, found in places.items():
        for exact, others in contained.items():
            for other in others:
                if {exact, other} <= found.keys():
                    yield (where, exact, other), found[exact], found[other]


def _signed(value: float | None, sign: int) -> float | None:
    return None if value is None else sign * value


PURE = ("ddp", "tp", "gpipe", "fsdp")
VARIANTS = {
    "galvatron_dp_tp": ("ddp", "tp"),
    "galvatron_dp_pp": ("ddp", "gpipe"),
    "galvatron": (*PURE, "galvatron_dp_tp", "galvatron_dp_pp"),
    "galvatron_1f1b_biobj": (*PURE, "1f1b", "3d", "galvatron"),
    "galvatron_base": (*PURE, "galvatron"),
    "galvatron_bmw": ("galvatron_1f1b_biobj", "galvatron_base"),
}
READINGS = ("printed", "published", "repaired")


def _variants(table: str) -> Pairs:
    rows = ROWS["galvatron"][table]
    yield from down(VARIANTS, "strategy", "rate", ("cluster", "memory_gb", "model"), rows, -1)
    searched = [row for row in rows if row["strategy"] in VARIANTS]
    yield from across({"rate": [f"{name}_rate" for name in READINGS]}, searched, -1)
    bounded = [row for row in searched if row.get("rate_bound") is not None]
    yield from across({"rate_bound": ["rate"]}, bounded, -1)


def _partitions(table: str) -> Pairs:
    rows = ROWS["galvatron"][table]
    others = sorted({row["strategy"] for row in rows} - {"exact"})
    yield from down({"exact": others}, "strategy", "rate", ("memory_gb", "model"), rows, -1)


def _osdp_rates(table: str) -> Pairs:
    rows = ROWS["osdp"][table]
    forms = {row["strategy"].partition(":")[0] for row in rows} - {"pipeline"}
    contained = {f"{form}:knapsack": (f"{form}:replicated", f"{form}:sharded") for form in forms}
    contained |= {f"osdp{of}:knapsack": (f"osdp{of}_base:knapsack",) for of in ("", "_peak")}
    contained |= {"pipeline:osdp": ("pipeline:ddp", "pipeline:fsdp"), "pipeline:3d_osdp": ("pipeline:3d",)}
    yield from down(contained, "strategy", "rate", ("cluster", "memory_gib", "model"), rows, -1)


H3T_SEARCHES = {
    "exact": ("dp_printed", "dp_published", "dp", "dp_up"),
    "exact_on_device": ("all_on", "zero2", "zero3"),
    "exact_free": ("exact", "greedy_printed", "greedy", "uniform", "random"),
}
"""Searches by the exact row of their problem: synchronized at the paper's limit; synchronized with the whole device;
with synchronization as a choice, at the paper's limit."""


def _h3t_columns(table: str, hardware: Hardware) -> Pairs:
    free = [row for row in ROWS["h3t"]["exact_free"] if row["hardware"] == hardware]
    rows = [*ROWS["h3t"][table], *free]
    assert {row["solver"] for row in rows} == {*H3T_SEARCHES, *(each for of in H3T_SEARCHES.values() for each in of)}
    yield from down(H3T_SEARCHES, "solver", "seconds", ("column",), rows)
    yield from across({"bound": ["seconds"]}, [row for row in rows if row["bound"] is not None])


def _h3t_limits() -> Pairs:
    def place(row: Mapping[str, Any]) -> tuple[object, ...]:
        return row["hardware"], row["column"], round(row["limit_gb"], 3)

    free = {place(row): row for row in ROWS["h3t"]["figure_6_free"]}
    rows = [{**row, "free": free[place(row)]["seconds"]} for row in ROWS["h3t"]["figure_6"]]
    assert len(free) == len(rows)
    searches = ("dp", "dp_up", "greedy", "uniform", "random", "exact")
    yield from across({"exact": ("dp", "dp_up"), "free": searches}, rows)
    yield from across({"bound": ["seconds"]}, list(free.values()))


def _capture_peaks(table: str) -> Pairs:
    contained = {"exact": ("alpa", "printed", "published", "repaired")}
    place = ("model", "batch", "schedule", "gpus")
    yield from down(contained, "solver", "peak_gb", place, ROWS["capture"][table])


KIWI = {"kiwi_reduced": ("sharding",), "kiwi_chain": FORMULATIONS[:-1]}


def _kiwi_limits(table: str) -> Pairs:
    rows = [row for row in ROWS["kiwi"][table] if row["share"] is not None]
    yield from down(KIWI, "formulation", "cost", ("mesh", "slowdown", "sequence", "optimizer", "share"), rows)


def _kiwi_programs() -> Pairs:
    rows = [*ROWS["kiwi"]["table_1"], *ROWS["kiwi"]["table_1_published"]]
    contained: dict[str, tuple[str, ...]] = {exact: (published,) for exact, published in PUBLISHED.items()}
    contained |= {"kiwi_chain": ("kiwi_reduced", "sharding")}
    contained["kiwi_reduced"] += ("sharding",)
    contained["kiwi_full"] += ("kiwi_chain",)
    yield from down(contained, "formulation", "ratio", ("share",), rows)


def _one_model(paper: str) -> Pairs:
    objective = "peak_gb" if paper == "capture" else "step_ms"
    if paper == "kiwi":
        contained: dict[str, tuple[str, ...]] = {"kiwi_chain": ("kiwi_reduced",)}
        yield from down(contained, "planner", objective, ("limit_gb",), ROWS[paper]["one_model"])
        return
    yield from down({"exact": ("published",)}, "way", objective, ("limit_gb",), ROWS[paper]["one_model"])
    if paper != "capture":  # whose plans beyond it are the fastest, not the smallest
        for place, exact, other in down(
            {"exact": tuple(BASELINES.get(paper, ())), "beyond": ("exact",)},
            "way",
            objective,
            ("limit_gb",),
            ROWS[paper]["one_model"],
        ):
            yield place, exact, None if other is None else other * (1 + GAP)


COMPARED: Mapping[tuple[str, str], Callable[[], Pairs]] = {
    **{(paper, "one_model"): partial(_one_model, paper) for paper in PAPERS},
    **{
        ("galvatron", name): partial(_variants, name)
        for name in ("table_2", "table_3", "table_3_inferred", "table_5", "table_5_inferred")
    },
    **{("galvatron", name): partial(_partitions, name) for name in ("table_4", "table_4_inferred")},
    ("galvatron", "figure_7"): lambda: down(
        {"exact": READINGS}, "solver", "rate", ("case",), ROWS["galvatron"]["figure_7"], -1
    ),
    ("galvatron", "stages"): lambda: across({"exact": READINGS}, ROWS["galvatron"]["stages"]),
    ("galvatron", "figure_6_stages"): lambda: down(
        {"exact": READINGS}, "search", "quanta", ("layers",), ROWS["galvatron"]["figure_6_stages"]
    ),
    ("galvatron", "restated"): lambda: across({"joint_quanta": ["cpsat_quanta"]}, ROWS["galvatron"]["restated"]),
    **{("osdp", name): partial(_osdp_rates, name) for name in ("figure_5", "figure_6")},
    **{
        ("osdp", name): lambda name=name: ((row, 0.0, row["lost"]) for row in ROWS["osdp"][name])
        for name in ("losses", "search_limits", "search_limits_long")
    },
    **{
        ("osdp", name): lambda name=name: ((row, 0.0, row["gained"]) for row in ROWS["osdp"][name])
        for name in ("room", "profile")
    },
    ("h3t", "table_1"): partial(_h3t_columns, "table_1", Hardware.PRESET),
    ("h3t", "table_1_inferred"): partial(_h3t_columns, "table_1_inferred", Hardware.INFERRED),
    ("h3t", "optimizer"): lambda: down(
        {"exact": ("dp_published", "dp_up")}, "solver", "seconds", ("column", "optimizer"), ROWS["h3t"]["optimizer"]
    ),
    ("h3t", "figure_6"): _h3t_limits,
    **{
        ("capture", name): partial(_capture_peaks, name)
        for name in ("figure_6_hybrid", "figure_6_pipeline", "figure_9")
    },
    ("capture", "restated"): lambda: across({"exact_peak_gb": ["canonical_peak_gb"]}, ROWS["capture"]["restated"]),
    **{
        ("kiwi", name): partial(_kiwi_limits, name)
        for name in ("figure_5_encoder", "figure_5_decoder", "figure_6", "sequence_lengths")
    },
    ("kiwi", "table_1"): _kiwi_programs,
    ("kiwi", "llama_recompute"): lambda: down(
        {"kiwi_offload": ("kiwi_chain",)}, "formulation", "cost", ("share",), ROWS["kiwi"]["llama_recompute"]
    ),
}
"""Pairs of a table; of some with the rows of another, as what both answer is one problem."""

WITH_ANOTHER = {("h3t", "exact_free"), ("h3t", "figure_6_free"), ("kiwi", "table_1_published")}
"""Tables whose rows are compared with those of another."""

_SEARCHED = ("free_restated", "canonical")
NOTHING = {
    "kiwi": ("operators", "figure_6_plans", "figure_7", "twenty_layers", "llama"),
    "osdp": ("table_1", "figure_7", "modes", "second_opinion"),
    "galvatron": ("strategies", "figure_4", "figure_6", "figure_5", "stages_restated"),
    "h3t": ("search_space", "table_3", "table_5", "table_6", "table_6_ties", "switches", "plans", "gpt_3", *_SEARCHED),
    "capture": ("description_1", "profiling_runs", "degrees", "figure_7", "fewest", "table_2"),
}
"""Tables of sizes, seconds, errors and single plans; local runs are compared with their predictions elsewhere."""


def test_every_kept_table_is_compared_or_has_nothing_to_compare() -> None:
    named = {*COMPARED, *WITH_ANOTHER, *((paper, name) for paper, names in NOTHING.items() for name in names)}
    kept = {(paper, name) for paper, tables in ROWS.items() for name in tables}
    local = {(paper, name) for paper, name in kept if name.endswith("_runs") or name.startswith("figure_7_local")}
    assert named == kept - local | {("capture", "profiling_runs")}
    assert len(named) == len(COMPARED) + len(WITH_ANOTHER) + sum(map(len, NOTHING.values()))


@pytest.mark.parametrize(("paper", "table"), [pytest.param(*each, id="-".join(each)) for each in COMPARED])
def test_exact_is_never_dearer_than_what_it_contains(paper: str, table: str) -> None:
    compared = 0
    for place, exact, other in COMPARED[paper, table]():
        if other is not None:
            compared += 1
            assert exact is not None, place
            assert exact <= other * (1 - 1e-12 if other < 0 else 1 + 1e-12), place
    assert compared


@pytest.mark.parametrize("table", ["table_1", "figure_5_encoder", "figure_5_decoder", "figure_6", "llama_recompute"])
def test_kiwi_costs_no_more_within_a_larger_limit(table: str) -> None:
    costs: dict[tuple[object, ...], list[tuple[int, float]]] = {}
    for row in ROWS["kiwi"][table]:
        if row["share"] is not None:
            cost = row.get("cost", row.get("ratio"))
            place = *(row.get(each) for each in ("mesh", "slowdown")), row["formulation"]
            costs.setdefault(place, []).append((row["share"], math.inf if cost is None else cost))
    assert any(len(found) > 1 for found in costs.values())
    for place, found in costs.items():
        ordered = [cost for _, cost in sorted(found)]
        assert ordered == sorted(ordered, reverse=True), place


def test_osdp_is_proven_in_every_case() -> None:
    """Of every formulation in Figures 5 and 6; the other problems are proven to have no plan."""
    rows = [*ROWS["osdp"]["figure_5"], *ROWS["osdp"]["figure_6"]]
    exact = [row for row in rows if row["strategy"].endswith(":knapsack")]
    assert Counter(row["status"] for row in exact) == {"optimal": 229, "infeasible": 23}
    assert all(row["exact_proven"] for row in ROWS["osdp"]["losses"])
    assert all(row["status"] == "optimal" and row["same_cost"] for row in ROWS["osdp"]["second_opinion"])


def test_galvatron_is_proven_within_a_thousandth() -> None:
    """In Tables II and III; at most a thousandth of the bound, at which the search ends."""
    rows = [row for table in ("table_2", "table_3") for row in ROWS["galvatron"][table] if row["rate"]]
    gaps = [row["rate_bound"] / row["rate"] - 1 for row in rows if row["rate_bound"]]
    assert len(gaps) >= 333
    assert max(gaps) <= 0.001 + 2e-6
    assert all(row["proven"] for row in ROWS["galvatron"]["stages"])


@pytest.mark.parametrize("table", ["table_1", "table_1_inferred"])
def test_h3t_is_proven_in_all_columns(table: str) -> None:
    exact = [row for row in ROWS["h3t"][table] if row["solver"] == "exact"]
    assert len({row["column"] for row in exact}) == len(exact) == 12
    assert all(row["bound"] == row["seconds"] is not None for row in exact)


def test_h3t_is_proven_at_all_limits() -> None:
    rows = ROWS["h3t"]["figure_6"]
    for hardware in Hardware:
        of = [row for row in rows if row["hardware"] == hardware]
        assert len(of) == len(FIGURE_6_COLUMNS) * len(FIGURE_6_SHARES) == 28
    assert all(row["proven"] and row["bound"] == row["exact"] is not None for row in rows)
    assert any(row["greedy"] is not None and row["greedy"] < row["exact"] for row in rows), "synchronization costs"


def test_capture_is_planned_in_milliseconds() -> None:
    """0.4 ms for 16 layers, 2 ms for 32, and by a general solver the same least peak."""
    for row in ROWS["capture"]["restated"]:
        assert row["exact_seconds"] <= {16: 0.4e-3, 32: 2e-3}[row["layers"]], row
        assert row["exact_peak_gb"] == row["canonical_peak_gb"], row


def test_exact_searches_beside_general_solvers_are_kept_where_they_are_twice_as_good() -> None:
    """In seconds or gap: Galvatron-BMW's whole search and its labels, H3T's synchronized search, CAPTURE's program."""
    for row in ROWS["galvatron"]["restated"]:
        assert row["joint_gap"] == 0, row
        assert 2 * row["joint_seconds"] < row["cpsat_seconds"], row
    for row in ROWS["galvatron"]["stages_restated"]:
        assert 2 * row["exact_seconds"] < row["seconds"], row
    for row in ROWS["h3t"]["canonical"]:
        assert row["exact_proven"], row
        assert 2 * row["exact_seconds"] < row["seconds"], row
    for row in ROWS["capture"]["restated"]:
        assert 2 * row["exact_seconds"] < row["canonical_seconds"], row


def test_each_way_of_free_synchronization_is_kept_where_it_is_better() -> None:
    rows = ROWS["h3t"]["free_restated"]
    few = [row for row in rows if row["layers"] <= 4]
    proven = {way: sum(row["proven"] for row in few if row["way"] == way) for way in ("event model", "program")}
    assert proven["event model"] >= 2 * max(1, proven["program"])
    columns = {way: [row for row in rows if row["layers"] == 48 and row["way"] == way] for way in proven}
    gaps = [(a["gap"], b["gap"]) for a, b in zip(columns["event model"], columns["program"], strict=True)]
    assert all(program < model for model, program in gaps)
    assert sum(program < model / 2 for model, program in gaps) >= 3  # of four columns

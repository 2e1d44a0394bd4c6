"""KIWI's claims beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.papers.claims.claim import Answer, Claim, Results, Verdict
from planner.papers.claims.judge import fact, no_figure, not_reproduced, number, percent, remark, same
from planner.papers.kiwi.headline import FIGURE_5, factors, largest, least_memory
from planner.papers.kiwi.tables import TIMED_SHARES

__all__ = ["RULES"]

COSTS = "the paper gives neither operator costs, links nor the sequence length; ours are presets and 512 to 2048 tokens"
SIZES = "the paper does not print the perceptron's sizes; ours are our own instance"
SOLVER = "another solver on another machine and instance"
HLO = "the paper counts operators of XLA's HLO, ours are those of the traced PyTorch step, backward included"
FIGURES = ("figure_5_encoder", "figure_5_decoder")
HEURISTICS = ("checkpoint_dots", "megatron_selective")
COMPARABLE, COMPARED_LAYERS = 2.0, 12
"""Ratio of solver times up to which they are comparable, and the layers up to which the paper finds them so."""

BLOCK_WEIGHTS_GB = 1_258_291_200 * 4 / 1e9


def _largest_factor(results: Results, claim: Claim) -> float | None:
    other = claim.key.rpartition("alpa")[2].removeprefix("_") or "sharding"
    row = largest(factors(results, *FIGURE_5), other)
    return None if row is None else float(row["factor"])


def _never_worse(results: Results, claim: Claim) -> tuple[bool, str]:
    found = [row["factor"] for row in factors(results, *FIGURE_5) if row["formulation"] == "sharding"]
    least = min(found, default=0.0)
    return least >= 1, f"Alpa takes {least:.4f} to {max(found, default=0.0):.3f} times"


def _floor(results: Results, claim: Claim) -> float | None:
    _, model, mesh = claim.key.split("/")
    return least_memory(results[f"figure_5_{model}"]).get((mesh.removeprefix("mesh_"), "kiwi_chain"))


def _only_kiwi(results: Results, claim: Claim) -> tuple[bool, str]:
    below = []
    for model in ("encoder", "decoder"):
        floors = least_memory(results[f"figure_5_{model}"])
        for mesh in ("2x4", "4x2"):
            ours, *others = (
                floors.get((mesh, each), float("inf"))
                for each in ("kiwi_chain", "sharding", "checkpoint_dots", "megatron_selective")
            )
            below.append((ours < min(others), f"{model} {mesh}: {ours:.2f} against {min(others):.2f} GB"))
    return all(holds for holds, _ in below), "; ".join(text for _, text in below)


def _mlp(results: Results) -> Mapping[int, Mapping[str, Mapping[str, Any]]]:
    found: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in results["table_1"]:
        if row["ratio"] is not None:
            found.setdefault(row["share"], {})[row["formulation"]] = row
    return found


def _increases(results: Results) -> dict[int, float]:
    return {
        share: percent(rows["kiwi_reduced"]["ratio"] / rows["kiwi_full"]["ratio"])
        for share, rows in _mlp(results).items()
        if {"kiwi_reduced", "kiwi_full"} <= rows.keys()
    }


def _worst(results: Results, claim: Claim) -> float | None:
    increases = _increases(results)
    if not increases:
        return None
    share = max(increases, key=lambda each: increases[each])
    return float(share) if claim.key.endswith("limit_pct") else increases[share]


def _full_seconds(results: Results, claim: Claim) -> float | None:
    row = _mlp(results).get(20, {}).get("kiwi_full")
    seconds = None if row is None else float(row["seconds"])
    return seconds if seconds is None or not claim.key.endswith("_min") else seconds / 60


def _solver_factor(results: Results, claim: Claim) -> float | None:
    rows = _mlp(results).get(20, {})
    if not {"kiwi_full", "kiwi_reduced"} <= rows.keys():
        return None
    return float(rows["kiwi_full"]["seconds"] / rows["kiwi_reduced"]["seconds"])


def _table_1(results: Results, claim: Claim) -> tuple[bool, str]:
    words, holds = [], True
    for printed in claim.printed:
        rows = _mlp(results).get(printed["limit_pct"], {})
        full, reduced = rows.get("kiwi_full"), rows.get("kiwi_reduced")
        if full is None or reduced is None:
            words.append(f"{printed['limit_pct']} %: none")
            holds = False
            continue
        ratios = full["ratio"], reduced["ratio"]
        holds = holds and all(
            abs(ours / printed[which]["latency"] - 1) <= 0.1
            for ours, which in zip(ratios, ("full", "reduced"), strict=True)
        )
        words.append(
            f"{printed['limit_pct']} %: full {ratios[0]:.3f} in {full['seconds']:.1f} s, reduced {ratios[1]:.3f} in "
            f"{reduced['seconds']:.1f} s"
        )
    words += [f"the paper's own program, {_program(row)}" for row in results["table_1_published"]]
    return holds, "; ".join(words)


def _program(row: Mapping[str, Any]) -> str:
    """A row of the paper's own programs in words."""
    name = f"{row['share']} %, {row['formulation'].split('_')[1]}"
    if row["ratio"] is None:
        return f"{name}: no plan in {row['seconds']:.0f} s"
    if row["claimed_seconds"] is not None:
        return f"{name}: {row['ratio']:.3f}, claimed optimal after {row['claimed_seconds']:.1f} s"
    gap = "no bound" if row["claimed_gap_percent"] is None else f"a claimed gap of {row['claimed_gap_percent']:.0f} %"
    return f"{name}: {row['ratio']:.3f} after {row['seconds']:.0f} s with {gap}"


def _operators(results: Results, claim: Claim) -> float:
    counts = {row["layers"]: row["operators"] for row in results["operators"]}
    return float(counts[int(claim.key.rpartition("/")[2])])


def _slower(results: Results, below: bool) -> tuple[bool, str]:
    """Seconds of KIWI over Alpa's by layers, the larger ratio of both limits: comparable below 12, slower above."""
    seconds = {(row["layers"], row["share"], row["formulation"]): row["seconds"] for row in results["figure_7"]}
    ratios: dict[int, float] = {}
    for layers, share, formulation in seconds:
        if formulation == "kiwi_chain" and (layers < COMPARED_LAYERS if below else layers > COMPARED_LAYERS):
            ratio = seconds[layers, share, "kiwi_chain"] / seconds[layers, share, "sharding"]
            ratios[layers] = max(ratio, ratios.get(layers, 0.0))
    text = ", ".join(f"{layers} layers: {ratio:.2f}" for layers, ratio in sorted(ratios.items()))
    return all(ratio <= COMPARABLE if below else ratio > 1 for ratio in ratios.values()), text


def _costs_by_slowdown(results: Results, share: int) -> dict[int, dict[str, float]]:
    """Costs by formulation under one limit of Figure 6, by slowdown."""
    found: dict[int, dict[str, float]] = {}
    for row in results["figure_6"]:
        costs = found.setdefault(row["slowdown"], {})
        if row["share"] == share and row["cost"] is not None:
            costs[row["formulation"]] = row["cost"]
    return dict(sorted(found.items()))


def _grows(results: Results, claim: Claim) -> tuple[bool, str]:
    """At every limit where Alpa has all plans the gain grows; at full speed no heuristic is as fast as Alpa."""
    holds, compared, words = True, False, []
    for share in sorted({row["share"] for row in results["figure_6"]}):
        by_slowdown = _costs_by_slowdown(results, share)
        pairs = [(costs.get("sharding"), costs.get("kiwi_chain")) for costs in by_slowdown.values()]
        gains = [None if alpa is None or ours is None else alpa / ours for alpa, ours in pairs]
        known = [gain for gain in gains if gain is not None]
        full = by_slowdown[min(by_slowdown)]
        rules = [full[rule] / full["sharding"] for rule in HEURISTICS if {rule, "sharding"} <= full.keys()]
        if len(known) == len(gains):
            compared = True
            holds = holds and known == sorted(known) and known[-1] > known[0]
        holds = holds and all(ratio > 1 for ratio in rules)
        text = ", ".join("none" if gain is None else f"{gain:.3f}" for gain in gains)
        words.append(f"{share} %: {text}; heuristics {', '.join(f'{ratio:.3f}' for ratio in rules) or 'none'}")
    return holds and compared, (
        "Alpa's time over KIWI's at links / 1, 10, 100, and heuristics over Alpa at full speed: " + "; ".join(words)
    )


def _fit(results: Results, claim: Claim) -> tuple[bool, str]:
    values = {layers: 30 + 278 * layers for layers in (1, 4, 8, 12, 16, 20)}
    return True, ", ".join(f"{layers}: {count}" for layers, count in values.items())


def _same_fit(claim: Claim) -> Answer:
    ours = 30 + 278 * int(claim.key.rpartition("/")[2])
    return Answer(str(ours), Verdict.HOLDS if ours == claim.printed else Verdict.DIFFERS, "30 + 278 * layers")


RULES = (
    number("headline/up_to_factor_vs_alpa*", _largest_factor, COSTS, *FIGURE_5),
    fact("headline/never_worse_than_alpa", _never_worse, "where both have a plan, under the same limit", *FIGURE_5),
    remark("headline/note"),
    not_reproduced("figure_1_ms/*", "neither sizes nor links of the 4-layer perceptron are printed"),
    fact(
        "feasibility_floor_gb/statement",
        _only_kiwi,
        "least memory in which kiwi_chain found a plan, and the least of Alpa and both heuristics",
        *FIGURES,
    ),
    fact(
        "feasibility_floor_gb/reading",
        lambda r, c: (abs(BLOCK_WEIGHTS_GB - 5.03) < 0.01, f"{BLOCK_WEIGHTS_GB:.2f} GB"),
        "weights of four blocks by their shapes",
    ),
    number("feasibility_floor_gb/*", _floor, f"least memory in which kiwi_chain found a plan; {COSTS}", *FIGURES),
    fact("table_1", _table_1, f"{SIZES}; {SOLVER}", "table_1", "table_1_published"),
    number("table_1_vs_prose/worst*", _worst, SIZES, "table_1"),
    number(
        "table_1_vs_prose/solver_time*", _full_seconds, f"at 20 %, our program of the full problem; {SOLVER}", "table_1"
    ),
    number(
        "table_1_vs_prose/solver_factor*",
        _solver_factor,
        f"at 20 %, our program of the full problem; {SOLVER}",
        "table_1",
    ),
    number("table_2_encoder_operators/*", _operators, HLO, "operators"),
    fact("table_2_check/fit", _fit, "arithmetic on the printed counts"),
    fact("table_2_check/outlier", lambda r, c: (30 + 278 * 4 == 1142, "1142"), "arithmetic on the printed counts"),
    fact(
        "table_2_check/fit_values/*",
        lambda r, c: (_same_fit(c).verdict is Verdict.HOLDS, _same_fit(c).ours),
        "30 + 278 * layers",
    ),
    same("figure_6/mesh", lambda: [1, 4], "the mesh of table figure_6"),
    same("figure_6/model", lambda: "decoder", "the model of table figure_6"),
    same("figure_6/bandwidth_divisors", lambda: [1, 10, 100], "the slowdowns of table figure_6"),
    fact("figure_6/claim", _grows, f"at shares of the memory of the fastest sharded plan; {COSTS}", "figure_6"),
    no_figure("figure_6/values"),
    same("figure_7/limits_pct", lambda: list(TIMED_SHARES), "the limits of table figure_7"),
    fact(
        "figure_7/comparable*",
        lambda r, c: _slower(r, below=True),
        f"seconds of kiwi_chain over those of sharding, at most {COMPARABLE:g}; {SOLVER}",
        "figure_7",
    ),
    fact(
        "figure_7/slower*",
        lambda r, c: _slower(r, below=False),
        f"seconds of kiwi_chain over those of sharding; {SOLVER}",
        "figure_7",
    ),
    no_figure("figure_7/values_s"),
)
"""In the order in which they are tried."""

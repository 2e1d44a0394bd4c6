"""CAPTURE's claims beside ours: published plans against Alpa's choice, both judged by the replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.papers.capture.cases import PROFILING_GPUS
from planner.papers.capture.tables import PLANS
from planner.papers.claims.claim import Answer, Claim, Results, Rule, printed_claims
from planner.papers.claims.judge import fact, judge_number, no_figure, not_reproduced, number, remark, same

__all__ = ["RULES"]

ALPA = "Alpa's plans are not printed: ours is the fastest plan that fits by the replay; shapes are Alpa's public ones"
REPLAY = "against the replay, which is what is profiled too, not against measurements"
HOURS = "hours of profiling runs on the authors' machine; ours simulates the runs"
GPIPE, HYBRID, PIPELINE = "gpipe", "figure_6_hybrid", "figure_6_pipeline"
MEASURED = "figure_7_local_mixed_gpipe"
MODELS = {"gpt3": "GPT-3", "moe": "MoE", "wide_resnet": "Wide-ResNet"}

Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


def _pairs(results: Results, table: str, schedule: str, model: str = "", solver: str = "published") -> list[Pair]:
    """Alpa's row and another's of every case."""
    rows = [row for row in results[table] if row["schedule"] == schedule and row["model"].startswith(model)]
    cases = {(row["model"], row["batch"], row["gpus"], row["solver"]): row for row in rows}
    return [(row, cases[(*key[:3], solver)]) for key, row in cases.items() if key[3] == "alpa"]


def _saving(pair: Pair) -> float:
    return 100 * (1 - float(pair[1]["peak_gb"]) / float(pair[0]["peak_gb"]))


def _loss(pair: Pair) -> float:
    return 100 * (1 - float(pair[1]["rate"]) / float(pair[0]["rate"]))


def _savings(table: str, schedule: str, model: str = "") -> Callable[[Results, Claim], float | list[float]]:
    def ours(results: Results, claim: Claim) -> float | list[float]:
        found = [_saving(pair) for pair in _pairs(results, table, schedule, model)]
        if isinstance(claim.printed, list):
            return [min(found), max(found)]
        return min(found) if claim.key.endswith("min") else max(found)

    return ours


def _losses(schedule: str, model: str = "") -> Callable[[Results, Claim], float | list[float]]:
    def ours(results: Results, claim: Claim) -> float | list[float]:
        found = [_loss(pair) for pair in _pairs(results, HYBRID, schedule, model)]
        return [min(found), max(found)] if isinstance(claim.printed, list) else max(found)

    return ours


def _total(results: Results, claim: Claim) -> tuple[bool, str]:
    pairs = _pairs(results, HYBRID, "1f1b")
    lower = sum(ours["total_gb"] < alpa["total_gb"] for alpa, ours in pairs)
    return lower == len(pairs), f"total memory lower in {lower} of {len(pairs)} cases"


def _single(results: Results, claim: Claim) -> tuple[bool, str]:
    found = [_saving(pair) for pair in _pairs(results, PIPELINE, "1f1b", "MoE")]
    return all(abs(saving) < 1e-6 for saving in found), ", ".join(f"{saving:.2f} %" for saving in found)


def _within(results: Results, claim: Claim) -> Answer:
    """Of measured peaks where that table was run, else of the replay."""
    _, kind, name = claim.key.split("/")
    rows = results["figure_7"]
    row = next(row for row in rows if row["schedule"] == GPIPE and row["predictor"] == "published")
    replayed = float(row[f"{'gpu' if kind == 'per_gpu_share' else 'plan'}_{name}"])
    plans = results.get(MEASURED)
    if plans is None:
        return judge_number(replayed, claim.printed, REPLAY)
    errors = [
        abs(error)
        for plan in plans
        for error in (plan["published_gpus"] if kind == "per_gpu_share" else [plan["published_plan"]])
    ]
    within = sum(error <= int(name.removeprefix("within_")) / 100 for error in errors) / len(errors)
    return judge_number(
        100 * within, claim.printed, f"plans of small models measured on local processes; {replayed:.4g} {REPLAY}"
    )


def _smaller(results: Results, claim: Claim) -> tuple[bool, str]:
    fewest = [16 / row["gpus"] for row in results["fewest"] if row["gpus"] is not None]
    return max(fewest) > claim.printed, f"the model that needs least fits on {16 / max(fewest):g} of 16 GPUs"


def _setups(results: Results) -> dict[str, dict[str, Mapping[str, Any]]]:
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in results["figure_9"]:
        found.setdefault(row["gpus"], {})[row["solver"]] = row
    return found


def _alpa_on_8(results: Results, claim: Claim) -> tuple[bool, str]:
    row = _setups(results)["4+4"]["alpa"]
    return not row["fits"], f"fits with {row['peak_gb']:.1f} GB"


def _runs_on(results: Results, claim: Claim) -> tuple[bool, str]:
    setups = [gpus for gpus, rows in _setups(results).items() if rows["published"]["fits"]]
    sizes = sorted({sum(map(int, gpus.split("+"))) for gpus in setups})
    return sizes == claim.printed, str(sizes)


def _best_gain(results: Results, claim: Claim) -> float:
    setups = _setups(results)
    base = setups["4+4+4+4"]["alpa"]["rate"]
    return 100 * (max(float(rows["published"]["rate"]) for rows in setups.values()) / float(base) - 1)


def _merged(results: Results, model: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    rows = [row for row in results["table_2"] if row["model"] == model]
    return rows[0], rows[1]


def _table_2(results: Results, claim: Claim) -> tuple[bool, str]:
    _, model, what = claim.key.split("/")
    whole, merged = _merged(results, model)
    if what == "profiling":
        return False, f"{whole['runs']} runs, {whole['profiling_seconds'] / 3600:.2f} h of steps simulated"
    if what.startswith("planning"):
        readings = [
            f"{name} {whole[f'{prefix}planning_seconds']:.1f} s, "
            + ("done" if whole[f"{prefix}complete"] else f"cut after {whole[f'{prefix}placements']:,} placements")
            for prefix, name in (("", "Algorithm 4"), ("printed_", "as printed"))
            if f"{prefix}complete" in whole
        ]
        return False, f"{'; '.join(readings)}; exact {whole['exact_seconds']:.3f} s"
    if what == "total":
        seconds = whole["profiling_seconds"] + whole["planning_seconds"]
        return False, f"{seconds / 3600:.2f} h without compilation"
    share = merged["profiling_seconds"] / whole["profiling_seconds"]
    return False, f"{100 * share:.0f} % of the profiling with {merged['layers']} of {whole['layers']} layers"


def _halves(results: Results, claim: Claim) -> tuple[bool, str]:
    shares = {}
    for model in ("GPT-3-6.7B", "MoE-7.1B", "Wide-ResNet-2B"):
        whole, merged = _merged(results, model)
        shares[model] = merged["profiling_seconds"] / whole["profiling_seconds"]
    text = ", ".join(f"{model} {100 * share:.0f} %" for model, share in shares.items())
    prose = claim.key.endswith("prose")
    expected = {"GPT-3-6.7B": True, "MoE-7.1B": prose, "Wide-ResNet-2B": not prose}
    return all((shares[model] < 0.7) == halved for model, halved in expected.items()), text


def _gpipe_gain(model: str) -> Callable[[Results, Claim], tuple[bool, str]]:
    def judged(results: Results, claim: Claim) -> tuple[bool, str]:
        found = [_saving(pair) for pair in _pairs(results, PIPELINE, GPIPE, model)]
        holds = abs(max(found) - float(claim.printed)) <= 0.1 * max(float(claim.printed), 1.0)
        return holds, ", ".join(f"{saving:.2f} %" for saving in found)

    return judged


def _over(loss: float | list[float], claim: Claim) -> tuple[bool, str]:
    value = loss if isinstance(loss, float) else max(loss)
    return value > claim.printed, f"{value:.1f} %"


def _sums(claim: Claim) -> tuple[bool, str]:
    """Whether the printed sums are as the remark says."""
    times = {each.key: each.printed for each in printed_claims("capture")}
    model = claim.key.split("/")[1]
    parts = [_seconds(times[f"table_2_hms/{model}/{name}"]) for name in ("profiling", "planning", "total")]
    adds_up = parts[0] + parts[1] == parts[2]
    said = claim.printed is True or str(claim.printed).startswith("only")
    return adds_up == said, f"{parts[0] + parts[1]} s against {parts[2]} s"


def _seconds(text: str) -> int:
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600 * hours + 60 * minutes + seconds


RULES = (
    number("headline_peak_reduction_up_to_pct", _savings(HYBRID, "1f1b"), ALPA, HYBRID),
    fact("smaller_setup_factor_more_than", _smaller, "fewest GPUs by the exact least peak, of all models", "fewest"),
    same("figure_6_peak_reduction_pct/hybrid_1f1b/panels", lambda: ["a", "b", "c"], "first part of our figure"),
    same("figure_6_peak_reduction_pct/hybrid_gpipe/panels", lambda: ["d", "e", "f"], "second part of our figure"),
    same("figure_6_peak_reduction_pct/pipeline_only_1f1b/panels", lambda: ["g", "h", "i"], "third part of our figure"),
    same("figure_6_peak_reduction_pct/pipeline_only_gpipe/panels", lambda: ["j", "k", "l"], "last part of our figure"),
    fact("figure_6_peak_reduction_pct/hybrid_1f1b/note", _total, ALPA, HYBRID),
    number("figure_6_peak_reduction_pct/hybrid_1f1b/*", _savings(HYBRID, "1f1b"), ALPA, HYBRID),
    number("figure_6_peak_reduction_pct/hybrid_gpipe/*", _savings(HYBRID, GPIPE), ALPA, HYBRID),
    fact("figure_6_peak_reduction_pct/pipeline_only_1f1b/moe", _single, "16 layers on 16 GPUs", PIPELINE),
    number(
        "figure_6_peak_reduction_pct/pipeline_only_1f1b/*",
        _savings(PIPELINE, "1f1b"),
        "Alpa's 16 layers of equal computation; our Wide-ResNet has 16 layers, so one partition; the paper's has 32",
        PIPELINE,
    ),
    *(
        fact(
            f"figure_6_peak_reduction_pct/pipeline_only_gpipe/{name}",
            _gpipe_gain(model),
            "Alpa's 16 layers of equal computation; our Wide-ResNet has 16 layers, so one partition",
            PIPELINE,
        )
        for name, model in MODELS.items()
    ),
    no_figure("figure_6_peak_reduction_pct/per_panel_values_otherwise"),
    same("figure_7_prediction_within_pct/plans", lambda: PLANS, "plans of table figure_7"),
    same("figure_7_prediction_within_pct/gpus_per_plan", lambda: PROFILING_GPUS, "GPUs of table figure_7"),
    same(
        "figure_7_prediction_within_pct/gpu_predictions",
        lambda: PLANS * PROFILING_GPUS,
        "plans times GPUs of table figure_7",
    ),
    Rule("figure_7_prediction_within_pct/*", _within, ("figure_7",)),
    number("figure_8/1f1b/throughput_loss_pct", _losses("1f1b"), ALPA, HYBRID),
    number("figure_8/1f1b/memory_gain_pct", _savings(HYBRID, "1f1b"), ALPA, HYBRID),
    fact(
        "figure_8/gpipe_moe_7.1b/throughput_loss_pct_over",
        lambda r, c: _over(_losses(GPIPE, "MoE-7.1B")(r, c), c),
        ALPA,
        HYBRID,
    ),
    number("figure_8/gpipe_moe_7.1b/memory_gain_pct", _savings(HYBRID, GPIPE, "MoE-7.1B"), ALPA, HYBRID),
    number(
        "figure_8/gpipe_gpt3/throughput_loss_pct", _losses(GPIPE, "GPT-3-2.6B"), f"2.6B, which fits; {ALPA}", HYBRID
    ),
    number(
        "figure_8/gpipe_gpt3/memory_gain_pct",
        _savings(HYBRID, GPIPE, "GPT-3-2.6B"),
        f"2.6B, which fits; {ALPA}",
        HYBRID,
    ),
    no_figure("figure_8/gpipe_wide_resnet/throughput_loss_pct"),
    number("figure_8/gpipe_wide_resnet/memory_gain_pct_if_max", _savings(HYBRID, GPIPE, "Wide-ResNet"), ALPA, HYBRID),
    no_figure("figure_8/pairing_of_1f1b_extremes"),
    fact("figure_9/alpa_on_8", _alpa_on_8, "the fastest plan that fits by the replay fits on 8 GPUs", "figure_9"),
    fact("figure_9/capture_runs_on", _runs_on, "the published choice, on 6 GPUs as 3+3 and 4+2", "figure_9"),
    number("figure_9/best_gain_pct", _best_gain, "our Alpa on 16 GPUs uses them; fewer GPUs compute less", "figure_9"),
    not_reproduced("figure_9/best_gain_setup", "our gain is none, so there is no setup of it"),
    no_figure("figure_9/other_values"),
    not_reproduced("table_1", "settings: the models of our cases; hidden sizes are not printed"),
    fact(
        "table_2_hms/*/sum_ok",
        lambda r, c: _sums(c),
        "arithmetic on the printed times: profiling and planning as printed against the total",
    ),
    not_reproduced("table_2_hms/*/alpa", "Alpa's own profiling and search are not part of this project"),
    remark("table_2_hms/merged_note"),
    fact("table_2_hms/*", _table_2, HOURS, "table_2"),
    remark("table_2_vs_prose/reading"),
    fact(
        "table_2_vs_prose/*",
        _halves,
        "share of the profiling that merging to 16 layers leaves; our Wide-ResNet has 16",
        "table_2",
    ),
)
"""In the order in which they are tried."""

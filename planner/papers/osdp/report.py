"""Summary of the rows of the suite ``osdp``: throughputs, losses of the searches, gains beside the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from formulations.osdp.scheduler import Method
from planner.benchmarks.rows import BenchRow
from planner.papers.osdp.cases import CLUSTERS, OsdpCase

DEPTH_FIRST = (Method.DFS, Method.DFS_SHARDED_FIRST, Method.DFS_GROUPED, Method.DFS_LOOK_AHEAD)

SEARCHED = ("osdp_base", "osdp")
"""Formulations on which the paper's search runs too: it cannot count the peak."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A gain that the paper prints.

    Parameters
    ----------
    figure
        Figure of the paper.
    cluster, families
        A key of :data:`CLUSTERS`, and the families of models that it covers; all if empty.
    formulation, baseline
        Keys of :data:`FORMULATIONS`: a formulation's exact plan is compared with FSDP's of the same formulation, or
        with the exact plan of another one.
    printed
        The printed figures, as text.
    """

    figure: str
    cluster: str
    families: tuple[str, ...]
    formulation: str
    baseline: str
    printed: str


FSDP = "FSDP"

CLAIMS = (
    *(
        Claim("figure 5", "titan", (family,), formulation, FSDP, printed)
        for family, printed in (
            ("N&D", "at most 23 %, 22 % on average"),
            ("W&S", "over all pure strategies at most 92 %, 32 % on average"),
            ("I&C", "over all pure strategies at most 168 %, 33 % on average"),
        )
        for formulation in ("osdp", "osdp_units", "osdp_peak")
    ),
    *(
        Claim("figure 6", "a100", (), formulation, FSDP, "at most 67 %, 29 % on average")
        for formulation in ("osdp", "osdp_units", "osdp_peak")
    ),
    Claim("figure 8", "titan", (), "osdp", "osdp_base", "3 to 92 %"),
    Claim("figure 8", "titan", (), "osdp_peak", "osdp_peak_base", "3 to 92 %"),
    Claim("figure 9", "titan", (), "osdp_checkpointing", FSDP, "at most 108.3 %, 52.9 % on average"),
)
"""All gains that the paper prints, for its figures 5, 6, 8 and 9."""

Objectives = Mapping[OsdpCase, Mapping[str, int]]
"""Objective of each solver on each case."""


def summarized(cases: Mapping[str, OsdpCase], rows: Sequence[BenchRow]) -> list[str]:
    """Lines on the throughput of every case, the losses of the searches, and our gains beside the paper's."""
    found: dict[OsdpCase, dict[str, int]] = {}
    for row in rows:
        if row.instance in cases and row.objective is not None:
            found.setdefault(cases[row.instance], {})[row.solver] = row.objective
    return [*throughputs(found), *losses(cases.values(), found), *gains(found)]


def throughputs(found: Objectives) -> list[str]:
    """One line for each model, limit and machine: samples/s of FSDP, the searches and the exact plans."""
    columns = {
        "FSDP": ("osdp", Method.SHARDED),
        "published": ("osdp", Method.DFS),
        "published, grouped": ("osdp", Method.DFS_GROUPED),
        "exact": ("osdp", Method.KNAPSACK),
        "exact by parameter, uncut": ("osdp_by_parameter", Method.KNAPSACK),
        "FSDP in larger units": ("osdp_units", Method.SHARDED),
        "exact in larger units": ("osdp_units", Method.KNAPSACK),
        "FSDP at the true peak": ("osdp_peak", Method.SHARDED),
        "exact at the true peak": ("osdp_peak", Method.KNAPSACK),
        "exact, checkpointed": ("osdp_checkpointing", Method.KNAPSACK),
    }
    lines = [f"samples/s: {' | '.join(columns)}"]
    for cluster, gibibytes, model in dict.fromkeys((case.cluster, case.gibibytes, case.model) for case in found):
        cells = []
        for formulation, method in columns.values():
            case = OsdpCase(model, cluster, gibibytes, formulation)
            objective = found.get(case, {}).get(method)
            cells.append("-" if objective is None else f"{case.samples_per_second(objective):.2f}")
        lines.append(f"{cluster}, {gibibytes} GiB, {model}: {' | '.join(cells)}")
    return lines


def losses(cases: Iterable[OsdpCase], found: Objectives) -> list[str]:
    """Loss of each of the paper's searches against the exact plan of the same problem."""
    exact = Method.KNAPSACK.value
    solvable = [case for case in cases if case.formulation in SEARCHED and exact in found.get(case, {})]
    lines = []
    for search in DEPTH_FIRST:
        lost = sorted(found[case][search] / found[case][exact] - 1 for case in solvable if search in found[case])
        if lost:
            lines.append(
                f"{search} beside exact, same problems: loses {100 * median(lost):.3f} % (median), {100 * lost[0]:.3f} "
                f"to {100 * lost[-1]:.1f} %; no plan in time in {len(solvable) - len(lost)} of {len(solvable)}"
            )
    return lines


def gains(found: Objectives) -> list[str]:
    """Gains of the exact plans over FSDP's and over more restricted ones, beside the paper's."""
    lines = []
    for claim in CLAIMS:
        shares = [
            share
            for case, objectives in found.items()
            if case.cluster == CLUSTERS[claim.cluster]
            and case.formulation == claim.formulation
            and (not claim.families or case.family in claim.families)
            and (share := _gain(case, claim.baseline, objectives, found)) is not None
        ]
        if shares:
            families = ", ".join(claim.families) or "all models"
            ours = f"at most {100 * max(shares):.1f} %, {100 * mean(shares):.1f} % on average of {len(shares)}"
            lines.append(
                f"{claim.figure}, {claim.cluster}, {families}: {claim.formulation} over {claim.baseline} {ours}; "
                f"paper: {claim.printed}"
            )
    return lines


def _gain(case: OsdpCase, baseline: str, objectives: Mapping[str, int], found: Objectives) -> float | None:
    """Relative gain in throughput of a case's exact plan over a baseline; None where either has no plan."""
    exact = Method.KNAPSACK.value
    if baseline == FSDP:
        other = objectives.get(Method.SHARDED.value)
    else:
        other = found.get(replace(case, formulation=baseline), {}).get(exact)
    return None if other is None or exact not in objectives else other / objectives[exact] - 1

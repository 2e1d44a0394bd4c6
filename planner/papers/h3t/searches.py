"""H3T's searches by name, and the cases of its Figure 6 and Table 6.

``dp_printed`` is Algorithm 4 with every slip kept, ``dp_published`` without those that the paper's text contradicts,
``dp`` repaired, all rounding to the nearest of 128 units, ``dp_up`` and ``dp_down`` repaired with other roundings: all
of synchronized sequences. Of all 128 sets of switches: ``all_on``, ``random`` (Algorithm 1), ``uniform`` (one set for
all layers), ``greedy_printed`` and ``greedy`` (Algorithm 2), and ``synchronized``, the exact synchronized plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from formulations.h3t.dynamic_program import search_dp
from formulations.h3t.exact import ExactResult, least_memory, solve_synchronized
from formulations.h3t.operations import ALL_ON, Switch
from formulations.h3t.problem import Outcome, simulate
from formulations.h3t.sampling import H3tFound, search_greedy, search_random, search_uniform
from formulations.h3t.slips import AS_PRINTED, AS_PUBLISHED, REPAIRED, Rounding, Slip
from formulations.problem.solution import SolveOptions
from planner.papers.h3t.cases import GIGABYTE, NO_LIMIT_GB, H3tCase, table_1_cases
from planner.papers.hardware import Hardware

SECONDS = 60.0
"""Time limit of the exact search."""

REPORTED = (Switch.PARTITION, Switch.LAZY_PREFETCH, Switch.REMAT, Switch.OFFLOAD_HIDDEN)

Found = tuple[tuple[int, ...], Outcome] | None
Search = Callable[[H3tCase, SolveOptions], Found]


@cache
def exact(case: H3tCase) -> ExactResult:
    """The exact synchronized plan of a case, to the proof or for :data:`SECONDS`."""
    return solve_synchronized(case.tables(), case.memory_limit, deadline=time.monotonic() + SECONDS)


def _dp(slips: Slip, rounding: Rounding, case: H3tCase, options: SolveOptions) -> Found:
    del options
    found = search_dp(case.tables(), case.memory_limit, slips=slips, rounding=rounding)
    return None if found.sequence is None or found.outcome is None else (found.sequence, found.outcome)


def _all_on(case: H3tCase, options: SolveOptions) -> Found:
    del options
    step = case.step()
    sequence = (int(ALL_ON),) * len(step.layers)
    return sequence, simulate(step, sequence)


def _random(case: H3tCase, options: SolveOptions) -> Found:
    return _pair(search_random(case.step(), options.seed))


def _uniform(case: H3tCase, options: SolveOptions) -> Found:
    del options
    return _pair(search_uniform(case.step()))


def _greedy(slips: Slip, case: H3tCase, options: SolveOptions) -> Found:
    del options
    return _pair(search_greedy(case.step(), slips))


def _synchronized(case: H3tCase, options: SolveOptions) -> Found:
    del options
    found = exact(case)
    return None if found.sequence is None or found.outcome is None else (found.sequence, found.outcome)


def _pair(found: H3tFound | None) -> Found:
    return None if found is None else (found.sequence, found.outcome)


SEARCHES: dict[str, Search] = {
    "dp_printed": partial(_dp, AS_PRINTED, Rounding.NEAREST),
    "dp_published": partial(_dp, AS_PUBLISHED, Rounding.NEAREST),
    "dp": partial(_dp, REPAIRED, Rounding.NEAREST),
    "dp_up": partial(_dp, REPAIRED, Rounding.UP),
    "dp_down": partial(_dp, REPAIRED, Rounding.DOWN),
    "all_on": _all_on,
    "random": _random,
    "uniform": _uniform,
    "greedy_printed": partial(_greedy, AS_PRINTED),
    "greedy": partial(_greedy, REPAIRED),
    "synchronized": _synchronized,
}
"""Searches by name: a sequence of switches with its cost and peak, or None."""


def described(sequence: Sequence[int], outcome: Outcome) -> str:
    """Time, peak, and how many layers have which switches on."""
    shares = ", ".join(
        f"{switch.name.lower().replace('_', ' ')} {share:.0f} %"
        for switch, share in zip(REPORTED, switch_shares(sequence), strict=True)
        if switch.name
    )
    return f"{outcome.cost / 1e6:.3f} s, peak {outcome.peak / GIGABYTE:.2f} GB, {shares}"


def switch_shares(sequence: Sequence[int]) -> list[float]:
    """Percent of layers with partition, lazy prefetching, rematerialization, hidden offloading on, as in Table 6."""
    return [100 * sum(bool(switches & switch) for switches in sequence) / len(sequence) for switch in REPORTED]


FIGURE_6_COLUMNS = (0, 2, 4, 8)
"""Columns of Table 1 that are searched over memory limits."""

FIGURE_6_SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Limits between the least memory of any synchronized sequence and that of the fastest one."""


def figure_6_case(column: int, share: float, hardware: Hardware = Hardware.PRESET) -> H3tCase:
    """A column of Table 1 at a limit: 0 is the least memory of any synchronized plan, 1 that of the fastest one."""
    case = table_1_cases(hardware)[column]
    least = least_memory(case.tables())
    most = exact(replace(case, limit_gb=NO_LIMIT_GB)).outcome
    assert most is not None, "without a limit there is a plan"
    limit = int(least + (most.peak - least) * share)
    return replace(case, limit_gb=-(-limit // 10**7) / 100)


def table_6_cases(pcie_share: float = 1.0) -> dict[str, H3tCase]:
    """The simulated cases of Table 6; ``greedy`` is the default one by another solver.

    Parameters
    ----------
    pcie_share
        Of our preset's PCIe that the default case has.
    """
    case = replace(table_1_cases()[0], pcie_share=pcie_share)
    return {
        "default": case,
        "pcie-slow": replace(case, pcie_share=0.1 * pcie_share),
        "compute-slow": replace(case, compute_share=0.1),
        "limit-25": replace(case, limit_gb=25.0),
    }

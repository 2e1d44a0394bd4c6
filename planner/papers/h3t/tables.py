"""H3T's tables with every row: its searches and ZeRO-2 and ZeRO-3 as sequences of switches, under two hardwares.

ZeRO is modelled, not quoted. The paper turned rematerialization and the offload of the optimizer on for both. In the
words of the switches all layers have

- ZeRO-2: rematerialization and synchronization; parameters, once gathered, stay until backward, so that all of them are
  on every device when forward ends;
- ZeRO-3: partition too; parameters are gathered again before backward, their shards stay on the device.

Neither prefetches lazily, offloads hidden states, or orders a segment economically. Both run in the same simulator,
with the same treatment of the optimizer, as every other sequence. As they are synchronized, the exact plan under a
limit that they keep is never slower. They are out of memory where they need more than the device has without reserve.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from formulations.h3t.exact import ExactResult, least_memory, solve_synchronized
from formulations.h3t.operations import ALL_ON, Switch
from formulations.h3t.problem import Optimizer, Outcome, simulate
from formulations.h3t.program import memory_floor
from formulations.h3t.segments import HANDED_OVER_SETS, SYNCHRONIZED_SETS
from formulations.h3t.ties import layers_with
from formulations.problem.solution import SolveOptions
from planner.layers.presets.paper_models import paper_layers
from planner.machine.cluster import load_cluster
from planner.papers.cells import Cell, Row, Table
from planner.papers.h3t import paper_tables as paper
from planner.papers.h3t.cases import GIGABYTE, H3tCase, column_of, problem_row, table_1_cases
from planner.papers.h3t.free_tables import (
    FREE_TIMED,
    canonical_cells,
    exact_free_cells,
    figure_6_free_cells,
    restated_cells,
)
from planner.papers.h3t.searches import (
    FIGURE_6_COLUMNS,
    FIGURE_6_SHARES,
    REPORTED,
    SEARCHES,
    SECONDS,
    described,
    figure_6_case,
    switch_shares,
    table_6_cases,
)
from planner.papers.hardware import H3T_PCIE_SHARE, Hardware

__all__ = ["TABLES", "ZERO", "exact_within", "uniform_outcome"]

ZERO = {
    "zero2": Switch.REMAT | Switch.SEGMENT_SYNC,
    "zero3": Switch.REMAT | Switch.SEGMENT_SYNC | Switch.PARTITION,
}
"""Switches of every layer."""

GPT_3_CLUSTER = "a100-8x8-nvlink"
GPT_3_BATCHES = (512, 1024)
STATE_BYTES = 16
"""Bytes a parameter in host memory: parameter and gradient in 16 bits, and Adam's three numbers in 32."""


def uniform_outcome(case: H3tCase, switches: Switch) -> Outcome:
    """Cost and peak where all layers have the same switches."""
    step = case.step()
    return simulate(step, (int(switches),) * len(step.layers))


def exact_within(case: H3tCase, limit_bytes: int) -> ExactResult:
    """The exact synchronized plan within a number of bytes, and its bound."""
    return solve_synchronized(case.tables(), limit_bytes, deadline=time.monotonic() + SECONDS)


def device_bytes(case: H3tCase) -> int:
    """Bytes that tensors can have on a device, whatever limit the solver had."""
    device = load_cluster(case.cluster).device
    return device.memory_bytes - device.reserve_bytes


def _row(
    case: H3tCase, hardware: Hardware, solver: str, found: Outcome | None, limit: int, bound: int | None = None
) -> Row:
    fits = found is not None and found.peak <= limit
    return problem_row(case, hardware) | {
        "solver": solver,
        "seconds": found.cost / 1e6 if found is not None and fits else None,
        "bound": None if bound is None else bound / 1e6,
        "peak_gb": None if found is None else found.peak / GIGABYTE,
        "limit_gb": limit / GIGABYTE,
    }


def _searches(case: H3tCase, hardware: Hardware) -> Iterator[Row]:
    """A column of Table 1."""
    yield from _found(
        case, hardware, ("dp_printed", "dp_published", "dp", "dp_up", "greedy_printed", "greedy", "uniform", "random")
    )
    room = device_bytes(case)
    for solver, switches in (("all_on", ALL_ON), *ZERO.items()):
        yield _row(case, hardware, solver, uniform_outcome(case, switches), room)
    on_device = exact_within(case, room)
    yield _row(case, hardware, "exact_on_device", on_device.outcome, room, on_device.bound)


def _found(case: H3tCase, hardware: Hardware, solvers: Sequence[str]) -> Iterator[Row]:
    """Plans of searches at the case's limit, and the exact synchronized one."""
    for solver in solvers:
        pair = SEARCHES[solver](case, SolveOptions())
        yield _row(case, hardware, solver, None if pair is None else pair[1], case.memory_limit)
    exact = exact_within(case, case.memory_limit)
    yield _row(case, hardware, "exact", exact.outcome, case.memory_limit, exact.bound)


def _peaks(case: H3tCase) -> Iterator[Row]:
    """The least peak of any synchronized sequence, what no sequence goes below, and those of uniform ones.

    The last three columns are terms of ``all_on`` that the paper's runs may lack.
    """
    row: Row = {"column": column_of(case), "device_gb": device_bytes(case) / GIGABYTE}
    for solver, switches in (("all_on", ALL_ON), *ZERO.items()):
        row[solver] = uniform_outcome(case, switches).peak / GIGABYTE
    step = case.step()
    ends = paper_layers(case.model, load_cluster(case.cluster)).layers[:: len(step.layers) + 1]
    yield row | {
        "least": least_memory(case.tables()) / GIGABYTE,
        "floor": memory_floor(step) / GIGABYTE,
        "workspace": step.layers[0].backward_bytes / GIGABYTE,
        "gradient": step.layers[0].parameter_bytes / GIGABYTE,
        "ends": 2 * sum(each.parameter_bytes for each in ends) / GIGABYTE,
    }


def _search_seconds(case: H3tCase) -> Iterator[Row]:
    case.tables()
    row: Row = {"model": case.model, "batch": case.batch, "limit_gb": case.limit_gb}
    for solver in ("dp", "greedy", "random"):
        started = time.perf_counter()
        SEARCHES[solver](case, SolveOptions())
        row[f"{solver}_seconds"] = time.perf_counter() - started
    started = time.perf_counter()
    exact_within(case, case.memory_limit)
    yield row | {"exact_seconds": time.perf_counter() - started}


def _table_1(hardware: Hardware) -> Iterator[Cell]:
    for case in table_1_cases(hardware):
        yield Cell(f"{case}, {hardware}", partial(_searches, case, hardware))


def _table_3() -> Iterator[Cell]:
    for case in table_1_cases():
        yield Cell(str(case), partial(_peaks, case))


def _table_5() -> Iterator[Cell]:
    for printed in paper.TABLE_5:
        case = H3tCase("a100-8x8-nvlink", printed.model, printed.batch, printed.limit_gb)
        yield Cell(str(case), partial(_search_seconds, case))


def _table_6() -> Iterator[Cell]:
    for hardware, share in ((Hardware.PRESET, 1.0), (Hardware.INFERRED, H3T_PCIE_SHARE)):
        cases = table_6_cases(share)
        for name, solver in (*((each, "dp") for each in cases), ("greedy", "greedy")):
            case = cases["default" if name == "greedy" else name]
            yield Cell(f"{name}, {hardware}", partial(_switches, case, name, solver, hardware))


def _switches(case: H3tCase, name: str, solver: str, hardware: Hardware) -> Iterator[Row]:
    """Shares of the layers that have a switch on; no row where the search has no plan."""
    pair = SEARCHES[solver](case, SolveOptions())
    if pair is not None:
        names = ("partition", "lazy_prefetch", "remat", "offload_hidden")
        shares = dict(zip(names, switch_shares(pair[0]), strict=True))
        yield {"hardware": str(hardware), "case": name, "seconds": pair[1].cost / 1e6, **shares}


def _ties() -> Iterator[Cell]:
    for hardware, share in ((Hardware.PRESET, 1.0), (Hardware.INFERRED, H3T_PCIE_SHARE)):
        for name, case in table_6_cases(share).items():
            if name != "limit-25":  # so many plans are equal there that it takes minutes
                yield Cell(f"{name}, {hardware}", partial(_among_fastest, case, name, hardware))


def _among_fastest(case: H3tCase, name: str, hardware: Hardware) -> Iterator[Row]:
    """Percent of the layers that have a switch on, the least and the most among all fastest synchronized plans."""
    for switch in REPORTED:
        least, most = layers_with(switch, case.tables(), case.memory_limit)
        layers = len(case.step().layers)
        yield {
            "hardware": str(hardware),
            "case": name,
            "switch": str(switch.name).lower(),
            "least": 100 * least / layers,
            "most": 100 * most / layers,
        }


def _one_off() -> Iterator[Row]:
    """A step with every switch on, and with one of them off in all layers."""
    case = table_1_cases()[0]
    for name, switches in (("none", ALL_ON), *((str(each.name).lower(), ALL_ON ^ each) for each in Switch)):
        found = uniform_outcome(case, Switch(switches))
        yield {"off": name, "seconds": found.cost / 1e6, "peak_gb": found.peak / GIGABYTE}


def _optimizer() -> Iterator[Cell]:
    """Both readings of when the optimizer runs, and none, under the same searches."""
    for column in FIGURE_6_COLUMNS:
        for optimizer in Optimizer:
            case = replace(table_1_cases(Hardware.INFERRED)[column], optimizer=optimizer)
            searches = ("dp_published", "dp_up", "greedy", "uniform")
            yield Cell(str(case), partial(_found, case, Hardware.INFERRED, searches))


def _figure_6() -> Iterator[Cell]:
    for hardware in Hardware:
        for column in FIGURE_6_COLUMNS:
            for share in FIGURE_6_SHARES:
                name = column_of(table_1_cases()[column])
                yield Cell(f"{name}, {hardware}, {share:.0%} of the room", partial(_within, column, share, hardware))


def _within(column: int, share: float, hardware: Hardware) -> Iterator[Row]:
    within = figure_6_case(column, share, hardware)
    row: Row = {"hardware": str(hardware), "column": column_of(within), "limit_gb": within.limit_gb}
    for solver in ("dp", "dp_up", "greedy", "random", "uniform"):
        pair = SEARCHES[solver](within, SolveOptions())
        fits = pair is not None and pair[1].peak <= within.memory_limit
        row[solver] = pair[1].cost / 1e6 if pair is not None and fits else None
    exact = exact_within(within, within.memory_limit)
    yield row | {
        "exact": None if exact.outcome is None else exact.outcome.cost / 1e6,
        "bound": None if exact.bound is None else exact.bound / 1e6,
        "proven": exact.outcome is not None and exact.outcome.cost == exact.bound,
    }


def _gpt_3(batch: int) -> Iterator[Row]:
    """All switches on, on 64 A100; layers and widths are those of GPT-3's own paper (Brown et al. 2020)."""
    case = H3tCase(GPT_3_CLUSTER, "GPT-3-175B", batch, 28.0)
    step, cluster = case.step(), load_cluster(case.cluster)
    found = simulate(step, (int(ALL_ON),) * len(step.layers))
    parameters = sum(layer.parameter_bytes for layer in step.layers) // 2
    hidden = sum(layer.hidden_bytes for layer in step.layers) * cluster.devices_per_node
    yield {
        "batch": batch,
        "gpus": cluster.devices,
        "seconds": found.cost / 1e6,
        "peak_gb": found.peak / GIGABYTE,
        "host_gb": (STATE_BYTES * parameters / cluster.nodes + hidden) / GIGABYTE,
    }


def _search_space() -> Iterator[Row]:
    yield {"switches": len(Switch), "S_full": 2 ** len(Switch), "S_dp": SYNCHRONIZED_SETS, "R": HANDED_OVER_SETS}


def _plans() -> Iterator[Cell]:
    """Plans of one case in words."""
    case = H3tCase("rtx-2080ti-8-pcie", "H3T-1.8B", 8, 6.0)
    for solver in ("dp_published", "greedy", "synchronized"):
        yield Cell(f"{case}, {solver}", partial(_plan, case, solver))


def _plan(case: H3tCase, solver: str) -> Iterator[Row]:
    pair = SEARCHES[solver](case, SolveOptions())
    yield {"case": str(case), "solver": solver, "plan": None if pair is None else described(*pair)}


TABLES: Mapping[str, Table] = {
    "search_space": Table(lambda: [Cell("all", _search_space)]),
    "table_1": Table(partial(_table_1, Hardware.PRESET)),
    "table_1_inferred": Table(partial(_table_1, Hardware.INFERRED)),
    "table_3": Table(_table_3),
    "table_5": Table(_table_5, frozenset(f"{solver}_seconds" for solver in ("dp", "greedy", "random", "exact"))),
    "table_6": Table(_table_6),
    "table_6_ties": Table(_ties),
    "switches": Table(lambda: [Cell("all", _one_off)]),
    "optimizer": Table(_optimizer),
    "figure_6": Table(_figure_6),
    "figure_6_free": Table(figure_6_free_cells, FREE_TIMED, named_only=True),
    "exact_free": Table(exact_free_cells, FREE_TIMED),
    "canonical": Table(canonical_cells, FREE_TIMED, named_only=True),
    "free_restated": Table(restated_cells, FREE_TIMED, named_only=True),
    "plans": Table(_plans),
    "gpt_3": Table(lambda: [Cell(f"batch {batch}", partial(_gpt_3, batch)) for batch in GPT_3_BATCHES]),
}
"""Tables by name."""

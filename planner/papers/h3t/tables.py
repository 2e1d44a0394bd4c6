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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from formulations.h3t.exact import least_memory, solve_synchronized
from formulations.h3t.operations import ALL_ON, Switch
from formulations.h3t.problem import Outcome, simulate
from formulations.h3t.segments import HANDED_OVER_SETS, SYNCHRONIZED_SETS
from formulations.problem.solution import SolveOptions
from planner.machine.cluster import load_cluster
from planner.papers.cells import Cell, Row, Table
from planner.papers.h3t import paper_tables as paper
from planner.papers.h3t.bench import SEARCHES, SECONDS, switch_shares, table_6_cases
from planner.papers.h3t.cases import GIGABYTE, NO_LIMIT_GB, H3tCase, table_1_cases
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


def exact_within(case: H3tCase, limit_bytes: int) -> Outcome | None:
    """Cost and peak of the exact synchronized plan within a number of bytes; None where nothing fits."""
    return solve_synchronized(case.tables(), limit_bytes, deadline=time.monotonic() + SECONDS).outcome


def device_bytes(case: H3tCase) -> int:
    """Bytes that tensors can have on a device, whatever limit the solver had."""
    device = load_cluster(case.cluster).device
    return device.memory_bytes - device.reserve_bytes


def _row(case: H3tCase, hardware: Hardware, solver: str, found: Outcome | None, limit: int) -> Row:
    fits = found is not None and found.peak <= limit
    return {
        "hardware": str(hardware),
        "column": _column_of(case),
        "solver": solver,
        "seconds": found.cost / 1e6 if found is not None and fits else None,
        "peak_gb": None if found is None else found.peak / GIGABYTE,
        "limit_gb": limit / GIGABYTE,
    }


def _column_of(case: H3tCase) -> str:
    return f"{case.cluster}/{case.model}/{case.batch}"


def _searches(case: H3tCase, hardware: Hardware) -> Iterator[Row]:
    """A column of Table 1."""
    for solver in ("dp_printed", "dp_published", "dp", "dp_up", "greedy", "uniform", "random"):
        pair = SEARCHES[solver](case, SolveOptions())
        yield _row(case, hardware, solver, None if pair is None else pair[1], case.memory_limit)
    yield _row(case, hardware, "exact", exact_within(case, case.memory_limit), case.memory_limit)
    room = device_bytes(case)
    for solver, switches in (("all_on", ALL_ON), *ZERO.items()):
        yield _row(case, hardware, solver, uniform_outcome(case, switches), room)
    yield _row(case, hardware, "exact_on_device", exact_within(case, room), room)


def _peaks(case: H3tCase) -> Iterator[Row]:
    """The least peak of any synchronized sequence beside those of all switches on and of ZeRO."""
    row: Row = {"column": _column_of(case), "device_gb": device_bytes(case) / GIGABYTE}
    for solver, switches in (("all_on", ALL_ON), *ZERO.items()):
        row[solver] = uniform_outcome(case, switches).peak / GIGABYTE
    yield row | {"least": least_memory(case.tables()) / GIGABYTE}


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


FIGURE_6_SHARES = (0.0, 0.1, 0.3, 1.0)
"""Limits between the least memory of any synchronized sequence and that of the fastest one."""


def _figure_6() -> Iterator[Cell]:
    for column in (0, 2, 4, 8):
        case = table_1_cases(Hardware.INFERRED)[column]
        for share in FIGURE_6_SHARES:
            yield Cell(f"{case}, {share:.0%} of the room", partial(_within, case, share))


def _within(case: H3tCase, share: float) -> Iterator[Row]:
    least = least_memory(case.tables())
    fastest = exact_within(replace(case, limit_gb=NO_LIMIT_GB), int(NO_LIMIT_GB) * GIGABYTE)
    assert fastest is not None, "without a limit there is a plan"
    limit = int(least + (fastest.peak - least) * share)
    within = replace(case, limit_gb=-(-limit // 10**7) / 100)
    row: Row = {"column": _column_of(case), "limit_gb": within.limit_gb}
    for solver in ("dp", "greedy", "random", "uniform"):
        pair = SEARCHES[solver](within, SolveOptions())
        fits = pair is not None and pair[1].peak <= within.memory_limit
        row[solver] = pair[1].cost / 1e6 if pair is not None and fits else None
    exact = exact_within(within, within.memory_limit)
    yield row | {"exact": None if exact is None else exact.cost / 1e6}


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


TABLES: Mapping[str, Table] = {
    "search_space": Table(lambda: [Cell("all", _search_space)]),
    "table_1": Table(partial(_table_1, Hardware.PRESET)),
    "table_1_inferred": Table(partial(_table_1, Hardware.INFERRED)),
    "table_3": Table(_table_3),
    "table_5": Table(_table_5, frozenset(f"{solver}_seconds" for solver in ("dp", "greedy", "random", "exact"))),
    "table_6": Table(_table_6),
    "figure_6": Table(_figure_6),
    "gpt_3": Table(lambda: [Cell(f"batch {batch}", partial(_gpt_3, batch)) for batch in GPT_3_BATCHES]),
}
"""Tables by name."""

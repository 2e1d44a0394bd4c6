"""OSDP's scheduler: plan every batch size that fits, and take the one with the least time per sample.

Memory grows with the batch, so the search ends at the first batch size at which nothing fits. All smaller ones are
candidates: more samples amortize the communication of a step, fewer leave memory for more DP, and neither is always
better (section 3.2).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from itertools import count

from formulations.layers.layer import LayerChain, tied_layers
from formulations.osdp.depth_first import Dfs, search_depth_first
from formulations.osdp.exact import ExactOsdp
from formulations.osdp.problem import (
    DP,
    SECONDS_PER_COST,
    ZDP,
    Accounting,
    OperatorTable,
    OsdpError,
    OsdpMachine,
    OsdpSettings,
    Slicing,
    operator_tables,
    step_bytes,
    step_cost,
)
from formulations.problem.solution import Status, relative_gap

COSTS_PER_QUANTUM = 1000
SECONDS_PER_QUANTUM = SECONDS_PER_COST / COSTS_PER_QUANTUM
"""Quantum of times per sample: a picosecond of a step for one sample on one device, rounded up."""

DFS_SECONDS = 307.0
"""Longest search that the paper reports."""


Allows = Callable[[str, Slicing], bool]
"""Whether an operator, by its name, may have a mode."""


class Method(StrEnum):
    """Method that chooses the modes.

    REPLICATED, SHARDED: all DP (PyTorch's DDP), or all ZDP (FSDP).
    DFS and the like: the paper's search, :mod:`formulations.osdp.depth_first`.
    KNAPSACK: exactly, :mod:`formulations.osdp.exact`.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"
    DFS = "dfs"
    DFS_SHARDED_FIRST = "dfs_sharded_first"
    DFS_GROUPED = "dfs_grouped"
    DFS_LOOK_AHEAD = "dfs_look_ahead"
    KNAPSACK = "knapsack"


_RULES = {Method.REPLICATED: DP, Method.SHARDED: ZDP}


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best plan found at one batch size.

    Parameters
    ----------
    batch
        Samples on one device.
    status
        ``optimal``, ``feasible``, or ``no_solution`` where a search ran out of time without a plan.
    modes
        Of every operator, in the order of the model; empty without a plan.
    cost, bound
        Nanoseconds of a step, and its lower bound at this batch size; None where unknown.
    """

    batch: int
    status: Status
    modes: tuple[Slicing, ...] = ()
    cost: int | None = None
    bound: int | None = None


@dataclass(frozen=True, slots=True)
class OsdpPlan:
    """The modes of all operators, the batch, and their proven bound.

    Parameters
    ----------
    solver
        The method.
    status
        As everywhere; ``infeasible`` where proved in exact integers. A fixed rule of modes that does not fit has
        ``no_solution``, since other modes may fit.
    batch
        Samples on one device, 0 without a plan.
    modes
        Operator -> mode, in the order of the model. Where a mode is ZDP or DP as a whole, torch's ``fully_shard`` wraps
        the operator's module, or leaves its parameters replicated.
    objective, bound
        Time of a step per sample on one device, in quanta of :data:`SECONDS_PER_QUANTUM`; None where unknown.
    gap
        ``(objective - bound) / objective``.
    seconds
        Of the search.
    step_seconds
        Predicted seconds of a step.
    samples_per_second
        Predicted throughput of all devices.
    memory_bytes, peak_bytes
        Bytes on one device as the settings count them, and those at the worst operator
        (:attr:`~formulations.osdp.problem.Accounting.PEAK`).
    candidates
        Of all batch sizes that were tried.
    """

    solver: str
    status: Status
    batch: int
    modes: dict[str, Slicing]
    objective: int | None
    bound: int | None
    gap: float | None
    seconds: float
    step_seconds: float
    samples_per_second: float
    memory_bytes: int
    peak_bytes: int
    candidates: tuple[Candidate, ...]


def plan_osdp(
    chain: LayerChain,
    machine: OsdpMachine,
    settings: OsdpSettings | None = None,
    method: Method = Method.KNAPSACK,
    *,
    batch: int | None = None,
    batch_step: int = 1,
    time_limit: float = DFS_SECONDS,
    allows: Allows | None = None,
) -> OsdpPlan:
    """Choose the mode of every operator, and the batch.

    Parameters
    ----------
    chain
        The model.
    machine
        The machine.
    settings
        Possible choices and the count of memory; OSDP-base as published if None.
    method
        Method that chooses the modes.
    batch
        Samples on one device; all batch sizes that fit if None.
    batch_step
        Difference between consecutive batch sizes, and the first of them.
    time_limit
        Seconds for a depth-first search, divided among the batch sizes. The other methods need no limit.
    allows
        Whether an operator, by its name, may have a mode; all may if None.

    Raises
    ------
    OsdpError
        If the batch, its step or the limit is not positive, memory does not grow with the batch, or an operator is
        left no mode.
    """
    chosen = settings or OsdpSettings()
    _validate(batch, batch_step, time_limit)
    started = time.perf_counter()
    tables = _allowed_tables(chain, machine, chosen, allows)
    if batch is None and all(table.sample_resident == 0 == table.workspace(2) - table.workspace(1) for table in tables):
        raise OsdpError(f"model {chain.name} keeps no activations, so any batch fits; give a batch")
    batches = count(batch_step, batch_step) if batch is None else [batch]
    if method in _RULES:
        found = _by_rule(tables, machine, chosen, _RULES[method], batches)
    elif method is Method.KNAPSACK:
        found = _exactly(_alike(chain, tables), machine, chosen, batches)
    else:
        found = _depth_first(_alike(chain, tables), machine, chosen, Dfs(method.value), batches, time_limit)
    candidates = tuple(found)
    return _best(chain, machine, chosen, method, candidates, time.perf_counter() - started)


def _allowed_tables(
    chain: LayerChain, machine: OsdpMachine, settings: OsdpSettings, allows: Allows | None
) -> tuple[OperatorTable, ...]:
    tables = operator_tables(chain, machine, settings)
    if allows is None:
        return tables
    left = [[mode for mode in table.modes if allows(table.name, mode)] for table in tables]
    for table, modes in zip(tables, left, strict=True):
        if not modes:
            raise OsdpError(f"operator {table.name} of model {chain.name} is left no mode; allow it one")
    return tuple(table.among(modes) for table, modes in zip(tables, left, strict=True))


def _validate(batch: int | None, batch_step: int, time_limit: float) -> None:
    if batch is not None and batch < 1:
        raise OsdpError(f"batch is {batch}; give at least one sample for each device, or None for all that fit")
    if batch_step < 1:
        raise OsdpError(f"batch_step is {batch_step}; give at least one sample")
    if not time_limit > 0:
        raise OsdpError(f"time_limit is {time_limit}; give a positive number of seconds")


Tables = tuple[OperatorTable, ...]
"""Of all operators of a model."""


def _alike(chain: LayerChain, tables: Tables) -> list[Tables]:
    """One problem for each mode that operators with a shared parameter may have; the problem itself without any."""
    alike = tied_layers(chain)
    if not alike:
        return [tables]
    common = [mode for mode in tables[0].modes if all(mode in tables[i].modes for i in alike)]
    return [tuple(table.among([mode]) if i in alike else table for i, table in enumerate(tables)) for mode in common]


def _by_rule(
    tables: Tables, machine: OsdpMachine, settings: OsdpSettings, mode: Slicing, batches: Iterable[int]
) -> Iterator[Candidate]:
    choices = [table.modes.index(mode) for table in tables]
    for batch in batches:
        if step_bytes(tables, choices, batch, settings.accounting) > machine.memory_bytes:
            return
        yield Candidate(batch, Status.FEASIBLE, (mode,) * len(tables), step_cost(tables, choices, batch))


def _exactly(
    problems: Sequence[Tables], machine: OsdpMachine, settings: OsdpSettings, batches: Iterable[int]
) -> Iterator[Candidate]:
    exact = [ExactOsdp(tables, settings.accounting, machine.memory_bytes) for tables in problems]
    for batch in batches:
        solved = [(each, found) for each in exact if (found := each.solve(batch)) is not None]
        if not solved:
            return
        best, (cost, _, choices) = min(solved, key=lambda entry: entry[1][0])
        bound = min(found[1] for _, found in solved)
        status = Status.OPTIMAL if cost == bound else Status.FEASIBLE
        yield Candidate(batch, status, _modes(best.tables, choices), cost, bound)


def _depth_first(
    problems: Sequence[Tables],
    machine: OsdpMachine,
    settings: OsdpSettings,
    variant: Dfs,
    batches: Iterable[int],
    time_limit: float,
) -> Iterator[Candidate]:
    """Search at every batch size at which the least memory fits, as the paper's scheduler does."""
    waiting, limit, accounting = [], machine.memory_bytes, settings.accounting
    for batch in batches:
        fitting = [tables for tables in problems if _least(tables, batch, accounting) <= limit]
        if not fitting:
            break
        waiting.append((batch, fitting))
    deadline = time.monotonic() + time_limit
    for done, (batch, fitting) in enumerate(waiting):
        seconds = (deadline - time.monotonic()) / (len(waiting) - done) / len(fitting)
        found = [(each, search_depth_first(each, batch, limit, variant, seconds, accounting)) for each in fitting]
        plans = [
            (step_cost(tables, outcome.choices, batch), _modes(tables, outcome.choices))
            for tables, outcome in found
            if outcome.choices is not None
        ]
        if not plans:
            yield Candidate(batch, Status.NO_SOLUTION)
            continue
        cost, chosen = min(plans, key=lambda plan: plan[0])
        complete = all(outcome.complete for _, outcome in found)
        status = Status.OPTIMAL if complete else Status.FEASIBLE
        yield Candidate(batch, status, chosen, cost, cost if complete else None)


def _least(tables: Tables, batch: int, accounting: Accounting) -> int:
    """Least bytes of any modes: all added up, or at the peak the best of all levels of temporary bytes."""
    resident, extra = [table.resident(batch) for table in tables], [table.extra(batch) for table in tables]
    if accounting is Accounting.PUBLISHED:
        return sum(int((held + more).min()) for held, more in zip(resident, extra, strict=True))
    lowest = max(int(each.min()) for each in extra)
    levels: set[int] = {value for each in extra for value in each.tolist() if value >= lowest}
    return min(
        level + sum(int(held[at_once <= level].min()) for held, at_once in zip(resident, extra, strict=True))
        for level in levels
    )


def least_bytes(
    chain: LayerChain, machine: OsdpMachine, settings: OsdpSettings, batch: int = 1, allows: Allows | None = None
) -> int:
    """Least bytes on one device that any allowed modes need at a batch, as the settings count them."""
    problems = _alike(chain, _allowed_tables(chain, machine, settings, allows))
    return min(_least(tables, batch, settings.accounting) for tables in problems)


def _modes(tables: Tables, choices: Sequence[int]) -> tuple[Slicing, ...]:
    return tuple(table.modes[choice] for table, choice in zip(tables, choices, strict=True))


def per_sample(cost: int, batch: int) -> int:
    """Quanta of :data:`SECONDS_PER_QUANTUM` per sample, rounded up, of a step's nanoseconds."""
    return -(-cost * COSTS_PER_QUANTUM // batch)


def _best(
    chain: LayerChain,
    machine: OsdpMachine,
    settings: OsdpSettings,
    method: Method,
    candidates: tuple[Candidate, ...],
    seconds: float,
) -> OsdpPlan:
    planned = [(Fraction(each.cost, each.batch), each) for each in candidates if each.cost is not None]
    bounds = [per_sample(each.bound, each.batch) for each in candidates if each.bound is not None]
    bound = min(bounds) if bounds and len(bounds) == len(candidates) else None
    if not planned:
        nothing_fits = not candidates and method not in _RULES
        status = Status.INFEASIBLE if nothing_fits else Status.NO_SOLUTION
        return OsdpPlan(method, status, 0, {}, None, None, None, seconds, 0.0, 0.0, 0, 0, candidates)
    best = min(planned, key=lambda entry: entry[0])[1]
    assert best.cost is not None
    objective = per_sample(best.cost, best.batch)
    step_seconds = best.cost * SECONDS_PER_COST
    return OsdpPlan(
        solver=method,
        status=Status.OPTIMAL if objective == bound else Status.FEASIBLE,
        batch=best.batch,
        modes=dict(zip((layer.name for layer in chain.layers), best.modes, strict=True)),
        objective=objective,
        bound=bound,
        gap=relative_gap(objective, bound),
        seconds=seconds,
        step_seconds=step_seconds,
        samples_per_second=machine.devices * best.batch / step_seconds if step_seconds else float("inf"),
        memory_bytes=bytes_of(chain, machine, settings, best.modes, best.batch),
        peak_bytes=bytes_of(chain, machine, replace(settings, accounting=Accounting.PEAK), best.modes, best.batch),
        candidates=candidates,
    )


def bytes_of(
    chain: LayerChain, machine: OsdpMachine, settings: OsdpSettings, modes: Sequence[Slicing], batch: int
) -> int:
    """Bytes on one device as the settings count them, for modes of these settings."""
    tables = operator_tables(chain, machine, settings)
    choices = [table.modes.index(mode) for table, mode in zip(tables, modes, strict=True)]
    return step_bytes(tables, choices, batch, settings.accounting)

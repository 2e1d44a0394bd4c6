"""Random decisions whose operators run again twice, and what a replay counts on the safe side."""

from __future__ import annotations

import random
from dataclasses import replace

from formulations.step.kiwi_chain import chain_moments
from formulations.step.modes import Modes, needed_reruns, once_or_twice
from formulations.step.training_step import Moments, NodeKind, StepDecision, StepModel
from planner.graph.last_reads import OUTPUT, last_reads
from planner.graph.operator_graph import OperatorGraph
from planner.graph.view_chains import view_chains
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Compute, Reshard, Schedule


def with_reruns_twice(model: StepModel, decision: StepDecision, seed: int) -> StepDecision:
    """The same layouts; operators run again once or twice, and reruns read any copy of those that may do so twice."""
    rng = random.Random(f"twice of {seed}")
    modes = once_or_twice(model, chain_moments(model))
    found: dict[int, Moments] = {}
    for i in sorted(modes, reverse=True):
        readers = {edge.consumer for edge in model.edges_from[i]}
        reads = [moment for v in readers for moment in found.get(v, ())]
        reads += [v for v in readers if model.nodes[v].kind is NodeKind.BACKWARD]
        any_copy = len(modes[i][-1]) > 1
        possible = [mode for mode in modes[i] if any_copy or mode[-1] <= min(reads, default=mode[-1])]
        twice = [mode for mode in possible if len(mode) > 1 and any(mode[0] <= read < mode[1] for read in reads)]
        if possible and rng.random() < 0.6:
            found[i] = rng.choice(twice if twice and rng.random() < 0.7 else possible)
    return replace(decision, recomputed=needed_reruns(model, found))


def modes_with(model: StepModel, decision: StepDecision) -> Modes:
    """Modes of a problem that a decision of :func:`with_reruns_twice` is in, and few others."""
    every = once_or_twice(model, chain_moments(model))
    return {i: (mode, *every[i][-1:]) if len(every[i][-1]) > 1 else (mode,) for i, mode in decision.recomputed.items()}


def peaks_on_the_way(graph: OperatorGraph, schedule: Schedule, report: ReplayReport) -> bool:
    """Whether the peak is a path of several steps whose source may end before, while the replay counts it to the end.

    It does so where the reader is not the last one in every plan.
    """
    at = report.peak_instruction
    peak = schedule.instructions[at]
    if not isinstance(peak, Reshard) or len(peak.path) == 2:
        return False
    chains = view_chains(graph)
    readers = (step.operator for step in schedule.instructions[at:] if isinstance(step, Compute))
    reader = next((operator for operator in readers if not graph.operators[operator].is_view), OUTPUT)
    return last_reads(graph, chains).get(chains[schedule.buffers[peak.source].value].base) not in (reader, OUTPUT)

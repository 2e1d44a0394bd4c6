"""Kinds, labels and modules of instructions, the same in pages, traces and tables of profiles."""

from __future__ import annotations

from itertools import pairwise

from planner.common.root_name import shown
from planner.graph.operator_classes import operator_class
from planner.graph.operator_graph import OperatorGraph, Value, ValueRole
from planner.machine.resharding import step_between
from planner.schedule.instructions import Compute, Free, Instruction, Offload, Prefetch, Reshard, Schedule, Update, Wait

COPY_OUT, COPY_IN, FREE, VIEW, UPDATE = "copy to the host", "copy from the host", "release", "view", "optimizer"
START, WAIT = "start of a collective", "wait for a collective"
LOCAL_RESHARD = "local slice"
COLLECTIVES = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all"})


def kind_of(graph: OperatorGraph, entry: Instruction) -> str:
    """Class of operator, collective, or kind of copy of an instruction."""
    match entry:
        case Compute(operator):
            described = graph.operators[operator]
            return VIEW if described.is_view else str(operator_class(described.target))
        case Reshard(overlapped=True):
            return START
        case Wait():
            return WAIT
        case Reshard(_, _, path):
            steps = (step_between(before, after) for before, after in pairwise(path))
            found = [str(step.collective) for step in steps if step is not None and step.collective is not None]
            return found[0] if found else LOCAL_RESHARD
        case Update():
            return UPDATE
        case Offload():
            return COPY_OUT
        case Prefetch():
            return COPY_IN
        case Free():
            return FREE


def label_of(graph: OperatorGraph, schedule: Schedule, entry: Instruction) -> str:
    """Name of an instruction with what it works on."""
    match entry:
        case Compute(operator, recompute=recompute):
            return shown(graph.operators[operator].identity) + " (again)" * recompute
        case Wait(buffer):
            return f"{WAIT}: {shown(graph.values[schedule.buffers[buffer].value].name)}"
        case Reshard(source, _, path):
            name = shown(graph.values[schedule.buffers[source].value].name)
            return f"{name}: {' -> '.join(','.join(at) for at in path)}"
        case Update(parameter):
            return f"update {graph.values[schedule.buffers[parameter].value].name}"
        case Offload(source) | Prefetch(source):
            return f"{kind_of(graph, entry)}: {shown(graph.values[schedule.buffers[source].value].name)}"
        case Free():
            return FREE


def module_of(graph: OperatorGraph, schedule: Schedule, entry: Instruction) -> str:
    """Path of the module that an instruction belongs to; empty for the root, and where it frees buffers.

    What moves or updates a tensor belongs to the module that makes it, or whose parameter it is.
    """
    match entry:
        case Compute(operator):
            return graph.operators[operator].module_path
        case Reshard(source) | Offload(source) | Prefetch(source):
            return module_of_value(graph, graph.values[schedule.buffers[source].value])
        case Wait(buffer) | Update(buffer):
            return module_of_value(graph, graph.values[schedule.buffers[buffer].value])
        case Free():
            return ""


def module_of_value(graph: OperatorGraph, value: Value) -> str:
    """Path of the module that makes a value, or whose parameter or buffer it is."""
    if value.producer is not None:
        return graph.operators[value.producer].module_path
    return value.name.rpartition(".")[0] if value.role in (ValueRole.PARAMETER, ValueRole.BUFFER) else ""

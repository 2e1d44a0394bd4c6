"""A plan of operators as one of layers, where it is one: data parallelism whose parameters are whole or sharded.

What a plan decides operator by operator has no words in functions that take modules. Everything of that kind is listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod

from planner.graph.operator_graph import ValueRole
from planner.graph.placement import REPLICATE, is_partial, is_shard
from planner.layers.plan.document import LayerPlan, LayerSettings, Sharding, StagePlan
from planner.plan.decision import ComputeStep, Decision, InputValue, ReshardStep, TransferStep
from planner.plan.format import Plan
from runtime.export.translation import ExportError

_NAMED = 3
"""Things that a message names of many."""


def layer_form(plan: Plan, layers: Iterable[str]) -> tuple[LayerPlan, tuple[str, ...]]:
    """Express a plan of operators in the settings of layers.

    Parameters
    ----------
    plan
        The plan.
    layers
        Names of the model's layers, in the order in which they run.

    Returns
    -------
    LayerPlan
        One stage, with the same settings for all layers.
    tuple of str
        What is different in it but changes no number.

    Raises
    ------
    ExportError
        The plan decides what layers have no setting for; the message lists it.
    """
    decision = plan.decision
    reader = _Reader(decision)
    if obstacles := reader.obstacles():
        raise ExportError(
            "this plan decides operator by operator what functions for modules cannot express: "
            + "; ".join(obstacles)
            + ". Run it with runtime.load, or plan layers (--model-formulation osdp, galvatron, h3t or capture)"
        )
    sharding, shards, whole = reader.sharding()
    devices = prod(decision.options.mesh)
    degree = shards if sharding != "none" else None
    settings = LayerSettings(name="layer", data_parallel=devices, sharding=sharding, shard_degree=degree)
    accumulated = decision.options.grad_accum
    made = LayerPlan(
        model=decision.model.model_copy(update={"batch": decision.model.batch * accumulated}),
        devices=devices,
        stages=(StagePlan(layers=tuple(settings.model_copy(update={"name": name}) for name in layers)),),
        micro_batches=accumulated,
        optimizer=decision.options.optimizer,
    )
    kept = f"{_listed(whole)} kept whole by the plan, sharded here" if whole and sharding != "none" else ""
    return made, (kept,) if kept else ()


class _Reader:
    """Reads from a plan's schedule what each parameter and each batch is."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self._mesh = decision.options.mesh
        schedule = decision.schedule
        self._instructions = schedule.instructions
        self._value = [value for value, _ in schedule.buffers]
        self._placement = [schedule.placements[placement] for _, placement in schedule.buffers]
        self._stored = self._given(ValueRole.PARAMETER)

    def _given(self, role: ValueRole) -> Mapping[int, int]:
        """Buffers in which the step is given the values of a role, by value."""
        values = self._decision.values
        roles = {k: value.role for k, value in enumerate(values) if isinstance(value, InputValue)}
        inputs = self._decision.schedule.inputs
        return {self._value[buffer]: buffer for buffer in inputs if roles.get(self._value[buffer]) == role}

    def _name(self, value: int) -> str:
        named = self._decision.values[value]
        return named.name if isinstance(named, InputValue) else self._decision.operators[named.operator]

    def obstacles(self) -> list[str]:
        """What layers have no setting for."""
        found = []
        again = Counter(
            self._decision.operators[step.operator].split(".")[0]
            for step in self._instructions
            if isinstance(step, ComputeStep) and step.op == "recompute"
        )
        if again:
            found.append(f"{again.total()} operators run again by themselves")
        copied = sum(isinstance(step, TransferStep) and step.op == "offload" for step in self._instructions)
        if copied:
            found.append(f"{copied} tensors wait on the host by themselves")
        divided = {
            self._value[buffer]
            for step in self._instructions
            if isinstance(step, ComputeStep)
            for buffer in step.inputs
            if self._value[buffer] in self._stored and self._placement[buffer] != (REPLICATE,) * len(self._mesh)
        }
        if divided:
            found.append(f"operators that divide their parameter ({_listed(self._name(value) for value in divided)})")
        of_batch = self._of_batch()
        moved = {
            self._value[step.source]
            for step in self._instructions
            if isinstance(step, ReshardStep) and self._value[step.source] in of_batch and self._leaves_a_shard(step)
        }
        if moved:
            found.append(f"{len(moved)} tensors between operators are gathered or divided anew")
        whole = [
            self._name(value)
            for value, buffer in self._given(ValueRole.INPUT).items()
            if any(word != "S0" for word in self._placement[buffer])
        ]
        if whole:
            found.append(f"inputs that are not divided by rows on every axis ({_listed(whole)})")
        axes = {self._sharded_axes(buffer) for buffer in self._stored.values()} - {()}
        inner = tuple(range(len(self._mesh) - max(map(len, axes), default=0), len(self._mesh)))
        if len(axes) > 1 or (axes and axes != {inner}):
            found.append("parameters sharded on other than the innermost axes")
        return found

    def _of_batch(self) -> set[int]:
        """Values that depend on the batch; all others are the same whatever its rows."""
        found = set(self._given(ValueRole.INPUT))
        for step in self._instructions:
            if isinstance(step, ComputeStep) and any(self._value[buffer] in found for buffer in step.inputs):
                found.update(self._value[buffer] for buffer in step.outputs if buffer is not None)
        return found

    def _leaves_a_shard(self, step: ReshardStep) -> bool:
        """Whether a tensor is sharded otherwise before than after: no sum over ranks, no part of a whole tensor."""
        before, after = self._placement[step.source], self._placement[step.target]
        return any(is_shard(old) and old != new for old, new in zip(before, after, strict=True))

    def _sharded_axes(self, buffer: int) -> tuple[int, ...]:
        return tuple(axis for axis, word in enumerate(self._placement[buffer]) if is_shard(word))

    def sharding(self) -> tuple[Sharding, int, list[str]]:
        """Sharding of the parameters, ranks that share one copy, and names of the parameters that are kept whole."""
        parts = {value: self._sharded_axes(buffer) for value, buffer in self._stored.items()}
        axes = max(parts.values(), key=len, default=())
        if not axes:
            return "none", 1, []
        gathers = Counter(
            self._value[step.source]
            for step in self._instructions
            if isinstance(step, ReshardStep)
            and self._value[step.source] in self._stored
            and not any(is_partial(word) for word in self._placement[step.source])
        )
        again = sum(gathers[value] > 1 for value, sharded in parts.items() if sharded)
        sharding: Sharding = "zero3" if 2 * again >= sum(map(bool, parts.values())) else "zero2"
        whole = [self._name(value) for value, sharded in parts.items() if not sharded]
        return sharding, prod(self._mesh[axis] for axis in axes), whole


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(every[:_NAMED]) + more

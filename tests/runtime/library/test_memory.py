"""The peak with the user's optimizer: predicted, measured, and refused above the plan's limit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.processes.library_runs import OPTIMIZERS, batches
from support.steps.planned_steps import random_plan, real_step

import runtime
from planner.plan.decision import decision_digest
from planner.plan.document import Plan
from runtime.library.optimizers.memory import MemoryWarning
from runtime.library.optimizers.probe import OptimizerRefusedError
from runtime.measure.memory_meter import MemoryMeter

CPU = torch.device("cpu")
STEP_COUNTS = 4
"""Bytes of a count of steps, one per parameter, which is not predicted."""


def peaks_on_rank(plan: Plan, name: str, optimizer: str, clip_norm: float | None) -> tuple[int, int, int, int]:
    """Predicted and measured peak of the second step, measured peak of an evaluation, and number of parameters.

    Torch makes the state of most optimizers in the first step, so that its forward has more room.
    """
    module = real_step(name).module
    step = runtime.load(plan, module, optimizer=OPTIMIZERS[optimizer], clip_norm=clip_norm, device="cpu")
    (batch,) = batches(name, 1)
    clip = None if clip_norm is None else step.updates.clip
    step(batch)
    meter = MemoryMeter(CPU, step.training.resident_tensors())
    step.training.run(step.shares.blocks(batch), meter, clip)
    evaluation = MemoryMeter(CPU, step.training.resident_tensors())
    with evaluation.metering():
        step.evaluate(batch)
    return step.peak_bytes, meter.peak_bytes, evaluation.peak_bytes, len(step.updates.parameters)


@pytest.mark.fast_cases("adamw-1.0")
@pytest.mark.parametrize(
    ("optimizer", "clip_norm"),
    [("adamw", None), ("adamw", 1.0), ("foreach", None), ("fused", 1.0), ("nesterov", 1.0), ("rmsprop", None)],
)
def test_the_peak_is_at_most_the_predicted_one(optimizer, clip_norm, two_ranks):
    plan = random_plan("gpt2", (2,), 1, "sgd_momentum" if optimizer == "nesterov" else "adamw")
    for predicted, measured, evaluated, count in two_ranks.run(peaks_on_rank, plan, "gpt2", optimizer, clip_norm):
        assert 0.8 * predicted <= measured <= predicted + STEP_COUNTS * count + 64
        assert evaluated <= measured


def limited(plan: Plan, limit: int) -> Plan:
    """The plan with a limit in place of none."""
    options = plan.decision.options.model_copy(update={"memory_bytes": limit})
    decision = plan.decision.model_copy(update={"options": options})
    return plan.model_copy(update={"decision": decision, "digest": decision_digest(decision)})


def refusal_on_rank(plan: Plan, amsgrad: bool) -> str:
    try:
        runtime.load(plan, real_step("gpt2").module, optimizer=partial(torch.optim.AdamW, amsgrad=amsgrad))
    except OptimizerRefusedError as error:
        return str(error)
    return ""


def test_more_state_than_the_limit_allows_is_refused_with_the_bytes(two_ranks):
    plan = random_plan("gpt2", (2,), 1)
    tight = limited(plan, plan.peak_bytes)
    assert two_ranks.run(refusal_on_rank, tight, False) == ["", ""]
    for message in two_ranks.run(refusal_on_rank, tight, True):
        more = int(message.split("bytes on each device, ")[1].split()[0])
        assert more > 0
        assert f"{more} more than its limit of {plan.peak_bytes} allows: plan with" in message


def warning_on_rank(plan: Plan) -> tuple[str, int]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = runtime.load(plan, real_step("gpt2").module, optimizer=partial(torch.optim.AdamW, amsgrad=True))
    found = [str(entry.message) for entry in caught if issubclass(entry.category, MemoryWarning)]
    return "".join(found), step.peak_bytes


def test_more_state_than_predicted_is_said_once(two_ranks):
    plan = random_plan("gpt2", (2,), 1)
    (first, peak), (second, _) = two_ranks.run(warning_on_rank, plan)
    assert f"{peak - plan.peak_bytes} bytes" in first
    assert second == ""

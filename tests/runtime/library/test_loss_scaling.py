"""Scaled losses and sums of gradients, held to one process of torch alone."""

from __future__ import annotations

import pytest
import torch
from support.layers.layer_runs import planned_model, staged_plan
from support.processes.library_runs import ADAMW, batches, full_tensors
from support.steps.planned_steps import random_plan, real_step
from torch import nn

import runtime
from planner.models.references import load_step
from runtime.layers.reference import model_reference
from runtime.library.errors import LoadError
from runtime.library.optimizers.scaling import LossScale, LossScaling
from runtime.measure.memory_meter import MemoryMeter

CLIP = 0.5


def doubled(count: int = 3):
    """Batches of twice the rows of a plan."""
    found = batches("gpt2", 2 * count)
    return [
        {key: torch.cat([one[key], other[key]]) for key in one}
        for one, other in zip(found[::2], found[1::2], strict=True)
    ]


def variants_on_rank(plan, layers, planned):
    """Losses, norms and tensors of plain and scaled runs of either kind of plan, and of sums of gradients."""
    found = {}
    for name, one, options, given in (
        ("plain", plan, {}, batches("gpt2")),
        ("scaled", plan, {"loss_scaling": LossScaling(2.0**10, growth_interval=2)}, batches("gpt2")),
        ("layers", layers, {}, batches("gpt2")),
        ("layers scaled", layers, {"loss_scaling": LossScaling(2.0**10, growth_interval=2)}, batches("gpt2")),
        ("summed", plan, {"accumulate": 2}, doubled()),
        ("summed by rows", planned, {}, doubled()),
    ):
        step = runtime.load(one, real_step("gpt2").module, optimizer=ADAMW, clip_norm=CLIP, device="cpu", **options)
        losses, norms = [], []
        for batch in given:
            if name == "summed by rows":
                rows = step.shares.rows
                batch = {key: tensor[rows.start : rows.stop] for key, tensor in batch.items()}
            losses.append(step(batch).item())
            norms.append(float(step.gradient_norm))
        found[name] = losses, norms, full_tensors(step.state_dict()), step.updates.loss_scale
    try:
        runtime.load(layers, real_step("gpt2").module, accumulate=2, device="cpu")
    except LoadError as error:
        found["refused"] = str(error)
    return found


@pytest.mark.slow
def test_powers_of_two_change_nothing_and_sums_are_those_of_the_whole_batch(two_ranks):
    module = real_step("gpt2").module
    updater = ADAMW(module.parameters())
    losses, norms = [], []
    for batch in doubled():
        loss = module(**batch).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
        updater.step()
        updater.zero_grad()
        losses.append(loss.item())
    ends = {"data_parallel": 2, "sharding": "zero3"}
    plans = random_plan("gpt2", (2,), 0), staged_plan("gpt2", [ends] * 4, devices=2, model=random_model()), summing()
    for found in two_ranks.run(variants_on_rank, *plans):
        for kind in ("plain", "layers"):
            name = "scaled" if kind == "plain" else "layers scaled"
            assert found[name][:2] == found[kind][:2]
            assert found[name][3] == 2.0**11
            assert all(torch.equal(found[name][2][key], tensor) for key, tensor in found[kind][2].items())
        for name in ("summed", "summed by rows"):
            assert found[name][0] == pytest.approx(losses, rel=1e-5)
            assert found[name][1] == pytest.approx(norms, rel=1e-5)
            for key, tensor in module.state_dict().items():
                assert torch.allclose(found[name][2][key], tensor, rtol=1e-4, atol=1e-4), key
        assert found["refused"] == "accumulate 2: the plan itself has 1 micro-batches"


def random_model():
    """The model of the plans of operators."""
    return random_plan("gpt2", (2,), 0).decision.model


def summing():
    """A plan for two micro-batches."""
    return random_plan("gpt2", (2,), 2, micro_batches=2)


def peaks_on_rank(plan):
    """Bytes predicted and measured of the second step, where the optimizer has its state."""
    step = runtime.load(plan, real_step("gpt2").module, optimizer=ADAMW, device="cpu")
    (batch,) = doubled(1)
    step(batch)
    meter = MemoryMeter(torch.device("cpu"), step.training.resident_tensors())
    step.training.run_micro_batches(step.shares.micro_batches(batch), meter=meter)
    return step.peak_bytes, meter.peak_bytes, len(step.updates.parameters)


@pytest.mark.slow
def test_sums_of_gradients_are_in_the_predicted_peak(two_ranks):
    plan = summing()
    alone = random_plan("gpt2", (2,), 2)
    assert plan.peak_bytes > alone.peak_bytes
    assert 1.5 < plan.objective_seconds / alone.objective_seconds < 2.5
    for predicted, measured, count in two_ranks.run(peaks_on_rank, plan):
        assert predicted == plan.peak_bytes
        assert 0.8 * predicted <= measured <= predicted + 4 * count + 64


HALF = LossScaling(2.0**20, growth_interval=2)
HALF_STEPS = 8


def half_on_rank(plan):
    """Losses, scales and tensors of a float16 training whose first steps overflow, and what is refused."""
    reference = model_reference(plan)
    step = runtime.load(plan, load_step(reference, "cpu").module, optimizer=ADAMW, loss_scaling=HALF, device="cpu")
    losses, scales = [], []
    for _ in range(HALF_STEPS):
        scales.append(step.updates.loss_scale)
        losses.append(step(load_step(reference, "cpu").example_kwargs).item())
    return losses, scales, full_tensors(step.state_dict()), step.updates.scale.skipped


@pytest.mark.slow
def test_overflows_are_skipped_as_one_process_skips_them(two_ranks):
    model = planned_model("gpt2", dtype="float16")
    ends = {"data_parallel": 2, "sharding": "zero3"}
    plan = staged_plan(
        "gpt2", [ends, {"data_parallel": 2}, ends, ends], devices=2, model=model, optimizer="adamw_mixed"
    )
    step = load_step(model_reference(plan), "cpu")
    named = dict(step.module.named_parameters())
    masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in named.items()}
    updater, scale = ADAMW(masters.values()), LossScale(HALF)
    losses, scales = [], []
    for _ in range(HALF_STEPS):
        scales.append(scale.value)
        loss = step.module(**step.example_kwargs).loss
        (loss * scale.value).backward()
        losses.append(loss.item())
        finite = all(bool(parameter.grad.isfinite().all()) for parameter in named.values())
        if finite:
            for name, parameter in named.items():
                masters[name].grad = parameter.grad.float() / scale.value
            updater.step()
            for name, parameter in named.items():
                parameter.data.copy_(masters[name].data)
        scale.after_step(finite)
        step.module.zero_grad()
    assert 1 < scale.skipped < HALF_STEPS - 2
    assert sorted(scales, reverse=True) != scales  # it grew again
    for found_losses, found_scales, tensors, skipped in two_ranks.run(half_on_rank, plan):
        assert (found_scales, skipped) == (scales, scale.skipped)
        assert found_losses == pytest.approx(losses, rel=5e-3)
        for name, parameter in named.items():
            assert torch.allclose(tensors[name].float(), parameter.float(), atol=5e-3), name


def test_the_scale_is_that_of_torch():
    """Against ``torch.amp.GradScaler`` on gradients that are finite or not."""
    ours = LossScale(LossScaling(8.0, 4.0, 0.25, 2))
    theirs = torch.amp.GradScaler("cpu", 8.0, 4.0, 0.25, 2)
    weight = nn.Parameter(torch.ones(2))
    updater = torch.optim.SGD([weight], lr=0.0)
    for finite in (True, True, False, True, True, True, False, False):
        theirs.scale(weight.sum() * (1.0 if finite else float("inf"))).backward()
        theirs.step(updater)
        theirs.update()
        updater.zero_grad()
        ours.after_step(finite)
        assert ours.value == theirs.get_scale()
    restored = LossScale(LossScaling())
    restored.load_state_dict(ours.state_dict())
    assert (restored.value, restored.skipped) == (ours.value, 3)

"""The files that ranks start from and are compared with."""

from __future__ import annotations

import pytest
import torch
from support.steps.plain_schedule import replicated_schedule
from support.steps.planned_steps import step_reference, traced_step

from planner.models.references import load_step
from planner.torch_adapter.local.collectives import MeshGroups
from planner.torch_adapter.tracing.step_module import StepArguments
from runtime.measure.batches import Batches
from runtime.measure.comparison import ReferenceComparison
from runtime.measure.initial_state import local_state, read_initial_state
from runtime.measure.local_shards import local_block
from runtime.measure.reference import prepare, read_reference
from runtime.measure.rounding import NO_ERROR, WorstError, worst_of
from runtime.operators.training import LocalTraining

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["gpt", "tied_gpt", "res_net"])
def prepared(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    prepare(step_reference(request.param), "sgd", 2, None, folder)
    return request.param, folder


def test_the_initial_state_is_that_of_the_seed(prepared):
    name, folder = prepared
    state, module = read_initial_state(folder), load_step(step_reference(name), "cpu").module
    expected = dict([*module.named_parameters(), *module.named_buffers()])
    assert state.tensors.keys() == expected.keys()
    assert all(torch.equal(state.tensors[key], tensor) for key, tensor in expected.items())


def test_a_rank_copies_its_blocks_only(prepared):
    name, folder = prepared
    traced, groups = traced_step(name), MeshGroups((2,), (1,), ("",))
    schedule = replicated_schedule(traced.graph, (2,))
    state = read_initial_state(folder)
    local = local_state(state, traced.constants, traced.graph, schedule, groups, CPU)
    for key, tensor in local.items():
        assert torch.equal(tensor, state.tensors[key])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.untyped_storage().data_ptr() != state.tensors[key].untyped_storage().data_ptr()


def test_the_reference_is_plain_training(prepared):
    name, folder = prepared
    reference, step = read_reference(folder), load_step(step_reference(name), "cpu")
    kwargs = dict(step.example_kwargs)
    labels = kwargs.pop("labels")
    loss = step.loss_fn(step.module(*step.example_args, **kwargs), labels)
    loss.backward()
    assert reference.losses[0] == pytest.approx(loss.item(), rel=1e-6)
    assert len(reference.losses) == 2
    for key, parameter in step.module.named_parameters():
        torch.testing.assert_close(reference.gradients[key], parameter.grad)
    assert reference.gradient_scale == max(float(g.abs().max()) for g in reference.gradients.values())
    moved = max(float((reference.updated[k] - p.detach()).abs().max()) for k, p in step.module.named_parameters())
    assert moved > 0


def test_blocks_of_a_reference_agree_with_themselves_and_differ_when_changed(prepared):
    _, folder = prepared
    reference = read_reference(folder)
    placements = {
        key: ("S0",) if tensor.ndim and tensor.shape[0] % 2 == 0 else ("R",)
        for key, tensor in reference.updated.items()
    }
    groups = MeshGroups((2,), (1,), ("",))
    comparison = ReferenceComparison(reference, placements, groups)
    blocks = {key: local_block(g, placements[key], (2,), (1,)).clone() for key, g in reference.gradients.items()}
    assert set(comparison.gradients(blocks).values()) == {0.0}
    changed = max(blocks, key=lambda key: float(blocks[key].abs().max()))
    scale = float(reference.gradients[changed].abs().max())
    blocks[changed].view(-1)[0] += 0.01 * scale
    found = worst_of(comparison.gradients(blocks))
    assert found.name == changed
    assert found.error == pytest.approx(0.01, rel=1e-3)
    updated = {key: local_block(t, placements[key], (2,), (1,)).clone() for key, t in reference.updated.items()}
    assert comparison.updated(updated).error == 0.0
    updated[changed] += 0.1
    assert comparison.updated(updated).name == changed


def test_a_gradient_that_only_one_side_has_is_an_infinite_error(prepared):
    _, folder = prepared
    reference = read_reference(folder)
    placements = dict.fromkeys(reference.gradients, ("R",))
    comparison = ReferenceComparison(reference, placements, MeshGroups((2,), (1,), ("",)))
    missing, *others = reference.gradients
    local = {name: reference.gradients[name] for name in others}
    assert worst_of(comparison.gradients(local)) == WorstError(float("inf"), missing)
    errors = comparison.gradients({**reference.gradients, "unknown": torch.ones(1)})
    assert worst_of(errors) == WorstError(float("inf"), "unknown")


def test_an_error_that_is_no_number_is_the_worst():
    nothing = WorstError(float("nan"), "a")
    assert NO_ERROR.worse_of(nothing) is nothing
    assert nothing.worse_of(WorstError(3.0, "b")) is nothing
    assert WorstError(1.0, "a").worse_of(WorstError(2.0, "b")).name == "b"
    assert WorstError(1.0, "a", 0.1).worse_of(WorstError(2.0, "b", 0.3)).name == "a"


def test_micro_batches_of_a_step_are_those_of_one_process(tmp_path):
    """A rank's steps of two micro-batches, each of other rows of a text."""
    data, reference = tmp_path / "text.txt", step_reference("gpt")
    data.write_bytes(bytes(range(120)) * 4)
    prepare(reference, "sgd", 2, data, tmp_path, micro_batches=2)
    step, traced = load_step(reference, "cpu"), traced_step("gpt")
    arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
    batches = Batches.of(step.module, arguments, arguments.tensors, data, 2)
    groups, schedule = MeshGroups((1,), (0,), ("",)), replicated_schedule(traced.graph, (1,))
    state = local_state(read_initial_state(tmp_path), traced.constants, traced.graph, schedule, groups, CPU)
    training = LocalTraining(traced, schedule, groups, state, "sgd", 0, CPU, micro_batches=2)
    found = read_reference(tmp_path)
    losses = [training.step(batches.of_step(number)) for number in range(2)]
    assert losses == pytest.approx(found.losses, rel=1e-5)
    assert losses[0] != losses[1]
    for key, tensor in found.updated.items():
        assert torch.allclose(training.state[key], tensor, rtol=1e-5, atol=1e-6), key

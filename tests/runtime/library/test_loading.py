"""What ``runtime.load`` takes and refuses, and the step that it returns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.library_runs import ADAMW, batches
from support.steps.models import class_loss, mean_square
from support.steps.planned_steps import random_plan, real_step, with_source
from torch import nn
from torch.distributed.tensor import DTensor

import runtime
from planner.graph.optimizers import OPTIMIZERS, optimizer_named
from planner.plan.document import Plan, save_plan
from runtime.library.errors import BatchError
from runtime.library.optimizers.user import UserOptimizer, planned_optimizer
from runtime.measure.optimizer import LocalOptimizer

ROOT = Path(__file__).parents[3]
PLANS = ROOT / "tests" / "fixtures" / "plans"


def failure_on_rank(plan: Any, **options: Any) -> str:
    """Kind and message of what ``load`` raises."""
    try:
        runtime.load(plan, device="cpu", allow_code=True, **options)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing(plan: Any, options: dict[str, Any]) -> str:
    return failure_on_rank(plan, **options)


def test_what_is_no_plan_of_this_job_is_refused(two_ranks, tmp_path):
    plan = random_plan("mlp", (2,), 0)
    (tmp_path / "broken.json").write_text("{")
    cases = [
        (tmp_path / "nothing.json", {}, "PlanError: plan ", "cannot be read"),
        (str(tmp_path / "broken.json"), {}, "PlanError: plan ", "is not JSON"),
        (
            PLANS / "galvatron.json",
            {"module": nn.Linear(1, 1), "batch": {"input": torch.ones(1, 1)}},
            "FamilyError: the layer executor cannot cut a Linear into layers",
            "",
        ),
        (random_plan("mlp", (4,), 0), {}, "LaunchError: ", "the plan is for mesh 4, 4 ranks, the job has 2: start 4"),
        (
            plan,
            {"module": nn.Linear(16, 16)},
            "PlanError: the plan was made for something else: the module, its batch",
            "plan again",
        ),
        (3, {}, "LoadError: plan is a int: give a plan of planner.api or the path of its file", ""),
        (plan, {"module": mean_square}, "LoadError: module is a function: give an nn.Module or None", ""),
        (plan, {"loss_fn": mean_square}, "LoadError: batch and loss_fn belong to a module of your own", ""),
        (plan, {"module": nn.Linear(1, 1), "loss_fn": mean_square}, "LoadError: loss_fn without a batch", ""),
    ]
    for given, options, begin, contained in cases:
        for message in two_ranks.run(failing, given, options):
            assert message.startswith(begin)
            assert contained in message


def own_module_on_rank(plan: Plan) -> tuple[float, dict[str, Any]]:
    """Loss and facts of a step whose module, batch and loss are the caller's."""
    module = real_step("mlp").module
    (batch,) = batches("mlp", 1)
    step = runtime.load(plan, module, batch=tuple(batch.values()), loss_fn=mean_square, optimizer=ADAMW, device="cpu")
    loss = step(batch).item()
    summary = step.summary()
    return loss, {
        "same_module": step.module is module,
        "dtensors": all(isinstance(tensor, DTensor) for tensor in step.state_dict().values()),
        "trained": sorted(step.updates.parameters) == sorted(name for name, _ in module.named_parameters()),
        "repr": repr(summary),
        "html": summary._repr_html_(),
        "text": str(summary),
    }


def test_a_module_of_one_s_own_needs_nothing_that_the_plan_names(two_ranks):
    plan = with_source(random_plan("mlp", (2,), 0), source="no.such.module:function")
    (batch,) = batches("mlp", 1)
    expected = mean_square(real_step("mlp").module(*batch.values())).item()
    for loss, found in two_ranks.run(own_module_on_rank, plan):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert found["same_module"]
        assert found["dtensors"]
        assert found["trained"]
        assert found["repr"].startswith("<step of no.such.module:function on 2: ")
        assert found["repr"].endswith("1 steps taken>")
        assert found["html"].startswith("<table>")
        assert "AdamW, each parameter where the plan updates it" in found["text"]


def closed_over_on_rank(plan: Plan) -> tuple[list[float], str]:
    """Losses of a step whose loss function closes over the labels, and what a batch without them raises."""
    step, (first, second) = real_step("conv_net"), batches("conv_net", 2)
    labels = first.pop("labels")
    loaded = runtime.load(
        plan,
        step.module,
        batch=tuple(first.values()),
        loss_fn=lambda output: class_loss(output, labels),
        optimizer=ADAMW,
        device="cpu",
    )
    losses = [loaded.evaluate({**first, "labels": labels}).item(), loaded.evaluate(second).item()]
    try:
        loaded(first)
    except BatchError as error:
        return losses, str(error)
    return losses, ""


def test_labels_that_a_loss_closes_over_are_of_the_batch(two_ranks):
    step = real_step("conv_net")
    expected = [
        class_loss(step.module(*(batch[name] for name in batch if name != "labels")), batch["labels"]).item()
        for batch in batches("conv_net", 2)
    ]
    for losses, message in two_ranks.run(closed_over_on_rank, random_plan("conv_net", (2,), 0)):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert message == "the batch lacks labels: it takes images, labels"


@pytest.mark.slow
def test_one_process_needs_no_launcher(tmp_path):
    save_plan(random_plan("mlp", (1,), 0), tmp_path / "plan.json")
    script = (
        "import torch, runtime\n"
        "from support.processes.library_runs import batches\n"
        "step = runtime.load('plan.json', device='cpu', clip_norm=float('inf'), allow_code=True)\n"
        "losses = [step(batch).item() for batch in batches('mlp', 3)]\n"
        "print(*losses, float(step.gradient_norm) > 0, step.steps)\n"
    )
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    clean |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    *losses, norm, steps = ran.stdout.split()
    (batch, *_) = batches("mlp", 1)
    assert float(losses[0]) == pytest.approx(mean_square(real_step("mlp").module(*batch.values())).item(), rel=1e-6)
    assert len(set(losses)) == 3
    assert (norm, steps) == ("True", "3")


def test_importing_runtime_imports_no_torch():
    names = ["LossScaling", "ShareSampler", "Trainer", "compile_backend", "load", "parameters_on_meta"]
    code = "import sys, runtime; print('torch' in sys.modules, sorted(runtime.__all__))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"False {names}"
    with pytest.raises(AttributeError, match="module 'runtime' has no attribute 'train'"):
        _ = runtime.train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plan_s_optimizer_is_that_of_a_run(name, dtype):
    """Bit-equal to the one of ``meshwright run``, master copies of 16-bit parameters included."""
    generator = torch.Generator().manual_seed(0)
    start = {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in {"a": (3, 5), "b": (7,)}.items()}
    ours, theirs = ({key: tensor.clone() for key, tensor in start.items()} for _ in range(2))
    user = UserOptimizer(planned_optimizer(optimizer_named(name)), ours, optimizer_named(name))
    local = LocalOptimizer(name, theirs)
    for _ in range(3):
        gradients = {key: torch.randn(tensor.shape, generator=generator).to(dtype) for key, tensor in start.items()}
        for optimizer in (user, local):
            optimizer.begin_step()
            for key, gradient in gradients.items():
                optimizer.update(key, gradient.clone())
            optimizer.end_step()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor)
        assert not torch.equal(tensor, start[key])
    assert sum(t.nbytes for t in user.state_tensors() if t.ndim) == sum(t.nbytes for t in local.state_tensors())

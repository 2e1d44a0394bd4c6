"""The same training in one process: the plain module, eager autograd, torch's own optimizer.

``python -m runtime.measure.reference PLAN FOLDER --steps N`` writes into FOLDER the initial state that the ranks
read and, for N > 0, the reference of the comparison: the loss of each step, every gradient of the first step, and
parameters and module buffers after the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from formulations.problem.files import write_text_atomically
from planner.models.references import DTYPES, ModelReference, TrainingStep, load_step, reference_of
from planner.plan.document import load_plan
from planner.torch_adapter.tracing.step_module import StepArguments, step_loss
from runtime.measure.batches import Batches
from runtime.measure.initial_state import map_tensors, save_tensors, write_initial_state
from runtime.measure.optimizer import whole_model_optimizer
from runtime.measure.rounding import WIDER, Rounding, loss_error, write_rounding

GRADIENT_FLOOR = 1e-4
"""Least scale of a gradient, as a share of the largest entry of all gradients."""

GRADIENTS_FILE, UPDATED_FILE, LOSSES_FILE = "gradients.pt", "updated.pt", "losses.json"


@dataclass(frozen=True, eq=False)
class ReferenceRun:
    """Results of one process; gradients and updated tensors are mapped files.

    Parameters
    ----------
    losses
        Loss of each step.
    gradients
        Gradient of the first step by parameter name; a parameter without one is missing.
    updated
        Parameters and module buffers after the last step, by name.
    gradient_scale
        Largest absolute entry among all gradients.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    updated: Mapping[str, Tensor]
    gradient_scale: float

    def scale_of(self, gradient: Tensor) -> float:
        """What errors of a gradient are relative to: its largest entry, or a floor where all are small."""
        largest = float(gradient.abs().max()) if gradient.numel() else 0.0
        return max(largest, GRADIENT_FLOOR * self.gradient_scale) or 1.0


def prepare(
    reference: ModelReference, optimizer: str, steps: int, data: Path | None, folder: Path, micro_batches: int = 1
) -> None:
    """Write the initial state into ``folder`` and train ``steps`` steps for comparison.

    Parameters
    ----------
    reference
        Which step; parameters are initialised from its seed.
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`.
    steps
        Number of steps, at least 1.
    data
        Text to train on; None: the example batch.
    folder
        Where the files go.
    micro_batches
        Of a step, each of the reference's batch.
    """
    step = load_step(reference, "cpu")
    arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
    write_initial_state(folder, step.module, dict(zip(arguments.names, arguments.tensors, strict=True)))
    batches = Batches.of(step.module, arguments, arguments.tensors, data, micro_batches)
    _train(step, arguments, batches, optimizer, steps, folder)


def _train(
    step: TrainingStep, arguments: StepArguments, batches: Batches, optimizer: str, steps: int, folder: Path
) -> None:
    module = step.module
    updater = whole_model_optimizer(optimizer, module)
    losses, scale = [], 0.0
    for number in range(steps):
        losses.append(_backward(step, arguments, batches, number))
        if number == 0:
            found = _gradients(module)
            scale = max((float(gradient.abs().max()) for gradient in found.values() if gradient.numel()), default=0.0)
            save_tensors(folder / GRADIENTS_FILE, found)
        updater.step()
        module.zero_grad(set_to_none=True)
    named = [*module.named_parameters(), *module.named_buffers()]
    save_tensors(folder / UPDATED_FILE, {name: tensor.detach().contiguous() for name, tensor in named})
    write_text_atomically(folder / LOSSES_FILE, json.dumps({"losses": losses, "gradient_scale": scale}))


def _backward(step: TrainingStep, arguments: StepArguments, batches: Batches, number: int) -> float:
    """Forward and backward of all micro-batches of a step; its loss."""
    parts = []
    for at in range(batches.micro_batches):
        args, kwargs = arguments.rebuild(batches.tensors(number * batches.micro_batches + at))
        loss = step_loss(step.module, args, kwargs, step.loss_fn) / batches.micro_batches
        loss.backward()  # type: ignore[no-untyped-call]
        parts.append(loss.item())
    return sum(parts)


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.contiguous() for name, p in module.named_parameters() if p.grad is not None}


def prepare_rounding(reference: ModelReference, data: Path | None, folder: Path, micro_batches: int = 1) -> None:
    """Write how far the gradients of :func:`prepare` are from those of a wider dtype; arguments as there."""
    step = load_step(reference, "cpu")
    arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
    dtype = DTYPES[WIDER[reference.dtype]]
    examples = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in arguments.tensors)
    batches = Batches.of(step.module, arguments, examples, data, micro_batches)
    step.module.to(dtype)
    loss = _backward(step, arguments, batches, 0)
    run, precise = read_reference(folder), _gradients(step.module)
    errors = {
        name: float((gradient.to(dtype) - precise[name]).abs().max()) / run.scale_of(gradient)
        for name, gradient in run.gradients.items()
        if gradient.numel()
    }
    write_rounding(Rounding(loss_error(run.losses[0], loss), errors), folder)


def read_reference(folder: Path) -> ReferenceRun:
    """Read what :func:`prepare` wrote."""
    written = json.loads((folder / LOSSES_FILE).read_text(encoding="utf-8"))
    return ReferenceRun(
        tuple(written["losses"]),
        map_tensors(folder / GRADIENTS_FILE),
        map_tensors(folder / UPDATED_FILE),
        written["gradient_scale"],
    )


def prepare_from_command_line(step_of: Callable[[Path], tuple[ModelReference, str, int]]) -> None:
    """Prepare a run of a plan, with the options of the command line.

    Parameters
    ----------
    step_of
        Returns the model reference, the optimizer and the micro-batches of a plan file.
    """
    parser = argparse.ArgumentParser(description="Write the initial state of a plan's run, and train in one process.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounding", action="store_true", help="the rounding of what was written before")
    options = parser.parse_args()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    reference, optimizer, micro_batches = step_of(options.plan)
    if options.rounding:
        prepare_rounding(reference, options.data, options.folder, micro_batches)
    else:
        prepare(reference, optimizer, options.steps, options.data, options.folder, micro_batches)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _step_of(path: Path) -> tuple[ModelReference, str, int]:
    plan = load_plan(path)
    return reference_of(plan.decision.model), plan.decision.options.optimizer, plan.decision.options.grad_accum


if __name__ == "__main__":
    prepare_from_command_line(_step_of)

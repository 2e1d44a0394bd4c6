"""What every rank of a layer plan's run does: read the plan, build its stage, train, compare, report.

Started by :mod:`runtime.layer_launch`, or by torch's own launcher, one process per device::

    torchrun --nproc-per-node 4 -m runtime.layer_main layers.json --steps 5 --check --report report.json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from formulations.files import write_text_atomically
from planner.layer_plan import LayerPlan, load_layer_plan, parse_layer_plan, save_layer_plan
from planner.layer_plan_check import check_layer_plan
from planner.models import load_step
from planner.plan_format import canonical_json
from planner.torch_adapter.resized_storages import ResizedStorageMeter
from planner.torch_adapter.step_module import StepArguments
from runtime.batches import Batches
from runtime.comparison import NO_ERROR, WorstError
from runtime.initial_state import read_initial_state
from runtime.layer_check import check_model
from runtime.layer_comparison import gradient_error, uncompared
from runtime.layer_families import model_family
from runtime.layer_mesh import plan_meshes
from runtime.layer_reference import model_reference
from runtime.layer_report import LayerRankReport, LayerRunReport, merged_layer_report
from runtime.layer_training import LayerTraining
from runtime.measure import Measurement, train_and_measure
from runtime.process_group import LaunchError, broadcast_text, gather_texts, joined, rank_device
from runtime.rank_main import RunOptions, is_first_here, parse_options
from runtime.reference import ReferenceRun, read_reference

PLAN_FILE = "layers.json"


def run_layer_rank(options: RunOptions) -> int:
    """Do this rank's part; rank 0 writes the report.

    Returns
    -------
    int
        The same exit code on every rank; see :attr:`LayerRunReport.exit_code`.

    Raises
    ------
    FamilyError, LaunchError, PlanError
        The job does not have the plan's ranks, or the plan or the model cannot be run.
    """
    device = rank_device(options.device)
    with joined(device) as membership:
        text = canonical_json(load_layer_plan(options.plan)) if dist.get_rank() == 0 else ""
        plan = parse_layer_plan(broadcast_text(text), str(options.plan))
        check_layer_plan(plan)
        options = replace(options, scratch=options.scratch / f"meshwright-{broadcast_text(uuid.uuid4().hex)}")
        try:
            report = _run(plan, options, device)
            if dist.get_rank() == 0:
                for failure in report.failures():
                    print("meshwright:", failure, file=sys.stderr)
        finally:
            if is_first_here():
                shutil.rmtree(options.scratch, ignore_errors=True)
        membership.exit_code = report.exit_code
    return report.exit_code


def _run(plan: LayerPlan, options: RunOptions, device: torch.device) -> LayerRunReport:
    step = load_step(model_reference(plan), "meta")
    family = model_family(step)
    check_model(plan, family, step.example_kwargs)
    meshes = plan_meshes(plan, device.type)
    _prepare(plan, options)
    initial = read_initial_state(options.scratch)
    arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
    examples = tuple(initial.examples[name] for name in arguments.names)
    batches = Batches.of(step.module, arguments, examples, options.data)
    training = LayerTraining(plan, family, step.module, meshes, initial.tensors, device)
    reference = read_reference(options.scratch) if options.check else None
    own = _train(training, batches, reference, options.steps, device)
    ranks = [LayerRankReport.model_validate_json(text) for text in gather_texts(own.model_dump_json())]
    missing = [] if reference is None else uncompared([rank.compared for rank in ranks], reference)
    report = merged_layer_report(plan, ranks, options.device, reference, missing)
    if options.report is not None and dist.get_rank() == 0:
        write_text_atomically(options.report, json.dumps(report.model_dump(mode="json"), indent=2) + "\n")
    return report


def _train(
    training: LayerTraining, batches: Batches, reference: ReferenceRun | None, steps: int, device: torch.device
) -> LayerRankReport:
    worst, compared = NO_ERROR, dict[str, int]()

    def compare(gradients: Mapping[str, Tensor]) -> None:
        nonlocal worst, compared
        if reference is not None:
            worst, compared = gradient_error(gradients, training.stage.origins, reference)

    measured = train_and_measure(training, batches, steps, device, compare, ResizedStorageMeter())
    return _rank_report(measured, worst, compared)


def _rank_report(measured: Measurement, worst: WorstError, compared: dict[str, int]) -> LayerRankReport:
    return LayerRankReport(
        losses=measured.losses,
        measured_peak_bytes=measured.peak_bytes,
        measured_host_peak_bytes=measured.host_peak_bytes,
        resident_set_bytes=measured.resident_set_bytes,
        measured_step_s=measured.step_seconds,
        grad_rel_error=worst.error,
        worst_gradient=worst.name,
        compared=compared,
    )


def _prepare(plan: LayerPlan, options: RunOptions) -> None:
    """Have one process per machine make the initial state and, for a check, train for comparison."""
    if is_first_here():
        options.scratch.mkdir(parents=True, mode=0o700)
        save_layer_plan(plan, options.scratch / PLAN_FILE)
        command = [sys.executable, "-m", "runtime.layer_reference", str(options.scratch / PLAN_FILE)]
        command += [str(options.scratch), "--steps", str(options.steps if options.check else 0)]
        command += ["--data", str(options.data)] if options.data is not None else []
        made = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if made.returncode != 0:
            last = (made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1]
            raise LaunchError(f"the process that makes the initial state failed: {last}")
    dist.barrier()


@record
def main() -> int:
    """Run one rank."""
    return run_layer_rank(parse_options())


if __name__ == "__main__":
    sys.exit(main())

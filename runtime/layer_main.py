"""Main program of every rank of a layer plan's run: read the plan, build its stage, train, compare, report.

Started by :mod:`runtime.layers.launch`, or by torch's own launcher, one process per device::

    torchrun --nproc-per-node 4 -m runtime.layer_main layers.json --steps 5 --check --report report.json
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan, load_layer_plan, parse_layer_plan, save_layer_plan
from planner.models.references import check_code, load_step
from planner.plan.decision import canonical_json
from planner.torch_adapter.meters.resized_storages import ResizedStorageMeter
from planner.torch_adapter.tracing.step_module import StepArguments
from runtime.job.device_memory import check_device_memory
from runtime.job.membership import joined
from runtime.job.planned_device import kind_for_rank, print_calibration_note
from runtime.job.process_group import broadcast_text, gather_texts, rank_device, round_as_float32
from runtime.job.rank_job import (
    RunOptions,
    is_first_here,
    parse_options,
    scratch_folder,
    shared_rounding,
    train_for_comparison,
)
from runtime.layers.check import check_comparable, check_model
from runtime.layers.comparison import gradient_error, uncompared
from runtime.layers.families.registry import model_family
from runtime.layers.mesh import plan_meshes
from runtime.layers.reference import model_reference
from runtime.layers.report import LayerRankReport, LayerRunReport
from runtime.layers.training import LayerTraining
from runtime.library.sources import reader_without_module, seeded_step, shared_examples
from runtime.library.weights import ModuleTensors
from runtime.measure.batches import Batches
from runtime.measure.initial_state import read_initial_state
from runtime.measure.local_shards import reader_of
from runtime.measure.merged_report import merged_measurements, rank_measurements
from runtime.measure.reference import ReferenceRun, read_reference
from runtime.measure.rounding import NO_ROUNDING
from runtime.measure.run_report import write_report
from runtime.measure.steps import train_and_measure

PLAN_FILE = "layers.json"
REFERENCE = "runtime.layers.reference"


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
    device = rank_device(kind_for_rank(options.device, options.plan))
    if options.check:
        round_as_float32()
    with joined(device) as membership:
        text = canonical_json(load_layer_plan(options.plan)) if dist.get_rank() == 0 else ""
        plan = parse_layer_plan(broadcast_text(text), str(options.plan))
        check_layer_plan(plan)
        check_code(plan.model.source, options.allow_code)
        print_calibration_note(plan)
        check_device_memory(plan.held_bytes, device)
        with scratch_folder(options) as own:
            report = _run(plan, own, device)
            if dist.get_rank() == 0:
                print(report.line(plan.objective_seconds, plan.held_bytes))
                for failure in report.failures():
                    print("meshwright:", failure, file=sys.stderr)
        membership.exit_code = report.exit_code
    return report.exit_code


def _run(plan: LayerPlan, options: RunOptions, device: torch.device) -> LayerRunReport:
    reference = model_reference(plan)
    step, seeded = (load_step(reference, "meta"), None) if options.check else seeded_step(reference)
    family = model_family(step)
    check_model(plan, family, step.example_kwargs)
    if options.check:
        check_comparable(family)
    meshes = plan_meshes(plan, device.type)
    copy = options.scratch / PLAN_FILE
    if is_first_here():
        save_layer_plan(plan, copy)
    arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
    if options.check:  # one process makes the state of all
        train_for_comparison(REFERENCE, copy, options)
        initial = read_initial_state(options.scratch)
        read, examples = reader_of(initial.tensors), tuple(initial.examples[name] for name in arguments.names)
    else:
        examples = shared_examples(step, device)
        read = reader_without_module(step.module, ModuleTensors(step.module, device, seeded), None)
    batches = Batches.of(step.module, arguments, examples, options.data)
    training = LayerTraining(plan, family, step.module, meshes, read, device)
    expected = read_reference(options.scratch) if options.check else None
    own = _train(training, batches, expected, options, device)
    ranks = [LayerRankReport.model_validate_json(text) for text in gather_texts(own.model_dump_json())]
    missing = [] if expected is None else uncompared([rank.compared for rank in ranks], expected)
    report = LayerRunReport(
        devices=plan.devices,
        stages=len(plan.stages),
        micro_batches=plan.micro_batches,
        device=device.type,
        dtype=plan.model.dtype,
        uncompared=missing,
        **merged_measurements(ranks, expected),
    )
    if options.report is not None and dist.get_rank() == 0:
        write_report(report, options.report)
    return report


def _train(
    training: LayerTraining, batches: Batches, reference: ReferenceRun | None, options: RunOptions, device: torch.device
) -> LayerRankReport:
    errors, compared, rounding = dict[str, float](), dict[str, int](), NO_ROUNDING

    def compare(gradients: Mapping[str, Tensor]) -> None:
        nonlocal errors, compared
        if reference is not None:
            errors, compared = gradient_error(gradients, training.stage.origins, reference)

    measured = train_and_measure(training, batches, options.steps, device, compare, ResizedStorageMeter())
    if reference is not None:
        loss, copy = measured.losses[0], options.scratch / PLAN_FILE
        rounding = shared_rounding(REFERENCE, copy, options, errors, loss, reference.losses[0])
    return LayerRankReport(compared=compared, **rank_measurements(measured, errors, rounding))


@record
def main() -> int:
    """Run one rank."""
    return run_layer_rank(parse_options("runtime.layer_main"))


if __name__ == "__main__":
    sys.exit(main())

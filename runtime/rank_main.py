"""Main program of every rank of a run: read the plan, rebuild its schedule, train, compare, report.

Started by :mod:`runtime.job.launch`, or by torch's own launcher, one process per device::

    torchrun --nproc-per-node 4 -m runtime.rank_main plan.json --steps 5 --check --report report.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from planner.models.references import TrainingStep, check_code, load_step, reference_of
from planner.plan.decision import NANOSECONDS, canonical_json
from planner.plan.document import Plan, load_plan, save_plan
from planner.schedule.instructions import Schedule, Wait
from planner.strategies.traced_step import TracedStep, trace_step
from planner.torch_adapter.deferred_values import DeferredValues
from planner.torch_adapter.local.collectives import MeshGroups
from planner.torch_adapter.tracing.step_module import StepArguments
from runtime.job.device_memory import check_device_memory
from runtime.job.layout import device_mesh, print_layout_note
from runtime.job.membership import joined
from runtime.job.planned_device import check_kind, kind_for_rank, print_calibration_note
from runtime.job.process_group import LaunchError, broadcast_text, gather_texts, rank_device, round_as_float32
from runtime.job.rank_job import (
    RunOptions,
    check_comparable,
    is_first_here,
    parse_options,
    scratch_folder,
    shared_rounding,
    train_for_comparison,
)
from runtime.library.sources import place, seeded_step, shared_examples
from runtime.library.weights import ModuleTensors
from runtime.measure.batches import Batches
from runtime.measure.comparison import ReferenceComparison
from runtime.measure.initial_state import local_state, read_initial_state
from runtime.measure.merged_report import merged_measurements, rank_measurements
from runtime.measure.reference import read_reference
from runtime.measure.rounding import NO_ERROR, NO_ROUNDING, Rounding, WorstError
from runtime.measure.run_report import RankReport, RunReport, write_report
from runtime.measure.steps import Measurement, train_and_measure
from runtime.operators.checked_plan import check_ranks, checked_schedule
from runtime.operators.instruction_clock import InstructionClock
from runtime.operators.profiled_clock import clock_of
from runtime.operators.training import LocalTraining

PLAN_FILE = "plan.json"
REFERENCE = "runtime.measure.reference"


def print_result(plan: Plan, report: RunReport) -> None:
    """Print in one line what was predicted and measured, without libraries for tables, and failures on stderr."""
    print(report.line(report.predicted_step_s, max(report.predicted_peak_bytes)))
    print_failures(plan, report)


def print_failures(plan: Plan, report: RunReport) -> None:
    """Print the failures of a run on stderr, one line each."""
    for failure in report.failures():
        print("meshwright:", failure, file=sys.stderr)


def run_rank(options: RunOptions, show: Callable[[Plan, RunReport], None] = print_result) -> int:
    """Do this rank's part; rank 0 writes the report.

    Parameters
    ----------
    options
        How to run.
    show
        Called on rank 0 with the merged report, before any rank leaves the job.

    Returns
    -------
    int
        The same exit code on every rank; see :attr:`RunReport.exit_code`.

    Raises
    ------
    LaunchError
        If the job does not have the plan's ranks.
    PlanError
        If the plan cannot be read, or is not a correct plan of the step as traced on this machine.
    """
    device = rank_device(kind_for_rank(options.device, options.plan))
    if options.check:
        round_as_float32()
    with joined(device) as membership:
        plan = _shared_plan(options)
        if options.device is None:
            check_kind(plan, device.type)
        check_device_memory(plan.peak_bytes, device, plan.decision.options.reserve_bytes)
        print_layout_note(plan.decision.options.mesh, plan.decision.options.cluster)
        print_calibration_note(plan)
        with scratch_folder(options) as own:
            report = _run(plan, own, device)
            if dist.get_rank() == 0:
                show(plan, report)
        membership.exit_code = report.exit_code
    return report.exit_code


def _run(plan: Plan, options: RunOptions, device: torch.device) -> RunReport:
    """Train, and return rank 0's report of all ranks on every rank."""
    copy = options.scratch / PLAN_FILE
    if is_first_here():
        save_plan(plan, copy)
    reference = reference_of(plan.decision.model)
    step, seeded = (load_step(reference, "meta"), None) if options.check else seeded_step(reference)
    traced = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn, reference.reduce_dtype)
    schedule = checked_schedule(plan, traced, dist.get_world_size())
    if options.check:
        check_comparable(traced.graph.random_targets)
        train_for_comparison(REFERENCE, copy, options)
    texts = gather_texts(train_rank(plan, step, seeded, traced, schedule, options, device).model_dump_json())
    merged = ""
    if dist.get_rank() == 0:
        report = merged_report(plan, [RankReport.model_validate_json(text) for text in texts], options, device)
        if options.report is not None:
            write_report(report, options.report)
        merged = report.model_dump_json()
    return RunReport.model_validate_json(broadcast_text(merged))


def _shared_plan(options: RunOptions) -> Plan:
    """The plan that rank 0 reads."""
    text = canonical_json(load_plan(options.plan)) if dist.get_rank() == 0 else ""
    text = broadcast_text(text)
    plan = Plan.model_validate_json(text)
    check_ranks(plan, dist.get_world_size())
    check_code(plan.decision.model.source, options.allow_code)
    return plan


def train_rank(
    plan: Plan,
    step: TrainingStep,
    seeded: DeferredValues | None,
    traced: TracedStep,
    schedule: Schedule,
    options: RunOptions,
    device: torch.device,
) -> RankReport:
    """Train this rank's part, and compare it where the options say so; a collective of all ranks.

    Parameters
    ----------
    plan, schedule
        The plan, and its checked schedule.
    step, seeded, traced
        The step as :func:`runtime.library.sources.seeded_step` has it; its tensors are replaced. And the traced one.
    options
        How to run.
    device
        Device of this rank.
    """
    decision = plan.decision
    overlapping = any(isinstance(entry, Wait) for entry in schedule.instructions)
    mesh = device_mesh(device.type, decision.options.mesh)
    groups = MeshGroups.of(mesh, overlapping=overlapping)
    if options.profile and decision.options.grad_accum > 1:
        raise LaunchError(
            "--profile: the instructions of several micro-batches are not timed; plan without --grad-accum"
        )
    clock = clock_of(len(schedule.instructions), device, options.steps) if options.profile else None
    arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
    if options.check:  # one process has made the state of all
        initial = read_initial_state(options.scratch)
        state = local_state(initial, traced.constants, traced.graph, schedule, groups, device)
        examples = tuple(initial.examples[name] for name in arguments.names)
    else:
        examples = shared_examples(step, device)
        own = ModuleTensors(step.module, device, seeded)
        state = place(traced, schedule, step.module, own, None, groups, mesh, device)
    training = LocalTraining(
        traced,
        schedule,
        groups,
        state,
        decision.options.optimizer,
        decision.model.seed,
        device,
        clock,
        decision.options.grad_accum,
        decision.options.is_fused,
    )
    batches = Batches.of(step.module, arguments, examples, options.data, decision.options.grad_accum)
    if not options.check:
        measured = train_and_measure(training, batches, options.steps, device)
        return _rank_report(measured, {}, NO_ERROR, instruction_times(training, batches, options.steps, clock))
    reference = read_reference(options.scratch)
    comparison = ReferenceComparison(reference, training.placements, groups)
    errors: dict[str, float] = {}
    measured = train_and_measure(
        training,
        batches,
        options.steps,
        device,
        lambda gradients: errors.update(comparison.gradients(gradients)),
    )
    rounding = shared_rounding(
        REFERENCE, options.scratch / PLAN_FILE, options, errors, measured.losses[0], reference.losses[0]
    )
    updated = comparison.updated(training.state)
    times = instruction_times(training, batches, options.steps, clock)
    return _rank_report(measured, errors, updated, times, rounding)


def instruction_times(
    training: LocalTraining, batches: Batches, steps: int, clock: InstructionClock | None
) -> tuple[int, ...] | None:
    """Nanoseconds of each instruction, after the steps of which the clock shall not touch the times."""
    if clock is None:
        return None
    for number in range(steps, steps + clock.more_steps):
        training.step(batches.of_step(number))
    return clock.typical()


def _rank_report(
    measured: Measurement,
    errors: Mapping[str, float],
    updated: WorstError,
    times: tuple[int, ...] | None,
    rounding: Rounding = NO_ROUNDING,
) -> RankReport:
    found = rank_measurements(measured, errors, rounding)
    return RankReport(param_rel_error=updated.error, worst_parameter=updated.name, instruction_ns=times, **found)


def merged_report(plan: Plan, ranks: list[RankReport], options: RunOptions, device: torch.device) -> RunReport:
    """One report of all ranks' reports."""
    reference = read_reference(options.scratch) if options.check else None
    host, updated = plan.decision.predicted.host, NO_ERROR
    times = [rank.instruction_ns for rank in ranks if rank.instruction_ns is not None]
    for rank in ranks:
        updated = updated.worse_of(WorstError(rank.param_rel_error, rank.worst_parameter))
    return RunReport(
        plan_digest=plan.digest,
        mesh=plan.decision.options.mesh,
        device=device.type,
        dtype=plan.decision.model.dtype,
        memory_limit_bytes=plan.decision.options.limit_bytes,
        predicted_peak_bytes=[plan.peak_bytes] * len(ranks),
        predicted_host_peak_bytes=[host.peak_bytes] * len(ranks),
        predicted_step_s=plan.objective_seconds,
        predicted_stall_s=host.stall_ns / NANOSECONDS,
        max_param_rel_error=None if reference is None else updated.error,
        worst_parameter=updated.name,
        instruction_ns=times or None,
        **merged_measurements(ranks, reference),
    )


@record
def main() -> int:
    """Run one rank."""
    return run_rank(parse_options("runtime.rank_main"))


if __name__ == "__main__":
    sys.exit(main())

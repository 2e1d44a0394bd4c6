"""Preparation of a rank's job: options, a scratch folder, the initial state."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from runtime.job.layout import ranks_by_machine
from runtime.job.process_group import LaunchError, broadcast_text, gather_texts
from runtime.job.slurm import adopt_slurm
from runtime.measure.rounding import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    NO_ROUNDING,
    Rounding,
    loss_error,
    read_rounding,
    worst_of,
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run, as the command has them."""

    plan: Path
    steps: int
    check: bool
    data: Path | None
    device: str | None
    report: Path | None
    scratch: Path
    profile: bool = False
    allow_code: bool = False
    checkpoints: Path | None = None
    every: int = 0


def parse_options(program: str, arguments: list[str] | None = None) -> RunOptions:
    """Options of the command line of a module named `program`, whose process is a rank of torchrun or srun."""
    adopt_slurm()
    parser = argparse.ArgumentParser(prog=program, description="Run a plan as one rank of a job.")
    parser.add_argument("plan", type=Path, help="plan file; rank 0 reads it")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (at least 1)")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    parser.add_argument("--data", type=Path, help="text whose bytes are the tokens, on every machine")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="that of the plan's cluster if left out")
    parser.add_argument("--report", type=Path, help="where rank 0 writes its report (JSON)")
    parser.add_argument("--profile", action="store_true", help="time every instruction, for the report")
    parser.add_argument("--allow-code", action="store_true", help="let the plan import the module that it names")
    parser.add_argument("--scratch", type=Path, help="folder of this machine for the run's temporary folder")
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints, which all machines see")
    parser.add_argument("--every", type=int, default=0, help="steps between checkpoints; 0: after the last one alone")
    found = parser.parse_args(arguments)
    if found.steps < 1:
        raise LaunchError(f"--steps {found.steps}: a run has at least one step")
    return RunOptions(
        plan=found.plan,
        steps=found.steps,
        check=found.check,
        data=found.data,
        device=found.device,
        report=found.report,
        scratch=found.scratch or Path(tempfile.gettempdir()),
        profile=found.profile,
        allow_code=found.allow_code,
        checkpoints=found.checkpoints,
        every=found.every,
    )


def is_first_here() -> bool:
    """Whether this is the first rank of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


@contextmanager
def scratch_folder(options: RunOptions) -> Iterator[RunOptions]:
    """The options with a folder of this run alone as their scratch, made on every machine and removed at the end.

    A collective of all ranks. Machines may have one file system: each has a name of its own, that of its first rank.
    """
    first = ranks_by_machine().index(dist.get_rank()) - int(os.environ.get("LOCAL_RANK", "0"))
    folder = options.scratch / f"meshwright-{broadcast_text(uuid.uuid4().hex)}-{first}"
    try:
        if is_first_here():
            folder.mkdir(parents=True, mode=0o700)
        yield replace(options, scratch=folder)
    finally:
        if is_first_here():
            shutil.rmtree(folder, ignore_errors=True)


def check_comparable(random_targets: Sequence[str]) -> None:
    """Refuse to compare a step with one process if it draws random numbers, which differ between the two.

    Parameters
    ----------
    random_targets
        Targets of the operators that do; see :attr:`planner.graph.operator_graph.OperatorGraph.random_targets`.

    Raises
    ------
    LaunchError
        There are some.
    """
    if random_targets:
        raise LaunchError(
            f"--check: the step draws random numbers ({', '.join(random_targets)}), others than one process: plan "
            "without dropout (--dropout 0; a function of yours takes it as a parameter), or leave --check out"
        )


def train_for_comparison(module: str, plan: Path, options: RunOptions) -> None:
    """Start one process per machine that makes the initial state and trains for comparison.

    A collective of all ranks.

    Parameters
    ----------
    module
        Module of that process: :mod:`runtime.measure.reference` or :mod:`runtime.layers.reference`.
    plan
        Copy of the plan on this machine.
    options
        Options of the run; results go into the scratch folder.

    Raises
    ------
    LaunchError
        The process failed.
    """
    _run_reference(module, plan, options, ["--steps", str(options.steps)])


def shared_rounding(
    module: str, plan: Path, options: RunOptions, errors: Mapping[str, float], loss: float, expected: float
) -> Rounding:
    """The rounding of one process, computed where a gradient or the loss of any rank is not within single precision.

    A collective of all ranks.

    Parameters
    ----------
    module, plan, options
        As for :func:`train_for_comparison`, which was called before.
    errors
        Relative errors of this rank's gradients.
    loss, expected
        Loss of the first step, and one process's.

    Raises
    ------
    LaunchError
        The process failed.
    """
    near = worst_of(errors).error <= GRADIENT_TOLERANCE and loss_error(loss, expected) <= LOSS_TOLERANCE
    if all(text == str(True) for text in gather_texts(str(near))):
        return NO_ROUNDING
    _run_reference(module, plan, options, ["--rounding"])
    return read_rounding(options.scratch)


def _run_reference(module: str, plan: Path, options: RunOptions, wanted: list[str]) -> None:
    if is_first_here():
        command = [sys.executable, "-m", module, str(plan), str(options.scratch), *wanted]
        command += ["--data", str(options.data)] if options.data is not None else []
        found_here = os.pathsep.join(filter(None, sys.path))  # a model beside the user's script is there as well
        environment = {**os.environ, "PYTHONPATH": found_here}
        made = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=environment)
        if made.returncode != 0:
            last = (made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1]
            raise LaunchError(f"the process that trains for comparison or makes the initial state failed: {last}")
    dist.barrier()

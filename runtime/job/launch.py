"""Runs a plan on this machine: one process per rank through torch's launcher, and one report.

If a rank dies the launcher ends the others, so a failure is one error and never a hang; the ranks' watchdogs end a job
in which one hangs. The ranks are fresh interpreters that import nothing but torch, numpy and pydantic (and transformers
for ``hf:`` models).
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from formulations.problem.files import write_text_atomically
from planner.layers.plan.document import LayerPlan, is_layer_plan, load_layer_plan, save_layer_plan
from planner.models.references import check_code
from planner.plan.document import Plan, load_plan, save_plan
from runtime.job.planned_device import device_of_run
from runtime.job.process_group import LaunchError
from runtime.job.rank_job import RunOptions, check_comparable
from runtime.measure.run_report import RunReport

_ENDED_BY_US = (-signal.SIGTERM, -signal.SIGALRM)
"""Exit codes of ranks that end because another one failed."""

_KILLED = ", which is how the operating system ends a process where memory runs out"

_FAULT = re.compile(r"rank [\d, ]+ of \d+.*", re.DOTALL)
"""The fault that the ranks' watchdogs agreed on (:mod:`runtime.job.watchdog`)."""


def run_plan(
    plan: Plan | Path | str,
    *,
    steps: int = 5,
    check: bool = False,
    data: Path | str | None = None,
    device: str | None = None,
    profile: bool = False,
    allow_code: bool = False,
) -> RunReport:
    """Run a plan on this machine.

    Parameters
    ----------
    plan
        A plan or its file.
    steps
        Optimizer steps; the first is metered, the others are timed.
    check
        Train in one process as well, without a plan, and compare losses, gradients and parameters.
    data
        Text whose bytes are the token ids; None: the model's example batch in every step.
    device
        ``cpu`` (gloo) or ``cuda`` (NCCL, one device per rank); None: the kind that the plan is for.
    profile
        Time every instruction; see :mod:`runtime.measure.profile`.
    allow_code
        Whether a plan from elsewhere may import the module that it names; see
        :func:`planner.models.references.check_code`.

    Returns
    -------
    RunReport

    Raises
    ------
    PlanError
        If the plan cannot be read.
    ModelError
        If its model is code that was not allowed.
    LaunchError
        If the run cannot be started or a rank fails.
    """
    checked = plan if isinstance(plan, Plan) else load_plan(Path(plan))
    check_code(checked.decision.model.source, allow_code)
    if check:
        check_comparable(checked.decision.random_targets)
    device = device_of_run(device, checked)
    report = run_module(
        "runtime.rank_main",
        prod(checked.decision.options.mesh),
        lambda path: save_plan(checked, path),
        steps=steps,
        check=check,
        data=data,
        device=device,
        more=["--profile"] * profile,
    )
    return RunReport.model_validate_json(report)


def train_plan(options: RunOptions, max_restarts: int = 0) -> str:
    """Train on this machine with checkpoints, from the last one that is there.

    Parameters
    ----------
    options
        The plan's file, of operators or of layers, and how to train.
    max_restarts
        How often the ranks are started again after a failure; each time they go on from the last checkpoint.

    Returns
    -------
    str
        The number of steps and the last loss as JSON, null where no step was left to do.

    Raises
    ------
    PlanError
        The plan cannot be read.
    ModelError
        Its model is code that was not allowed.
    LaunchError
        The run cannot be started, or ranks failed more often than that.
    """
    path = options.plan
    plan = load_layer_plan(path) if is_layer_plan(path) else load_plan(path)
    source = plan.model.source if isinstance(plan, LayerPlan) else plan.decision.model.source
    check_code(source, options.allow_code)
    report = run_module(
        "runtime.train_main",
        plan.devices if isinstance(plan, LayerPlan) else prod(plan.decision.options.mesh),
        lambda place: save_layer_plan(plan, place) if isinstance(plan, LayerPlan) else save_plan(plan, place),
        steps=options.steps,
        check=False,
        data=options.data,
        device=device_of_run(options.device, plan),
        more=["--checkpoints", str(options.checkpoints), "--every", str(options.every)],
        max_restarts=max_restarts,
    )
    if options.report is not None:
        write_text_atomically(options.report, report)
    return report


def run_module(
    module: str,
    ranks: int,
    save: Callable[[Path], None],
    *,
    steps: int,
    check: bool,
    data: Path | str | None,
    device: str,
    more: Sequence[str] = (),
    max_restarts: int = 0,
) -> str:
    """Run a plan of any kind in local processes.

    Parameters
    ----------
    module
        Module that every rank runs: :mod:`runtime.rank_main` or :mod:`runtime.layer_main`.
    ranks
        Number of processes.
    save
        Writes the plan to a file.
    steps, check, data, device
        As :func:`run_plan` takes them.
    more
        Further options of the module.
    max_restarts
        How often the ranks are started again after a failure.

    Returns
    -------
    str
        The report as JSON.

    Raises
    ------
    LaunchError
        If the run cannot be started or a rank fails.
    """
    if steps < 1:
        raise LaunchError(f"steps {steps}: a run has at least one step")
    if data is not None and not Path(data).is_file():
        raise LaunchError(f"data {data} is no file: give a text file")
    with tempfile.TemporaryDirectory(prefix="meshwright-run-") as name:
        folder = Path(name)
        plan, report = folder / "plan.json", folder / "report.json"
        save(plan)
        arguments = [str(plan), "--steps", str(steps), "--device", device, "--allow-code"]  # checked by the caller
        arguments += ["--report", str(report), "--scratch", str(folder / "scratch")]
        arguments += ["--check"] if check else []
        arguments += ["--data", str(Path(data).resolve())] if data is not None else []
        arguments += more
        for restart in range(max_restarts + 1):
            fault = _launch(module, ranks, arguments, folder / f"logs-{restart}", report)
            if not fault:
                break
            if restart == max_restarts:
                raise LaunchError(fault)
            print(f"meshwright: {fault}; restart {restart + 1} of {max_restarts}", file=sys.stderr, flush=True)
        return report.read_text(encoding="utf-8")


def _launch(module: str, ranks: int, arguments: list[str], logs: Path, report: Path) -> str:
    """Start local processes of a module and wait for them; the fault that ended them, empty where none did.

    An error exit of a rank after the report was written means a failed check, which is in the report.
    """
    logs.mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    try:
        with _quiet_launcher(), _inherited_environment(), _kept_signal_handlers():
            elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        return "" if report.exists() else _fault(error, ranks, logs)
    return ""


def _fault(error: ChildFailedError, ranks: int, logs: Path) -> str:
    """Which rank failed and why, on one line: a signal, what the ranks agreed on, or the first message."""
    found = {rank: _message(failure.message) for rank, failure in error.failures.items()}
    agreed = {rank: match[0] for rank, message in found.items() if (match := _FAULT.search(message))}
    said = min((error.failures[rank].timestamp for rank in agreed), default=math.inf)
    for rank, failure in error.failures.items():
        # A stopped rank is killed by the others after they recorded the fault.
        if failure.exitcode < 0 and failure.exitcode not in _ENDED_BY_US and failure.timestamp < said:
            hint = _KILLED if failure.exitcode == -signal.SIGKILL else ""
            return f"rank {rank} of {ranks} failed: {found[rank]}{hint}{_last_words(logs, failure.local_rank)}"
    if agreed:
        return next(iter(agreed.values()))
    rank, failure = error.get_first_failure()
    message = found[rank]
    if not message or "To enable traceback" in message:
        message += _last_words(logs, failure.local_rank)
    return f"rank {rank} of {ranks} failed: {message}"


def _message(message: str | dict[str, Any]) -> str:
    """Message of a failed rank; for an exception torch hands over a dictionary with its stack."""
    return " ".join((str(message.get("message", "")) if isinstance(message, dict) else message).split())


def _last_words(logs: Path, local_rank: int) -> str:
    found = sorted(logs.rglob(f"{local_rank}/stderr.log"))
    lines = found[-1].read_text(encoding="utf-8", errors="replace").strip().splitlines() if found else []
    fatal = next((k for k, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if fatal is not None:  # what was said before it; stacks and lists of modules follow
        said = [line.strip() for line in lines[:fatal] if line.strip()][-2:]
        return f"; its last lines: {'; '.join([*said, lines[fatal].strip()])}"
    return f"; its last line: {lines[-1].strip()}" if lines else ""


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the launcher's log, whose content is in the raised error."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that the launcher replaces, so that the caller's handling of Ctrl-C stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def _inherited_environment() -> Iterator[None]:
    """Pass this process's import path to the ranks, for models in files beside a script."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before

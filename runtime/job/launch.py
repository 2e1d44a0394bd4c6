"""Runs a plan on this machine: one process per rank through torch's launcher, and one report.

If a rank dies the launcher ends the others, so a failure is one error and never a hang. The ranks are
fresh interpreters that import nothing but torch, numpy and pydantic (and transformers for ``hf:`` models).
"""

from __future__ import annotations

import logging
import os
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

from planner.models.references import check_code
from planner.plan.document import Plan, load_plan, save_plan
from runtime.job.process_group import LaunchError
from runtime.measure.run_report import RunReport

LOG_LINES = 15
"""Last lines of a failed rank's log that an error shows when the rank left no message."""


def run_plan(
    plan: Plan | Path | str,
    *,
    steps: int = 5,
    check: bool = False,
    data: Path | str | None = None,
    device: str = "cpu",
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
        ``cpu`` (gloo) or ``cuda`` (NCCL, one device per rank).
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
        _launch(module, ranks, arguments, folder / "logs", report)
        return report.read_text(encoding="utf-8")


def _launch(module: str, ranks: int, arguments: list[str], logs: Path, report: Path) -> None:
    """Start local processes of a module and wait for them.

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
        with _quiet_launcher(), _inherited_import_path(), _kept_signal_handlers():
            elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        if report.exists():
            return
        rank, failure = error.get_first_failure()
        raise LaunchError(
            f"rank {rank} of {ranks} failed: {_reason(failure.message, logs, failure.local_rank)}"
        ) from None


def _reason(message: str | dict[str, Any], logs: Path, local_rank: int) -> str:
    """Message of a failed rank, or the end of its log where it died without one (a signal, out of memory).

    Torch hands over the content of the rank's error file: for an exception a dictionary with its stack.
    """
    if isinstance(message, dict):
        message = str(message.get("message", ""))
    if message and "To enable traceback" not in message:
        return message
    found = sorted(logs.rglob(f"{local_rank}/stderr.log"))
    lines = found[-1].read_text(encoding="utf-8", errors="replace").strip().splitlines() if found else []
    return "\n".join([message, *lines[-LOG_LINES:]])


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
def _inherited_import_path() -> Iterator[None]:
    """Pass this process's import path to the ranks, for models in files beside a notebook or script."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before

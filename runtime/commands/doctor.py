"""The command ``doctor``: what is installed, what this machine has, what is missing and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, metadata, requires, version
from pathlib import Path
from typing import Annotated, Literal

import typer

from planner.common.units import format_bytes
from runtime.commands.bench import INTERRUPTED
from runtime.commands.options import JsonFile
from runtime.commands.tables.progress import progress_line
from runtime.commands.values import OptionError, listed, writable_file, write_json

MISSING = 1
"""Exit code where something is missing that meshwright needs."""
SOLVER_MODULES = {"highspy": "highspy", "ortools": "ortools.sat.python.cp_model", "pyomo": "pyomo.environ"}
"""What a solver's package imports; each in a process of its own, because two of them cannot share one."""
SECONDS = 60.0
"""Longest time of a command that a check starts."""


class State(StrEnum):
    """Result of a check: there, absent but not needed, or absent and needed."""

    OK = "ok"
    OPTIONAL = "optional"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Parameters
    ----------
    name
        What was looked for.
    state
        Whether it is there.
    found
        Version, size or reason.
    remedy
        How to get it; empty where it is there.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


def doctor(
    json_file: JsonFile = None,
    families: Annotated[
        bool, typer.Option("--families", help="Plan a small model of each of 30 families of transformers instead.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="Of --families: these alone, such as llama,t5.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md",
            help="Of --families: page to write after each one. Rows are kept beside it, in FILE.json, and the same "
            "command goes on from those of the same versions.",
        ),
    ] = None,
) -> int:
    """Say what is installed, what this machine has, what is missing and how to get it.

    With --families, say which families of hf: models are planned on two ranks, and why others are refused (minutes).

    The exit code is 1 where something is missing that meshwright needs, or a family fails without a reason.
    """
    if only is not None and not families:
        raise OptionError("--only: names families; give --families too")
    if out is not None and not families:
        raise OptionError("--out: is a page of families; give --families too")
    if out is not None and out.suffix != ".md":
        raise OptionError(f"--out: {str(out)!r} is no page; name a file that ends in .md")
    if families:
        return _families([] if only is None else listed(only, "--only"), json_file, out and writable_file(out, "--out"))
    findings = list(examine())
    _print(findings)
    write_json(json_file, [asdict(finding) for finding in findings])
    return MISSING if any(finding.state is State.MISSING for finding in findings) else 0


def _families(names: list[str], json_file: Path | None, out: Path | None) -> int:
    from planner.models.families import FAMILIES, families_table
    from planner.models.family_page import kept_rows

    known = [family for kind in FAMILIES.values() for family in kind]
    if unknown := [name for name in names if name not in known]:
        raise OptionError(f"--only: {unknown[0]!r} is no family; use {', '.join(known)}")
    wanted = names or known
    rows, interrupted = [], False
    with progress_line("families") as line:
        try:
            for row in kept_rows(wanted, out, lambda family: line.begin(f"planning {family}"), typer.echo):
                rows.append(row)
                typer.echo(f"{row.family}: {row.outcome}, {row.operators} operators, {row.seconds:.1f} s", err=True)
        except KeyboardInterrupt:
            interrupted = True
    typer.echo(families_table(rows))
    if out is not None and rows:
        typer.echo(f"wrote {out}")
    write_json(json_file, [asdict(row) for row in rows])
    if interrupted:
        typer.echo(f"meshwright: interrupted after {len(rows)} of {len(wanted)} families", err=True)
        return INTERRUPTED
    return MISSING if any(row.outcome == "defect" for row in rows) else 0


def examine() -> Iterator[Finding]:
    """Findings in the order in which they are shown."""
    yield Finding("python", State.OK, f"{platform.python_version()}, {sys.executable}")
    yield from packages()
    yield from solvers()
    for check in (torch_loads, processor, memory, gpu, compiler, calibration, network_namespaces):
        yield check()
    yield from gpu_calibration()


def packages() -> Iterator[Finding]:
    """Every package that meshwright requires, and the extras that are not complete."""
    from packaging.requirements import Requirement

    if _version("meshwright") is None:
        yield Finding("meshwright", State.MISSING, "not installed, only imported", "make install")
        return
    wanted = [Requirement(text) for text in requires("meshwright") or ()]
    extras: dict[str, list[str]] = {}
    for requirement in wanted:
        extra = next((name for name in _extras() if requirement.marker and _only_for(requirement.marker, name)), "")
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        found = _version(requirement.name)
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        text = f"'{requirement.name}{requirement.specifier}'"
        if extra:
            extras.setdefault(extra, []).extend([] if fits else [requirement.name])
        elif fits:
            yield Finding(requirement.name, State.OK, str(found))
        else:
            reason = "not installed" if found is None else f"{found} is not {requirement.specifier}"
            yield Finding(requirement.name, State.MISSING, reason, f"pip install {text}")
    for extra, absent in extras.items():
        if absent:
            remedy = f"pip install 'meshwright[{extra}]'"
            yield Finding(f"extra {extra}", State.OPTIONAL, f"without {', '.join(absent)}", remedy)
        else:
            yield Finding(f"extra {extra}", State.OK, "complete")


def solvers() -> Iterator[Finding]:
    """Whether the solvers' packages load, and solvers that other packages add."""
    for package, module in SOLVER_MODULES.items():
        if _version(package) is None:
            continue  # named among the packages
        error = _failure([sys.executable, "-c", f"import {module}"])
        name = f"{package} loads"
        if error:
            yield Finding(name, State.MISSING, error, f"pip install --force-reinstall {package}")
        else:
            yield Finding(name, State.OK, "yes")
    added = sorted(entry.name for entry in entry_points(group="meshwright.solvers"))
    yield Finding("solvers of other packages", State.OK, ", ".join(added) or "none")


def torch_loads() -> Finding:
    """Whether torch loads, and with which backends of ``torch.distributed``."""
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError) as error:
        return Finding("torch loads", State.MISSING, _line(str(error)), "make install, or pip install torch")
    if not distributed.is_available() or not distributed.is_gloo_available():
        return Finding(
            "torch loads", State.MISSING, "torch.distributed has no gloo", "install a build of torch with it"
        )
    nccl = distributed.is_nccl_available()
    return Finding("torch loads", State.OK, f"{torch.__version__}, gloo{', nccl' if nccl else ''}")


def processor() -> Finding:
    """Cores that this process may use."""
    from planner.machine.identity import current_machine

    machine = current_machine()
    return Finding("processor", State.OK, f"{machine.cores} cores, {machine.processor}")


def memory() -> Finding:
    """Physical memory of this machine."""
    from planner.machine.identity import physical_memory_bytes

    return Finding("memory", State.OK, format_bytes(physical_memory_bytes()))


def gpu() -> Finding:
    """GPUs that torch can use."""
    try:
        import torch
    except (ImportError, OSError):
        return Finding("gpu", State.OPTIONAL, "unknown without torch", "install torch")
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
        text = ", ".join(f"{device.name} ({format_bytes(device.total_memory)})" for device in devices)
        return Finding("gpu", State.OK, f"{text}, CUDA {torch.version.cuda}")
    if shutil.which("nvidia-smi") and not _failure(["nvidia-smi", "-L"]):
        remedy = "install torch's build for CUDA; make install takes its index as TORCH_INDEX"
        return Finding("gpu", State.OPTIONAL, "a GPU that this build of torch cannot use", remedy)
    return Finding("gpu", State.OPTIONAL, "none", "plans for GPUs need none; run --device cuda needs one")


def compiler() -> Finding:
    """C++ compiler, which ``torch.compile`` needs."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    found = next((path for path in map(shutil.which, filter(None, names)) if path), None)
    if found is None:
        remedy = "apt-get install g++, or set CXX; plans run without it, torch.compile does not"
        return Finding("compiler", State.OPTIONAL, "no C++ compiler", remedy)
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=SECONDS, check=False)
    triton = _version("triton")
    return Finding("compiler", State.OK, _line(shown.stdout) + (f", triton {triton}" if triton else ""))


def gpu_calibration() -> Iterator[Finding]:
    """That of this machine's GPUs, where torch can use some."""
    if gpu().state is State.OK:
        yield calibration("cuda")


def calibration(kind: Literal["cpu", "cuda"] = "cpu") -> Finding:
    """The cluster of this machine's devices of a kind, as ``meshwright calibrate`` measured them."""
    name, command = {
        "cpu": ("calibration", "meshwright calibrate"),
        "cuda": ("calibration of GPUs", "meshwright calibrate --device cuda"),
    }[kind]
    try:
        from planner.machine.cluster import LOCAL_NAMES, ClusterError, load_cluster, local_cluster_path
    except ImportError as error:
        return Finding(name, State.OPTIONAL, f"unknown without {error.name}", "install it first")
    try:
        cluster = load_cluster(LOCAL_NAMES[kind])
    except ClusterError as error:
        return Finding(name, State.OPTIONAL, _line(str(error)), command)
    measured = sum(map(len, cluster.costs.values()))
    return Finding(name, State.OK, f"{local_cluster_path(kind)}, {measured} instructions measured")


def network_namespaces() -> Finding:
    """Whether network namespaces can be made, with which tests stand for two hosts."""
    name, remedy = "network namespaces", "apt-get install iproute2, and root; only tests of two hosts need them"
    if platform.system() != "Linux":
        return Finding(name, State.OPTIONAL, "Linux alone has them", "none; only tests of two hosts need them")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return Finding(name, State.OPTIONAL, f"no command {command}", remedy)
    if os.geteuid() != 0:
        return Finding(name, State.OPTIONAL, "not root", remedy)
    error = _failure(["unshare", "--net", "true"])
    return Finding(name, State.OPTIONAL, error, remedy) if error else Finding(name, State.OK, "yes")


def _extras() -> tuple[str, ...]:
    return tuple(metadata("meshwright").get_all("Provides-Extra") or ())


def _only_for(marker: object, extra: str) -> bool:
    return f'extra == "{extra}"' in str(marker).replace("'", '"')


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _failure(command: list[str]) -> str:
    """Reason why a command fails, as one line; empty where it does not."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _line(str(error))
    return "" if finished.returncode == 0 else _line(finished.stderr, last=True) or f"exit code {finished.returncode}"


def _line(text: str, *, last: bool = False) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if last else lines[0]) if lines else ""


def _print(findings: list[Finding]) -> None:
    """Print a line per finding, and the remedy below it; a terminal wraps none, so that paths can be copied."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        style = {State.OK: "", State.OPTIONAL: "dim", State.MISSING: "bold"}[finding.state]
        lines = [f"{finding.state:<8}  {finding.name:<{width}}  {finding.found}"]
        if finding.remedy:
            lines.append(f"{'':<8}  {'':<{width}}  to get it: {finding.remedy}")
        console.print(Text("\n".join(lines), style=style), soft_wrap=True)

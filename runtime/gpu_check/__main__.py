"""``python -m runtime.gpu_check``: every check on a device, into one JSON file.

It needs torch, NumPy and pydantic; plans travel with it. On a CPU it runs at small size and names what needs a device.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from formulations.problem.files import write_text_atomically
from planner.machine.identity import current_machine
from runtime.gpu_check import calibration, compiled, copies, kernels, layers, library, steps
from runtime.gpu_check.outcomes import Figures, NotRunError, Outcome, Status, outcome_of
from runtime.job.process_group import round_as_float32
from runtime.library.process import chosen_device, join

OUT = "gpu_check.json"


class Report(BaseModel):
    """Report of all checks: where they ran, and their outcomes."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    version: int = 1
    device: str
    machine: Figures
    outcomes: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """Checks that found a wrong result."""
        return [outcome for outcome in self.outcomes if outcome.status is Status.FAILED]


def machine_of(device: torch.device) -> Figures:
    """Identity of a device and of its libraries."""
    found: Figures = {**current_machine().model_dump(), "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        found |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "compute_capability": list(torch.cuda.get_device_capability(device)),
            "processors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "devices": torch.cuda.device_count(),
            "segments_grow": any(segment.get("is_expandable") for segment in segments),
        }
    return found


def checks(device: torch.device) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Checks by name, in the order in which they run; the larger ones are for a device alone."""
    on_device = device.type == "cuda"
    yield "attention", partial(kernels.attention, device, (4, 16, 2048, 64) if on_device else (1, 4, 32, 16))
    yield "dropout", partial(kernels.dropout, device, 2**26 if on_device else 2**16)
    yield "copies beside the computation", partial(copies.copies, device) if on_device else _needs_a_device
    yield "calibration", calibration.calibrated if on_device else _needs_a_device
    yield "convolutions", partial(steps.as_the_plain_module, "u-net", 100, device)
    yield "offload", partial(steps.as_the_plain_module, "gpt2-offload", 50, device)
    yield "library", partial(library.resumed, device)
    yield "layers", partial(layers.plans_of_layers, device, *((8, 512, 4) if on_device else (2, 64, 2)))
    for ranks in (1, 2) if on_device else (2,):
        yield f"half precision, {ranks} ranks", partial(steps.as_one_process, ranks, device)
    for model in ("gpt2-tiny", "llama-tiny", "gpt2-medium", "llama-1b"):
        possible = on_device or model.endswith("tiny")
        for name, check in (("time by class", steps.by_class), ("under limits", steps.side_by_side)):
            yield f"{name}, {model}", partial(check, model, device) if possible else _needs_a_device
        yield f"operators, {model}", partial(steps.operators, model, device) if on_device else _needs_a_device
    for model, budgets in {"gpt2-tiny": (0.5,), "gpt2-wide": (0.5, 0.0)}.items():
        possible = on_device or model.endswith("tiny")
        yield f"compiled, {model}", partial(compiled.compiled, model, device, budgets) if possible else _needs_a_device
    yield "memory of communicators", _needs_devices


def _needs_a_device() -> Figures:
    raise NotRunError("needs a CUDA device")


def _needs_devices() -> Figures:
    raise NotRunError("needs two CUDA devices and a meter of NCCL's memory, which is not written")


def run_checks(
    device: torch.device, out: Path, only: Sequence[str] = (), show: Callable[[str], None] = print
) -> Report:
    """Run checks on a device, one after another: all, or those whose names begin with one of ``only``.

    The report is written after each of them, so that what ran before an interruption is kept.
    """
    join(device)
    round_as_float32()
    report = Report(device=str(device), machine=machine_of(device), outcomes=[])
    for name, check in checks(device):
        if only and not name.startswith(tuple(only)):
            continue
        outcome = outcome_of(name, check)
        found = [*report.outcomes, outcome]
        report = report.model_copy(update={"machine": machine_of(device), "outcomes": found})
        write_text_atomically(out, report.model_dump_json(indent=1) + "\n")
        show(f"{outcome.status:8} {name} {outcome.seconds:.1f} s" + (f": {outcome.reason}" if outcome.reason else ""))
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run as the command line says; 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="runtime.gpu_check", description="Check a device, into one JSON file.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--out", type=Path, default=Path(OUT), help=f"file to write; {OUT} here if left out")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names of checks; all if left out")
    found = parser.parse_args(arguments)
    report = run_checks(chosen_device(found.device), found.out, found.only, partial(print, flush=True))
    not_run = sum(outcome.status is Status.NOT_RUN for outcome in report.outcomes)
    passed = len(report.outcomes) - not_run - len(report.failed)
    print(f"{passed} passed, {len(report.failed)} failed, {not_run} not run: {found.out}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())

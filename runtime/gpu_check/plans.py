"""The plans that travel with the check, as ``python -m planner.benchmarks.device_plans`` wrote them."""

from __future__ import annotations

import json
import lzma
import tempfile
from dataclasses import dataclass
from pathlib import Path

from planner.plan.document import Plan, load_plan
from runtime.gpu_check.outcomes import NotRunError

FOLDER = Path(__file__).with_name("plans")
SHARES = (100, 80, 60, 40, 30)
"""Limits in per cent of the free peak."""


@dataclass(frozen=True)
class DevicePlan:
    """A plan under a share of the peak of the fastest plan without a limit.

    Parameters
    ----------
    free_peak_bytes, share
        That peak, and the share in per cent.
    plan
        None where no plan fits.
    predicted_ns
        Nanoseconds of a step by kind of instruction.
    refused
        Why there is no plan.
    """

    free_peak_bytes: int
    share: int
    plan: Plan | None
    predicted_ns: dict[str, int]
    refused: str

    @property
    def limit_bytes(self) -> int:
        """Bytes that tensors may have."""
        return self.free_peak_bytes * self.share // 100


def device_plan(name: str, share: int = 100) -> DevicePlan:
    """Read a plan.

    Raises
    ------
    NotRunError
        There is no such file.
    PlanError
        It holds no plan, or was edited.
    """
    path = FOLDER / f"{name}-{share}.json.xz"
    if not path.exists():
        raise NotRunError(f"{path.name} is not among the plans: python -m planner.benchmarks.device_plans makes it")
    content = json.loads(lzma.decompress(path.read_bytes()))
    plan = None
    if "plan" in content:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / path.stem
            file.write_text(json.dumps(content["plan"]), encoding="utf-8")
            plan = load_plan(file)
    return DevicePlan(
        content["free_peak_bytes"], content["share"], plan, content.get("predicted_ns", {}), content.get("refused", "")
    )


def required(name: str, share: int = 100) -> Plan:
    """The plan itself.

    Raises
    ------
    NotRunError
        There is none.
    """
    found = device_plan(name, share)
    if found.plan is None:
        raise NotRunError(f"no plan of {name} fits into {share} % of its free peak: {found.refused}")
    return found.plan

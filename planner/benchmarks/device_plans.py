"""Plans that travel with the check of a device (``python -m runtime.gpu_check``), which has no solver.

``python -m planner.benchmarks.device_plans FOLDER [NAME...]`` makes them all, or those whose names begin so. Each is a
compressed file with the plan and its predicted time per kind of instruction, or with the reason why there is none.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.benchmarks.suites import SuiteError
from planner.common.infeasibility import InfeasibleError
from planner.machine.cluster import ClusterSpec, read_cluster
from planner.models.references import ModelReference
from planner.plan.document import Plan, schedule_of
from planner.replay.clocks import step_time
from planner.replay.memory import LocalBytes
from planner.session.planning import PlanningSession
from planner.session.request import PlanRequest
from planner.view.naming import kind_of

CLUSTER = "h100-8-nvlink"
SHARES = (100, 80, 60, 40, 30)
"""Limits in per cent of the peak of the fastest plan without a limit."""
SUFFIX = ".json.xz"
_MODELS = "planner.benchmarks.language_models:"


@dataclass(frozen=True, slots=True)
class DeviceCase:
    """A step on a mesh whose plans are made, under each share of its free peak.

    Parameters
    ----------
    reference, mesh
        The step, and the mesh.
    shares
        Of :data:`SHARES`.
    formulation
        What is decided.
    """

    reference: ModelReference
    mesh: tuple[int, ...] = (1,)
    shares: tuple[int, ...] = (100,)
    formulation: str = "kiwi_chain"


CASES: dict[str, DeviceCase] = {
    "gpt2-tiny": DeviceCase(ModelReference(_MODELS + "gpt2_tiny", batch=32, sequence=64), shares=SHARES),
    "llama-tiny": DeviceCase(ModelReference(_MODELS + "llama_tiny", batch=32, sequence=64), shares=SHARES),
    "gpt2-half": DeviceCase(ModelReference(_MODELS + "gpt2_tiny", 8, 64, "bfloat16", layers=1, reduce_dtype="same")),
    "gpt2-half-2": DeviceCase(ModelReference(_MODELS + "gpt2_tiny", 8, 64, "bfloat16", layers=1), (2,)),
    "gpt2-offload": DeviceCase(
        ModelReference(_MODELS + "gpt2_tiny", batch=32, sequence=64, layers=2),
        shares=(50,),
        formulation="kiwi_offload",
    ),
    "u-net": DeviceCase(ModelReference("planner.benchmarks.real_models:u_net_tiny")),
    "gpt2-wide": DeviceCase(
        ModelReference(_MODELS + "gpt2_medium", 16, 1024, "bfloat16", layers=4, reduce_dtype="same")
    ),
    "gpt2-medium": DeviceCase(
        ModelReference(_MODELS + "gpt2_medium", 16, 1024, "bfloat16", reduce_dtype="same"), shares=SHARES
    ),
    "llama-1b": DeviceCase(
        ModelReference(_MODELS + "llama_1b", 8, 2048, "bfloat16", reduce_dtype="same"), shares=SHARES
    ),
}
"""Cases by name; the file of a plan is ``NAME-SHARE.json.xz``. One device sums no gradients, so it casts none."""


def device_plans(
    folder: Path,
    names: Sequence[str] = (),
    seconds: float = 120.0,
    begins: Callable[[str], None] = print,
    cluster: ClusterSpec | str = CLUSTER,
) -> None:
    """Write plans into a folder, one file after another.

    Parameters
    ----------
    folder
        Made where missing.
    names
        Names of cases or their beginnings; all if empty.
    seconds
        Time limit of each solve.
    begins
        Called with the name of each file when it is written.
    cluster
        What the plans are for.

    Raises
    ------
    SuiteError
        A name is the beginning of none.
    """
    for name in names:
        if not any(case.startswith(name) for case in CASES):
            raise SuiteError(f"device plans: no case begins with {name!r}; cases are {', '.join(CASES)}")
    for name, case in CASES.items():
        if not names or any(name.startswith(begin) for begin in names):
            _write_case(folder, name, case, seconds, begins, cluster)


def _write_case(
    folder: Path,
    name: str,
    case: DeviceCase,
    seconds: float,
    begins: Callable[[str], None],
    cluster: ClusterSpec | str,
) -> None:
    session = PlanningSession(case.reference, cluster, case.mesh)
    request = PlanRequest(formulation="kiwi_chain", time_limit=seconds, gap=0.01)
    free = session.plan(request)
    reserve = session.cluster.device.reserve_bytes
    for share in case.shares:
        memory = reserve + free.peak_bytes * share // 100
        content: dict[str, object] = {"free_peak_bytes": free.peak_bytes, "share": share}
        try:
            limited = PlanRequest(memory=memory, formulation=case.formulation, time_limit=seconds, gap=0.01)
            plan = session.plan(limited) if share < 100 or limited.formulation != request.formulation else free
            content |= {"plan": plan.model_dump(mode="json"), "predicted_ns": predicted_by_kind(session, plan)}
        except InfeasibleError as error:
            content["refused"] = str(error)
        folder.mkdir(parents=True, exist_ok=True)
        packed = lzma.compress(json.dumps(content, sort_keys=True).encode())
        path = folder / f"{name}-{share}{SUFFIX}"
        path.write_bytes(packed)
        begins(f"{path}: {len(packed)} bytes, {content.get('refused') or plan}")


def predicted_by_kind(session: PlanningSession, plan: Plan) -> dict[str, int]:
    """Nanoseconds of a step that a plan predicts for each class of operator, collective or copy."""
    graph, schedule = session.graph, schedule_of(plan, session.graph)
    time, _ = step_time(graph, schedule, session.instruction_costs, LocalBytes(graph, session.mesh))
    assert time is not None, "a plan predicts the time of its instructions"
    spent = Counter[str]()
    for instruction, quanta in zip(schedule.instructions, time.durations, strict=True):
        spent[kind_of(graph, instruction)] += quanta
    return dict(sorted(spent.items()))


def main() -> None:
    """Make plans as the command line says."""
    parser = argparse.ArgumentParser(description="Make the plans that travel with `python -m runtime.gpu_check`.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"beginnings of {', '.join(CASES)}; all where left out")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of each solve")
    parser.add_argument("--cluster", help=f"file of a cluster; {CLUSTER} if left out")
    found = parser.parse_args()
    cluster = CLUSTER if found.cluster is None else read_cluster(Path(found.cluster))
    device_plans(found.folder, found.names, found.seconds, cluster=cluster)


if __name__ == "__main__":
    main()

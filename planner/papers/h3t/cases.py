"""H3T's experiments as problems: the models of its Table 2 on its three machines, under its limits.

Costs are our presets, the paper measured its own. Its limits are those of its solver, so no reserve is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from formulations.h3t.costs import H3tMachine, Link, h3t_step
from formulations.h3t.problem import H3tLayer, H3tStep, Optimizer
from formulations.h3t.segments import SegmentTables, segment_tables
from planner.layers.presets.paper_models import paper_layers
from planner.machine.cluster import load_cluster
from planner.papers.h3t import paper_tables as paper
from planner.papers.h3t.adapter import h3t_machine
from planner.papers.hardware import H3T_A100_COMPUTE_SHARE, H3T_PCIE_SHARE, Hardware

__all__ = ["GIGABYTE", "NO_LIMIT_GB", "H3tCase", "column_of", "problem_row", "table_1_cases"]

GIGABYTE = 10**9

NO_LIMIT_GB = 10.0**6

HOST_MEMORY_BANDWIDTH = {"rtx-2080ti-8-pcie": 11.5e9, "a100-8-nvlink": 30e9, "a100-8x8-nvlink": 30e9}
"""Bytes/s of the CPU optimizer for one device, assumed: 0.6 of what two sockets have with four channels of DDR4-2400
(E5 v4), or eight of DDR4-3200 (8358), divided among eight devices."""


@dataclass(frozen=True, slots=True)
class H3tCase:
    """A model on a machine under a limit.

    Parameters
    ----------
    cluster, model, batch
        As in :data:`planner.papers.h3t.paper_tables.COLUMNS`.
    limit_gb
        Gigabytes (1e9) on one device.
    pcie_share, compute_share
        Of the speed of PCIe, which devices without links of their own also share among each other, and of computation.
    optimizer
        How its time counts.
    """

    cluster: str
    model: str
    batch: int
    limit_gb: float
    pcie_share: float = 1.0
    compute_share: float = 1.0
    optimizer: Optimizer = Optimizer.OVERLAPPED

    def __str__(self) -> str:
        """Name of its instances."""
        changes = [
            *([f"pcie-x{self.pcie_share:g}"] if self.pcie_share != 1 else []),
            *([f"compute-x{self.compute_share:g}"] if self.compute_share != 1 else []),
            *([f"optimizer-{self.optimizer}"] if self.optimizer is not Optimizer.OVERLAPPED else []),
        ]
        return "-".join([self.cluster, self.model, f"batch-{self.batch}", f"{self.limit_gb:g}GB", *changes])

    @property
    def memory_limit(self) -> int:
        """Bytes."""
        return int(self.limit_gb * GIGABYTE)

    def step(self) -> H3tStep:
        """The step under its limit."""
        return replace(_step(replace(self, limit_gb=NO_LIMIT_GB)), memory_limit=self.memory_limit)

    def tables(self) -> SegmentTables:
        """Its segments, without a memory limit."""
        return _tables(replace(self, limit_gb=NO_LIMIT_GB))


def table_1_cases(hardware: Hardware = Hardware.PRESET) -> list[H3tCase]:
    """The columns of Table 1 at the paper's limits.

    Parameters
    ----------
    hardware
        Inferred, eight GeForce cards have less of PCIe and eight A100 of computation. For 64 A100 nothing is inferred:
        the paper does not say what is between the nodes.
    """
    pcie, compute = {"rtx-2080ti-8-pcie": H3T_PCIE_SHARE}, {"a100-8-nvlink": H3T_A100_COMPUTE_SHARE}
    if hardware is Hardware.PRESET:
        pcie, compute = {}, {}
    return [
        H3tCase(
            *column,
            paper.LIMIT_GB[column.cluster],
            pcie_share=pcie.get(column.cluster, 1.0),
            compute_share=compute.get(column.cluster, 1.0),
        )
        for column in paper.COLUMNS
    ]


def problem_row(case: H3tCase, hardware: Hardware) -> dict[str, str]:
    """What rows of Table 1 say of the problem: hardware, column, and when the optimizer runs."""
    return {"hardware": str(hardware), "column": column_of(case), "optimizer": str(case.optimizer)}


def column_of(case: H3tCase) -> str:
    """Cluster, model and batch."""
    return f"{case.cluster}/{case.model}/{case.batch}"


@cache
def _tables(case: H3tCase) -> SegmentTables:
    return segment_tables(_step(case))


@cache
def _step(case: H3tCase) -> H3tStep:
    cluster = load_cluster(case.cluster)
    machine = _slower(h3t_machine(cluster, cluster.devices, HOST_MEMORY_BANDWIDTH[case.cluster]), case.pcie_share)
    step = h3t_step(paper_layers(case.model, cluster), machine, case.batch, case.memory_limit, case.optimizer)
    return replace(step, layers=tuple(_slower_layer(layer, case.compute_share) for layer in step.layers))


def _slower(machine: H3tMachine, share: float) -> H3tMachine:
    host = _slower_link(machine.host, share)
    if machine.device_link:
        return replace(machine, host=host)
    return replace(machine, host=host, between=_slower_link(machine.between, share))


def _slower_link(link: Link, share: float) -> Link:
    return Link(link.latency_seconds, link.seconds_per_byte / share)


def _slower_layer(layer: H3tLayer, share: float) -> H3tLayer:
    return replace(layer, forward=round(layer.forward / share), backward=round(layer.backward / share))

"""Prices of copies between device and host."""

from __future__ import annotations

from support.steps.hand_graphs import FLOAT, GraphMaker

from planner.graph.operator_graph import ValueRole
from planner.machine.cluster import ClusterSpec, DeviceSpec, HostCopies, LinkSpec
from planner.machine.costs import CostModel
from planner.strategies.instruction_costs import InstructionCosts


def prices(mesh, **changes):
    fields = {"name": "d", "flops": {"float32": 1.0}, "memory_bandwidth": 1.0, "launch_seconds": 0.0}
    device = DeviceSpec(**fields, memory_bytes=1, reserve_bytes=0)
    link = LinkSpec(latency_seconds=1e-6, bandwidth=1e9)
    cluster = ClusterSpec(
        name="c", source="-", device=device, devices_per_node=4, nodes=1, intra_node=link, host_link=link, **changes
    )
    make = GraphMaker()
    make.input("x", ValueRole.INPUT, (64, 4))
    make.operator("op", [0], [((64, 4), FLOAT)])
    return InstructionCosts(make.graph(), CostModel(cluster, mesh), {}, "sgd")


def test_a_copy_takes_the_latency_and_its_local_bytes():
    # 1024 bytes at 1 byte per nanosecond.
    assert prices((4,)).transfer_quanta(1, ("R",), outward=True) == 1000 + 1024
    assert prices((4,)).transfer_quanta(1, ("S0",), outward=False) == 1000 + 256
    assert prices((2, 2)).transfer_quanta(1, ("S0", "S0"), outward=True) == 1000 + 256
    assert prices((4,)).host_copies is HostCopies.BOTH_WAYS
    assert prices((4,), host_link_shared=True).host_copies is HostCopies.TAKE_TURNS

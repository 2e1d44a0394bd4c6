"""Memory that a plan may use on one device: the requested limit, the reserve in it, the rest for tensors."""

from __future__ import annotations

from dataclasses import dataclass

from planner.common.infeasibility import InfeasibleError
from planner.common.units import format_bytes
from planner.machine.cluster import ClusterError, ClusterSpec


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory of one device under a plan.

    Parameters
    ----------
    device_bytes
        Bytes that the plan may use in all.
    reserve_bytes
        Bytes of these for context, fragmentation and collectives, which torch's tensors cannot have.
    """

    device_bytes: int
    reserve_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes that torch's tensors may hold at any moment."""
        return self.device_bytes - self.reserve_bytes

    @classmethod
    def on(cls, cluster: ClusterSpec, memory: int | None) -> MemoryBudget:
        """The budget of ``memory`` bytes on a device of a cluster, or of all that the device has if None.

        Raises
        ------
        InfeasibleError
            The reserve uses the memory up.
        ClusterError
            The device has less memory.
        """
        device = cluster.device
        if memory is not None and memory <= device.reserve_bytes:
            raise InfeasibleError(
                f"memory {format_bytes(memory)}: the cluster reserves {format_bytes(device.reserve_bytes)} of it, "
                f"which leaves nothing for tensors; give more, or say with --tensor-memory what tensors may hold"
            )
        if memory is not None and memory > device.memory_bytes:
            raise ClusterError(
                f"memory {format_bytes(memory)}: a device of cluster {cluster.name} has "
                f"{format_bytes(device.memory_bytes)}; give at most that"
            )
        return cls(device.memory_bytes if memory is None else memory, device.reserve_bytes)

"""Seconds of kernels that are called or generated, by the rates of a device."""

from __future__ import annotations

from collections.abc import Mapping

from planner.graph.kernel_graph import Kernel
from planner.graph.operator_classes import ARITHMETIC, OperatorClass, operator_class, operator_name
from planner.machine.cluster import ClusterSpec
from planner.machine.costs import CostModel


class KernelSeconds:
    """A roofline: the longer of arithmetic and memory traffic, plus the launch.

    A generated kernel reads its inputs and writes its results once. Between them it computes at the rate at which the
    device runs its transcendental functions, which on CPUs is the slower of the two.

    Parameters
    ----------
    cluster
        The device is that of a cluster.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self._costs = CostModel(cluster, (1,))

    def of(self, kernel: Kernel, sizes: Mapping[str, int]) -> float:
        """Seconds of one execution.

        Parameters
        ----------
        kernel
            The kernel.
        sizes
            Bytes of values.
        """
        launch = self._costs.device.launch_seconds
        if not kernel.is_generated:
            return max(self._called(kernel), self._arithmetic(kernel)) + launch
        moved = sum(sizes[name] for name in (*kernel.reads, *kernel.writes))
        seconds = moved / self._costs.bandwidth_of(OperatorClass.POINTWISE)
        inside = sum(
            (read + returned) / self._costs.bandwidth_of(OperatorClass.TRANSCENDENTAL, operator_name(target))
            for target, (read, returned) in kernel.targets
            if operator_class(target) is OperatorClass.TRANSCENDENTAL
        )
        return max(seconds, inside) + launch

    def _called(self, kernel: Kernel) -> float:
        return sum(
            (read + returned) / self._costs.bandwidth_of(operator_class(target), operator_name(target))
            for target, (read, returned) in kernel.targets
        )

    def _arithmetic(self, kernel: Kernel) -> float:
        kinds = {operator_class(target) for target, _ in kernel.targets} & ARITHMETIC
        if not kernel.flops:
            return 0.0
        kind = next(iter(kinds), OperatorClass.MATMUL)
        return kernel.flops / self._costs.flops_of(kind, kernel.dtype)

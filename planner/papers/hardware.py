"""Hardware as the papers' own numbers imply it, beside the presets.

Presets are data sheets times assumed fractions. Where a paper's own figures contradict them, the figure that would make
them agree is a constant here, with its derivation. Tables are computed under both: ``preset`` and ``inferred``.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from planner.machine.cluster import ClusterSpec, load_cluster

__all__ = ["A100_TF32_FLOPS", "H3T_A100_COMPUTE_SHARE", "H3T_PCIE_SHARE", "Hardware", "cluster_of"]


class Hardware(StrEnum):
    """Which figures of a machine a table uses."""

    PRESET = "preset"
    INFERRED = "inferred"


A100_TF32_FLOPS = 109.2e12
"""FLOP/s of a float32 matrix product on an A100 whose tensor cores round it to TF32.

Derivation: at six FLOP a parameter and token, and attention's products, Galvatron-BMW's rates on A100 need 31 TFLOP/s a
device (Table III, 16 GB, BERT-Huge-32: 243.55 samples/s on 16), 42 (ViT-Huge-32: 871.26) and 62 (Table V, 32 GB,
ViT-xHuge: 330.30 on 64), a third more where layers run forward twice. The data sheet has 19.5 TFLOP/s without TF32 and
156 with it, so the runs had TF32 or half precision. 0.7 of 156 is the fraction that the preset assumes for the other
types of the tensor cores. Galvatron-BMW's memory (16 bytes a parameter) says that parameters were in float32."""

H3T_PCIE_SHARE = 0.1617
"""Of our preset's PCIe between eight GeForce 2080 Ti: 1.79 GB/s between devices, 2.04 GB/s to the host.

Derivation: with all switches on, 6B and a batch of 8, a step takes 22.1 s in H3T's Table 1. There computation takes 4 s
at most, so the rest is traffic over the one link that copies and collectives share: per layer and step, 3 x 7/8 of
the parameters among devices and 3 x 1/8 between device and host. The share makes our all-on step 22.1 s. The preset
gives 4.5 s, which leaves nothing to decide. Another row agrees: ZeRO-3 takes 2 s more than ZeRO-2 for one more
gathering of the 3.7 GB of 1.8B, of which 7/8 move: 1.6 GB/s where nothing hides it."""

H3T_A100_COMPUTE_SHARE = 0.838
"""Of our preset's speed of computation on eight A100.

Derivation: 6B with a batch of 512 is bound by computation (its time does not change with links); with all switches on a
step takes 19.8 s in H3T's Table 1 and 16.6 s by the preset."""


@cache
def cluster_of(name: str, hardware: Hardware = Hardware.PRESET) -> ClusterSpec:
    """Cluster by preset name; inferred, its A100 compute float32 products in TF32.

    Raises
    ------
    ClusterError
        If there is no such preset.
    """
    cluster = load_cluster(name)
    if hardware is Hardware.PRESET or "A100" not in cluster.device.name:
        return cluster
    flops = {**cluster.device.flops, "float32": A100_TF32_FLOPS}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"flops": flops})})

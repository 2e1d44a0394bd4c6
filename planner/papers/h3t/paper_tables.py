"""Printed results of H3T: Tables 1, 3, 5 and 6 (Wang et al., NeurIPS 2023); seconds, gigabytes, minutes, percent.

``None`` stands for out of memory.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COLUMNS", "TABLE_1", "TABLE_3", "TABLE_5", "TABLE_6", "Column", "SolverMinutes"]


class Column(NamedTuple):
    """A column of Table 1: cluster, model, global batch."""

    cluster: str
    model: str
    batch: int


_GEFORCE, _A100, _A100_NODES = "rtx-2080ti-8-pcie", "a100-8-nvlink", "a100-8x8-nvlink"

COLUMNS = (
    Column(_GEFORCE, "H3T-1.8B", 128),
    Column(_GEFORCE, "H3T-1.8B", 512),
    Column(_GEFORCE, "H3T-6B", 8),
    Column(_GEFORCE, "H3T-6B", 32),
    Column(_A100, "H3T-6B", 128),
    Column(_A100, "H3T-6B", 512),
    Column(_A100, "H3T-13B", 128),
    Column(_A100, "H3T-13B", 512),
    Column(_A100_NODES, "H3T-13B", 1024),
    Column(_A100_NODES, "H3T-13B", 4096),
    Column(_A100_NODES, "H3T-100B", 1024),
    Column(_A100_NODES, "H3T-100B", 2048),
)

LIMIT_GB = {_GEFORCE: 8.0, _A100: 28.0, _A100_NODES: 28.0}
"""Limits of appendix C.3."""

TABLE_1: dict[str, tuple[float | None, ...]] = {
    "dp": (6.0, 17.6, 19.4, 19.8, 5.5, 19.5, 10.0, 28.4, 7.4, 26.6, 35.6, 61.6),
    "greedy": (5.8, 17.5, 19.6, 20.5, 5.5, 19.7, 9.7, 28.7, 7.6, 26.8, 36.2, 62.0),
    "all_on": (7.1, 17.7, 22.1, 23.0, 5.7, 19.8, 9.9, 28.6, 7.8, 26.9, 36.3, 61.8),
    "zero3": (11.3, None, None, None, 15.7, None, 43.2, None, None, None, None, None),
    "zero2": (9.3, None, None, None, 6.8, None, 17.7, None, 10.6, None, None, None),
}
"""Measured seconds of a step."""

TABLE_3 = (1.7, 6.0, 1.0, 2.0, 6.0, 21.5, 7.0, 23.2, 6.7, 22.9, 14.1, 20.2)
"""Measured least gigabytes with all switches on."""


class SolverMinutes(NamedTuple):
    """A row of Table 5: 64 A100; minutes of serial Python."""

    model: str
    batch: int
    limit_gb: float
    dp: float
    greedy: float
    random: float


TABLE_5 = (
    SolverMinutes("H3T-13B", 1024, 25, 12.0, 0.6, 0.1),
    SolverMinutes("H3T-100B", 1024, 25, 4.7, 0.9, 0.2),
    SolverMinutes("H3T-13B", 4096, 25, 2.8, 0.6, 0.1),
    SolverMinutes("H3T-13B", 1024, 100, 13.9, 0.6, 0.1),
)

TABLE_6 = {
    "default": (90, 8, 92, 21),
    "pcie-slow": (0, 0, 98, 0),
    "compute-slow": (88, 90, 88, 81),
    "limit-25": (50, 50, 65, 56),
    "greedy": (0, 0, 100, 0),
}
"""Percent of layers with partition, lazy prefetching, rematerialization, hidden offloading on: 1.8B, batch 128,
8 x 2080 Ti, 8 GB, dynamic program unless noted. The paper's text claims that the larger limit lowers all four; only
two of the figures fall."""

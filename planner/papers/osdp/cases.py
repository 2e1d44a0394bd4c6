"""The experiments of OSDP (figures 5, 6, 8 and 9): its models on its machines, and the compared formulations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from formulations.layers.layer import LayerChain
from formulations.osdp.parameters import per_parameter
from formulations.osdp.problem import ANY_SLICES, PUBLISHED_SLICES, Accounting, OsdpMachine, OsdpSettings
from formulations.osdp.scheduler import DFS_SECONDS, SECONDS_PER_QUANTUM, Method, OsdpPlan, plan_osdp
from planner.layers.presets.paper_models import PAPER_MODELS, paper_layers
from planner.machine.cluster import load_cluster
from planner.papers.osdp.adapter import data_parallel_machine

GIBIBYTE = 2**30

MODELS = tuple(name for name, model in PAPER_MODELS.items() if model.paper == "OSDP")
"""Names of the paper's models; a family, and layers and hidden size of each part."""

CLUSTERS = {"titan": "titan-rtx-8-pcie", "a100": "a100-2x8-nvlink"}
"""The paper's machines: figures 5, 8 and 9, and figure 6."""

LIMITS_GIB = (8, 16)
"""Memory that the paper allows on each device."""


@dataclass(frozen=True, slots=True)
class Formulation:
    """A formulation that is compared with FSDP.

    Parameters
    ----------
    settings
        Decisions and the count of memory.
    batch_step
        Samples on one device by which the batch grows.
    by_parameter
        Whether every parameter has a mode of its own, in place of every module
        (:mod:`formulations.osdp.parameters`).
    """

    settings: OsdpSettings
    batch_step: int = 1
    by_parameter: bool = False


SAMPLES_OF_A_UNIT = 6
"""Samples of 96 tokens in one unit of the batch in the authors' public script: 96 sequences of 6 tokens."""

FORMULATIONS: dict[str, Formulation] = {
    "osdp_base": Formulation(OsdpSettings()),
    "osdp_by_parameter": Formulation(OsdpSettings(), by_parameter=True),
    "osdp": Formulation(OsdpSettings(slices=PUBLISHED_SLICES)),
    "osdp_units": Formulation(OsdpSettings(slices=PUBLISHED_SLICES), SAMPLES_OF_A_UNIT),
    "osdp_peak_base": Formulation(OsdpSettings(accounting=Accounting.PEAK)),
    "osdp_peak": Formulation(OsdpSettings(slices=ANY_SLICES, accounting=Accounting.PEAK)),
    "osdp_checkpointing": Formulation(OsdpSettings(slices=ANY_SLICES, accounting=Accounting.PEAK, checkpointing=True)),
}
"""Equation (1) as printed: uncut, uncut with a mode for each parameter, with 4 slices, with larger steps of the batch;
then at the true peak: uncut, cut as needed (figure 8), checkpointed (figure 9)."""


@dataclass(frozen=True, slots=True)
class OsdpCase:
    """A model on a machine under a limit.

    Parameters
    ----------
    model
        One of :data:`MODELS`.
    cluster
        Name or file; all its devices share the data.
    gibibytes
        Memory of each device, of which the cluster's reserve is taken off.
    formulation
        A key of :data:`FORMULATIONS`.
    """

    model: str
    cluster: str
    gibibytes: int
    formulation: str

    @property
    def name(self) -> str:
        """Name of the instance."""
        return f"{self.cluster}-{self.gibibytes}GiB-{self.model}-{self.formulation}"

    @property
    def family(self) -> str:
        """Family of its model, as the paper names it."""
        return self.model.partition("-")[0]

    @property
    def settings(self) -> OsdpSettings:
        """Settings of its formulation."""
        return FORMULATIONS[self.formulation].settings

    def plan(self, method: Method = Method.KNAPSACK, time_limit: float = DFS_SECONDS) -> OsdpPlan:
        """Plan of a method, the batch included."""
        step = FORMULATIONS[self.formulation].batch_step
        return plan_osdp(self.chain(), self.machine(), self.settings, method, batch_step=step, time_limit=time_limit)

    def samples_per_second(self, objective: int) -> float:
        """Throughput of all devices at a time per sample on one of them, as plans have it."""
        return self.machine().devices / (objective * SECONDS_PER_QUANTUM)

    def chain(self) -> LayerChain:
        """Attention and MLP modules of the model between embedding and head, or all their parameters."""
        modules = paper_layers(self.model, load_cluster(self.cluster), apart=True)
        by_parameter = FORMULATIONS[self.formulation].by_parameter
        return per_parameter(modules, PAPER_MODELS[self.model].tensors) if by_parameter else modules

    def machine(self) -> OsdpMachine:
        """The machine in the paper's terms."""
        cluster = load_cluster(self.cluster)
        return data_parallel_machine(cluster, cluster.devices, self.gibibytes * GIBIBYTE - cluster.device.reserve_bytes)


@lru_cache(maxsize=512)
def exact_plan(case: OsdpCase) -> OsdpPlan:
    """The exact plan of a case; in milliseconds, so every other row is compared with it."""
    return case.plan()

"""The models and machines of OSDP's experiments (Table 1, figures 5 to 9).

The paper gives ranges of layers and hidden sizes; the pairs here lie inside them. It gives neither heads, sequence nor
vocabulary: heads of 64 and GPT-2's vocabulary with an untied head, which meets the printed parameter counts, are
assumed, and 96 tokens, the default of the authors' public training script. With the usual 512 tokens and eager
attention most of these models would not fit into 8 GiB at a batch of one without checkpointing.
"""

from __future__ import annotations

from dataclasses import dataclass

from formulations.layers import LayerChain
from formulations.models.osdp import Accounting, OsdpMachine, OsdpSettings
from planner.cluster import ClusterSpec, load_cluster
from planner.layer_formulas import Activation, BlockShape, FormulaDevice
from planner.layer_language import gpt
from planner.layer_osdp import data_parallel_machine

GIBIBYTE = 2**30
SEQUENCE = 96
VOCABULARY = 50257
HEAD_SIZE = 64
ITEM_BYTES = 4

MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "N&D-96x1024": ((96, 1024),),
    "N&D-48x1536": ((48, 1536),),
    "N&D-96x1536": ((96, 1536),),
    "W&S-4x6144": ((4, 6144),),
    "W&S-2x8192": ((2, 8192),),
    "W&S-4x8192": ((4, 8192),),
    "I&C-22x1024+2x4096": ((22, 1024), (2, 4096)),
    "I&C-15x1024+9x4096": ((15, 1024), (9, 4096)),
    "I&C-92x1024+4x4096": ((92, 1024), (4, 4096)),
}
"""Name -> layers and hidden size of each part."""

CLUSTERS = {"titan": "titan-rtx-8-pcie", "a100": "a100-2x8-nvlink"}
"""The paper's machines: figures 5, 8 and 9, and figure 6."""

LIMITS_GIB = (8, 16)
"""Memory that the paper allows on each device."""

ANY_SLICES = (1, 2, 4, 8, 16)
"""Slices to choose from: those of figure 7."""

FORMULATIONS: dict[str, OsdpSettings] = {
    "osdp_base": OsdpSettings(),
    "osdp": OsdpSettings(slices=(1, 4)),
    "osdp_peak_base": OsdpSettings(accounting=Accounting.PEAK),
    "osdp_peak": OsdpSettings(slices=ANY_SLICES, accounting=Accounting.PEAK),
    "osdp_checkpointing": OsdpSettings(slices=ANY_SLICES, accounting=Accounting.PEAK, checkpointing=True),
}
"""Equation (1) as printed, uncut and with 4 slices; and at the true peak: uncut, cut as needed, checkpointed."""


@dataclass(frozen=True, slots=True)
class OsdpCase:
    """A model on a machine under a limit.

    Parameters
    ----------
    model
        A key of :data:`MODELS`.
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
    def settings(self) -> OsdpSettings:
        """Settings of its formulation."""
        return FORMULATIONS[self.formulation]

    def chain(self) -> LayerChain:
        """Attention and MLP modules of the model between embedding and head."""
        return minigpt(self.model, load_cluster(self.cluster))

    def machine(self) -> OsdpMachine:
        """The machine in the paper's terms."""
        cluster = load_cluster(self.cluster)
        return data_parallel_machine(cluster, cluster.devices, self.gibibytes * GIBIBYTE - cluster.device.reserve_bytes)


def minigpt(model: str, cluster: ClusterSpec) -> LayerChain:
    """Layers of a model of :data:`MODELS`, in float32, with times of a cluster's device."""
    widths = [hidden for layers, hidden in MODELS[model] for _ in range(layers)]
    first = widths[0]
    shape = BlockShape(first, first // HEAD_SIZE, HEAD_SIZE, 4 * first, ITEM_BYTES, activation=Activation.GELU_IN_STEPS)
    device = FormulaDevice(cluster, "float32")
    layers = gpt(device, widths, sequence=SEQUENCE, vocabulary=VOCABULARY, shape=shape, tied=False, apart=True)
    return LayerChain(model, layers)

"""CAPTURE's experiments as problems: the models of its Table I on its machine, both schedules, fewer GPUs.

Shapes are those of Alpa's public benchmarks, which carry the same names and recompute every layer in backward; so does
every layer here. Parameters in half precision have 16 bytes of states each (a copy in single precision, Adam). The
first and the last block have the embedding and the head (stem and classifier) with them: GPT-3 has 32 layers and MoE
16, as in Table I. Wide-ResNet has 16, its blocks; in the tables it has 32, in the prose 16. What Alpa's 32 are is not
given: they come from cutting its operators. Tensor parallelism leaves convolutions whole here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from formulations.capture.predictor import Prediction, Profile, predict, profile_layers
from formulations.capture.problem import PartitionProblem, nodes_of, powers_of_two, stage_configurations
from formulations.capture.replay import StageReplay, StepTimes, layer_borders
from formulations.capture.slips import Slip
from formulations.galvatron.costs import CostModel
from formulations.galvatron.strategies import LayerStrategy
from formulations.layers.pipeline_schedule import Schedule
from planner.layers.presets.paper_models import paper_layers
from planner.machine.cluster import load_cluster
from planner.papers.galvatron.adapter import device_links

__all__ = ["CLUSTER", "GIGABYTE", "MODELS", "CaptureCase"]

GIGABYTE = 10**9

CLUSTER = "a100-4x4-infiniband"
GPUS_PER_NODE, PROFILING_GPUS = 4, 16

MODELS: dict[str, tuple[tuple[int, ...], int]] = {
    "GPT-3-2.6B": ((1024,), 64),
    "GPT-3-6.7B": ((1024,), 32),
    "MoE-2.4B": ((1024,), 32),
    "MoE-7.1B": ((1024,), 32),
    "Wide-ResNet-1B": ((768,), 24),
    "Wide-ResNet-2B": ((768, 1536), 24),
}
"""Batches and number of micro-batches by model (Table I)."""

STATES_PER_PARAMETER = {"float16": 8, "float32": 4}
"""Bytes of parameters, gradients and optimizer states for each byte of parameters."""


@dataclass(frozen=True)
class CaptureCase:
    """A model on some GPUs of the machine.

    Parameters
    ----------
    model
        A key of :data:`MODELS`.
    batch
        Samples of a step.
    schedule
        Of the micro-batches.
    nodes
        GPUs of every node that is used.
    merge_to
        Layers that the layer merger leaves; None: not used.
    pipeline_only
        Whether every stage has one GPU.
    """

    model: str
    batch: int
    schedule: Schedule
    nodes: tuple[int, ...] = nodes_of(PROFILING_GPUS, GPUS_PER_NODE)
    merge_to: int | None = None
    pipeline_only: bool = False

    def __str__(self) -> str:
        nodes = "+".join(map(str, self.nodes))
        merged = "" if self.merge_to is None else f"-merged-{self.merge_to}"
        pipeline = "-pipeline-only" if self.pipeline_only else ""
        return f"{self.model}-{self.batch}-{self.schedule}-{nodes}{merged}{pipeline}"

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return MODELS[self.model][1]

    @property
    def micro_batch(self) -> int:
        """Samples of one."""
        return self.batch // self.micro_batches

    @property
    def limit(self) -> int:
        """Bytes of one GPU for tensors."""
        device = load_cluster(CLUSTER).device
        return device.memory_bytes - device.reserve_bytes

    @property
    def degrees(self) -> list[int]:
        """Degrees of parallelism on a node."""
        return [1] if self.pipeline_only else powers_of_two(max(self.nodes))

    @property
    def configurations(self) -> tuple[LayerStrategy, ...]:
        """Ways of running a stage."""
        return stage_configurations(self.degrees, checkpoint=True)

    @cached_property
    def replay(self) -> StageReplay:
        """The profiled system, its layers merged to :attr:`merge_to`."""
        return self._unmerged if self.merge_to is None else self._unmerged.merged(self.profile.borders)

    @cached_property
    def problem(self) -> PartitionProblem:
        """Partition problem with the memory of stages by the replay."""
        return self.replay.problem(self.nodes, self.configurations, self.micro_batch)

    @cached_property
    def times(self) -> StepTimes:
        """Times of stages."""
        return self.replay.times(self.configurations, self.micro_batch)

    @cached_property
    def profile(self) -> Profile:
        """Profile from all 16 GPUs, also for plans on fewer."""
        return profile_layers(
            self._unmerged,
            PROFILING_GPUS,
            self.micro_batch,
            [1] if self.pipeline_only else powers_of_two(GPUS_PER_NODE),
            checkpoint=True,
            merge_to=self.merge_to,
        )

    @cached_property
    def _unmerged(self) -> StageReplay:
        cluster = load_cluster(CLUSTER)
        chain = paper_layers(self.model, cluster)
        costs = CostModel(device_links(cluster), states_per_parameter=STATES_PER_PARAMETER[chain.dtype])
        return StageReplay(
            chain=chain,
            borders=layer_borders(chain),
            model=costs,
            schedule=self.schedule,
            micro_batches=self.micro_batches,
        )

    def prediction(self, slips: Slip) -> Prediction:
        """Predicted memory of stages."""
        return predict(self.profile, self.problem, self.micro_batch, slips)

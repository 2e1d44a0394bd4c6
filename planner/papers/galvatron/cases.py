"""Galvatron-BMW's experiments as problems: models of its Table I, clusters, memory limits and variants.

Every variant is a search space and a search. Their schedules are inferred from the paper's tables: the rows named
1F1B, and BMW, hold fewer activations than the others, which pipeline as GPipe does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import inf

from formulations.galvatron.costs import CostModel
from formulations.galvatron.pipeline import MicroBatchRule, PipelineProblem, SearchSpace, pipeline_problem
from formulations.galvatron.published_search import Balance, SearchOutcome, search_base, search_bmw
from formulations.galvatron.slips import REPAIRED, Slip
from formulations.galvatron.strategies import Dimension
from formulations.galvatron.uniform import UniformStrategy, uniform_problem, with_any_degree
from formulations.layers.layer import LayerChain, LayerProfile
from formulations.layers.pipeline_schedule import Schedule
from planner.layers.presets.paper_models import MEBIBYTE, paper_layers
from planner.papers.galvatron.adapter import device_links
from planner.papers.hardware import Hardware, cluster_of

__all__ = ["BATCHES", "VARIANT_SPACES", "GalvatronCase", "Variant"]

GIGABYTE = 1024 * MEBIBYTE
"""Bytes of a GB in the paper; :data:`planner.layers.presets.paper_models.MEBIBYTE` has the reason."""

BATCHES = (*range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, 2049, 64))
"""Batches that are tried: multiples of 8, further apart the larger they are."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the paper.

    Parameters
    ----------
    space
        Which strategies it has, Takeaway 3 left aside.
    schedule
        How its pipelines run.
    adjusts
        Whether it adjusts partitions (Algorithm 2) or takes one (Algorithm 1).
    """

    space: SearchSpace
    schedule: Schedule
    adjusts: bool


_ALL = SearchSpace()
_UNCHECKPOINTED = SearchSpace(checkpoint=False)

VARIANT_SPACES = {
    "galvatron_dp_tp": Variant(
        SearchSpace((Dimension.DATA, Dimension.TENSOR), checkpoint=False, pipeline=False), Schedule.GPIPE, False
    ),
    "galvatron_dp_pp": Variant(SearchSpace((Dimension.DATA,), checkpoint=False), Schedule.GPIPE, False),
    "galvatron": Variant(_UNCHECKPOINTED, Schedule.GPIPE, False),
    "galvatron_1f1b_biobj": Variant(_UNCHECKPOINTED, Schedule.ONE_F_ONE_B, True),
    "galvatron_base": Variant(_ALL, Schedule.GPIPE, False),
    "galvatron_bmw": Variant(_ALL, Schedule.ONE_F_ONE_B, True),
}
"""Variants by the names of :data:`planner.papers.galvatron.paper_tables.VARIANTS`."""


@dataclass(frozen=True, slots=True)
class GalvatronCase:
    """One cell of a table.

    Parameters
    ----------
    cluster
        Name of a preset.
    model
        As the paper's Table I names it.
    memory_gb
        Limit on one device, in :data:`GIGABYTE`.
    variant
        A key of :data:`VARIANT_SPACES`.
    rule
        Which numbers of micro-batches are tried; as printed, always twice the stages.
    batches
        Which batches are.
    blocks
        Number of blocks, which are all alike, in place of the model's own; None leaves these.
    hardware
        Whose figures the cluster has.
    any_degree
        Whether tensor parallelism of any degree is possible, as the paper's rows of Megatron imply, or only of those
        that divide the assumed heads.
    data_with_sharded
        Whether the strategies that Takeaway 3 drops are kept.
    """

    cluster: str
    model: str
    memory_gb: int
    variant: str
    rule: MicroBatchRule = MicroBatchRule.TWICE_THE_STAGES
    batches: tuple[int, ...] = BATCHES
    blocks: int | None = None
    hardware: Hardware = Hardware.PRESET
    any_degree: bool = False
    data_with_sharded: bool = True

    def __str__(self) -> str:
        divisors = "-any-micro-batches" if self.rule is MicroBatchRule.DIVISORS else ""
        blocks = "" if self.blocks is None else f"-with-{self.blocks}-blocks"
        other = self.batches != BATCHES
        batches = f"-{len(self.batches)}-batches-of-{self.batches[0]}-to-{self.batches[-1]}" if other else ""
        hardware = "" if self.hardware is Hardware.PRESET else f"-{self.hardware}"
        degrees = "-any-degree" if self.any_degree else ""
        dropped = "" if self.data_with_sharded else "-takeaway-3"
        return f"{self.cluster}-{self.memory_gb}G-{self.model}{blocks}{divisors}{batches}{hardware}{degrees}{dropped}"

    def problem(self, slips: Slip = REPAIRED) -> PipelineProblem:
        """Set up the problem; slips change estimates of its costs alone."""
        return _problem_of(self, slips)

    def baseline(self, uniform: UniformStrategy) -> PipelineProblem:
        """Set up the problem that a uniform strategy leaves, under the same costs."""
        cluster, limit = cluster_of(self.cluster, self.hardware), self.memory_gb * GIGABYTE
        return uniform_problem(self.chain(), limit, self.batches, CostModel(device_links(cluster)), uniform, self.rule)

    def chain(self) -> LayerChain:
        """Layers of the model."""
        chain = paper_chain(self.model, self.cluster, self.blocks, self.hardware)
        devices = cluster_of(self.cluster, self.hardware).devices
        return with_any_degree(chain, devices) if self.any_degree else chain

    def search(self, slips: Slip = REPAIRED, balance: Balance | None = None, time_limit: float = inf) -> SearchOutcome:
        """Run a search on the problem, some slips kept.

        Parameters
        ----------
        slips
            Slips that are kept as printed.
        balance
            What one partition balances (Algorithm 1); the variant's own search if None.
        time_limit
            Seconds; the paper's searches have none.
        """
        if balance is None and VARIANT_SPACES[self.variant].adjusts:
            return search_bmw(self.problem(slips), slips, time_limit=time_limit)
        return search_base(self.problem(slips), slips, balance=balance or Balance.TIME, time_limit=time_limit)


@lru_cache(maxsize=8)
def _problem_of(case: GalvatronCase, slips: Slip) -> PipelineProblem:
    cluster = cluster_of(case.cluster, case.hardware)
    variant = VARIANT_SPACES[case.variant]
    return pipeline_problem(
        case.chain(),
        cluster.devices,
        case.memory_gb * GIGABYTE,
        case.batches,
        CostModel(device_links(cluster), slips=slips),
        replace(variant.space, data_with_sharded=case.data_with_sharded),
        variant.schedule,
        case.rule,
    )


@cache
def paper_chain(
    model: str, cluster: str, blocks: int | None = None, hardware: Hardware = Hardware.PRESET
) -> LayerChain:
    """Layers of a model with the activations that the paper prints, and no workspaces, which it does not count.

    Embedding and head are layers of their own, the first and the last.

    Parameters
    ----------
    model, cluster
        Names of the model in Table I and of the cluster's preset.
    blocks, hardware
        As for :class:`GalvatronCase`.
    """
    chain = paper_layers(model, cluster_of(cluster, hardware), printed_activations=True)
    first, *middle, last = (_without_workspaces(layer) for layer in chain.layers)
    if blocks is not None:
        middle = [replace(middle[0], name=f"block {number}") for number in range(blocks)]
    return replace(chain, layers=(first, *middle, last))


def _without_workspaces(layer: LayerProfile) -> LayerProfile:
    split = replace(layer.split, forward_workspace_bytes=0, backward_workspace_bytes=0)
    return replace(layer, split=split, forward_workspace_bytes=0, backward_workspace_bytes=0)

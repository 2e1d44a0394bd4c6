"""Cases of CAPTURE's Figure 7 that run here: two small language models on local processes.

The predictor is profiled on such runs and predicts random ones, all different, which then run. Processes and profile of
the last case stay, so that its plans can run in parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from formulations.capture.predictor import Profile
from formulations.galvatron.costs import CostModel
from formulations.layers.pipeline_schedule import Schedule
from planner.layers.plan.document import LayerPlan
from planner.layers.profiles.folding import model_layers
from planner.machine.cluster import load_cluster
from planner.models.references import ModelReference
from planner.papers.galvatron.adapter import device_links
from runtime.figure_7.errors import LocalPlans, MeasuredPlan, measured_plans
from runtime.figure_7.runs import LocalRuns, measured_by
from runtime.job.rank_pool import RankPool

__all__ = ["MODELS", "LocalCase", "part_of_plans"]

_CONFIGURATIONS = {
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_head": 4, "vocab_size": 64, "n_positions": 64, "bos_token_id": 0,
        "eos_token_id": 0, "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 63,
    },
}  # fmt: skip
MODELS = tuple(_CONFIGURATIONS)
"""Small models of these families; embedding and head are not tied, so that any stages may have them."""

_SEQUENCE, _FOLDED_BATCH = 64, 8
_CLUSTER = "titan-rtx-8-pcie"
"""Of which only the bytes of layers are taken, which are the same on all."""

_FEWEST_SUBMESHES = 3
"""Of a degree that is profiled."""


@dataclass(frozen=True)
class LocalCase:
    """Model, devices and micro-batches of one set of pipelines that run locally.

    Parameters
    ----------
    model
        One of :data:`MODELS`.
    schedule
        Order of the micro-batches in a stage: GPipe or 1F1B.
    blocks
        Number of blocks. The embedding and the head are layers too. Profiling needs twice as many layers as devices.
    devices, degrees
        Number of local processes, and the possible numbers of devices of a stage.
    micro_batches, micro_batch
        Number of micro-batches, and samples in each.
    """

    model: str
    schedule: Schedule
    blocks: int = 12
    devices: int = 4
    degrees: tuple[int, ...] = (1,)
    micro_batches: int = 4
    micro_batch: int = 8

    @property
    def is_mixed(self) -> bool:
        """Whether a stage may have several devices; then only plans with such a stage are drawn."""
        return max(self.degrees) > 1

    @property
    def profiling_devices(self) -> int:
        """Local processes of the profiling runs, which need three stages of the largest degree."""
        return max(self.devices, _FEWEST_SUBMESHES * max(self.degrees))


class _Session:
    """Local processes of a case, and its profile."""

    def __init__(self, case: LocalCase) -> None:
        self.case = case
        cluster = load_cluster(_CLUSTER)
        self._folder = TemporaryDirectory(prefix="meshwright-figure-7-")
        configuration = Path(self._folder.name) / "config.json"
        configuration.write_text(json.dumps(_CONFIGURATIONS[case.model]), encoding="utf-8")
        reference = ModelReference(
            f"hf:{configuration}", batch=_FOLDED_BATCH, sequence=_SEQUENCE, layers=case.blocks, dropout=0.0
        )
        chain = model_layers(reference, cluster)
        self._pool = RankPool(case.devices)
        runs = LocalRuns(
            chain=chain,
            borders=tuple(range(len(chain) + 1)),
            schedule=case.schedule,
            micro_batches=case.micro_batches,
            reference=reference,
            measure=lambda plan: measured_by(self._pool)(plan),
        )
        self.plans = LocalPlans(
            runs=runs,
            costs=CostModel(device_links(cluster)),
            devices=case.devices,
            degrees=case.degrees,
            micro_batch=case.micro_batch,
        )
        try:
            self.profile = self._profile(runs)
        except BaseException:
            self.close()
            raise

    def _profile(self, runs: LocalRuns) -> Profile:
        if self.case.profiling_devices == self.case.devices:
            return self.plans.profile()
        pools = {self.case.devices: self._pool}
        try:

            def measure(plan: LayerPlan) -> Sequence[int]:
                if plan.devices not in pools:
                    pools[plan.devices] = RankPool(plan.devices)
                return measured_by(pools[plan.devices])(plan)

            many = replace(self.plans, devices=self.case.profiling_devices, runs=replace(runs, measure=measure))
            return many.profile()
        finally:
            for size, pool in pools.items():
                if size != self.case.devices:
                    pool.close()

    def renew(self) -> None:
        """Start the processes anew: they keep the groups of every plan, and grow slower."""
        self._pool.close()
        self._pool = RankPool(self.case.devices)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
        self._folder.cleanup()


_last: list[_Session] = []
"""The session of the last part of plans, at most one."""


def part_of_plans(case: LocalCase, first: int, end: int, seed: int = 0) -> Iterator[MeasuredPlan]:
    """Run some of a case's random plans; processes and profile are those of the call before, if it had the same case.

    Parameters
    ----------
    case
        Which.
    first, end
        Half-open range of numbers of plans.
    seed
        Of the random numbers.

    Raises
    ------
    TraceError, LaunchError, PlanError
        There are too few layers, devices or plans, or something cannot be run.
    """
    if not _last or _last[0].case != case:
        while _last:
            _last.pop().close()
        _last.append(_Session(case))
    session = _last[0]
    session.renew()
    try:
        yield from measured_plans(session.plans, session.profile, end, seed, first, mixed=case.is_mixed)
    except BaseException:
        _last.clear()
        session.close()
        raise

"""Table of Galvatron-BMW's Figure 5: seconds of steps that run here, beside the estimator's.

Small language models run on two local processes, with one strategy for all layers, or a mixture. As in the paper the
estimator has computing times of a profile: steps of the model on one device, which both processes run at once. From
three of them follow seconds of a sample, of a micro-batch of any size, and of a step beside both, which is the
optimizer's. The link is as ``meshwright calibrate`` measured it. Predictions are made with the paper's slowdown of
overlapping computation and communication, and without.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from formulations.galvatron.costs import CostModel
from formulations.galvatron.pipeline import PipelinePlan, PipelineProblem, SearchSpace, pipeline_problem
from formulations.layers.layer import LayerChain, LayerProfile
from formulations.layers.pipeline_schedule import Schedule
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan, StagePlan
from planner.layers.plan.settings import strategy_settings
from planner.layers.profiles.folding import model_layers
from planner.machine.cluster import LOCAL_NAME, load_cluster
from planner.models.references import ModelReference, planned_model
from planner.papers.cells import Cell, Row, Table
from planner.papers.galvatron.adapter import device_links
from runtime.figure_7.runs import training_of_rank
from runtime.job.rank_pool import RankPool

__all__ = ["SLOWDOWNS", "TABLES", "LocalSteps", "local_plans", "step_rows"]

DEVICES = 2
SLOWDOWNS = {"with_slowdown": 1.3, "without": 1.0}
"""Of computation and communication at once: the paper's, and none."""

_WARM_UP, _STEPS = 2, 5
_NO_LIMIT = 2**50

_CONFIGURATIONS: Mapping[str, Mapping[str, object]] = {
    "gpt2": {
        "model_type": "gpt2", "n_embd": 384, "n_head": 6, "vocab_size": 1024, "n_positions": 128, "bos_token_id": 0,
        "eos_token_id": 0, "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6,
        "num_key_value_heads": 6, "vocab_size": 1024, "max_position_embeddings": 128, "pad_token_id": 1023,
    },
}  # fmt: skip
_BLOCKS, _BATCH, _SEQUENCE = 4, 8, 128
_PROFILED = ((_BATCH // 2, 1), (_BATCH, 1), (_BATCH, 2))
"""Batches of the steps on one device, and their micro-batches."""


@dataclass(frozen=True)
class LocalSteps:
    """A model whose steps run here, and the estimators of their seconds.

    Parameters
    ----------
    reference, chain
        The model, and its layers by the local cluster's speed.
    problems
        By the names of :data:`SLOWDOWNS`: the problem of all plans, priced by the estimator.
    devices
        Number of processes.
    update_seconds
        Of a step, beside what its layers take.
    """

    reference: ModelReference
    chain: LayerChain
    problems: Mapping[str, PipelineProblem]
    devices: int = DEVICES
    update_seconds: float = 0.0

    @classmethod
    def of(cls, reference: ModelReference, devices: int = DEVICES) -> LocalSteps:
        """Fold a model, with costs of this machine.

        Raises
        ------
        ClusterError
            This machine is not calibrated.
        """
        return cls._priced(reference, model_layers(reference, load_cluster(LOCAL_NAME)), devices)

    @classmethod
    def profiled(cls, reference: ModelReference) -> LocalSteps:
        """As :meth:`of`, with times of steps on one device, which this measures.

        Raises
        ------
        ClusterError
            This machine is not calibrated.
        """
        alone = cls.of(reference, devices=1)
        half, whole, in_two = (alone._alone(batch, parts) for batch, parts in _PROFILED)
        of_sample = (whole - half) / (_BATCH - _BATCH // 2)
        fixed = max(0.0, in_two - whole)
        chain = _with_times(alone.chain, of_sample, fixed)
        return replace(cls._priced(reference, chain, DEVICES), update_seconds=max(0.0, half + half - whole - fixed))

    def _alone(self, batch: int, micro_batches: int) -> float:
        """Seconds of a step on one device, which as many processes as there are take at once, each its own."""
        steps = replace(self, reference=replace(self.reference, batch=batch))
        text = steps.layer_plan(
            PipelinePlan(batch, micro_batches, (0, len(self.chain.layers)), (0,) * len(self.chain.layers))
        ).model_dump_json()
        with ExitStack() as stack:
            pools = [stack.enter_context(RankPool(1)) for _ in range(DEVICES)]
            with ThreadPoolExecutor(DEVICES) as threads:
                found: list[float] = list(threads.map(lambda pool: pool.run(seconds_of_rank, text)[0], pools))
        return sum(found) / len(found)

    @classmethod
    def _priced(cls, reference: ModelReference, chain: LayerChain, devices: int) -> LocalSteps:
        cluster = load_cluster(LOCAL_NAME)
        links = replace(device_links(cluster), devices_per_node=DEVICES)
        problems = {
            name: pipeline_problem(
                chain,
                devices,
                _NO_LIMIT,
                (reference.batch,),
                CostModel(links, overlap_slowdown=slowdown),
                SearchSpace(any_order=False),
                Schedule.ONE_F_ONE_B_IF_FILLED,
            )
            for name, slowdown in SLOWDOWNS.items()
        }
        return cls(reference, chain, problems, devices)

    def layer_plan(self, plan: PipelinePlan) -> LayerPlan:
        """A plan as the layer executor takes it."""
        (problem, *_) = self.problems.values()
        strategies = problem.tables(plan.stages, plan.batch // plan.micro_batches).strategies
        layers = [
            strategy_settings(layer, strategies[choice])
            for layer, choice in zip(self.chain.layers, plan.choices, strict=True)
        ]
        made = LayerPlan(
            model=planned_model(self.reference, plan.batch),
            devices=self.devices,
            stages=tuple(StagePlan(layers=tuple(layers[first:end])) for first, end in pairwise(plan.borders)),
            micro_batches=plan.micro_batches,
            schedule="1f1b" if plan.micro_batches >= plan.stages else "gpipe",
            optimizer="adamw",
            seed=self.reference.seed,
        )
        check_layer_plan(made)
        return made

    def seconds(self, plan: PipelinePlan) -> dict[str, float]:
        """The estimator's seconds of a step, by the names of :data:`SLOWDOWNS`."""
        return {
            name: problem.evaluate(plan).cost * 1e-7 + self.update_seconds for name, problem in self.problems.items()
        }


def _with_times(chain: LayerChain, of_sample: float, fixed: float) -> LayerChain:
    """The chain with other sums of its layers' seconds, of a sample and of any micro-batch, in the same proportions."""
    total = sum(layer.forward_seconds + layer.backward_seconds for layer in chain.layers)

    def scaled(layer: LayerProfile) -> LayerProfile:
        ratio, part = of_sample / total, layer.split
        return replace(
            layer,
            forward_seconds=layer.forward_seconds * ratio,
            backward_seconds=layer.backward_seconds * ratio,
            forward_fixed_seconds=layer.forward_seconds / total * fixed,
            backward_fixed_seconds=layer.backward_seconds / total * fixed,
            split=replace(
                part, forward_seconds=part.forward_seconds * ratio, backward_seconds=part.backward_seconds * ratio
            ),
        )

    return replace(chain, layers=tuple(map(scaled, chain.layers)))


def local_plans(steps: LocalSteps) -> Iterator[tuple[str, PipelinePlan]]:
    """Plans with names: every strategy for all layers, and each two strategies for one half of the layers each.

    Parameters
    ----------
    steps
        Whose plans.
    """
    (problem, *_) = steps.problems.values()
    batch, layers = steps.reference.batch, problem.layers
    for stages, micro_batches in ((1, 1), (1, 2), (2, 2), (2, 4)):
        tables = problem.tables(stages, batch // micro_batches)
        borders = (0, *(layers * (stage + 1) // stages for stage in range(stages)))
        usable: list[int] = np.flatnonzero(tables.allowed[tables.kinds].all(axis=0)).tolist()
        for number in usable:
            name = f"{stages} stages, {micro_batches} micro-batches, {tables.strategies[number]}"
            yield name, PipelinePlan(batch, micro_batches, borders, (number,) * layers)
        for number, other in pairwise(usable) if stages == 1 and micro_batches == 1 else ():
            halves = (number,) * (layers // 2) + (other,) * (layers - layers // 2)
            name = f"1 stages, 1 micro-batches, {tables.strategies[number]} then {tables.strategies[other]}"
            yield name, PipelinePlan(batch, 1, borders, halves)


def step_rows(model: str, plans: int | None = None) -> Iterator[Row]:
    """Seconds of a step of every plan, measured and by the estimator.

    Parameters
    ----------
    model
        A key of the models.
    plans
        Number of plans; all if None.

    Raises
    ------
    ClusterError
        This machine is not calibrated.
    LaunchError
        A plan cannot be run.
    """
    with TemporaryDirectory(prefix="meshwright-figure-5-") as folder, RankPool(DEVICES) as pool:
        configuration = Path(folder) / "config.json"
        configuration.write_text(json.dumps(_CONFIGURATIONS[model]), encoding="utf-8")
        reference = ModelReference(f"hf:{configuration}", batch=_BATCH, sequence=_SEQUENCE, layers=_BLOCKS, dropout=0.0)
        steps = LocalSteps.profiled(reference)
        for name, plan in list(local_plans(steps))[:plans]:
            ranks = pool.run(seconds_of_rank, steps.layer_plan(plan).model_dump_json())
            yield {"model": model, "plan": name, "measured": max(ranks)} | steps.seconds(plan)


def seconds_of_rank(text: str) -> float:
    """Median seconds of a step of a plan, of which this process is a rank.

    Parameters
    ----------
    text
        The plan as JSON.

    Raises
    ------
    FamilyError, LaunchError, PlanError
        The plan or its model cannot be run, or not on so many ranks.
    """
    training, batch = training_of_rank(text)
    seconds = []
    for _ in range(_WARM_UP + _STEPS):
        torch.distributed.barrier()
        started = time.perf_counter()
        training.step(batch)
        seconds.append(time.perf_counter() - started)
    return median(seconds[_WARM_UP:])


def _cells(models: Sequence[str]) -> Iterator[Cell]:
    for model in models:
        yield Cell(model, partial(step_rows, model))


TABLES: Mapping[str, Table] = {
    "figure_5": Table(partial(_cells, tuple(_CONFIGURATIONS)), frozenset({"measured", *SLOWDOWNS}))
}
"""Tables by name: three minutes on a machine that is calibrated."""

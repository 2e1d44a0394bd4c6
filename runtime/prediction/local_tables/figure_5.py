"""Table of Galvatron-BMW's Figure 5: seconds of steps that run here, beside the estimator's.

Small language models run on two local processes, with one strategy for all layers, or a mixture. The estimator has the
speed of the processes and their link as ``meshwright calibrate`` measured them, once with the paper's slowdown of
overlapping computation and communication, once without. The optimizer's own step, which the estimator leaves out, is
part of what is measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
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
from formulations.layers.layer import LayerChain
from formulations.layers.pipeline_schedule import Schedule
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan, StagePlan
from planner.layers.plan.settings import strategy_settings
from planner.layers.profiles.folding import model_layers
from planner.machine.cluster import LOCAL_NAME, load_cluster
from planner.models.references import ModelReference, load_step, planned_model
from planner.papers.cells import Cell, Row, Table
from planner.papers.galvatron.adapter import device_links
from runtime.job.rank_pool import RankPool
from runtime.layers.check import check_model
from runtime.layers.families.registry import model_family
from runtime.layers.mesh import plan_meshes
from runtime.layers.reference import model_reference
from runtime.layers.training import LayerTraining
from runtime.measure.local_shards import reader_of

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


@dataclass(frozen=True)
class LocalSteps:
    """A model whose steps run here, and the estimators of their seconds.

    Parameters
    ----------
    reference, chain
        The model, and its layers by the local cluster's speed.
    problems
        By the names of :data:`SLOWDOWNS`: the problem of all plans, priced by the estimator.
    """

    reference: ModelReference
    chain: LayerChain
    problems: Mapping[str, PipelineProblem]

    @classmethod
    def of(cls, reference: ModelReference) -> LocalSteps:
        """Fold a model, with costs of this machine.

        Raises
        ------
        ClusterError
            This machine is not calibrated.
        """
        cluster = load_cluster(LOCAL_NAME)
        chain = model_layers(reference, cluster)
        links = replace(device_links(cluster), devices_per_node=DEVICES)
        problems = {
            name: pipeline_problem(
                chain,
                DEVICES,
                _NO_LIMIT,
                (reference.batch,),
                CostModel(links, overlap_slowdown=slowdown),
                SearchSpace(any_order=False),
                Schedule.ONE_F_ONE_B_IF_FILLED,
            )
            for name, slowdown in SLOWDOWNS.items()
        }
        return cls(reference, chain, problems)

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
            devices=DEVICES,
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
        return {name: problem.evaluate(plan).cost * 1e-7 for name, problem in self.problems.items()}


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
        steps = LocalSteps.of(reference)
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
    plan = LayerPlan.model_validate_json(text)
    device = torch.device("cpu")
    initial, step = (load_step(model_reference(plan), where) for where in ("cpu", "meta"))
    family = model_family(step)
    check_model(plan, family, step.example_kwargs)
    named = [*initial.module.named_parameters(), *initial.module.named_buffers()]
    state = {name: tensor.detach() for name, tensor in named}
    training = LayerTraining(plan, family, step.module, plan_meshes(plan, device.type), reader_of(state), device)
    seconds = []
    for _ in range(_WARM_UP + _STEPS):
        torch.distributed.barrier()
        started = time.perf_counter()
        training.step(initial.example_kwargs)
        seconds.append(time.perf_counter() - started)
    return median(seconds[_WARM_UP:])


def _cells(models: Sequence[str]) -> Iterator[Cell]:
    for model in models:
        yield Cell(model, partial(step_rows, model))


TABLES: Mapping[str, Table] = {
    "figure_5": Table(partial(_cells, tuple(_CONFIGURATIONS)), frozenset({"measured", *SLOWDOWNS}))
}
"""Tables by name: two minutes on a machine that is calibrated."""

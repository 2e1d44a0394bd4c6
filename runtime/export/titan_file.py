"""Writes a layer plan as a job of torchtitan: a module with one function, for its ``--module`` and ``--config``.

Torchtitan trains models of its own under one setting for all layers, so a plan is expressed where its layers agree. The
words are those of torchtitan 0.3.
"""

from __future__ import annotations

from itertools import groupby
from textwrap import wrap
from typing import Any, NamedTuple

from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan
from planner.models.references import TrainingStep
from runtime.export.translation import ExportError
from runtime.measure.optimizer import HYPERPARAMETERS

FUNCTION = "planned"
"""Name of the function, which ``--config`` takes."""

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}


class _Sizes(NamedTuple):
    """What tells a Llama from another."""

    width: int
    inner_width: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool


_FLAVORS = {
    _Sizes(256, 768, 6, 16, 16, 2048, tied=False): "debugmodel",
    _Sizes(2048, 8192, 16, 32, 8, 128256, tied=True): "1B",
    _Sizes(3072, 8192, 28, 24, 8, 128256, tied=True): "3B",
    _Sizes(4096, 14336, 32, 32, 8, 128256, tied=False): "8B",
    _Sizes(8192, 28672, 80, 64, 8, 128256, tied=False): "70B",
    _Sizes(16384, 53248, 126, 128, 8, 128256, tied=False): "405B",
}
"""Flavors of torchtitan's ``llama3`` by the sizes of the model."""


def titan_file(plan: LayerPlan, step: TrainingStep, name: str, flavor: str | None = None) -> str:
    """Text of the module.

    Parameters
    ----------
    plan, step
        A plan that :func:`runtime.layers.check.check_model` passed, and the training step of its model.
    name
        Name of the file, which its first lines show.
    flavor
        Flavor of torchtitan's ``llama3``; None: the one of the model's sizes.

    Raises
    ------
    ExportError
        The model is no Llama, or of sizes that torchtitan has no flavor of; layers that differ; settings that
        torchtitan has no field for.
    """
    if type(step.module).__name__ != "LlamaForCausalLM":
        found = type(step.module).__name__
        raise ExportError(f"torchtitan's models are its own: of those here it has Llama, not {found}")
    flavor = _flavor(step.module) if flavor is None else flavor
    plan = _with_whole_blocks(plan)
    if obstacles := _obstacles(plan):
        raise ExportError("torchtitan cannot express this plan: " + "; ".join(obstacles))
    layer = next(layer for layer in plan.layers if _is_block(layer))
    master = plan.optimizer == "adamw_mixed" and plan.model.dtype == "bfloat16"
    settings = {
        "training": _training(plan, layer, master),
        "parallelism": _parallelism(plan, layer),
    }
    lines = [
        f'"""{plan.model.source} on {plan.devices} devices, as it was planned: a job of torchtitan 0.3.',
        "",
        f"    torchrun --nproc-per-node {plan.devices} -m torchtitan.train "
        f"--module {name.removesuffix('.py')} --config {FUNCTION}",
        "",
        "Data, tokenizer and learning rates are those of the debug model: set yours below.",
        '"""',
        "",
        "from torchtitan.components.loss import CrossEntropyLoss",
        "from torchtitan.components.optimizer import default_adamw",
        "from torchtitan.config import ParallelismConfig, TrainingConfig",
        *(["from torchtitan.distributed.activation_checkpoint import FullAC"] if layer.checkpoint else []),
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        "from torchtitan.models.llama3 import model_registry",
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        f"def {FUNCTION}() -> Trainer.Config:",
        '    """Return the job."""',
        "    config = llama3_debugmodel()",
        f'    config.model_spec = model_registry("{flavor}")',
        "    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))",
        f"    config.optimizer = default_adamw(lr={HYPERPARAMETERS[plan.optimizer].lr})",
        f"    config.activation_checkpoint = {'FullAC.Config()' if layer.checkpoint else 'None'}",
        "    config.validator.enable = False",
    ]
    for field, values in settings.items():
        lines.append(f"    config.{field} = {field.title()}Config(")
        lines += [f"        {key}={_literal(value)}," for key, value in values.items()] + ["    )"]
    return "\n".join([*lines, "    return config", ""])


def _flavor(model: Any) -> str:
    config = model.config
    sizes = _Sizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
        config.tie_word_embeddings,
    )
    if sizes not in _FLAVORS:
        listed = ", ".join(f"{size} {value}" for size, value in sizes._asdict().items()).replace("_", " ")
        raise ExportError(
            f"torchtitan has no llama3 of these sizes ({listed}); its flavors are {', '.join(_FLAVORS.values())}: add "
            "one to its llama3_configs and give its name as --flavor"
        )
    return _FLAVORS[sizes]


def _with_whole_blocks(plan: LayerPlan) -> LayerPlan:
    """The plan with one layer for each block whose parts are planned alike."""

    def whole(parts: list[LayerSettings]) -> list[LayerSettings]:
        named = [part.model_copy(update={"name": _block_of(part)}) for part in parts]
        return named[:1] if len(set(named)) == 1 else parts

    stages = []
    for stage in plan.stages:
        blocks = [list(parts) for _, parts in groupby(stage.layers, key=_block_of)]
        stages.append(StagePlan(layers=tuple(layer for parts in blocks for layer in whole(parts))))
    return plan.model_copy(update={"stages": tuple(stages)})


def _block_of(layer: LayerSettings) -> str:
    """Module path of the block that a layer of a Llama is, or is a part of."""
    return ".".join(layer.name.split(".")[:3])


def _is_block(layer: LayerSettings) -> bool:
    return layer.name not in ("embedding", "head")


def _obstacles(plan: LayerPlan) -> list[str]:
    """Everything of a plan that torchtitan has no field for."""
    found = []
    blocks = [layer for layer in plan.layers if _is_block(layer)]
    around = [layer for layer in plan.layers if not _is_block(layer)]
    fields = ("data_parallel", "sharding", "shards", "tensor_parallel", "undivided", "sequence_parallel")
    for field in (*fields, "offload_parameters"):
        listed = blocks if field in ("undivided", "sequence_parallel") else plan.layers
        values = sorted({str(getattr(layer, field)) for layer in listed})
        if len(values) > 1:
            found.append(f"layers differ in {field} ({', '.join(values)})")
    kept = sum(not layer.checkpoint for layer in blocks)
    if 0 < kept < len(blocks):
        found.append(
            f"{len(blocks) - kept} of {len(blocks)} blocks are checkpointed, where its checkpoints are all or none"
        )
    if any(layer.checkpoint for layer in around):
        found.append("embedding or head are checkpointed")
    if any(layer.undivided for layer in blocks):
        found.append("blocks that every device computes whole")
    if any(layer.name != _block_of(layer) for layer in blocks):
        found.append("blocks whose parts differ")
    offloads = ("offload_hidden", "offload_optimizer")
    found += [name.replace("_", " ") for name in offloads if any(getattr(layer, name) for layer in plan.layers)]
    if any(layer.slices > 1 for layer in plan.layers):
        found.append("matrix products in slices")
    if not plan.optimizer.startswith("adamw"):
        found.append(f"optimizer {plan.optimizer}: its own is AdamW")
    if plan.model.dtype == "float16":
        found.append("dtype float16")
    return found


def _training(plan: LayerPlan, layer: LayerSettings, master: bool) -> dict[str, Any]:
    rows = plan.model.batch // layer.data_parallel
    pieces = 1 if len(plan.stages) > 1 else plan.micro_batches
    return {
        "local_batch_size": rows // pieces,
        "global_batch_size": plan.model.batch,
        "seq_len": plan.model.sequence,
        "enable_cpu_offload": layer.offload_parameters,
        "dtype": "float32" if master else plan.model.dtype,
        "mixed_precision_param": plan.model.dtype,
        "steps": 10,
        "disable_cuda_graphs": len(plan.stages) > 1,  # which its graphs do not capture
    }


def _parallelism(plan: LayerPlan, layer: LayerSettings) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "data_parallel_replicate_degree": layer.replicas,
        "data_parallel_shard_degree": layer.shards,
        "fsdp_reshard_after_forward": "never" if layer.sharding == "zero2" else "always",
        "tensor_parallel_degree": layer.tensor_parallel,
        "enable_sequence_parallel": layer.sequence_parallel,
        "pipeline_parallel_degree": len(plan.stages),
    }
    if len(plan.stages) > 1:
        settings["pipeline_parallel_schedule"] = _SCHEDULES[plan.schedule]
        settings["pipeline_parallel_microbatch_size"] = plan.model.batch // layer.data_parallel // plan.micro_batches
        settings["module_fqns_per_model_part"] = [
            [name for one in stage.layers for name in _titan_names(one.name)] for stage in plan.stages
        ]
    return settings


def _titan_names(name: str) -> list[str]:
    around = {"embedding": ["tok_embeddings"], "head": ["norm", "lm_head"]}
    return around.get(name, [name.removeprefix("model.")])


def _literal(value: Any) -> str:
    if isinstance(value, list):
        lines = [f"            {_quoted(stage)},".replace("'", '"') for stage in value]
        return "\n".join(["[", *lines, "        ]"])
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _quoted(stage: list[str]) -> str:
    return "\n             ".join(wrap(repr(stage), 105))

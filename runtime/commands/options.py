"""Options that several commands share: the model, the machine, and the memory limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.graph.optimizers import OPTIMIZERS

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="hf:NAME, hf:PATH/config.json or module.path:function; layers:FILE for plans of layers.",
        show_default=False,
    ),
]
Mesh = Annotated[str, typer.Option(metavar="2x2", help="Ranks along each mesh axis.", show_default=False)]
Cluster = Annotated[str, typer.Option(metavar="NAME|FILE", help="Preset, local-cpu, or a cluster file.")]
Memory = Annotated[
    str | None,
    typer.Option(metavar="4GiB", help="Memory of one device, its reserve included; all that it has if absent."),
]
TensorMemory = Annotated[
    str | None,
    typer.Option(
        metavar="4GiB",
        help="In place of --memory: what torch's tensors may hold, beyond the reserve.",
        show_default=False,
    ),
]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Let a plan import the module that it names as its model; only if you trust it."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(metavar="64GiB", help="Host memory of one device for offloaded tensors.", show_default="no limit"),
]
Batch = Annotated[int, typer.Option(min=1, help="Sequences in one step, over all ranks.")]
SequenceLength = Annotated[int, typer.Option("--seq", min=1, help="Tokens in one sequence.")]
Dtype = Annotated[str, typer.Option(help="Parameters and activations: float32, bfloat16 or float16.")]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(OPTIMIZERS)}; adamw_mixed trains 16-bit parameters in 32 bits.",
        show_default="adamw_mixed for them, else adamw",
    ),
]
GradAccum = Annotated[int, typer.Option(min=1, help="Micro-batches in one step.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Result to write as JSON too.", show_default=False)
]
DEFAULT_SOLVER = "portfolio"
"""Spelled out, because the registry would import numpy before ``--help`` is shown."""

FORMULATIONS = (
    "sharding",
    "kiwi_reduced",
    "kiwi_chain",
    "kiwi_offload",
    "checkpoint_dots",
    "megatron_selective",
    "full_checkpoint",
    "checkmate",
    "alpa_then_checkmate",
    "kiwi_full",
    "kiwi_full_published",
    "kiwi_reduced_published",
)
"""Spelled out for the same reason; a test holds them equal to :data:`planner.session.formulations.FORMULATIONS`."""

LAYER_FORMULATIONS = ("osdp", "galvatron", "h3t", "capture")
"""Those that plan whole layers; a test holds them equal to :data:`planner.layers.planning.LAYER_FORMULATIONS`."""

Formulation = Annotated[str, typer.Option("--model-formulation", help=" | ".join(FORMULATIONS + LAYER_FORMULATIONS))]
AsPublished = Annotated[
    bool,
    typer.Option("--as-published", help="Let the paper's own search decide, on the same problem as the exact one."),
]
Objective = Annotated[
    str | None, typer.Option(metavar="peak|time", help="capture: what is least.", show_default="peak")
]
MemoryModel = Annotated[
    str | None, typer.Option(metavar="paper|engine", help="osdp: how bytes are counted.", show_default="paper")
]
Strategies = Annotated[
    str | None,
    typer.Option(metavar="paper|all", help="osdp, galvatron: what a layer may choose.", show_default="paper"),
]
MicroBatches = Annotated[
    str | None,
    typer.Option(metavar="paper|all", help="galvatron: which numbers of micro-batches.", show_default="paper"),
]
OptimizerRuns = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="h3t: the optimizer runs at_the_end, or overlapped.", show_default="at_the_end"),
]
Slips = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Slips that --as-published keeps: printed, prose (those that the paper's text does not contradict), "
        "repaired (none), or names with commas.",
        show_default="prose",
    ),
]
SearchBatch = Annotated[bool, typer.Option("--search-batch", help="Let a plan of layers choose its batch.")]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PART=DECISION",
        help="Let an operator, module, parameter or pattern keep, recompute or offload its outputs, or be placed: "
        "'*.mlp=recompute' or lm_head.weight=S0; may be repeated.",
        show_default=False,
    ),
]
Forbidden = Annotated[
    list[str] | None,
    typer.Option("--forbid", metavar="PART=DECISION", help="What the plan must not decide, as for --pin."),
]
Solver = Annotated[str, typer.Option(help="Name of the solver.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes of the solver; 1 is deterministic.", show_default="one per core"),
]
Seed = Annotated[int, typer.Option(help="Seed of the parameters and of everything random.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Use this many layers of an hf: model.", show_default="all")]
Dropout = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Dropout of an hf: model, or of a function that takes it.", show_default="its own"
    ),
]
ReduceDtype = Annotated[
    str,
    typer.Option(
        help="Sum gradients of 16-bit parameters over devices in float32, or in the dtype of the parameters: same."
    ),
]
LossChunks = Annotated[
    int, typer.Option(min=1, help="Compute head and loss of an hf: language model in so many parts of the sequence.")
]

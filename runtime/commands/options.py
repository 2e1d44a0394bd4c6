"""Options that several commands share, alone and in groups: the step, the machine, and the search for a plan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from planner.graph.optimizers import OPTIMIZERS
from runtime.commands.values import (
    STANDARD_OUTPUT,
    OptionError,
    check_json_file,
    device_memory,
    parse_bytes,
)

if TYPE_CHECKING:
    from planner.models.references import ModelReference
    from planner.session import PlanRequest

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
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Result to write as JSON too; - is standard output, and texts then go to standard error.",
        show_default=False,
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.", show_default=False)]
OtherCluster = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="Cluster of the plan, where its name does not find it.")
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
    typer.Option(
        "--as-published",
        help="Let the paper's own search decide, on the same problem as the exact one. For kiwi_reduced and kiwi_full "
        "that is the paper's program, for steps of few operators.",
    ),
]
Objective = Annotated[
    str | None, typer.Option(metavar="peak|time", help="capture: what is least.", show_default="peak")
]
MemoryModel = Annotated[
    str | None,
    typer.Option(
        metavar="paper|engine",
        help="osdp, and KIWI's programs: how bytes are counted. A program that leaves out copies as its paper does is "
        "solved with less memory until its plan fits.",
        show_default="paper for osdp, else engine",
    ),
]
Strategies = Annotated[
    str | None,
    typer.Option(metavar="paper|all", help="osdp, galvatron: what a layer may choose.", show_default="paper"),
]
MicroBatches = Annotated[
    str | None,
    typer.Option(metavar="paper|all", help="galvatron: which numbers of micro-batches.", show_default="paper"),
]
Degrees = Annotated[
    str | None,
    typer.Option(metavar="any|equal", help="capture: which numbers of devices stages have.", show_default="any"),
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
TimeLimit = Annotated[float, typer.Option(min=0.1, help="Seconds for the solver, per plan.")]
Gap = Annotated[
    float,
    typer.Option(min=0.0, max=0.99, help="End at this share of the cost above the bound; 0 asks for a proof."),
]
Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap",
        help="Let gathers of parameters and reductions of gradients run beside the computation, several at once.",
    ),
]
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


@dataclass(frozen=True, slots=True)
class Step:
    """Options of the training step beside its model and batch."""

    sequence: SequenceLength = 256
    dtype: Dtype = "float32"
    optimizer: Optimizer = None
    seed: Seed = 0
    layers: Layers = None
    dropout: Dropout = None
    loss_chunks: LossChunks = 1
    reduce_dtype: ReduceDtype = "float32"

    def reference(self, model: str, batch: int = 8) -> ModelReference:
        """The step of a model."""
        from planner.models.references import ModelReference

        return ModelReference(
            model,
            batch,
            self.sequence,
            self.dtype,
            self.seed,
            self.layers,
            self.dropout,
            self.loss_chunks,
            self.reduce_dtype,
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Options of the cluster and of its devices' memory."""

    cluster: Cluster = "local-cpu"
    memory: Memory = None
    tensor_memory: TensorMemory = None

    def limit(self) -> int | None:
        """Bytes of one device, its reserve included; errors as for :func:`device_memory`."""
        return device_memory(self.memory, self.tensor_memory, self.cluster)


@dataclass(frozen=True, slots=True)
class Searching:
    """Options of the search for a plan."""

    host_memory: HostMemory = None
    model_formulation: Formulation = "kiwi_chain"
    solver: Solver = DEFAULT_SOLVER
    workers: Workers = None
    time_limit: TimeLimit = 30.0
    gap: Gap = 0.0

    @property
    def of_layers(self) -> bool:
        """Whether whole layers are planned."""
        return self.model_formulation in LAYER_FORMULATIONS

    def host_limit(self) -> int | None:
        """Bytes of host memory of one device."""
        return None if self.host_memory is None else parse_bytes(self.host_memory, "--host-memory")

    def request(self, machine: Machine, step: Step) -> PlanRequest:
        """What is asked for of every plan."""
        from planner.session import PlanRequest

        return PlanRequest(
            machine.limit(),
            self.model_formulation,
            self.solver,
            self.time_limit,
            step.seed,
            self.workers,
            self.host_limit(),
            self.gap,
        )

    def check(self, context: typer.Context) -> None:
        """Refuse options that a formulation of layers does not use, where they were given.

        Raises
        ------
        OptionError
            Such an option is on the command line.
        """
        if not self.of_layers:
            return
        for name in ("solver", "workers", "gap", "host_memory"):
            if is_given(context, name):
                option = f"--{name.replace('_', '-')}"
                raise OptionError(
                    f"{option} {getattr(self, name)}: {self.model_formulation} plans layers by a search of its own; "
                    f"leave it out, or choose a formulation of operators, such as kiwi_chain"
                )


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter of the command is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def as_command(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return a function as a command.

    The fields of its groups of options become options of their own, ``--json -`` leaves standard output to the result,
    and a file that cannot be written is refused before anything is computed.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        of_group = get_type_hints(groups[name], include_extras=True)
        for option in fields(groups[name]):
            default = Parameter.empty if option.default is MISSING else option.default
            parameters.append(
                Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=of_group[option.name])
            )

    def command(**given: Any) -> int | None:
        grouped = {
            name: kind(**{option.name: given.pop(option.name) for option in fields(kind)})
            for name, kind in groups.items()
        }
        json_file: Path | None = given.get("json_file")
        check_json_file(json_file)
        try:
            with redirect_stdout(sys.stderr) if json_file == STANDARD_OUTPUT else nullcontext():
                return function(**grouped, **given)
        except KeyboardInterrupt:
            raise typer.Abort from None  # typer itself ends with code 130 and says nothing

    command.__doc__ = function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # of any function, says inspect
    return command

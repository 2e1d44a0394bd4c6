"""What an exploration is asked about on the command line: a plan file, or a model with all that a plan needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.commands.options import Machine, Searching, Step, is_given
from runtime.commands.tables.progress import progress_line
from runtime.commands.values import OptionError, parse_mesh, parse_pins

if TYPE_CHECKING:
    from planner.api import Exploration, LayerExploration

NANOSECOND = 1e-9

ModelOrPlan = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|PLAN",
        help="A plan file, or a model as for plan: hf:NAME, module.path:function, layers:FILE.",
        show_default=False,
    ),
]
MeshOfModel = Annotated[
    str | None, typer.Option("--mesh", metavar="2x2", help="Ranks along each mesh axis, for a model.")
]

OF_THE_PLAN = {
    "mesh": "--mesh",
    "batch": "--batch",
    "grad_accum": "--grad-accum",
    "memory": "--memory",
    "tensor_memory": "--tensor-memory",
    "host_memory": "--host-memory",
    "model_formulation": "--model-formulation",
    "sequence": "--seq",
    "dtype": "--dtype",
    "optimizer": "--optimizer",
    "layers": "--layers",
    "dropout": "--dropout",
    "loss_chunks": "--loss-chunks",
    "reduce_dtype": "--reduce-dtype",
}
"""Options that a plan file answers, by the name of their parameter."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The question of a command that explores; what is refused is refused before anything is traced.

    Parameters
    ----------
    context
        Of the command.
    model
        A model, or a plan file.
    mesh, machine, step, searching, batch, grad_accum
        Of a model. Of a plan file the cluster, the seed and the solver with its limits count alone.
    pin, forbid
        Pins of the user, beside those of a plan file.
    allow_code
        Whether a plan may import its model.

    Raises
    ------
    OptionError
        An option that a plan file answers is given with one, or a model lacks its mesh.
    """

    context: typer.Context
    model: str
    mesh: str | None
    machine: Machine
    step: Step
    searching: Searching
    batch: int
    grad_accum: int
    pin: list[str] | None
    forbid: list[str] | None
    allow_code: bool

    def __post_init__(self) -> None:
        given = [option for name, option in OF_THE_PLAN.items() if is_given(self.context, name)]
        if self.is_plan and given:
            raise OptionError(f"{given[0]}: {self.model} is a plan, which says that itself; leave it out")
        if self.is_plan:
            return
        if self.model.endswith(".json") and ":" not in self.model:
            raise OptionError(f"MODEL|PLAN: there is no plan file {self.model!r}")
        if self.mesh is None:
            raise OptionError(f"--mesh: give the ranks along each mesh axis of {self.model}, such as 2 or 2x4")
        if self.batch % self.grad_accum:
            raise OptionError(f"--grad-accum {self.grad_accum}: it does not divide --batch {self.batch}; change either")
        self.searching.check(self.context)

    @property
    def is_plan(self) -> bool:
        """Whether a file is named."""
        return Path(self.model).is_file()

    @property
    def pins(self) -> tuple[Sequence[tuple[str, str]], Sequence[tuple[str, str]]]:
        """Targets and decisions of the user's pins, and of what is forbidden."""
        return parse_pins(self.pin, "--pin"), parse_pins(self.forbid, "--forbid")

    @contextmanager
    def explored(self, pinned: bool = True) -> Iterator[Exploration | LayerExploration]:
        """The exploration, with its present plan, and a live line while it is used.

        Parameters
        ----------
        pinned
            Whether the user's pins hold from the beginning.
        """
        pins, forbidden = self.pins
        shape = None if self.mesh is None else parse_mesh(self.mesh, "--mesh")

        from planner import api

        request = self.searching.request(self.machine, self.step)
        with progress_line(f"planning {self.model}", NANOSECOND) as report, ExitStack() as stack:
            exploration: Exploration | LayerExploration
            if shape is None:
                plan = api.load(self.model)
                cluster = self.machine.cluster if is_given(self.context, "cluster") else None
                exploration = api.explore_plan(
                    plan, cluster=cluster, request=request, allow_code=self.allow_code, progress=report
                )
            else:
                exploration = api.explore(
                    self.step.reference(self.model, self.batch),
                    cluster=self.machine.cluster,
                    mesh=shape,
                    optimizer=self.step.optimizer,
                    grad_accum=self.grad_accum,
                    request=request,
                    progress=report,
                )
            if isinstance(exploration, api.Exploration):
                stack.enter_context(exploration)  # ends its solver processes
            if pinned and (pins or forbidden):
                exploration.with_pins(pins, forbidden)
            yield exploration

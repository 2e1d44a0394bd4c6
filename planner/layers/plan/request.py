"""The request of a plan of layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from formulations.problem.solution import Progress
from planner.common.plan_error import PlanError
from planner.graph.operator_graph import ITEM_BYTES
from planner.graph.optimizers import OptimizerSpec
from planner.layers.plan.choices import chosen
from planner.layers.plan.document import LayerSettings
from planner.layers.plan.pins import about_layer, broken_by
from planner.machine.cluster import ClusterSpec
from planner.models.references import ModelReference
from planner.plan.decision import Pin


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """Request of a plan of layers: formulation, model, cluster, limits.

    Parameters
    ----------
    formulation
        Its name.
    reference
        Which step.
    cluster
        The cluster.
    devices
        How many of the cluster's devices train.
    tensor_bytes
        Limit of torch's tensors on one device, in bytes.
    optimizer
        Name of the optimizer.
    as_published
        Whether the paper's own search decides.
    search_batch
        Whether the batch is decided too.
    time_limit
        Seconds for a search that may take long.
    given
        Choices of the problem (:mod:`planner.layers.plan.choices`) that are not the paper's.
    slips
        Slips that the paper's own search keeps; those that its text does not contradict if None.
    pins
        Decisions of the user, which both searches keep.
    settings
        All settings by layer, where these are given, so that stages and micro-batches alone are decided.
    progress
        Called with every better incumbent or bound of a search that may take long, in nanoseconds a step.
    """

    formulation: str
    reference: ModelReference
    cluster: ClusterSpec
    devices: int
    tensor_bytes: int
    optimizer: OptimizerSpec
    as_published: bool
    search_batch: bool
    time_limit: float
    given: Mapping[str, str] = field(default_factory=dict)
    slips: str | None = None
    pins: tuple[Pin, ...] = ()
    settings: Mapping[str, LayerSettings] | None = None
    progress: Callable[[Progress], None] | None = None

    @property
    def is_restricted(self) -> bool:
        """Whether something is left out by pins or by given settings."""
        return bool(self.pins) or self.settings is not None

    def allows(self, layer: LayerSettings) -> bool:
        """Whether the settings of a layer keep the pins, and are those that are given."""
        if self.settings is not None and self.settings.get(layer.name) != layer:
            return False
        return broken_by(self.pins, layer) is None

    def left_to(self, name: str) -> Hashable:
        """Equal for layers to which pins and given settings leave the same."""
        given = None if self.settings is None else self.settings[name].model_copy(update={"name": ""})
        return about_layer(self.pins, name), given

    def refusal(self, name: str = "") -> PlanError:
        """The error where pins or given settings leave nothing to a layer, or to the plan as a whole."""
        what = (
            "the given settings"
            if self.settings is not None
            else "pins " + ", ".join(repr(str(pin)) for pin in (about_layer(self.pins, name) if name else self.pins))
        )
        where = f" for layer {name}" if name else ""
        return PlanError(f"{what}: nothing that {self.formulation} may choose{where} keeps them; leave one out")

    @property
    def choices(self) -> dict[str, str]:
        """Value of every choice of the problem.

        Raises
        ------
        PlanError
            One that is given is not known.
        """
        return chosen(self.formulation, self.given)

    @property
    def states_per_parameter(self) -> int:
        """Bytes of parameters, gradients and optimizer states for one byte of parameters.

        Raises
        ------
        PlanError
            That is no whole number.
        """
        dtype = self.reference.dtype
        states = self.optimizer.state(dtype).nbytes(1)
        if states % ITEM_BYTES[dtype]:
            raise PlanError(
                f"optimizer {self.optimizer.name} with {dtype}: its states are no multiple of the parameters"
            )
        return 2 + states // ITEM_BYTES[dtype]

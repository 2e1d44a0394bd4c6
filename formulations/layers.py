"""What a layer costs: the common ground of every formulation that plans whole layers.

OSDP, Galvatron-BMW, H3T and CAPTURE do not look inside a layer. They need how many bytes it holds, how long it computes
and what its neighbours hand over, each for one sample, so that a batch is a multiplication. A layer here is any run of
operators that is planned as one: a transformer block, or its attention and its MLP apart (OSDP's Table 1).

Where the numbers come from is part of them: `source` says measured (a run on this machine), fitted (a line through
several runs or replays) or preset (a formula, or a figure that a paper prints).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

__all__ = ["LayerChain", "LayerProfile", "ProfileSource"]


class ProfileSource(StrEnum):
    """Where the numbers of a profile come from."""

    MEASURED = "measured"
    FITTED = "fitted"
    PRESET = "preset"


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer on one device, unsharded, at one sample.

    Parameters
    ----------
    name
        Unique in its chain; the module path where the layer comes from a captured model.
    kind
        Equal for layers that are the same but for their name.
    parameter_bytes
        Bytes of its parameters alone; gradients and optimizer states follow from the optimizer.
    input_bytes, output_bytes
        Bytes per sample of the hidden states that it takes and hands over.
    saved_bytes
        Bytes per sample that its forward leaves for its backward, its input left out.
    forward_workspace_bytes, backward_workspace_bytes
        Bytes per sample alive inside its forward or backward beyond what is saved, at the worst moment.
    forward_seconds, backward_seconds
        Computation of one sample; communication left out.
    fixed_seconds
        Computation of forward and backward together that a batch of any size pays once: the line's intercept.
    splittable_parameter_bytes, splittable_saved_bytes
        The part of `parameter_bytes` and of `saved_bytes` that tensor parallelism divides by its degree.
    reduced_bytes
        Bytes per sample that tensor parallelism all-reduces in forward, and again in backward.
    source
        Where these numbers come from.
    """

    name: str
    kind: str
    parameter_bytes: int
    input_bytes: int
    output_bytes: int
    saved_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    forward_seconds: float
    backward_seconds: float
    fixed_seconds: float
    splittable_parameter_bytes: int
    splittable_saved_bytes: int
    reduced_bytes: int
    source: ProfileSource

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ValueError(f"layer {self.name}: {field.name} is {value}; it must be finite and not negative")
        for part, whole in (
            ("splittable_parameter_bytes", "parameter_bytes"),
            ("splittable_saved_bytes", "saved_bytes"),
        ):
            if getattr(self, part) > getattr(self, whole):
                raise ValueError(f"layer {self.name}: {part} of {getattr(self, part)} exceed its {whole}")


@dataclass(frozen=True, slots=True)
class LayerChain:
    """The layers of one model, in the order in which they run.

    Parameters
    ----------
    name
        Of the model, for reports.
    layers
        At least one.

    Raises
    ------
    ValueError
        If there is no layer, or two share a name.
    """

    name: str
    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"model {self.name} has no layers; a chain needs one at least")
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"model {self.name} has two layers named {repeated}; name them apart")

    def __len__(self) -> int:
        return len(self.layers)

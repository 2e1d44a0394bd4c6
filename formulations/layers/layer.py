"""Profiles of layers: memory and time, the input of every formulation that plans whole layers.

OSDP, Galvatron-BMW, H3T and CAPTURE do not model the inside of a layer. They need its bytes, its time and the bytes of
its input and output, each for one sample, so that a batch is a multiplication. A layer here is any run of operators
that is planned as one: a transformer block, or its attention and its MLP apart (OSDP's Table 1).

Memory of a layer of ``b`` samples on a device, beyond parameters and their gradients:

- between forward and backward ``b * (input_bytes - unread_input_bytes + saved_bytes) + fixed_saved_bytes``, with
  checkpointing ``b * input_bytes``;
- while its forward runs ``b * (output_bytes + forward_workspace_bytes) + forward_fixed_workspace_bytes`` beyond that;
- while its backward runs ``b * backward_workspace_bytes + backward_fixed_workspace_bytes`` beyond that.

Every storage belongs to one layer: one that is handed over is input of the layer behind its maker. So sums over all
layers count nothing twice, also where later layers read it again (an encoder's output).

Tensor parallelism of degree ``t`` divides a part of everything: a quantity ``q`` of which ``p`` is split becomes
``q - p + p / t`` (Megatron-LM's columns, rows and heads; :meth:`LayerProfile.on_one_of`).

Every profile names the source of its numbers: measured (a run on this machine), fitted (a line through several runs or
replays) or preset (a formula, or a figure that a paper prints).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum

__all__ = ["UNDIVIDED", "LayerChain", "LayerProfile", "ProfileSource", "SplitPart", "tied_layers"]


class ProfileSource(StrEnum):
    """Source of the numbers of a profile."""

    MEASURED = "measured"
    FITTED = "fitted"
    PRESET = "preset"


def _check_numbers(owner: str, profile: LayerProfile | SplitPart) -> None:
    for field in fields(profile):
        value = getattr(profile, field.name)
        if isinstance(value, int | float) and not 0 <= value < float("inf"):
            raise ValueError(f"{owner}: {field.name} is {value}; it must be finite and not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart:
    """The part of a layer that tensor parallelism divides by its degree; included in the layer's own figures.

    Parameters
    ----------
    divisor
        A degree is possible where it divides this number, such as heads or a width. 0: nothing is divided, every device
        of the group computes the same, so every degree is possible.
    parameter_bytes, saved_bytes, forward_workspace_bytes, backward_workspace_bytes, forward_seconds, backward_seconds
        The part of the field of the same name of :class:`LayerProfile`.
    reduced_bytes
        Bytes per sample that the group all-reduces in forward, and again in backward.
    """

    divisor: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    reduced_bytes: int = 0

    def __post_init__(self) -> None:
        _check_numbers("split part", self)


UNDIVIDED = SplitPart()
"""Of a layer that tensor parallelism does not divide."""

_DIVIDED = (
    "parameter_bytes",
    "saved_bytes",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
    "forward_seconds",
    "backward_seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer on one device, unsharded, at one sample.

    Parameters
    ----------
    name
        Unique in its chain; the module path where the layer comes from a traced model.
    kind
        Equal for layers that are the same but for their name.
    parameter_bytes
        Bytes of its parameters alone; gradients and optimizer states follow from the optimizer.
    borrowed_parameter_bytes
        Bytes of parameters that it reads and an earlier layer counts (tied weights): a stage without that layer holds
        them once more.
    input_bytes
        Bytes per sample that the layer before made for it or for later ones; of the first layer the samples themselves.
    unread_input_bytes
        The part of `input_bytes` that no backward operator reads: it stays only where a layer is computed again.
    carried_bytes
        Bytes per sample that layers before the previous one made for it or for later ones, such as an encoder's output:
        a pipeline hands them over together with `input_bytes`.
    output_bytes
        Bytes per sample that it makes for later layers: `input_bytes` of the next one.
    saved_bytes
        Bytes per sample that its forward leaves for its backward, its input left out.
    fixed_saved_bytes
        The same at any batch size: the line's intercept.
    forward_workspace_bytes
        Peak bytes per sample inside its forward beyond input, output and saved tensors.
    backward_workspace_bytes
        Peak bytes per sample inside its backward beyond input and saved tensors: temporaries and the gradients of
        hidden states, those of parameters left out.
    forward_fixed_workspace_bytes, backward_fixed_workspace_bytes
        The same at any batch size, such as the first half of a tied weight's gradient.
    late_workspace_bytes, late_fixed_workspace_bytes
        As those of backward, from the first operator on that reads a parameter or makes the gradient of one: without
        the backward of the loss, in the layer that has it. None: as those of backward.
    largest_parameter_bytes
        Of its parameters the largest one's; None where that is not known.
    forward_seconds, backward_seconds
        Computation of one sample; communication left out.
    forward_fixed_seconds, backward_fixed_seconds
        Computation that a batch of any size pays once, such as launches: the line's intercept.
    split
        The part that tensor parallelism divides.
    bytes_source, seconds_source
        Sources of the numbers.

    Raises
    ------
    ValueError
        If a number is negative or not finite, or a part exceeds its whole.
    """

    name: str
    kind: str
    parameter_bytes: int
    borrowed_parameter_bytes: int = 0
    input_bytes: int
    unread_input_bytes: int = 0
    carried_bytes: int = 0
    output_bytes: int
    saved_bytes: int
    fixed_saved_bytes: int = 0
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    forward_fixed_workspace_bytes: int = 0
    backward_fixed_workspace_bytes: int = 0
    late_workspace_bytes: int | None = None
    late_fixed_workspace_bytes: int | None = None
    largest_parameter_bytes: int | None = None
    forward_seconds: float
    backward_seconds: float
    forward_fixed_seconds: float = 0.0
    backward_fixed_seconds: float = 0.0
    split: SplitPart = UNDIVIDED
    bytes_source: ProfileSource
    seconds_source: ProfileSource

    def __post_init__(self) -> None:
        _check_numbers(f"layer {self.name}", self)
        for field in _DIVIDED:
            part, whole = getattr(self.split, field), getattr(self, field)
            if part > whole:
                raise ValueError(f"layer {self.name}: split {field} is {part}, above its {field} {whole}")
        if self.unread_input_bytes > self.input_bytes:
            unread, given = self.unread_input_bytes, self.input_bytes
            raise ValueError(f"layer {self.name}: unread_input_bytes is {unread}, above input_bytes {given}")

    @property
    def fixed_seconds(self) -> float:
        """Computation of forward and backward together that a batch of any size pays once."""
        return self.forward_fixed_seconds + self.backward_fixed_seconds

    @property
    def boundary_bytes(self) -> int:
        """Bytes per sample that a pipeline hands over in front of this layer."""
        return self.input_bytes + self.carried_bytes

    def allows(self, degree: int) -> bool:
        """Whether tensor parallelism of this degree is possible."""
        return degree >= 1 and self.split.divisor % degree == 0

    def on_one_of(self, degree: int) -> LayerProfile:
        """Profile of the layer on one device of a tensor-parallel group, bytes rounded up.

        Its `split` is :data:`UNDIVIDED` with this layer's `reduced_bytes`, or with 0 for a group of one.

        Raises
        ------
        ValueError
            If the degree is not possible.
        """
        if not self.allows(degree):
            raise ValueError(
                f"layer {self.name} cannot be split in {degree}: use a degree that divides {self.split.divisor}"
            )
        if degree == 1:
            return replace(self, split=UNDIVIDED)
        whole, part, count = self, self.split, degree
        backward = _share(whole.backward_workspace_bytes, part.backward_workspace_bytes, count)
        late = whole.late_workspace_bytes
        return replace(
            self,
            parameter_bytes=_share(whole.parameter_bytes, part.parameter_bytes, count),
            saved_bytes=_share(whole.saved_bytes, part.saved_bytes, count),
            forward_workspace_bytes=_share(whole.forward_workspace_bytes, part.forward_workspace_bytes, count),
            backward_workspace_bytes=backward,
            late_workspace_bytes=late if late is None else min(late, backward),
            forward_seconds=whole.forward_seconds - part.forward_seconds + part.forward_seconds / count,
            backward_seconds=whole.backward_seconds - part.backward_seconds + part.backward_seconds / count,
            split=SplitPart(reduced_bytes=part.reduced_bytes),
        )


@dataclass(frozen=True, slots=True)
class LayerChain:
    """The layers of one model, in the order in which they run.

    Parameters
    ----------
    name
        Of the model, for reports.
    layers
        At least one.
    dtype
        Type of the parameters, by torch's name; the state of an optimizer depends on it.
    notes
        Remarks on the figures, such as tied weights, one sentence each.

    Raises
    ------
    ValueError
        If there is no layer, or two share a name.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    dtype: str = "float32"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"model {self.name} has no layers; a chain needs one at least")
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"model {self.name} has two layers named {repeated}; name them apart")

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Bytes per sample that stay between forward and backward without checkpointing, the samples left out."""
        handed_over = sum(layer.input_bytes - layer.unread_input_bytes for layer in self.layers[1:])
        return handed_over + sum(layer.saved_bytes for layer in self.layers)


def tied_layers(chain: LayerChain) -> tuple[int, ...]:
    """Layers that share a parameter: those that borrow one, and the first, which lends it (an embedding)."""
    borrowers = [position for position, layer in enumerate(chain.layers) if position and layer.borrowed_parameter_bytes]
    return (0, *borrowers) if borrowers else ()


def _share(whole: int, part: int, count: int) -> int:
    return whole - part + -(-part // count)

"""Predicted peak memory of each stage of a layer plan on one device, under torch's own engine.

The papers add up states, activations and one layer's temporaries. The engine holds more, a few terms per layer:

- **copies**: FSDP2 keeps a layer's own part of its parameters and gathers a whole copy while the layer runs, also where
  nothing is sharded. A gather of shards goes through a buffer of the same size, which in forward lives as long as the
  layer runs and in backward is filled for the next layer meanwhile. Layers of ZeRO-2, and those that share a parameter
  within a stage, keep their copy from their first forward to their last backward; the latter free it meanwhile for the
  loss.
- **gradients**: a layer's whole gradient waits, unsharded, for the last micro-batch, in a pipeline for the end of the
  last backward; the new one of a parameter lies beside it while it is added.
- **loss**: its backward comes before the last layer is gathered and has gradients.
- **reduction**: gradients are copied into a buffer and reduced from there; the buffer lives until the next layer is
  reduced. A mesh of one device divides the buffer into another one, and copies that. Where 16-bit gradients are reduced
  in 32 bits, the buffers and the sums over micro-batches have 32.
- **pipeline**: received hidden states and gradients have a buffer for every micro-batch of the step; the gradients that
  a stage sends back stay until the next step, and its results, the logits too, until their backward. Between stages
  with different numbers of devices nothing is received ahead.

A moment is the forward, backward or reduction of one layer, the backward of the loss, or the last reduction after all
backwards; the peak is the largest of them. It is a prediction without a guarantee. Left out are the optimizer's
temporaries, copies that collectives of tensor parallelism make, and the position biases that T5 hands from stage to
stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from formulations.layers.layer import LayerChain, LayerProfile
from formulations.layers.pipeline_schedule import Schedule
from planner.common.plan_error import PlanError
from planner.graph.operator_graph import ITEM_BYTES
from planner.graph.optimizers import optimizer_named
from planner.layers.plan.document import EnginePeak, LayerPlan, LayerSettings

_FETCHED_PART = 4
"""The part of a layer's offloaded activations that one operator needs in backward.

On CUDA the runtime fetches those of the next operator meanwhile. Profiles of layers have no operators; this is about
the part in small transformers."""

_LARGEST_PART = 2
"""The part of a layer's parameters that its largest one has, where a profile does not say: in transformers one matrix
is about the half of a module."""


def engine_peaks(plan: LayerPlan, profiles: Sequence[LayerProfile]) -> tuple[EnginePeak, ...]:
    """The peak on one device of every stage, with its moment.

    Parameters
    ----------
    plan
        A checked plan; without a machine it is counted as one for CPUs.
    profiles
        Profile of each of the plan's layers, in their order; see :func:`plan_profiles`.
    """
    ends = accumulate(len(stage.layers) for stage in plan.stages)
    ranges = pairwise([0, *ends])
    stages = [_Stage(plan, profiles, number, *bounds) for number, bounds in enumerate(ranges)]
    return tuple(max(stage.moments(), key=lambda moment: moment.nbytes) for stage in stages)


def plan_profiles(plan: LayerPlan, *chains: LayerChain) -> tuple[LayerProfile, ...]:
    """Profile of each of a plan's layers.

    Parameters
    ----------
    plan
        A plan of the model.
    chains
        The model folded into blocks, into modules of blocks, or both. A module that the plan names by its path has the
        profile of the module at the same place in its block, where block and plan have as many.

    Raises
    ------
    PlanError
        A layer is in none of them.
    """
    known = {layer.name: layer for chain in chains for layer in chain.layers}
    names = [layer.name for layer in plan.layers]
    found = []
    for name in names:
        block = next((block for block in known if name.startswith(f"{block}.")), name)
        parts = [part for part in names if part.startswith(f"{block}.")]
        modules = [module for module in known if module.startswith(f"{block}.")]
        if name not in known and (name not in parts or len(modules) != len(parts)):
            raise PlanError(f"layer {name} has no profile; there are those of {', '.join(known)}")
        found.append(known[name] if name in known else known[modules[parts.index(name)]])
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of one layer on a device; activations and workspaces are those of one micro-batch.

    Parameters
    ----------
    copy
        Its whole parameters, but for tensor parallelism.
    own
        The part of them that this device trains.
    piece
        Parameters that are gathered at once.
    buffer
        Buffer of a gather.
    wider
        Bytes in which gradients are summed for one byte of them.
    keeps_copy, keeps_for_loss
        Whether the copy stays from the first forward to the last backward, and whether also while the loss's runs.
    resident
        Own part and optimizer state where they are on the device.
    given, kept, again
        Hidden states that it takes; other tensors saved for backward; tensors that backward recomputes or fetches.
    forward, backward
        Temporaries, with the output in forward; of the last layer's backward from where it needs a parameter.
    loss
        Temporaries of the loss's backward, before that.
    largest
        The largest gradient that exists at once while it is added to that of earlier micro-batches.
    """

    name: str
    copy: int
    own: int
    piece: int
    buffer: int
    wider: int
    keeps_copy: bool
    keeps_for_loss: bool
    resident: int
    given: int
    kept: int
    again: int
    forward: int
    backward: int
    loss: int
    largest: int

    @property
    def gathered(self) -> int:
        """Copy that it makes to run, where it has none."""
        return 0 if self.keeps_copy else self.piece

    @property
    def reduction(self) -> int:
        """Most bytes of buffers, beyond one gradient of a piece, while it is reduced; wider ones are cast then."""
        if self.wider == 1:
            return self.piece if self.buffer else 2 * self.piece
        own = self.piece * self.own // self.copy if self.buffer else self.piece
        return self.wider * (self.piece + own) + own

    @property
    def summed(self) -> int:
        """Sum of its gradients over micro-batches."""
        return self.wider * self.copy


def _held(
    plan: LayerPlan,
    layer: LayerSettings,
    profile: LayerProfile,
    *,
    is_tied: bool,
    has_loss: bool,
    tied_gradients: int,
) -> _Held:
    """Memory of one layer.

    Parameters
    ----------
    plan, layer, profile
        The layer.
    is_tied
        Whether it shares a parameter with another layer of its stage, the first of which counts it.
    has_loss
        Whether it is the model's last.
    tied_gradients
        Bytes of its workspace that are parts of a shared parameter's gradient, which are counted as that.
    """
    degree = layer.tensor_parallel if layer.shares_products else 1
    part = profile.on_one_of(degree) if profile.allows(degree) else profile
    copy = part.parameter_bytes + (0 if is_tied else part.borrowed_parameter_bytes)
    if not profile.split.divisor:  # an embedding or a head is divided along its vocabulary
        copy = -(-copy // degree)
    sharded = layer.slices if layer.sharded_slices is None else layer.sharded_slices
    own = copy - copy * sharded // layer.slices * (layer.shards - 1) // layer.shards
    dtype = plan.model.dtype
    state = optimizer_named(plan.optimizer).state(dtype).nbytes(own // ITEM_BYTES[dtype])
    piece = -(-copy // layer.slices)
    rows = _rows(plan, layer)
    given = rows * part.input_bytes // (degree if layer.sequence_parallel else 1)
    saved = rows * part.saved_bytes + part.fixed_saved_bytes
    fetched = 0
    if layer.offload_hidden:  # under a checkpoint the input alone is saved
        fetched = given if layer.checkpoint else saved // _FETCHED_PART
        if plan.machine is not None and plan.machine.device == "cuda":
            fetched *= 2
    late, fixed = part.late_workspace_bytes, part.late_fixed_workspace_bytes
    if late is None or fixed is None or not has_loss:
        late, fixed = part.backward_workspace_bytes, part.backward_fixed_workspace_bytes
    largest = part.largest_parameter_bytes
    largest = piece // _LARGEST_PART if largest is None else min(piece, -(-largest // degree))
    made = part.forward_workspace_bytes + part.output_bytes
    return _Held(
        name=layer.name,
        copy=copy,
        own=own,
        piece=piece,
        buffer=piece if own < copy else 0,
        wider=ITEM_BYTES["float32"] // ITEM_BYTES[dtype] if plan.model.reduce_dtype == "float32" else 1,
        keeps_copy=layer.sharding == "zero2" or is_tied,
        keeps_for_loss=layer.sharding == "zero2",
        resident=0 if layer.offload_parameters else own + (0 if layer.offload_optimizer else state),
        given=0 if layer.offload_hidden else given,
        kept=0 if layer.checkpoint or layer.offload_hidden else saved,
        again=fetched + (saved if layer.checkpoint else 0),
        forward=rows * made + part.forward_fixed_workspace_bytes,
        backward=rows * late + max(0, fixed - tied_gradients),
        loss=rows * part.backward_workspace_bytes + max(0, part.backward_fixed_workspace_bytes - tied_gradients),
        largest=largest,
    )


def _rows(plan: LayerPlan, layer: LayerSettings) -> int:
    """Samples of one micro-batch that a device has."""
    return plan.model.batch // (plan.micro_batches * layer.data_parallel)


def _handed_over(plan: LayerPlan, profiles: Sequence[LayerProfile], place: int) -> int:
    """Bytes per sample that a stage hands to the one that begins at `place`.

    A decoder's embeddings are made with the encoder's, and go along until the bridge between the two.
    """
    names = [layer.name for layer in plan.layers]
    waiting = "bridge" in names and place <= names.index("bridge")
    return profiles[place].boundary_bytes + (profiles[0].output_bytes if waiting else 0)


class _Stage:
    """One stage: the moments of its layers, with what all of them hold."""

    def __init__(self, plan: LayerPlan, profiles: Sequence[LayerProfile], number: int, first: int, end: int) -> None:
        self._micro_batches, self._is_pipeline = plan.micro_batches, len(plan.stages) > 1
        self._is_even = plan.is_even
        self._has_loss = end == len(plan.layers)
        self._in_flight = Schedule(plan.schedule).in_flight(len(plan.stages), number, plan.micro_batches)
        borrowers = {place for place in range(first, end) if profiles[place].borrowed_parameter_bytes}
        tied = borrowers | {0} if first == 0 and borrowers else set[int]()
        table = max(profile.borrowed_parameter_bytes for profile in profiles)
        self._tied_gradient = table if tied else 0
        self._layers = [
            _held(
                plan,
                plan.layers[place],
                profiles[place],
                is_tied=place in tied,
                has_loss=place == len(plan.layers) - 1,
                tied_gradients=table if place else 2 * table,
            )
            for place in range(first, end)
        ]
        samples = plan.micro_batches * self._layers[0].given if number == 0 else 0
        self._states = self._sum("resident") + samples
        if (first == 0 or plan.is_even) and self._takes_what_it_is_given(plan, first):
            self._layers[0] = replace(self._layers[0], given=0)
        is_last = self._is_pipeline and self._has_loss
        self._logits = profiles[-1].forward_workspace_bytes * _rows(plan, plan.layers[-1]) if is_last else 0
        self._pipeline = self._pipeline_bytes(plan, profiles, first, end)
        self._moment = partial(EnginePeak, states=self._states, pipeline=self._pipeline)

    def moments(self) -> Iterator[EnginePeak]:
        """Moments of a step that may be the peak."""
        if self._has_loss:
            yield self._loss()
        for place in range(len(self._layers)):
            yield self._forward(place)
            if self._is_pipeline or self._micro_batches > 2:
                yield self._backward(place, reduces=False)
            if not self._is_pipeline:
                yield self._backward(place, reduces=True)
                yield self._reduction(place)
        if self._is_pipeline:
            yield self._last_reduction()
        yield self._moment(moment="update", gradients=self._sum("own"))

    @staticmethod
    def _takes_what_it_is_given(plan: LayerPlan, first: int) -> bool:
        """Whether the first layer's input is a buffer that is counted already, and no copy in another layout."""
        return first == 0 or plan.layers[first - 1].data_parallel == plan.layers[first].data_parallel

    def _pipeline_bytes(self, plan: LayerPlan, profiles: Sequence[LayerProfile], first: int, end: int) -> int:
        """Buffers of the pipeline, which live for the whole step."""
        held, last = 0, plan.layers[end - 1]
        if not self._is_even:  # gradients that are sent back, and outputs and one gradient of those in flight
            if first > 0:
                received = _handed_over(plan, profiles, first) * _rows(plan, plan.layers[first])
                held += plan.micro_batches * received
            if end < len(plan.layers):
                held += (self._in_flight + 1) * _handed_over(plan, profiles, end) * _rows(plan, last)
        elif first > 0:
            received = _handed_over(plan, profiles, first) * _rows(plan, plan.layers[first - 1])
            held += 2 * plan.micro_batches * received  # with the gradients that are sent back
        if self._is_even and end < len(plan.layers):
            sent = _handed_over(plan, profiles, end) * _rows(plan, last)
            held += (plan.micro_batches + self._in_flight) * sent
        return held + self._in_flight * self._logits

    def _forward(self, place: int) -> EnginePeak:
        layer, is_last = self._layers[place], place + 1 == len(self._layers)
        after_backwards = self._micro_batches > self._in_flight
        copies = self._kept_copies(None if self._micro_batches > 1 else place + 1)
        return self._moment(
            moment=f"forward of {layer.name}",
            activations=self._activations(place + 1),
            workspace=max(0, layer.forward - (self._logits if is_last else 0)),  # the pipeline has those
            copies=copies + layer.gathered + layer.buffer,
            gradients=self._sum("summed") if after_backwards else 0,
        )

    def _loss(self) -> EnginePeak:
        """Backward of the loss: the last layer is not gathered, and none has a gradient of this micro-batch."""
        layer = self._layers[-1]
        return self._moment(
            moment="backward of the loss",
            activations=self._activations(len(self._layers)),
            workspace=layer.loss + layer.again,
            copies=sum(each.copy for each in self._layers if each.keeps_for_loss),
            gradients=self._sum("summed") if self._micro_batches > 1 else 0,
        )

    def _backward(self, place: int, *, reduces: bool) -> EnginePeak:
        """Backward of a layer in a micro-batch whose backward reduces the gradients, or in one that does not."""
        layer, before = self._layers[place], self._layers[place - 1] if place else None
        repeats = self._micro_batches > 1
        # Autograd adds a gradient to the sum as soon as it is there; FSDP2 does to a wider sum after the layer.
        gradients = (layer.piece if layer.wider > 1 else layer.largest) if repeats else 0
        # A part of a shared parameter's gradient is held until the embedding's is there, and then their sum.
        gradients += self._tied_gradient * (1 if place else 2)
        if reduces:
            gradients += self._sum("summed", 0, place + 1) if repeats else layer.piece
            gradients += self._sum("own", place + 1)
        else:
            gradients += self._sum("summed")
        prefetched = before.buffer if before is not None and not before.keeps_copy else 0
        return self._moment(
            moment=f"backward of {layer.name}",
            activations=self._activations(place + 1),
            workspace=layer.backward + layer.again,
            copies=self._kept_copies(place + 1 if reduces else None) + layer.gathered + prefetched,
            gradients=gradients,
            reduction=sum(after.wider * after.piece for after in self._layers[place + 1 : place + 2]) if reduces else 0,
        )

    def _reduction(self, place: int) -> EnginePeak:
        """Peak while a layer's gradients are reduced, for layers that reduce them right after their backward."""
        layer = self._layers[place]
        repeats = self._micro_batches > 1
        waiting = self._sum("summed", 0, place) if repeats else 0
        return self._moment(
            moment=f"reduction of {layer.name}",
            activations=self._activations(place),
            workspace=layer.given,
            copies=self._kept_copies(place),
            gradients=waiting + layer.piece * (layer.wider if repeats else 1) + self._sum("own", place + 1),
            reduction=layer.reduction,
        )

    def _last_reduction(self) -> EnginePeak:
        """Reduction of all layers' gradients, where that comes at the end."""
        largest = max(self._layers, key=lambda layer: layer.reduction)
        return self._moment(
            moment="reduction of all layers",
            copies=self._kept_copies(None) - (largest.copy if largest.keeps_copy else 0),
            gradients=self._sum("summed"),
            reduction=largest.reduction,
        )

    def _activations(self, end: int) -> int:
        """Tensors saved for backward by the layers before `end`, and by the other micro-batches in flight."""
        others = (self._in_flight - 1) * (self._sum("given") + self._sum("kept"))
        return others + self._sum("given", 0, end) + self._sum("kept", 0, end)

    def _kept_copies(self, end: int | None) -> int:
        return sum(layer.copy for layer in self._layers[:end] if layer.keeps_copy)

    def _sum(self, what: str, first: int = 0, end: int | None = None) -> int:
        return sum(getattr(layer, what) for layer in self._layers[first:end])

"""Layers by formula: memory and FLOP of the modules of transformers and convolutional nets, for one sample.

A module is a list of :class:`Work`, operators in their order: FLOP, bytes moved, bytes made and bytes that stay for the
backward pass as PyTorch's eager operators leave them (attention written out, dropout masks of one byte; the counts of
Korthikanti et al. 2022, section 4.1, with the storages that they leave out). From it :func:`layer_of` derives the
profile of a layer; the time of a list is a roofline per operator, and backward computes twice what forward does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from formulations.layers.layer import LayerProfile, ProfileSource, SplitPart
from planner.graph.operator_graph import ITEM_BYTES
from planner.machine.cluster import ClusterSpec

BACKWARD_PER_FORWARD = 2
"""Computation of backward over that of forward: a gradient for each factor of every product."""

MASK_BYTES = 1
STATISTICS_BYTES = 4
LABEL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Work:
    """One operator, or several that follow each other alike, for one sample.

    Parameters
    ----------
    flops, moved_bytes
        Arithmetic, and bytes read and written.
    made_bytes
        Bytes of the result, whether it stays or not.
    saved_bytes
        Bytes that stay for the backward pass, the result of the whole layer left out.
    parameters
        Elements of its parameters.
    launches
        Kernels.
    divided
        Whether tensor parallelism divides all of it.
    reads_result
        Whether its own backward reads its result, as that of softmax does.
    """

    flops: int = 0
    moved_bytes: int = 0
    made_bytes: int = 0
    saved_bytes: int = 0
    parameters: int = 0
    launches: int = 1
    divided: bool = False
    reads_result: bool = False


RELU, GELU = 1, 2
"""Tensors of the inner width that the nonlinearity of a feed-forward module leaves for backward."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of a transformer block.

    Parameters
    ----------
    hidden, heads, head_size, feed_forward
        Widths; the heads together may be wider than the hidden states.
    item_bytes
        Bytes of one number.
    bias
        Whether products have a bias and normalisations a shift.
    dropout
        Whether there is dropout behind softmax and at the end of both modules.
    inner_dropout
        Whether there is dropout behind the activation too (T5).
    activation
        Tensors that the nonlinearity of the feed-forward module leaves, :data:`RELU`, :data:`GELU`, or more where it is
        written in steps (GPT-2).
    norm_tensors
        Tensors of hidden size that one normalisation leaves: 1, or 2 where it is written in steps (T5).
    """

    hidden: int
    heads: int
    head_size: int
    feed_forward: int
    item_bytes: int
    bias: bool = True
    dropout: bool = True
    inner_dropout: bool = False
    activation: int = GELU
    norm_tensors: int = 1

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_size

    def states(self, tokens: int) -> int:
        """Bytes of the hidden states of so many tokens."""
        return tokens * self.hidden * self.item_bytes


def attention(shape: BlockShape, tokens: int, keys: int, sources: int | None = None) -> list[Work]:
    """Attention module: normalisation, projections, scores, softmax, mixing, output, residual.

    Parameters
    ----------
    shape
        Of the block.
    tokens
        Tokens that have queries.
    keys
        Tokens that each of them attends to: all, or those of its window.
    sources
        Tokens that keys and values are made from (cross attention); None: the tokens themselves.
    """
    item = shape.item_bytes
    read = tokens if sources is None else sources
    projected = (tokens + 2 * read) * shape.inner * item
    scores = shape.heads * tokens * keys * item
    mixed = tokens * shape.inner * item
    product = 2 * tokens * keys * shape.inner
    return [
        normalization(shape, tokens),
        Work(
            flops=2 * (tokens + 2 * read) * shape.hidden * shape.inner,
            moved_bytes=shape.states(tokens + 2 * read) + 3 * projected,  # the copies by heads move them again
            made_bytes=projected,
            saved_bytes=projected,
            parameters=3 * shape.inner * (shape.hidden + shape.bias),
            launches=6,
            divided=True,
        ),
        Work(flops=product, moved_bytes=projected + scores, made_bytes=scores, divided=True),
        Work(moved_bytes=4 * scores, made_bytes=scores, launches=2, divided=True),  # scale and mask
        Work(moved_bytes=2 * scores, made_bytes=scores, saved_bytes=scores, divided=True, reads_result=True),  # softmax
        *([_dropout(scores, item, kept=True, divided=True)] if shape.dropout else []),
        Work(
            flops=product,
            moved_bytes=scores + 4 * mixed,
            made_bytes=mixed,
            saved_bytes=mixed,
            launches=2,
            divided=True,
        ),
        *_output(shape, tokens, shape.inner),
    ]


def feed_forward(shape: BlockShape, tokens: int) -> list[Work]:
    """Feed-forward module: normalisation, product, activation, product, residual."""
    item, wide = shape.item_bytes, tokens * shape.feed_forward * shape.item_bytes
    inside = shape.activation - 1
    return [
        normalization(shape, tokens),
        Work(
            flops=2 * tokens * shape.hidden * shape.feed_forward,
            moved_bytes=shape.states(tokens) + wide,
            made_bytes=wide,
            saved_bytes=wide if inside else 0,
            parameters=shape.feed_forward * (shape.hidden + shape.bias),
            divided=True,
        ),
        Work(
            moved_bytes=2 * max(1, inside) * wide,
            made_bytes=wide,
            saved_bytes=max(1, inside) * wide,
            launches=max(1, inside),
            divided=True,
            reads_result=not inside,
        ),
        *([_dropout(wide, item, kept=True, divided=True)] if shape.inner_dropout else []),
        *_output(shape, tokens, shape.feed_forward),
    ]


def normalization(shape: BlockShape, tokens: int) -> Work:
    """Layer normalisation in front of a module or behind its residual: either leaves one tensor of hidden size."""
    states = shape.states(tokens)
    return Work(
        moved_bytes=2 * shape.norm_tensors * states,
        made_bytes=states,
        saved_bytes=shape.norm_tensors * states + (1 + shape.bias) * tokens * STATISTICS_BYTES,
        parameters=(1 + shape.bias) * shape.hidden,
    )


def linear(tokens: int, width_in: int, width_out: int, item_bytes: int, *, bias: bool = True) -> Work:
    """Product with a weight that tensor parallelism leaves alone; its result stays."""
    made = tokens * width_out * item_bytes
    return Work(
        flops=2 * tokens * width_in * width_out,
        moved_bytes=tokens * width_in * item_bytes + made,
        made_bytes=made,
        saved_bytes=made,
        parameters=width_out * (width_in + bias),
    )


def lookup(shape: BlockShape, tokens: int, rows: int, *, normalized: bool) -> list[Work]:
    """Embedding of tokens: ``rows`` vectors of all tables together; sum, normalisation (BERT), dropout."""
    states = shape.states(tokens)
    works = [Work(moved_bytes=5 * states, made_bytes=states, parameters=rows * shape.hidden, launches=3)]
    if normalized:
        works.append(normalization(shape, tokens))
    if shape.dropout:
        works.append(_dropout(states, shape.item_bytes, kept=False, divided=False))
    return works


def language_head(shape: BlockShape, tokens: int, vocabulary: int, *, weight: bool, bias: bool) -> list[Work]:
    """Logits and cross entropy.

    Log-probabilities stay for the backward pass, and so do the logits: a training loop holds the model's output until
    the step is over (Table I of Galvatron-BMW shows both).

    Parameters
    ----------
    shape, tokens, vocabulary
        Sizes.
    weight, bias
        Whether the output embedding is a parameter of its own, and whether there is a bias.
    """
    logits = tokens * vocabulary * shape.item_bytes
    return [
        Work(
            flops=2 * tokens * shape.hidden * vocabulary,
            moved_bytes=shape.states(tokens) + logits,
            made_bytes=logits,
            saved_bytes=logits,
            parameters=vocabulary * (weight * shape.hidden + bias),
        ),
        Work(moved_bytes=3 * logits, made_bytes=logits, saved_bytes=logits, launches=2),
    ]


def _output(shape: BlockShape, tokens: int, width: int) -> list[Work]:
    """Product back to the hidden size, its bias, dropout and the residual; the sum is the layer's result."""
    states = shape.states(tokens)
    product = Work(
        flops=2 * tokens * width * shape.hidden,
        moved_bytes=tokens * width * shape.item_bytes + states,
        made_bytes=states,
        parameters=width * shape.hidden,
        divided=True,
    )
    # Every device of a tensor-parallel group holds the whole result: it is a sum over the group.
    bias = Work(parameters=shape.bias * shape.hidden, made_bytes=states, launches=0)
    dropout = [_dropout(states, shape.item_bytes, kept=False, divided=False)] if shape.dropout else []
    return [replace(product, made_bytes=0), bias, *dropout, Work(moved_bytes=3 * states)]


def _dropout(nbytes: int, item_bytes: int, *, kept: bool, divided: bool) -> Work:
    mask = nbytes // item_bytes * MASK_BYTES
    return Work(
        moved_bytes=2 * nbytes + mask,
        made_bytes=nbytes,
        saved_bytes=mask + (nbytes if kept else 0),
        divided=divided,
    )


@dataclass(frozen=True, slots=True)
class Boundary:
    """Bytes per sample in front of a layer and behind it; fields as in :class:`.LayerProfile`."""

    input_bytes: int
    output_bytes: int
    carried_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FormulaDevice:
    """A device on which layers are priced, and the type of their numbers.

    Parameters
    ----------
    cluster
        Where the rates come from.
    dtype
        Torch's name of the type of parameters and activations.
    """

    cluster: ClusterSpec
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return ITEM_BYTES[self.dtype]

    @property
    def source(self) -> ProfileSource:
        """Source of the times; those of a calibrated cluster are fitted, since its rates were fitted to runs."""
        return ProfileSource.PRESET if self.cluster.measured is None else ProfileSource.FITTED

    def seconds(self, works: Sequence[Work]) -> float:
        """Seconds of one sample, launches left out."""
        device = self.cluster.device
        rate = device.flops_of(self.dtype)
        return sum(max(work.flops / rate, work.moved_bytes / device.memory_bandwidth) for work in works)

    def launch_seconds(self, works: Sequence[Work]) -> float:
        """Seconds that any batch pays for launches."""
        return self.cluster.device.launch_seconds * sum(work.launches for work in works)


def layer_of(
    name: str,
    kind: str,
    works: Sequence[Work],
    boundary: Boundary,
    device: FormulaDevice,
    *,
    divisor: int = 0,
    reduced_bytes: int = 0,
    borrowed_parameters: int = 0,
) -> LayerProfile:
    """Profile of a layer that consists of these works.

    Parameters
    ----------
    name, kind, boundary
        As in :class:`formulations.layers.layer.LayerProfile`.
    works
        In the order in which they run.
    device
        Where times come from.
    divisor, reduced_bytes
        As in :class:`formulations.layers.layer.SplitPart`; with a divisor of 0 nothing is divided.
    borrowed_parameters
        Elements of parameters that an earlier layer counts.
    """
    divided = [work for work in works if work.divided] if divisor else []
    rest = [work for work in works if not (divisor and work.divided)]
    forward, backward = _workspaces(works, boundary)
    undivided = [replace(work, made_bytes=0, saved_bytes=0) if work.divided else work for work in works]
    forward_rest, backward_rest = _workspaces(undivided, boundary) if divisor else (forward, backward)
    part_seconds = device.seconds(divided)
    seconds = part_seconds + device.seconds(rest)
    return LayerProfile(
        name=name,
        kind=kind,
        parameter_bytes=sum(work.parameters for work in works) * device.item_bytes,
        borrowed_parameter_bytes=borrowed_parameters * device.item_bytes,
        input_bytes=boundary.input_bytes,
        carried_bytes=boundary.carried_bytes,
        output_bytes=boundary.output_bytes,
        saved_bytes=sum(work.saved_bytes for work in works),
        forward_workspace_bytes=forward,
        backward_workspace_bytes=backward,
        forward_seconds=seconds,
        backward_seconds=BACKWARD_PER_FORWARD * seconds,
        forward_fixed_seconds=device.launch_seconds(works),
        backward_fixed_seconds=BACKWARD_PER_FORWARD * device.launch_seconds(works),
        split=SplitPart(
            divisor=divisor,
            parameter_bytes=sum(work.parameters for work in divided) * device.item_bytes,
            saved_bytes=sum(work.saved_bytes for work in divided),
            forward_workspace_bytes=max(0, forward - forward_rest),
            backward_workspace_bytes=max(0, backward - backward_rest),
            forward_seconds=part_seconds,
            backward_seconds=BACKWARD_PER_FORWARD * part_seconds,
            reduced_bytes=reduced_bytes if divisor else 0,
        ),
        bytes_source=ProfileSource.PRESET,
        seconds_source=device.source,
    )


def _workspaces(works: Sequence[Work], boundary: Boundary) -> tuple[int, int]:
    """Most bytes beyond what stays while forward runs, and while backward runs: results and gradients in passing.

    While a work runs forward, its result and the one before it are alive beside the tensors saved up to it.
    While it runs backward, the gradients of both are, and the gradient of the residual; the work behind it has freed
    its result by then, unless its own backward reads it.
    """
    total = sum(work.saved_bytes for work in works)
    left = given = unsaved = 0
    forward = backward = 0
    for work in works:
        left += work.saved_bytes
        in_passing = max(0, work.made_bytes - work.saved_bytes)
        forward = max(forward, left + in_passing + unsaved - total)
        freed = 0 if work.reads_result else min(work.saved_bytes, work.made_bytes)
        backward = max(backward, left - freed + work.made_bytes + given - total)
        given = work.made_bytes
        unsaved = 0 if work.saved_bytes else given
    return forward, backward + boundary.output_bytes

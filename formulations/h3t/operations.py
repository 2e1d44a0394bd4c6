r"""What happens in an H3T step: switches, operations in their order, and how long every tensor lives; data only.

Section 3.2 and appendices A.1 and A.2 of Wang et al., NeurIPS 2023, describe the order of operations in words and draw
it in figures. This page is that order as read from the words; where they leave something open a comment says so.

A step runs in *segments*, one for each layer forward and one for each layer backward. A segment computes its layer;
meanwhile it ends what the layer before it (in time) left (*post*), and prepares the layer behind it (*prepare*). An
economical segment issues *post* first, any other *prepare* first. Streams are in-order queues: an operation starts when
everything issued to its stream before has ended, and so has everything that it comes after. A segment with
synchronization ends when all streams are empty; behind one without it the queues go on.

Borders are segments too: layer 0 is the embedding and layer N + 1 the loss. So the step begins with forward segment 0,
which prepares layer 1; turns with backward segment N + 1, which prepares layer N; and ends with backward segment 0,
which reduces the gradients of layer 1. These three always end with synchronization.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag, auto

__all__ = [
    "ALL_ON",
    "BACKWARD_SEGMENT",
    "FORWARD_SEGMENT",
    "HANDED_OVER",
    "LIVES",
    "SETS",
    "Life",
    "Operation",
    "Rule",
    "SegmentRules",
    "Stream",
    "Switch",
    "Tensor",
]


class Switch(IntFlag):
    """The seven switches of a layer (section 3.2); a set of them is an index 0 .. 127."""

    REMAT = auto()
    """Intermediate activations are dropped after forward and computed again before backward."""
    OFFLOAD_HIDDEN = auto()
    """The layer's input waits in host memory between forward and backward."""
    PARTITION = auto()
    """Gathered parameters are dropped after forward and gathered again before backward."""
    LAZY_PREFETCH = auto()
    """The device's own shard of the parameters waits in host memory and is fetched before every gathering."""
    ECONOMICAL_FORWARD = auto()
    """The forward segment does its post-processing before its preparation."""
    ECONOMICAL_BACKWARD = auto()
    """The backward segment does so."""
    SEGMENT_SYNC = auto()
    """All streams wait for each other at the end of the layer's two segments."""


SETS = 128
"""Sets of switches, ``|S|``."""

ALL_ON = Switch(SETS - 1)
"""All switches on."""

NONE = Switch(0)
"""No switch."""

HANDED_OVER = Switch.OFFLOAD_HIDDEN | Switch.PARTITION | Switch.LAZY_PREFETCH
"""Switches of a layer that the segments of its neighbours depend on; ``R`` of Algorithm 4."""


class Stream(IntEnum):
    """In-order queues. Without links between devices what is for `DEVICE` goes to `HOST`."""

    COMPUTE = 0
    DEVICE = 1
    HOST = 2
    PROCESSOR = 3
    """The host's own computation; the paper has no such stream though its optimizer runs there."""


class Operation(IntEnum):
    """What a segment issues for a layer."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    OFFLOAD_HIDDEN = 3
    FETCH_HIDDEN = 4
    FETCH = 5
    """The shard of the parameters, before forward."""
    GATHER = 6
    FETCH_AGAIN = 7
    """The same before backward."""
    GATHER_AGAIN = 8
    SCATTER = 9
    OFFLOAD_GRADIENT = 10
    UPDATE = 11


class Tensor(IntEnum):
    """What takes memory, per layer; hidden states are the layer's input, their gradients are as large."""

    HIDDEN = 0
    ACTIVATIONS = 1
    PARAMETERS = 2
    """All of them; their gradient is as large."""
    SHARD = 3
    """This device's part of them; its gradient is as large."""
    FORWARD_WORKSPACE = 4
    BACKWARD_WORKSPACE = 5


After = tuple[tuple[Operation, int], ...]
"""Operations and the layers they belong to, relative to a given one."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An operation that a segment issues.

    Parameters
    ----------
    operation, stream
        What, and where.
    offset
        The layer that it belongs to, relative to the segment's.
    when
        Switches of this layer that have to be on.
    after
        What has to have ended, layers relative to that of the operation; what does not happen has.
    """

    operation: Operation
    stream: Stream
    offset: int
    when: Switch = NONE
    after: After = ()


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """What the segments of one direction issue.

    Parameters
    ----------
    compute, post, prepare
        In the order of their issue; `post` and `prepare` change places in a segment that is not economical.
    economical
        The switch that says so.
    """

    compute: tuple[Rule, ...]
    post: tuple[Rule, ...]
    prepare: tuple[Rule, ...]
    economical: Switch


FORWARD_SEGMENT = SegmentRules(
    # With rematerialization this is F*: as long, but its activations live no longer than it runs.
    compute=(Rule(Operation.FORWARD, Stream.COMPUTE, 0, after=((Operation.FORWARD, -1), (Operation.GATHER, 0))),),
    # It only reads, so it may run beside the computation of its own layer (figure 9).
    post=(Rule(Operation.OFFLOAD_HIDDEN, Stream.HOST, 0, Switch.OFFLOAD_HIDDEN, after=((Operation.FORWARD, -1),)),),
    prepare=(
        Rule(Operation.FETCH, Stream.HOST, 1, Switch.LAZY_PREFETCH),
        Rule(Operation.GATHER, Stream.DEVICE, 1, after=((Operation.FETCH, 0),)),
    ),
    economical=Switch.ECONOMICAL_FORWARD,
)

BACKWARD_SEGMENT = SegmentRules(
    compute=(
        Rule(
            Operation.RECOMPUTE,
            Stream.COMPUTE,
            0,
            Switch.REMAT,
            after=((Operation.BACKWARD, 1), (Operation.FETCH_HIDDEN, 0), (Operation.GATHER_AGAIN, 0)),
        ),
        Rule(
            Operation.BACKWARD,
            Stream.COMPUTE,
            0,
            after=((Operation.BACKWARD, 1), (Operation.FETCH_HIDDEN, 0), (Operation.GATHER_AGAIN, 0)),
        ),
    ),
    # That the optimizer follows each layer's gradient is our reading; see formulations.h3t.problem.Optimizer.
    post=(
        Rule(Operation.SCATTER, Stream.DEVICE, 1, after=((Operation.BACKWARD, 0),)),
        Rule(Operation.OFFLOAD_GRADIENT, Stream.HOST, 1, after=((Operation.SCATTER, 0),)),
        Rule(Operation.UPDATE, Stream.PROCESSOR, 1, after=((Operation.OFFLOAD_GRADIENT, 0),)),
    ),
    # The shard goes before hidden states, since the gathering waits for it.
    prepare=(
        Rule(Operation.FETCH_AGAIN, Stream.HOST, -1, Switch.PARTITION | Switch.LAZY_PREFETCH),
        Rule(Operation.GATHER_AGAIN, Stream.DEVICE, -1, Switch.PARTITION, after=((Operation.FETCH_AGAIN, 0),)),
        Rule(Operation.FETCH_HIDDEN, Stream.HOST, -1, Switch.OFFLOAD_HIDDEN),
    ),
    economical=Switch.ECONOMICAL_BACKWARD,
)


@dataclass(frozen=True, slots=True)
class Life:
    """From the start of one operation to the end of others a tensor takes memory.

    Parameters
    ----------
    tensor
        What.
    begin
        Operation that makes it, and the layer that this belongs to, relative to the tensor's.
    ends
        It lives until all of these have ended.
    on, off
        Switches of the tensor's layer that have to be on, and off.
    """

    tensor: Tensor
    begin: tuple[Operation, int]
    ends: After
    on: Switch = NONE
    off: Switch = NONE


LIVES = (
    Life(Tensor.HIDDEN, (Operation.FORWARD, -1), ((Operation.BACKWARD, 0),), off=Switch.OFFLOAD_HIDDEN),
    Life(
        Tensor.HIDDEN,
        (Operation.FORWARD, -1),
        ((Operation.FORWARD, 0), (Operation.OFFLOAD_HIDDEN, 0)),
        on=Switch.OFFLOAD_HIDDEN,
    ),
    Life(Tensor.HIDDEN, (Operation.FETCH_HIDDEN, 0), ((Operation.BACKWARD, 0),), on=Switch.OFFLOAD_HIDDEN),
    # The gradient of the layer's input.
    Life(Tensor.HIDDEN, (Operation.BACKWARD, 0), ((Operation.BACKWARD, -1),)),
    Life(Tensor.ACTIVATIONS, (Operation.FORWARD, 0), ((Operation.BACKWARD, 0),), off=Switch.REMAT),
    Life(Tensor.ACTIVATIONS, (Operation.FORWARD, 0), ((Operation.FORWARD, 0),), on=Switch.REMAT),
    Life(Tensor.ACTIVATIONS, (Operation.RECOMPUTE, 0), ((Operation.BACKWARD, 0),), on=Switch.REMAT),
    Life(Tensor.PARAMETERS, (Operation.GATHER, 0), ((Operation.BACKWARD, 0),), off=Switch.PARTITION),
    Life(Tensor.PARAMETERS, (Operation.GATHER, 0), ((Operation.FORWARD, 0),), on=Switch.PARTITION),
    Life(Tensor.PARAMETERS, (Operation.GATHER_AGAIN, 0), ((Operation.BACKWARD, 0),), on=Switch.PARTITION),
    # Their gradient.
    Life(Tensor.PARAMETERS, (Operation.BACKWARD, 0), ((Operation.SCATTER, 0),)),
    # The words drop the shard after reduce-scatter only, with which lazy prefetching would save nothing before; so it
    # is dropped after each gathering too. Without lazy prefetching the shard is resident for the whole step.
    Life(Tensor.SHARD, (Operation.FETCH, 0), ((Operation.GATHER, 0),), on=Switch.LAZY_PREFETCH),
    Life(
        Tensor.SHARD,
        (Operation.FETCH_AGAIN, 0),
        ((Operation.GATHER_AGAIN, 0),),
        on=Switch.LAZY_PREFETCH | Switch.PARTITION,
    ),
    # Its gradient.
    Life(Tensor.SHARD, (Operation.SCATTER, 0), ((Operation.OFFLOAD_GRADIENT, 0),)),
    Life(Tensor.FORWARD_WORKSPACE, (Operation.FORWARD, 0), ((Operation.FORWARD, 0),)),
    Life(Tensor.FORWARD_WORKSPACE, (Operation.RECOMPUTE, 0), ((Operation.RECOMPUTE, 0),), on=Switch.REMAT),
    Life(Tensor.BACKWARD_WORKSPACE, (Operation.BACKWARD, 0), ((Operation.BACKWARD, 0),)),
)
"""Every tensor of a layer, each time it is there."""

"""Slips of Galvatron-BMW: errors and gaps of the printed paper, each with a name, so that both readings can run.

Every search takes a set of slips: those in it are kept as printed, the others are repaired as described in
:class:`Slip`. :data:`AS_PRINTED` has all of them, :data:`REPAIRED` none, and :data:`AS_PUBLISHED` all but those that
the paper's own text contradicts.

What only narrows the problem is no slip but a choice of the search space: strategies without those that Takeaway 3
drops, and one number of micro-batches (:mod:`formulations.galvatron.pipeline`).

Open points of the paper that are no errors are kept: the slowdown of 1.3 is a default; devices and stages of its
tables are powers of two (others divide as they can); tables II to V are on 8 TITAN, 16 TITAN and 16 A100, 16 A100, and
64 A100; its activations (Table I) fit eager attention in 32-bit floats at sequence 512; and a larger balance degree
(Eq. 6) means a smaller largest share of a stage, not a smaller total. Its baseline DeepSpeed 3D is 2 x 2 x 2 on eight
devices, with no degrees given for more. Such baselines, one strategy for all layers, are no searches and have no slips
(:mod:`formulations.galvatron.uniform`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, auto

__all__ = ["AS_PRINTED", "AS_PUBLISHED", "READINGS", "REPAIRED", "Slip"]


class Slip(Flag):
    """An error or gap of the paper that may be kept as printed.

    ==================  ================================================================================
    ``EQ4_STATE``       C(l, e) has no strategy of layer l, on which the cost R of the next layer
                        depends, so that the table's own choice is taken; repaired: C(l, e, s)
    ``EQ4_BORDERS``     C(0, .) = 0 and C(., 0) = infinity clash at (0, 0), and layers that use nothing
                        have no plan at budget 0; repaired: the first wins
    ``ALG3_BREAK``      the search over forward budgets ends at the first plan over the limit, though
                        the true peak is not monotone in the budget; repaired: it goes on
    ``ALG3_UNSET``      where no budget above E - b_up is accepted a cost comes back without a plan;
                        repaired: the plan of the largest budget that is accepted, wherever it is (b_up
                        is also too large: it is the maximum over all strategies)
    ``EQ8_OVERLAP``     the time of a micro-batch without synchronisation is the one with it less all
                        gradient traffic, though part of that was hidden; repaired: computed directly
    ``FULL_GRADIENTS``  Takeaway 3 lets replicas exchange whole gradients where each has a shard
    ``ONE_IN_FLIGHT``   the stage search counts the activations of one micro-batch at every stage;
                        repaired: those that the schedule holds there
    ``ALG1_RETURN``     the search over batches ends at the first one without a plan, which may only
                        be indivisible; repaired: it ends after several without one. Which batches are tried
                        is an input: the paper's 1, 2, 3 ... or multiples of 8, which fit its tables
    ``ALG2_APPEND``     only the last partition that is tried counts; repaired: all do
    ``ALG2_START``      the search starts at the memory-balanced partition alone; repaired: at the
                        time-balanced one too
    ``ALG2_STAGES``     plans of one stage are left out; repaired: they are searched
    ``ALG2_CYCLES``     partitions of equal maxima may be tried for ever (we stop after a number);
                        repaired: each is tried once, and layers move to both neighbours
    ``ALG2_RETURN``     as ``ALG1_RETURN``
    ==================  ================================================================================
    """

    EQ4_STATE = auto()
    EQ4_BORDERS = auto()
    ALG3_BREAK = auto()
    ALG3_UNSET = auto()
    EQ8_OVERLAP = auto()
    FULL_GRADIENTS = auto()
    ONE_IN_FLIGHT = auto()
    ALG1_RETURN = auto()
    ALG2_APPEND = auto()
    ALG2_START = auto()
    ALG2_STAGES = auto()
    ALG2_CYCLES = auto()
    ALG2_RETURN = auto()


REPAIRED = Slip(0)
"""Nothing as printed."""

AS_PRINTED = ~REPAIRED
"""Everything as printed.

Without checkpointing no layer needs anything in backward alone, so no budget is ever checked and there is never a plan;
with a pipeline, plans that the stage search accepts may need several times the limit.
"""

AS_PUBLISHED = AS_PRINTED ^ Slip.ALG3_UNSET ^ Slip.ONE_IN_FLIGHT
"""As printed but for the two slips that the text contradicts.

Section IV-B and Figure 4 have deeper stages of a 1F1B pipeline hold less than shallower ones, so a stage holds the
micro-batches of its place. Algorithm 1 collects the strategies of every stage, so Algorithm 3 returns a plan.
"""

READINGS: Mapping[str, Slip] = {"printed": AS_PRINTED, "published": AS_PUBLISHED, "repaired": REPAIRED}
"""The slips that a search keeps, by the name of its reading."""

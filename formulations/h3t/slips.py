"""Where H3T's algorithms are wrong or silent as printed, each with a name, so that both readings can run.

Every search takes a set of slips: those in it are kept as printed, the others are repaired as :class:`Slip` says. What
the order of operations leaves open is described in :mod:`formulations.h3t.operations`; how terms are rounded to units
is not said at all and is a setting (:class:`Rounding`); the optimizer's place is
:class:`~formulations.h3t.problem.Optimizer`.
"""

from __future__ import annotations

from enum import Flag, StrEnum, auto

__all__ = ["AS_PRINTED", "AS_PUBLISHED", "REPAIRED", "Rounding", "Slip"]


class Slip(Flag):
    """What may be kept as printed.

    ====================  ==============================================================================
    ``GREEDY_SPACING``    Algorithm 2 puts n layers ``floor(N / n)`` apart, which fills a prefix where n is
                          more than half of N; repaired: the i-th of them is layer ``1 + floor((i - 1) N / n)``
    ``LIMIT_STRICT``      line 17 (line 20 of Algorithm 4) wants a peak below the limit, where equation (3)
                          allows it; repaired: at most the limit
    ``LAST_LAYER_LOOP``   behind the last layer there is one next set, "null", and the loop tries it once for
                          every set; repaired: once. The plan is the same
    ``PRUNE_BOUNDS``      lines 32 and 33 of Algorithm 4 read entries at -1, which in Python are the last ones;
                          repaired: there is nothing before the first
    ====================  ==============================================================================
    """

    GREEDY_SPACING = auto()
    LIMIT_STRICT = auto()
    LAST_LAYER_LOOP = auto()
    PRUNE_BOUNDS = auto()


REPAIRED = Slip(0)
"""Nothing as printed."""

AS_PRINTED = ~REPAIRED
"""Everything as printed."""

AS_PUBLISHED = AS_PRINTED ^ Slip.GREEDY_SPACING ^ Slip.LIMIT_STRICT
"""As printed but for the two slips that the text contradicts: switches go into the sequence "evenly", and equation (3)
allows a peak as large as the limit."""


class Rounding(StrEnum):
    """How bytes become units of a share of the limit.

    UP never breaks the limit and loses up to a unit for every term of every layer; DOWN and NEAREST may break it.
    """

    NEAREST = "nearest"
    UP = "up"
    DOWN = "down"

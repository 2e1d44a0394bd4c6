"""Where CAPTURE is wrong or silent as printed, each with a name, so that both readings can run.

Every function takes a set of slips: those in it are kept as printed, the others are repaired as the docstring of
:class:`Slip` says. :data:`AS_PRINTED` has all of them, :data:`REPAIRED` none, and :data:`AS_PUBLISHED` all but those
that the paper's own text contradicts.

Repaired always, as nothing runs otherwise: the profiling partitionings of Description 1, of which line 5 holds a layer
too many and lines 14 and 15 too few unless a stage has one layer (they are made by a rule, see
:mod:`formulations.capture.profiling`); in Algorithm 4 the next group starts with the last layer of the
current one, and neither mesh nor plan is restored when a branch has been tried; Description 2 swaps the names of its
two batch sizes.

Only said wrongly: there are at most ``10 (L + 1)`` profiling runs, not ``10 (L - 1)``, and ``2 log2(k) + 1``
configurations, not ``2 log2(k) - 1``. Table I and II give Wide-ResNet 32 layers, where the prose has 16, which are
MoE's. In Table II the planning of MoE takes 94 seconds beside its minutes, and Wide-ResNet's times do not add up.
Layers count from 0 in one place and from 1 in another; here from 0.
"""

from __future__ import annotations

from enum import Flag, auto

__all__ = ["AS_PRINTED", "AS_PUBLISHED", "REPAIRED", "Slip"]


class Slip(Flag):
    """What may be kept as printed.

    =====================  =============================================================================
    ``LOG_FIT``            above degree 4, ``a + b ln n`` through degrees 2 and 4, which falls to 0 at 8 for
                           memory that is divided (clamped at 0 and counted); repaired: ``a + b / n``
    ``POSITION_1F1B``      a stage holds as many micro-batches as where it was profiled; repaired: what a
                           layer adds per sample is scaled to the micro-batches in flight at its place
    ``ALG4_TIES_LOST``     a plan that equals the best one is dropped, so that the rule for ties never
                           acts; repaired: it is compared by the rule
    ``ALG4_LOOP``          degrees run up to the size of a submesh without it, and a single GPU comes
                           twice; repaired: the size is included, a single GPU comes once
    ``TIES_DISTINCT``      of plans with one peak the GPUs at the peak leave, and the next peak decides,
                           however many left in each plan (where none is left that plan wins); repaired:
                           all GPUs in descending order are compared (leximax). Random choice
                           where all are equal is repaired in both: the first plan in order
    =====================  =============================================================================
    """

    LOG_FIT = auto()
    POSITION_1F1B = auto()
    ALG4_TIES_LOST = auto()
    ALG4_LOOP = auto()
    TIES_DISTINCT = auto()


REPAIRED = Slip(0)
"""Nothing as printed."""

AS_PRINTED = ~REPAIRED
"""Everything as printed."""

AS_PUBLISHED = AS_PRINTED ^ Slip.ALG4_TIES_LOST ^ Slip.ALG4_LOOP
"""As printed but for two lines of Algorithm 4 that section III-C contradicts.

A stage has 1 to k GPUs of a node, and k ways are counted with a single GPU once; so the loop includes k. A rule decides
among plans of one peak; so such plans are compared, not dropped."""

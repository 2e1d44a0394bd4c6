"""Choices of a paper's problem by name; a paper's own search and the exact one read the same.

The value of each that comes first is the default of both searches. So what a plan as published loses to an exact one is
due to the search alone. It is the paper's, but for KIWI, whose exact formulations count as the engine does. Options of
the command line and keywords have the same names everywhere:

======================  ==========  =======================================================================
``memory_model``        osdp        ``paper``: equation (1), all temporaries summed; ``engine``: the largest of
                                    them, with the gathered tensors of torch's FSDP2
``memory_model``        KIWI's      ``engine``: resharded copies and workspaces count while a program searches, for as
                        programs    long as they are held; ``paper``: they count when its decision is executed alone
``strategies``          osdp        ``paper``: whole operators or four slices; ``all``: 1 to 16 slices, and all
                                    operators checkpointed or none
``strategies``          galvatron   ``paper``: without those that Takeaway 3 drops; ``all``: with them
``micro_batches``       galvatron   ``paper``: twice as many as stages, one without a pipeline; ``all``: every
                                    divisor of the batch
``optimizer_runs``      h3t         ``at_the_end``: behind the step; ``overlapped``: each layer as soon as its
                                    gradient is in host memory
``objective``           capture     ``peak``: the least memory of the fullest device; ``time``: the fastest step
                                    within the limit, which the published search does not look for
``degrees``             capture     ``any``: stages may have different numbers of devices; ``equal``: all have
                                    equally many
======================  ==========  =======================================================================

Where the printed algorithms are wrong or silent, the published search keeps slips, by name. ``prose`` keeps those that
the paper's own text does not contradict, ``printed`` all, ``repaired`` none.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag
from typing import TypeVar

from formulations.kiwi.of_step import MEMORY_MODELS, PROGRAMS
from planner.common.plan_error import PlanError

__all__ = ["CHOICES", "SLIP_READINGS", "chosen", "kept_slips", "slip_names"]

F = TypeVar("F", bound=Flag)

CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "osdp": {"memory_model": ("paper", "engine"), "strategies": ("paper", "all")},
    "galvatron": {"strategies": ("paper", "all"), "micro_batches": ("paper", "all")},
    "h3t": {"optimizer_runs": ("at_the_end", "overlapped")},
    "capture": {"objective": ("peak", "time"), "degrees": ("any", "equal")},
    **{program: {"memory_model": MEMORY_MODELS} for program in PROGRAMS},
}
"""Values by formulation and choice, the default first."""

SLIP_READINGS = ("prose", "printed", "repaired")
"""Sets of slips that have a name; the first is the default."""


def chosen(formulation: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """Value of every choice of a formulation, the default where none is given.

    Raises
    ------
    PlanError
        The formulation has no such choice, or the choice no such value.
    """
    known = CHOICES.get(formulation, {})
    for name, value in given.items():
        if value is None:
            continue
        if name not in known:
            owners = ", ".join(owner for owner, names in CHOICES.items() if name in names)
            raise PlanError(
                f"{name} {value}: {formulation} has no such choice; it is for {owners or 'nothing'}: leave it out"
            )
        if value not in known[name]:
            raise PlanError(f"{name} {value}: {formulation} knows {' and '.join(known[name])}; choose one of them")
    return {name: given.get(name) or values[0] for name, values in known.items()}


def kept_slips(kinds: type[F], prose: F, text: str | None) -> F:
    """Slips that a published search keeps.

    Parameters
    ----------
    kinds
        All of a paper.
    prose
        Those that its text does not contradict.
    text
        One of :data:`SLIP_READINGS`, or names separated by commas; ``prose`` if None.

    Raises
    ------
    PlanError
        There is no slip of a name.
    """
    if text is None or text == "prose":
        return prose
    if text == "printed":
        return ~kinds(0)
    found = kinds(0)
    for name in () if text == "repaired" else text.split(","):
        member = kinds.__members__.get(name.strip().upper())
        if member is None:
            names = ", ".join(kinds.__members__).lower()
            raise PlanError(f"slips {text}: {name!r} is none; give {', '.join(SLIP_READINGS)}, or some of {names}")
        found |= member
    return found


def slip_names(slips: Flag) -> tuple[str, ...]:
    """Names of slips, in the order of their paper's list."""
    return tuple(slip.name.lower() for slip in slips if slip.name)

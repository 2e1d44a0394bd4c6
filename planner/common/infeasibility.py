"""The error that no plan fits: by how much, at which moment, because of which tensors, and what would fit."""

from __future__ import annotations

from math import ceil

from formulations.solvers.peaks.minimum_peak import MinimumPeak
from planner.common.root_name import shown
from planner.common.units import format_bytes

MIB = 2**20
NAMED_TENSORS = 3


class InfeasibleError(ValueError):
    """No plan fits the memory, or none was found in time; the message names the limit that would be enough."""


def refusal(smallest: MinimumPeak, limit: int, reserve: int, option: str = "--memory ") -> InfeasibleError:
    """The error for a problem that no plan fits.

    Parameters
    ----------
    smallest
        The smallest peak found without a limit, and its proven lower bound.
    limit
        Bytes that torch's tensors were allowed on one device.
    reserve
        Bytes of the device beyond these.
    option
        How the user gives the limit.

    Returns
    -------
    InfeasibleError
        The error of a proof where the bound is above the limit; else of a search that found no plan.
    """
    asked = format_bytes(limit + reserve)
    kept = f" ({format_bytes(reserve)} of it reserved)" if reserve else ""
    if smallest.peak is None:
        if smallest.bound > limit:
            needed = format_bytes(smallest.bound + reserve)
            return InfeasibleError(
                f"memory {asked}{kept} is too little: every plan of this formulation needs at least {needed} "
                "(a proven bound)"
            )
        return InfeasibleError(f"memory {asked}{kept}: no plan was found in the time limit; give more of either")
    if smallest.bound > limit:
        lacking = format_bytes(smallest.bound - limit)
        needed = format_bytes(smallest.bound + reserve)
        verdict = (
            f"is too little: every plan of this formulation needs at least {needed} (a proven bound), {lacking} more"
        )
    else:
        proven = format_bytes(smallest.bound + reserve)
        verdict = (
            f"is too little for every plan found: {format_bytes(smallest.peak - limit)} more are needed "
            f"(proven is that every plan needs at least {proven})"
        )
    tensors = ", ".join(
        f"{shown(' / '.join(names))} ({format_bytes(amount)})" for names, amount in smallest.alive[:NAMED_TENSORS]
    )
    others = [amount for _, amount in smallest.alive[NAMED_TENSORS:]]
    if others:
        tensors += f" and {len(others)} more ({format_bytes(sum(others))})"
    # Rounded up to whole MiB, so that the figure can be typed as it stands.
    fits = ceil((smallest.peak + reserve) / MIB)
    return InfeasibleError(
        f"memory {asked}{kept} {verdict}; it binds at {shown(smallest.time_name)}, where {tensors} are alive; "
        f"{option}{fits}MiB fits"
    )

"""What is known of the optimum from below, and how: the exact bound, and what each kind of solver claims.

A claim counts only where a second kind of solver supports it: the *agreed* bound is the second largest claim. It is
wrong only where two solvers of different kinds are.
"""

from __future__ import annotations

from collections.abc import Callable

from formulations.problem.solution import Proof, higher_bound
from formulations.solvers.protocol.registry import SolverSpec


def by_trust(spec: SolverSpec, exact: int | None, claimed: int | None) -> tuple[int | None, int | None]:
    """Return the exact and the claimed bound of a solver; what is not built in proves nothing."""
    return (exact, claimed) if spec.is_built_in else (None, higher_bound(exact, claimed))


class Bounds:
    """Lower bounds of one problem.

    Attributes
    ----------
    exact
        The best bound that follows in exact integers, or None.
    exact_by
        The solver that it is of.
    claims
        Per kind of solver the best bound that it claims; refuted ones are gone.
    """

    def __init__(self) -> None:
        self.exact: int | None = None
        self.exact_by = ""
        self.claims: dict[str, int] = {}
        self._refuted: set[str] = set()

    def raise_exact(self, bound: int | None, by: str) -> bool:
        """Keep an exact bound of a solver if it is better; return whether it is."""
        if bound is None or (self.exact is not None and bound <= self.exact):
            return False
        self.exact, self.exact_by = int(bound), by
        return True

    def claim(self, bound: int | None, kind: str) -> bool:
        """Keep a claim if it is beyond the last one of its kind of solver; return whether it is.

        A kind of solver that was refuted once claims nothing any more.
        """
        if bound is None or kind in self._refuted or bound <= self.claims.get(kind, bound - 1):
            return False
        self.claims[kind] = int(bound)
        return True

    def refute(self, objective: int) -> list[tuple[str, int]]:
        """Drop all claims above the cost of a checked assignment, and return them with the kinds that made them."""
        refuted = [(kind, bound) for kind, bound in self.claims.items() if bound > objective]
        for kind, _ in refuted:
            del self.claims[kind]
            self._refuted.add(kind)
        return refuted

    @property
    def agreed(self) -> int | None:
        """The largest bound that two kinds of solvers claim, or None."""
        claims = sorted(self.claims.values())
        return claims[-2] if len(claims) > 1 else None

    @property
    def claimed(self) -> tuple[str, int] | None:
        """The largest claim beyond the exact bound with the kind of solver that made it, or None."""
        best = max(self.claims.items(), key=lambda claim: claim[1], default=None)
        return None if best is None or (self.exact is not None and best[1] <= self.exact) else best

    def proof(self, objective: int | None, accepts: Callable[[int, int], bool]) -> Proof | None:
        """Return how it is known that an objective is near enough to the optimum, or None where it is not known."""
        if objective is None:
            return None
        if self.exact is not None and accepts(objective, self.exact):
            return Proof.EXACT
        if self.agreed is not None and accepts(objective, self.agreed):
            return Proof.AGREED
        if self.claimed is not None and accepts(objective, self.claimed[1]):
            return Proof.CLAIMED
        return None

"""Exact reductions of a problem, one per file, and the way back from a solution of what remains."""

from formulations.presolve.lift import Lift
from formulations.presolve.sequence import REDUCTIONS, Presolved, Size, presolve, unreduced

__all__ = ["REDUCTIONS", "Lift", "Presolved", "Size", "presolve", "unreduced"]

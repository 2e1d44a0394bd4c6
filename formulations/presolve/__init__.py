"""Exact reductions of a problem, one per file, and the way back from a solution of what remains."""

from formulations.presolve.lift import Lift
from formulations.presolve.sequence import REDUCTIONS, Presolved, Size, is_deep, lean_presolve, presolve

__all__ = ["REDUCTIONS", "Lift", "Presolved", "Size", "is_deep", "lean_presolve", "presolve"]

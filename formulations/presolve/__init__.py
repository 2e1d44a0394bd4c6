"""Exact reductions of a problem, one per file, and the way back from a solution of what remains."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formulations.presolve.sequence import REDUCTIONS, Presolved, Size, is_deep, lean_presolve, presolve
    from formulations.presolve.workspace.lift import Lift

__all__ = ["REDUCTIONS", "Lift", "Presolved", "Size", "is_deep", "lean_presolve", "presolve"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "workspace.lift" if name == "Lift" else "sequence"
    return getattr(import_module(f"{__name__}.{home}"), name)

"""The systems of the five papers on real models, their tables, and KIWI's problems as suites.

The suites plan models, which needs torch, and importing torch takes longer than solving a problem of the contest. So
each suite is imported at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.papers.kiwi.mlp import kiwi_mlp_suite
    from planner.papers.kiwi.transformer import kiwi_transformer_suite

_HOMES = {
    "kiwi_mlp_suite": "kiwi.mlp",
    "kiwi_transformer_suite": "kiwi.transformer",
}

__all__ = ["kiwi_mlp_suite", "kiwi_transformer_suite"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""The systems of the five papers on real models, and the suites of their experiments.

The suites plan models, which needs torch, and importing torch takes longer than solving a problem of the contest. So
each suite is imported at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.papers.capture.bench import capture_suite
    from planner.papers.galvatron.bench import galvatron_suite
    from planner.papers.h3t.bench import h3t_suite
    from planner.papers.kiwi.mlp import kiwi_mlp_suite
    from planner.papers.kiwi.transformer import kiwi_transformer_suite
    from planner.papers.osdp.bench import osdp_suite

_HOMES = {
    "capture_suite": "capture.bench",
    "galvatron_suite": "galvatron.bench",
    "h3t_suite": "h3t.bench",
    "kiwi_mlp_suite": "kiwi.mlp",
    "kiwi_transformer_suite": "kiwi.transformer",
    "osdp_suite": "osdp.bench",
}

__all__ = [
    "capture_suite",
    "galvatron_suite",
    "h3t_suite",
    "kiwi_mlp_suite",
    "kiwi_transformer_suite",
    "osdp_suite",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

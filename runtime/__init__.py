"""From a plan to a running ``torch.distributed`` job. Imports with torch, numpy and pydantic alone.

``load`` and ``Trainer`` train with a plan in a loop of one's own (:mod:`runtime.library`), ``compile_backend`` keeps
``torch.compile`` on one device within a limit (:mod:`runtime.compiling`); they are imported when used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.torch_adapter.deferred_values import parameters_on_meta
    from runtime.compiling.backend import compile_backend
    from runtime.library.data import ShareSampler
    from runtime.library.loading import load
    from runtime.library.optimizers.scaling import LossScaling
    from runtime.library.trainer import Trainer

__all__ = ["LossScaling", "ShareSampler", "Trainer", "compile_backend", "load", "parameters_on_meta"]

_WHERE = {
    "LossScaling": "library.optimizers.scaling",
    "ShareSampler": "library.data",
    "Trainer": "library.trainer",
    "compile_backend": "compiling.backend",
    "load": "library.loading",
    "parameters_on_meta": "library.sources",
}


def __getattr__(name: str) -> Any:
    """Import a name of :data:`__all__` at its first use."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"runtime.{_WHERE[name]}"), name)

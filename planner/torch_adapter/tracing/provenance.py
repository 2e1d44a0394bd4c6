"""Provenance of operators: module path and source line, recorded while a step is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

_TORCH_FOLDER = str(Path(torch.__file__).parent) + "/"
_OWN_FOLDER = str(Path(__file__).parents[2]) + "/"
_MODULE_PATH, _SOURCE = "meshwright_module_path", "meshwright_source"


class Provenance(TorchFunctionMode):
    """Marks every traced operator with the module and the source line that called it.

    Forward hooks keep the path of the running module; this mode intercepts each torch call and annotates its traced
    nodes. ``module_path`` stays at the innermost module when tracing fails there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._paths: list[str] = []

    @property
    def module_path(self) -> str:
        """Path of the innermost module that is running (empty for the root)."""
        return self._paths[-1] if self._paths else ""

    def place(self) -> str:
        """Running module and source line, for messages."""
        return f"module {self.module_path or '(root)'} ({_source_of_frame(sys._getframe(1))})"

    def restart(self) -> None:
        """Forget the running modules: the step is traced from its start again."""
        self._paths.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        mark = {_MODULE_PATH: self.module_path, _SOURCE: _source_of_frame(sys._getframe(1))}
        with annotate(mark):
            return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Follow the forward calls of every submodule of ``module``; a shared one goes by its first path."""
        handles = []
        for path, submodule in module.named_modules():
            if path:
                handles.append(submodule.register_forward_pre_hook(partial(self._enter, path), prepend=True))
                handles.append(submodule.register_forward_hook(partial(self._leave, path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        self._paths.append(path)

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        # A module that raised never left; where the model caught that, its path is still on top.
        while self._paths and self._paths.pop() != path:
            pass


def module_path_of(node: Node) -> str | None:
    """Module path that was recorded for a traced node, None where it comes from no torch call of the model."""
    path = (node.meta.get("custom") or {}).get(_MODULE_PATH)
    return None if path is None else str(path)


def source_of(node: Node) -> str:
    """``file:line`` that was recorded for a traced node, else empty."""
    return str((node.meta.get("custom") or {}).get(_SOURCE, ""))


def source_of_traceback(traceback: TracebackType | None) -> str:
    """Innermost ``file:line`` of a traceback that lies outside torch and this package."""
    found = ""
    while traceback is not None:
        if not _is_machinery(traceback.tb_frame.f_code.co_filename):
            found = _location(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _source_of_frame(frame: FrameType | None) -> str:
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return _location(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


@cache
def _is_machinery(filename: str) -> bool:
    return filename.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<")) or filename.endswith("/contextlib.py")


@cache
def _location(filename: str, line: int) -> str:
    return f"{importable_name(filename)}:{line}"


@cache
def importable_name(filename: str) -> str:
    """Path relative to the entry of ``sys.path`` it is imported from, so that it is the same on every machine."""
    folders = [folder.rstrip("/") + "/" for folder in sys.path if folder]
    inside = [folder for folder in folders if filename.startswith(folder)]
    return filename.removeprefix(max(inside, key=len)) if inside else filename

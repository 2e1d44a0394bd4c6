"""Constants of the package replaced in one process and in all that it starts.

The environment variable :data:`VARIABLE` holds ``{module: {constant: value}}`` as JSON. A value is a number, a flag, a
list for a tuple, or ``{"without": name}`` for a dictionary or tuple without one of its members. The import system
replaces the expression before the module is executed. So defaults of arguments, constants derived from it, names
imported elsewhere and compiled loops see the new value. Compiled loops are cached on disk by their source, which stays
the same: a process with other constants in compiled loops needs a folder of its own in ``NUMBA_CACHE_DIR``.

Without the variable nothing of this is imported.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from formulations.tuning.literals import assignments, members, replace_value, without_member

VARIABLE = "MESHWRIGHT_OVERRIDES"
WITHOUT = "without"

Overrides = Mapping[str, Mapping[str, Any]]
"""Module -> constant -> its value, as JSON holds it."""


class OverrideError(ValueError):
    """An override that does not fit; the message names the module and the constant."""


def as_variable(overrides: Overrides) -> dict[str, str]:
    """Return what the environment of a process needs; nothing where there is nothing to replace."""
    return {VARIABLE: json.dumps(overrides)} if overrides else {}


def install(text: str) -> None:
    """Replace constants in modules that are imported from now on.

    Raises
    ------
    OverrideError
        The text is no JSON object, or a module has been imported already.
    """
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise OverrideError(f"{VARIABLE}: not valid JSON: {error}") from None
    if not isinstance(overrides, dict) or not all(isinstance(names, dict) for names in overrides.values()):
        raise OverrideError(f"{VARIABLE}: must map modules to constants and their values, got {text:.80}")
    late = [module for module in overrides if module in sys.modules]
    if late:
        raise OverrideError(f"{VARIABLE}: {late[0]} is imported already; set the variable before the process starts")
    sys.meta_path.insert(0, _Finder(overrides))


def replaced(source: str, module: str, names: Mapping[str, Any]) -> ast.Module:
    """Return the syntax tree of a module with other values of some constants.

    Raises
    ------
    OverrideError
        The module has no such constant at its top level, or the constant no such member.
    """
    tree = ast.parse(source)
    found = {constant.name: constant for constant in assignments(tree)}
    for name, value in names.items():
        if name not in found:
            raise OverrideError(f"{module} has no constant {name}; it has {', '.join(found) or 'none'}")
        replace_value(tree, found[name], _expression(module, name, found[name].node, value))
    return tree


def _expression(module: str, name: str, node: ast.expr, value: Any) -> ast.expr:
    if isinstance(value, dict):
        left_out = value.get(WITHOUT)
        if not isinstance(left_out, str) or left_out not in members(node):
            raise OverrideError(f"{module}.{name} has no member {left_out!r}; it has {', '.join(members(node))}")
        return without_member(node, left_out)
    return ast.parse(repr(tuple(value) if isinstance(value, list) else value), mode="eval").body


class _Finder(MetaPathFinder):
    """Finds the modules that have overrides, before all other finders."""

    def __init__(self, overrides: Overrides) -> None:
        self._overrides = overrides

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the usual specification with another loader, or None for modules without overrides."""
        names = self._overrides.get(fullname)
        if names is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, names)
        return spec


class _Loader(SourceFileLoader):
    """Compiles a module anew with its overrides; bytecode on disk is neither read nor written."""

    def __init__(self, fullname: str, path: str, names: Mapping[str, Any]) -> None:
        super().__init__(fullname, path)
        self._names = names

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the module."""
        source = self.get_source(fullname)
        assert source is not None, "a module from a file has a source"
        tree = replaced(source, fullname, self._names)
        return compile(tree, self.get_filename(fullname), "exec", dont_inherit=True)

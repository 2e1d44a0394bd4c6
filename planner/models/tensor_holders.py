"""The tensors that a function reaches through what it closes over, and copies of it with others in their place.

Searched are closures, default arguments, ``functools.partial``, the objects of bound methods, lists, tuples,
dictionaries, attributes of objects, and parameters and buffers of modules. Of an object only the attributes count that
the code names: a trainer has more tensors than its loss needs. Of the variables of a module those count that the code
of the function reads, and that of functions of the same package which it calls.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Set
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

_DEPTH = 12
"""Objects inside one another that are searched; a module and its dictionaries are two."""
_ENTRIES = 64
"""Entries of a list, tuple or dictionary that is searched; one with more is a data set."""
_NOT_RUN = ("__init__", "__new__", "__post_init__", "__repr__", "__eq__", "__hash__", "__getstate__", "__setstate__")
_OF_MODULES = ("_parameters", "_buffers", "_modules")


class Search:
    """The tensors that a function reaches, and the objects that hold them.

    Parameters
    ----------
    function
        Any callable.
    module
        A module whose tensors, and those of its parts, are left out.

    Attributes
    ----------
    found
        Tensors by name, which is the path with underscores; one that is reached in two ways has one name.
    holders
        Identities of the objects on the ways to the tensors.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.found: dict[str, Tensor] = {}
        self.holders: set[int] = set()
        self._left_out = {id(part) for part in module.modules()}
        self._seen: dict[int, bool] = {}
        self._known: set[int] = set()
        self._package = _package(_function_of(function))
        self._holds(function, "", frozenset(), 0)

    def _holds(self, value: Any, path: str, named: Set[str], depth: int) -> bool:
        """Whether a value is a tensor or holds one; ``named`` are the names in the code that uses it."""
        if isinstance(value, Tensor):
            self._take(value, path)
            return True
        if depth > _DEPTH or id(value) in self._left_out or isinstance(value, type | ModuleType):
            return False
        if id(value) not in self._seen:
            self._seen[id(value)] = True  # for what refers to it from inside
            named = _names_used(value, named)
            base = "" if isinstance(value, FunctionType) else path  # a variable goes by its own name
            found = [
                self._holds(content, _joined(base, key), named, depth + 1)
                for key, content in (*_contents(value, named), *_variables(value, self._package))
            ]
            self._seen[id(value)] = any(found)
            if any(found):
                self.holders.add(id(value))
        return self._seen[id(value)]

    def _take(self, tensor: Tensor, path: str) -> None:
        if id(tensor) not in self._known:
            self._known.add(id(tensor))
            name = path
            while name in self.found:
                name += "_"
            self.found[name] = tensor


def copy_with(function: Callable[..., Any], holders: Set[int], tensors: Mapping[int, Tensor]) -> Callable[..., Any]:
    """Copy of a function and of the objects through which it reaches tensors, with others in their place.

    Parameters
    ----------
    function
        Of a :class:`Search`.
    holders
        Of that search; other objects are shared with the function.
    tensors
        By the identity of the tensor that each replaces.
    """
    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensors.get(id(value), value)
        if id(value) not in holders:
            return value
        if id(value) not in copies:
            _copy(value, copied, functools.partial(copies.__setitem__, id(value)))
        return copies[id(value)]

    found: Callable[..., Any] = copied(function)
    return found


def _copy(value: Any, copied: Callable[[Any], Any], keep: Callable[[Any], None]) -> None:
    """Copy a holder; it is kept before its contents are copied where they may refer to it."""
    if isinstance(value, FunctionType):
        cells = tuple(CellType() for _ in value.__closure__ or ())
        variables = dict(value.__globals__)
        function = FunctionType(value.__code__, variables, value.__name__, None, cells or None)
        keep(function)
        variables.update((name, copied(content)) for name, content in _variables(value, _package(value)))
        function.__dict__.update(value.__dict__)
        function.__defaults__ = value.__defaults__ and tuple(map(copied, value.__defaults__))
        function.__kwdefaults__ = {k: copied(v) for k, v in (value.__kwdefaults__ or {}).items()} or None
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            for content in _content(old):
                cell.cell_contents = copied(content)
    elif isinstance(value, MethodType):
        keep(MethodType(copied(value.__func__), copied(value.__self__)))
    elif isinstance(value, functools.partial):
        keywords = {name: copied(content) for name, content in value.keywords.items()}
        keep(functools.partial(copied(value.func), *map(copied, value.args), **keywords))
    elif isinstance(value, tuple):
        contents = map(copied, value)
        keep(value._make(contents) if hasattr(value, "_make") else tuple(contents))
    elif isinstance(value, list | dict):
        made = copy.copy(value)
        keep(made)
        for key, content in list(enumerate(value) if isinstance(value, list) else value.items()):
            made[key] = copied(content)
    else:
        made = _blank(type(value))
        keep(made)
        for name, content in _attributes(value):
            object.__setattr__(made, name, copied(content))


def _contents(value: Any, named: Set[str]) -> Iterator[tuple[Any, Any]]:
    """What a holder holds, by name; of its attributes the named ones."""
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((name, content) for content in _content(cell))
        defaults = value.__defaults__ or ()
        places = value.__code__.co_varnames[: value.__code__.co_argcount]
        yield from zip(places[len(places) - len(defaults) :], defaults, strict=True)
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, MethodType):
        yield from (("self", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from zip(_positional_names(value.func, len(value.args)), value.args, strict=True)
        yield from value.keywords.items()
    elif isinstance(value, list | tuple | dict):
        if len(value) <= _ENTRIES:
            yield from value.items() if isinstance(value, dict) else enumerate(value)
    elif _is_made_of_attributes(type(value)):
        of_module = _OF_MODULES if isinstance(value, nn.Module) else ()
        yield from ((name, content) for name, content in _attributes(value) if name in named or name in of_module)


def _variables(value: Any, package: str) -> Iterator[tuple[str, Any]]:
    """Variables of its module that a function reads; none where it is not of the package."""
    if isinstance(value, FunctionType) and _package(value) == package != "torch":
        names = _variables_read(value.__code__)
        yield from ((name, value.__globals__[name]) for name in names if name in value.__globals__)


def _variables_read(code: CodeType) -> list[str]:
    """Names that code, and functions made in it, look up among the variables of their module."""
    names = [entry.argval for entry in dis.get_instructions(code) if entry.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _variables_read(constant)
    return list(dict.fromkeys(names))


def _function_of(value: Any) -> Any:
    """The function inside partials and bound methods."""
    while isinstance(value, MethodType | functools.partial):
        value = value.__func__ if isinstance(value, MethodType) else value.func
    return value


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _is_made_of_attributes(kind: type) -> bool:
    """Whether objects of a class hold others as attributes, and a copy can be made of these without its knowledge.

    No class of C is, whose objects have a state of their own, and none that does something when a copy ends.
    """
    if issubclass(kind, list | tuple | dict) or hasattr(kind, "__del__"):
        return False
    makers: list[object] = [each.__new__ for each in kind.__mro__ if each is not SimpleNamespace]
    return all(make is object.__new__ or isinstance(make, FunctionType) for make in makers)


def _blank(kind: type) -> Any:
    return SimpleNamespace.__new__(kind) if issubclass(kind, SimpleNamespace) else object.__new__(kind)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    slots = (name for kind in type(value).__mro__ for name in _slots(kind))
    yield from getattr(value, "__dict__", {}).items()
    yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))


def _slots(kind: type) -> tuple[str, ...]:
    found = kind.__dict__.get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _content(cell: CellType) -> tuple[Any, ...]:
    """The one content of a cell; none where its name is not bound yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _positional_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # a function of C
        names = []
    return [names[at] if at < len(names) else f"args_{at}" for at in range(count)]


def _joined(path: str, key: object) -> str:
    """Name of a part; the places where a module keeps its own are no part of it."""
    name = "" if key in _OF_MODULES else re.sub(r"\W", "_", str(key))
    return "_".join(each for each in (path, name) if each)


def _names_used(value: Any, named: Set[str]) -> Set[str]:
    """The names, and those in the code of a function, or of the methods that an object's class runs for them."""
    if isinstance(value, FunctionType):
        return named | _names_in(value)
    if isinstance(value, MethodType | functools.partial):
        return _names_used(value.__func__ if isinstance(value, MethodType) else value.func, named)
    if not _is_made_of_attributes(type(value)):
        return named
    waiting = [(name, content) for each in type(value).__mro__ for name, content in vars(each).items()]
    names, size = set(named), -1
    while size != len(names):
        size = len(names)
        for name, content in waiting:
            if name in names or (name.startswith("__") and name not in _NOT_RUN) or name == "forward":
                for function in (content, getattr(content, "fget", None), getattr(content, "func", None)):
                    names |= _names_in(function) if isinstance(function, FunctionType) else set()
    return names


def _names_in(function: FunctionType) -> set[str]:
    """Names and strings in the code of a function, and of the functions that it closes over or that are beside it."""
    names: set[str] = set()
    waiting: list[FunctionType] = [function]
    seen: set[CodeType] = set()
    while waiting:
        each = waiting.pop()
        if each.__code__ in seen or _package(each) == "torch":
            continue
        seen.add(each.__code__)
        found = _names_in_code(each.__code__)
        names |= found
        held = [
            *(each.__globals__.get(name) for name in found),
            *(c for cell in each.__closure__ or () for c in _content(cell)),
        ]
        waiting += [function for function in held if isinstance(function, FunctionType)]
    return names


def _names_in_code(code: CodeType) -> set[str]:
    names = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in_code(constant)
    return names

"""Which cases are in ``make test``, which only in ``make test-all``, and which only in ``make fuzz``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any], slower: int | None = None) -> list[Any]:
    """The first few cases as they are, and the others marked slow; fuzz behind so many slow ones."""
    every = list(cases)
    last = len(every) if slower is None else count + slower
    return [*every[:count], *map(slow, every[count:last]), *map(fuzz, every[last:])]


def only(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases that are among ``fast`` as they are, and the others marked slow."""
    chosen = list(fast)
    return [case if case in chosen else slow(case) for case in cases]


def slow(*case: Any) -> Any:
    """A case of one or more values, marked slow."""
    return pytest.param(*case, marks=pytest.mark.slow)


def fuzz(*case: Any) -> Any:
    """A case of one or more values, marked fuzz."""
    return pytest.param(*case, marks=pytest.mark.fuzz)


def mark_slow_cases(items: Sequence[pytest.Item]) -> None:
    """Mark as slow the cases that a test names: ``slow_cases(ID, ...)``, or all but ``fast_cases(ID, ...)``.

    Raises
    ------
    pytest.UsageError
        A test names a case that it does not have, though other cases of it were collected.
    """
    known: dict[tuple[Any, str], set[str]] = defaultdict(set)
    named: dict[tuple[Any, str], set[str]] = {}
    for item in items:
        for kind in ("slow_cases", "fast_cases"):
            mark = item.get_closest_marker(kind)
            if mark is None:
                continue
            case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
            test = item.path, getattr(item, "originalname", item.name)
            known[test].add(case)
            named[test] = set(mark.args)
            if (case in mark.args) == (kind == "slow_cases"):
                item.add_marker(pytest.mark.slow)
    for test, cases in named.items():
        if len(known[test]) > 1 and not cases <= known[test]:
            raise pytest.UsageError(f"{test[0]}: {test[1]} has no case {sorted(cases - known[test])[0]!r}")

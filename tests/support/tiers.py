"""Which cases are in ``make test``, and which only in ``make test-all``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """The first few cases as they are, and the others marked slow."""
    return [case if place < count else slow(case) for place, case in enumerate(cases)]


def only(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases that are among ``fast`` as they are, and the others marked slow."""
    chosen = list(fast)
    return [case if case in chosen else slow(case) for case in cases]


def slow(*case: Any) -> Any:
    """A case of one or more values, marked slow."""
    return pytest.param(*case, marks=pytest.mark.slow)

"""The number tables of a contest file read by compiled code, without a Python object per number.

A contest file is a small document around a few lists of lists of integers, which hold all of its length. They are
cut out and read here; the rest is read by :mod:`json`. Text in any other form is left to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray

TOO_LARGE = -1
"""What stands for every number beyond 63 bits."""

_LARGEST = (1 << 63) - 1
_MOST_DIGITS = 4000
_ZERO, _NINE = 48, 57
_QUOTE, _BACKSLASH, _COMMA, _OPEN, _CLOSE = 34, 92, 44, 91, 93
_TAB, _LINE_FEED, _RETURN, _SPACE = 9, 10, 13, 32
_TENTH = _LARGEST // 10


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A list of lists of non-negative integers.

    Parameters
    ----------
    values
        All numbers, row after row; see :data:`TOO_LARGE`.
    sizes
        Length of every row.
    """

    values: IntArray
    sizes: IntArray


def cut_out_rows(data: bytes) -> tuple[bytes, list[Rows]] | None:
    """Cut all lists of lists of non-negative integers out of a JSON text.

    Parameters
    ----------
    data
        The text.

    Returns
    -------
    tuple or None
        The text with ``[k]`` in the place of the ``k``-th list of lists, and those; None where there is any other
        list, so that no list but these is left in the text.
    """
    text = np.frombuffer(data + b"\0", dtype=np.uint8)  # what ends the text is in no number and no list
    commas, opened = _count(text)
    values: IntArray = np.empty(commas + opened, dtype=np.int64)
    sizes: IntArray = np.empty(opened, dtype=np.int64)
    pieces: list[bytes] = []
    tables: list[Rows] = []
    begin, value_count, row_count = 0, 0, 0
    while True:
        first = _next_list(text, begin)
        if first == len(data):
            return b"".join([*pieces, data[begin:]]), tables
        end, value_end, row_end = _read_rows(text, first, values, value_count, sizes, row_count)
        if end < 0:
            return None
        pieces += [data[begin:first], b"[%d]" % len(tables)]
        tables.append(Rows(values[value_count:value_end], sizes[row_count:row_end]))
        begin, value_count, row_count = end, value_end, row_end


@compiled
def _count(text: NDArray[Any]) -> tuple[int, int]:
    """Return how many commas and how many opening brackets there are."""
    commas, opened = 0, 0
    for character in text:
        commas += character == _COMMA
        opened += character == _OPEN
    return commas, opened


@compiled
def _next_list(text: NDArray[Any], begin: int) -> int:
    """Return where the next list outside of strings begins, or the text's last place."""
    in_string = False
    at = begin
    while at < len(text) - 1:
        character = text[at]
        if in_string:
            if character == _BACKSLASH:
                at += 1
            elif character == _QUOTE:
                in_string = False
        elif character == _QUOTE:
            in_string = True
        elif character == _OPEN:
            return at
        at += 1
    return len(text) - 1


@compiled
def _past_space(text: NDArray[Any], at: int) -> int:
    """Return the next place that is not white space."""
    while text[at] == _SPACE or text[at] == _LINE_FEED or text[at] == _RETURN or text[at] == _TAB:
        at += 1
    return at


@compiled
def _read_number(text: NDArray[Any], begin: int) -> tuple[int, int]:
    """Read a number as JSON writes it; return the place after it, or -1, and its value."""
    at, value = begin, 0
    while _ZERO <= text[at] <= _NINE:
        digit = np.int64(text[at]) - _ZERO
        fits = value >= 0 and (value < _TENTH or (value == _TENTH and digit <= _LARGEST - 10 * _TENTH))
        value = int(10 * value + digit) if fits else TOO_LARGE
        at += 1
    digits = at - begin
    if digits == 0 or digits > _MOST_DIGITS or (digits > 1 and text[begin] == _ZERO):
        return -1, value
    return at, value


@compiled
def _read_rows(
    text: NDArray[Any], begin: int, values: IntArray, value_count: int, sizes: IntArray, row_count: int
) -> tuple[int, int, int]:
    """Read a list of lists from its bracket on; return the place after it and the new counts, or -1 in the place."""
    failed = (-1, value_count, row_count)
    at = _past_space(text, begin + 1)
    if text[at] == _CLOSE:
        return at + 1, value_count, row_count
    while text[at] == _OPEN:
        row_begin = value_count
        at = _past_space(text, at + 1)
        while text[at] != _CLOSE:
            at, value = _read_number(text, at)
            if at < 0:
                return failed
            values[value_count] = value
            value_count += 1
            at = _past_space(text, at)
            if text[at] == _COMMA:
                at = _past_space(text, at + 1)
                if text[at] == _CLOSE:
                    return failed
            elif text[at] != _CLOSE:
                return failed
        sizes[row_count] = value_count - row_begin
        row_count += 1
        at = _past_space(text, at + 1)
        if text[at] == _CLOSE:
            return at + 1, value_count, row_count
        if text[at] != _COMMA:
            return failed
        at = _past_space(text, at + 1)
    return failed

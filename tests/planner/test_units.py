from __future__ import annotations

import pytest

from planner.common.units import axis_unit, format_bytes, format_gap, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5 * 2**30, "5.00 GiB"),
        (2**42, "4.00 TiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("largest", "unit"), [(0, "KiB"), (900, "KiB"), (2**20 - 1, "KiB"), (2**20, "MiB"), (5.5 * 2**30, "GiB")]
)
def test_an_axis_has_the_unit_that_its_largest_value_fills(largest: float, unit: str) -> None:
    assert axis_unit(largest) == (unit, {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit])


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0125, "12.5 ms"), (3.2e-6, "3.2 µs"), (0.0, "0 µs")])
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
    assert format_seconds(-seconds) == (f"-{text}" if seconds else text)


@pytest.mark.parametrize(
    ("gap", "text"),
    [(None, "-"), (0.0, "0.00 %"), (7e-6, "< 0.01 %"), (1e-4, "0.01 %"), (0.0123, "1.23 %"), (1.0, "100.00 %")],
)
def test_only_a_closed_gap_is_printed_as_zero(gap: float | None, text: str) -> None:
    assert format_gap(gap) == text

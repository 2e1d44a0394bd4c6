"""In which order files of tests begin, and what is shown when all are over, whichever process ran them."""

from __future__ import annotations

from typing import Any

import pytest
from support.layers.peak_ratios import PROPERTY, PeakRatio, summary

LONGEST = (
    "test_notebooks",
    "test_launch",
    "test_solvers_differential",
    "test_session",
    "test_random_plans",
    "test_layer_executor",
    "test_layer_random",
)
"""Files that take a minute or more. A file is run by one process, so these begin first: both processes end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first and leave the order of all others."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show how far measured peaks of layer plans were from predicted ones."""
    properties = [
        value
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    found = [PeakRatio(*ratio) for ratios in properties for ratio in ratios]
    for line in summary(found) if found else ():
        terminalreporter.write_line(line)

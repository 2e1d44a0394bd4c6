"""What is shown when all tests are over, whichever process ran them."""

from __future__ import annotations

from typing import Any

from support.peak_ratios import PROPERTY, PeakRatio, summary


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

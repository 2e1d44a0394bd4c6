"""Page of KIWI's results."""

from __future__ import annotations

from planner.papers.page import Section

__all__ = ["SECTIONS", "TITLE"]

TITLE = "KIWI"

SECTIONS: tuple[Section, ...] = ()
"""In the order of the page."""

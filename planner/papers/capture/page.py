"""Page of CAPTURE's results."""

from __future__ import annotations

from planner.papers.page import Section

__all__ = ["SECTIONS", "TITLE"]

TITLE = "CAPTURE"

SECTIONS: tuple[Section, ...] = ()
"""In the order of the page."""

"""Page of H3T's results."""

from __future__ import annotations

from planner.papers.page import Section

__all__ = ["SECTIONS", "TITLE"]

TITLE = "H3T"

SECTIONS: tuple[Section, ...] = ()
"""In the order of the page."""

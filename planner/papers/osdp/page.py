"""Page of OSDP's results."""

from __future__ import annotations

from collections.abc import Iterator

from planner.papers.page import Rows, Section, pivot

__all__ = ["SECTIONS", "TITLE"]

TITLE = "OSDP"


def _pieces(rows: Rows) -> Iterator[str]:
    """Figure 7 of the paper."""
    yield "A sharded product from a hidden size to four times it, one sample on 8 TITAN RTX, bytes in GB:"
    yield ""
    yield from pivot(rows["figure_7"], "granularity", "hidden", "bytes", lambda each: f"{each / 1e9:.2f}", "slices")


SECTIONS = (Section("Figure 7: cut operators", ("figure_7",), _pieces),)
"""In the order of the page."""

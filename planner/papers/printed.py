"""What the papers print, by nested names: one JSON file of each paper in ``claims/printed/``."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = ["printed"]

_FOLDER = Path(__file__).parent / "claims" / "printed"


@cache
def printed(paper: str) -> MappingProxyType[str, Any]:
    """What a paper prints.

    Parameters
    ----------
    paper
        One of :data:`planner.papers.claims.claim.PAPERS`.

    Raises
    ------
    FileNotFoundError
        There is no such paper.
    """
    return MappingProxyType(json.loads((_FOLDER / f"{paper}.json").read_text(encoding="utf-8")))

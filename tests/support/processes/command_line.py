"""What tests of the command line look at, and a problem file small enough to be written in a test."""

from __future__ import annotations

from dataclasses import dataclass

TINY_PROBLEM = {
    "problem": {
        "name": "tiny",
        "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[5, 9], [4, 1]], "usages": [[8, 2], [3, 7]]},
        "edges": {"nodes": [[0, 1]], "costs": [[0, 3, 2, 0]]},
        "usage_limit": 10,
    }
}


@dataclass(frozen=True)
class Outcome:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str

"""Verified rules on disk, so that a model is checked once per torch version.

A JSON file under ``~/.cache/meshwright`` (or the directory in ``MESHWRIGHT_CACHE``). Its entries hold for
the exact code that made them: a digest of that code is written down, and another digest empties the cache.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from formulations.problem.files import write_text_atomically
from planner.graph.axis_rule import AxisRule
from planner.machine.identity import cache_directory

_PLANNER = Path(__file__).parents[2]
_SOURCES = ("torch_adapter/rules/*.py", "torch_adapter/local/*.py", "graph/axis_rule.py")
"""The code that makes and checks rules, below the folder of the package ``planner``."""


@dataclass(frozen=True, eq=False)
class OperatorRules:
    """Rules of one distinct operator on one mesh axis.

    Parameters
    ----------
    rules
        Sorted, all-replicate first.
    in_table
        Whether any table has the operator.
    not_dividing, dropped
        Candidates that were left out because a dimension does not divide, and because they are wrong.
    """

    rules: tuple[AxisRule, ...]
    in_table: bool
    not_dividing: int
    dropped: int


def cache_path() -> Path:
    """File of the rules of the running torch version."""
    return cache_directory() / f"rules-{torch.__version__}.json"


class RuleCache:
    """Entries by signature; a file that cannot be read counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = _read(path)
        self._unsaved = False

    def get(self, signature: str) -> OperatorRules | None:
        """The entry of a signature, None if there is none."""
        return self._entries.get(_key(signature))

    def put(self, signature: str, rules: OperatorRules) -> None:
        """Remember an entry until :meth:`save`."""
        self._entries[_key(signature)] = rules
        self._unsaved = True

    def save(self) -> None:
        """Write new entries, merged with those that other processes wrote in the meantime.

        An error of writing is ignored: the rules can be computed again.
        """
        if not self._unsaved:
            return
        self._entries = _read(self.path) | self._entries
        content = {
            "code": code_digest(),
            "entries": {key: _to_json(self._entries[key]) for key in sorted(self._entries)},
        }
        try:
            write_text_atomically(self.path, json.dumps(content, separators=(",", ":")))
        except OSError:
            return
        self._unsaved = False


def _key(signature: str) -> str:
    return hashlib.sha256(signature.encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, OperatorRules]:
    try:
        content = json.loads(path.read_text())
        if content["code"] != code_digest():
            return {}
        return {key: _from_json(entry) for key, entry in content["entries"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _to_json(entry: OperatorRules) -> dict[str, Any]:
    rules = [[rule.outputs, rule.inputs, rule.collectives] for rule in entry.rules]
    return {
        "rules": rules, "in_table": entry.in_table, "not_dividing": entry.not_dividing, "dropped": entry.dropped
    }  # fmt: skip


def _from_json(entry: dict[str, Any]) -> OperatorRules:
    rules = tuple(
        AxisRule(tuple(outputs), tuple(inputs), tuple((str(kind), int(size)) for kind, size in collectives))
        for outputs, inputs, collectives in entry["rules"]
    )
    return OperatorRules(rules, bool(entry["in_table"]), int(entry["not_dividing"]), int(entry["dropped"]))


@cache
def code_digest(planner: Path = _PLANNER) -> str:
    """Digest of the code that makes and checks rules.

    Parameters
    ----------
    planner
        Folder of the package ``planner``.
    """
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for file in sorted(planner.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()

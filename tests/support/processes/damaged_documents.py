"""Contest files, valid ones and ones that are nearly so: damaged as trees, as bytes and as gzip streams."""

from __future__ import annotations

import copy
import gzip
import json
import math
import random
from dataclasses import dataclass
from typing import Any

FORBIDDEN = 10**18
EXAMPLE: dict[str, Any] = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


@dataclass(frozen=True)
class Raw:
    """Text that stands in the file as it is, such as a number that Python would write in another way."""

    text: str


@dataclass(frozen=True)
class Pairs:
    """An object whose keys may repeat."""

    pairs: tuple[tuple[str, Any], ...]


VALUES = (
    *(Raw(text) for text in ("1e3", "1E2", "1.0", "-0", "-0.0", "-1", "0.5", "1e400", "007", "+1", "0x1", "1_000")),
    *(Raw(text) for text in ("NaN", "Infinity", "-Infinity", "true", "True", "nul", "'a'", "5000000000000000000000")),
    *(Raw(text) for text in ("9" * 400, "9" * 5000, '"\\ud800"', '"\\u0000"', '"\\x41"', "[1,]", "[,1]", "{,}", "//")),
    *(True, False, None, "", "5", "\u0660", "\U0001f600", [], {}, [[]], [[1]], {"a": 1}, 0, 1, 2, 3, 7),
    *(2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**64 + 1, FORBIDDEN - 1, FORBIDDEN, FORBIDDEN + 1, 10**30),
    *(10_000_000, 10_000_001),
)
_SPACES = ("", "", "", " ", "\n", "\t", "\r\n ", "  ")
_BAD_SPACES = ("\u00a0", "\v", "\ufeff", "/**/")
_TOKENS = (b"-1", b"1e5", b"true", b"null", b"{}", b"[]", b'""', b"NaN", b"1" + b"0" * 22, b",", b"]", b"0", b"\\u0031")


def random_document(generator: random.Random) -> dict[str, Any]:
    """Parallel edges, both orientations, loops, hyperedges, empty intervals, forbidden entries, no limit."""
    count = generator.randint(1, 4)
    sizes = [generator.randint(1, 3) for _ in range(count)]

    def cost() -> int:
        return generator.choice([0, 1, 7, 10**17, FORBIDDEN, FORBIDDEN + 5, 10**30]) if generator.random() < 0.3 else 3

    edges = []
    for _ in range(generator.randint(0, 6)):
        arity = generator.choice([1, 2, 2, 2, 3])
        edges.append([generator.randrange(count) for _ in range(arity)])
    table = [[cost() for _ in range(math.prod(sizes[i] for i in edge))] for edge in edges]
    problem: dict[str, Any] = {
        "nodes": {
            "intervals": [sorted(generator.choices(range(6), k=2), reverse=generator.random() < 0.1) for _ in sizes],
            "costs": [[cost() for _ in range(size)] for size in sizes],
            "usages": [[generator.randint(0, 9) for _ in range(size)] for size in sizes],
        },
        "edges": {"nodes": edges, "costs": table},
    }
    if generator.random() < 0.8:
        problem["usage_limit"] = generator.randint(0, 25)
    return {"problem": problem}


def damaged_tree(seed: int) -> bytes:
    """A document with none to three changes of types, sizes, keys or depth, written in one of JSON's many ways."""
    generator = random.Random(seed)
    document: Any = copy.deepcopy(EXAMPLE) if generator.random() < 0.5 else random_document(generator)
    for _ in range(generator.choice([0, 1, 1, 1, 2, 3])):
        document = _changed(document, generator)
    return _Writer(generator).text(document).encode("utf-8", "surrogatepass")


def damaged_bytes(seed: int) -> bytes:
    """The text of a document, damaged in one to three places."""
    generator = random.Random(seed)
    text = json.dumps(EXAMPLE if seed % 2 else random_document(generator))
    damaged = bytearray(text.encode())
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(damaged) + 1)
        kind = generator.randrange(5)
        if kind == 0:
            damaged[at : at + generator.randint(1, 12)] = b""
        elif kind == 1:
            damaged[at:at] = generator.choice(_TOKENS)
        elif kind == 2 and at < len(damaged):
            damaged[at] = generator.randrange(256)
        elif kind == 3:
            other = generator.randrange(len(damaged) + 1)
            damaged[at:at] = damaged[other : other + generator.randint(1, 40)]
        else:
            digits = [k for k, byte in enumerate(damaged) if chr(byte).isdigit()]
            if digits:
                damaged[generator.choice(digits)] = generator.choice(b"0123456789")
        if not damaged:
            damaged = bytearray(b" ")
    return bytes(damaged)


def damaged_gzip(seed: int) -> bytes:
    """A compressed document: whole, cut, with a flipped bit, with a tail, or of two members."""
    generator = random.Random(seed)
    text = damaged_tree(seed)
    whole = gzip.compress(text, generator.choice([0, 1, 9]), mtime=0)
    kind = generator.randrange(6)
    if kind == 0:
        return whole[: generator.randrange(2, len(whole))]
    if kind == 1:
        flipped = bytearray(whole)
        flipped[generator.randrange(2, len(whole))] ^= 1 << generator.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return whole + generator.choice([b"\0" * 9, b"tail", b"\x1f\x8b"])
    if kind == 3:
        at = generator.randrange(len(text) + 1)
        return gzip.compress(text[:at], mtime=0) + gzip.compress(text[at:], mtime=0)
    return whole


def _changed(document: Any, generator: random.Random) -> Any:
    """One change somewhere in a tree; the tree may be changed in place."""
    if generator.random() < 0.03:
        return generator.choice([[document], {"problem": document}, {"other": 1}, generator.choice(VALUES)])
    parent, key = generator.choice(list(_places(document)) or [(None, None)])
    if parent is None:
        return document
    if isinstance(parent, list):
        _change_list(parent, key, generator)
    else:
        _change_object(parent, key, generator)
    return document


def _places(value: Any) -> Any:
    """Every (container, key) of a tree."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _change_list(parent: list[Any], k: int, generator: random.Random) -> None:
    kind = generator.randrange(7)
    if kind <= 2:
        parent[k] = generator.choice(VALUES)
    elif kind == 3:
        del parent[k]
    elif kind == 4:
        parent.insert(generator.randrange(len(parent) + 1), copy.deepcopy(parent[k]))
    elif kind == 5:
        other = generator.randrange(len(parent))
        parent[k], parent[other] = parent[other], parent[k]
    else:
        parent[k] = _nested(parent[k], generator)


def _change_object(parent: dict[str, Any], key: str, generator: random.Random) -> None:
    kind = generator.randrange(7)
    value = parent.pop(key)
    if kind == 0:
        parent[key] = generator.choice(VALUES)
    elif kind == 1:
        parent[generator.choice([key + " ", key.upper(), "", key[:-1], key + "\u0301", "problem"])] = value
    elif kind == 2:
        parent[key] = value
        parent[generator.choice(["extra", "nodes", "usage_limit", "name"])] = generator.choice(VALUES)
    elif kind == 3:
        parent[key] = _nested(value, generator)
    elif kind == 4:
        # Twice the same key, at the level above: a dictionary cannot hold that itself.
        parent[key] = Pairs((*value.items(), *list(value.items())[:1])) if isinstance(value, dict) else value
    elif kind == 5:
        parent[key] = value  # last instead of where it was


def _nested(value: Any, generator: random.Random) -> Any:
    for _ in range(generator.choice([1, 1, 2, 30, 3000])):
        value = (
            Raw("[" + value.text + "]") if isinstance(value, Raw) else Raw("[" + _Writer(generator).text(value) + "]")
        )
    return value


class _Writer:
    """Writes a tree with spaces and escapes where JSON allows them, seldom where it does not."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._spaces = _SPACES if generator.random() < 0.3 else ("",)
        self._escapes = generator.random() < 0.1
        if generator.random() < 0.02:
            self._spaces = (*_SPACES, *_BAD_SPACES)

    def text(self, value: Any) -> str:
        if isinstance(value, Raw):
            return value.text
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, dict):
            return self._object(list(value.items()))
        if isinstance(value, Pairs):
            return self._object(list(value.pairs))
        if isinstance(value, list):
            return "[" + self._space() + ",".join(self._spaced(self.text(item)) for item in value) + "]"
        return json.dumps(value)

    def _object(self, pairs: list[tuple[str, Any]]) -> str:
        members = (self._spaced(self._string(key)) + ":" + self._spaced(self.text(value)) for key, value in pairs)
        return "{" + self._space() + ",".join(members) + "}"

    def _string(self, value: str) -> str:
        if self._escapes:
            return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else c for c in value) + '"'
        return json.dumps(value, ensure_ascii=self._generator.random() < 0.5)

    def _spaced(self, text: str) -> str:
        return self._space() + text + self._space()

    def _space(self) -> str:
        return self._generator.choice(self._spaces)

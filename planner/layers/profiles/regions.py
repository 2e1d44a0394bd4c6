"""Regions of a traced step, the operators of one layer each: found by module paths, repeated modules first.

A list of modules that are alike and feed each other (``model.layers.N``, ``transformer.h.N``, T5's ``encoder.block.N``,
the blocks inside of Swin's stages) gives one block per member. What lies before the first, between two lists and behind
the last is a region too: ``embedding``, ``bridge`` and ``head``. A block is cut further into its attention and its
feed-forward module, and a tail that lies between it and the next block (Swin's merging of patches). Where there is no
such list, modules with numbers are blocks, or those at the top. Regions are runs of consecutive forward operators; a
backward operator belongs to the region of the operator whose gradient it computes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.graph.operator_graph import Operator, OperatorGraph, Phase, ValueRole
from planner.graph.view_chains import view_chains

ATTENTION = "attention"
CROSS_ATTENTION = "cross_attention"
FEED_FORWARD = "mlp"
TAIL = "tail"

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_ALIKE = 0.5
"""Least share of parameter names that members of a list have in common; a first block may have a shortcut more."""


@dataclass(frozen=True, slots=True)
class Region:
    """A run of consecutive operators that is planned as one layer.

    Parameters
    ----------
    name
        Unique: the module path of the block, with the module's role behind it where the block is cut further.
    block
        Module path of the block; empty outside of blocks.
    role
        :data:`ATTENTION`, :data:`CROSS_ATTENTION`, :data:`FEED_FORWARD` or :data:`TAIL`; empty where none was found.
    operators
        Indices of the forward operators, views included, in order.
    """

    name: str
    block: str
    role: str
    operators: tuple[int, ...]


def module_regions(graph: OperatorGraph) -> tuple[Region, ...]:
    """Regions of a step in the order in which they run, blocks cut into attention and feed-forward modules."""
    result: list[Region] = []
    blocks = _Blocks(graph)
    for name, block, operators in _runs(graph, blocks):
        cut = _cut(graph, blocks, block, operators) if block else [("", operators)]
        if len(cut) == 1:
            result.append(Region(name, block, cut[0][0], tuple(operators)))
        else:
            result += [Region(f"{name}.{role}" if role else name, block, role, tuple(part)) for role, part in cut]
    return tuple(_named_apart(result))


def joined_regions(regions: Sequence[Region]) -> tuple[tuple[Region, ...], ...]:
    """Regions of one block together, in order."""
    groups: list[list[Region]] = []
    for region in regions:
        if region.block and groups and groups[-1][0].block == region.block:
            groups[-1].append(region)
        else:
            groups.append([region])
    return tuple(map(tuple, groups))


def operator_regions(graph: OperatorGraph, regions: Sequence[Region]) -> tuple[int, ...]:
    """Position of the region of every operator by index, backward operators included.

    A backward operator without a known forward operator, such as a sum of gradients, is where the one before it is.
    """
    found = {operator: position for position, region in enumerate(regions) for operator in region.operators}
    result: list[int] = []
    current = len(regions) - 1
    for operator in graph.operators:
        if operator.phase is Phase.FORWARD:
            result.append(found[operator.index])
            continue
        if operator.forward is not None:
            current = found[operator.forward]
        result.append(current)
    return tuple(result)


# ------------------------------------------------------------------------ blocks


def _runs(graph: OperatorGraph, blocks: _Blocks) -> list[tuple[str, str, list[int]]]:
    """(name, block, operators) of every block and of what lies around blocks."""
    runs: list[tuple[str, str, list[int]]] = []
    waiting: list[int] = []
    for operator in graph.operators:
        if operator.phase is not Phase.FORWARD:
            continue
        block = blocks.of(operator.module_path)
        if block is None:
            waiting.append(operator.index)
            continue
        if runs and runs[-1][1] == block:
            runs[-1][2].extend(waiting)
            runs[-1][2].append(operator.index)
        else:
            between = _placed(graph, blocks, runs, waiting, block)
            runs.append((block, block, [*between, operator.index]))
        waiting = []
    if runs and not blocks.stacked:
        runs[-1][2].extend(waiting)
    elif waiting:
        runs.append(("head" if runs else "model", "", waiting))
    return runs


def _placed(
    graph: OperatorGraph, blocks: _Blocks, runs: list[tuple[str, str, list[int]]], waiting: list[int], block: str
) -> list[int]:
    """Assign the operators before ``block`` to their regions; return those that belong to the block itself."""
    if all(graph.operators[index].is_view for index in waiting):
        return waiting
    if not blocks.stacked:
        if not runs:
            return waiting
        runs[-1][2].extend(waiting)
        return []
    if not runs:
        runs.append(("embedding", "", waiting))
        return []
    if _pattern(runs[-1][1]) != _pattern(block):
        runs.append(("bridge", "", waiting))
        return []
    if any(blocks.reads_parameter(graph.operators[index]) for index in waiting):
        runs[-1][2].extend(waiting)  # such as the merging of patches behind a stage
        return []
    return waiting


class _Blocks:
    """The module paths that are blocks."""

    def __init__(self, graph: OperatorGraph) -> None:
        self._graph = graph
        self._bases = [chain.base for chain in view_chains(graph)]
        names = [name for value in graph.parameters for name in (value.name, *value.aliases)]
        prefixes = {prefix for name in names for prefix in _numbered(name)}
        self._inside = {
            prefix: frozenset(_pattern(name[len(prefix) + 1 :]) for name in names if name.startswith(prefix + "."))
            for prefix in prefixes
        }
        self._known: dict[str, str | None] = {}
        feeds = self._feeding()
        lists: dict[str, list[str]] = {}
        for prefix in sorted(prefixes, key=_sort_key):
            lists.setdefault(_pattern(prefix), []).append(prefix)
        self._lists = {pattern for pattern, members in lists.items() if self._is_stack(members, feeds)}

    def of(self, path: str) -> str | None:
        """Block that a module lies in: the innermost of nested lists; None outside of blocks."""
        if path not in self._known:
            self._known[path] = self._find(path)
        return self._known[path]

    @property
    def stacked(self) -> bool:
        """Whether the model has a list of blocks."""
        return bool(self._lists)

    def reads_parameter(self, operator: Operator) -> bool:
        """Whether an argument is a parameter or a view of one."""
        return any(self._graph.values[self._bases[value]].role is ValueRole.PARAMETER for value in operator.inputs)

    def _find(self, path: str) -> str | None:
        numbered = [prefix for prefix in _numbered(path) if prefix in self._inside]
        if self._lists:
            inside = [prefix for prefix in numbered if _pattern(prefix) in self._lists]
            # Swin's stages are a list, its blocks are a list inside: modules of a stage outside its blocks are in none.
            deepest = max(
                (p.count("#") for p in self._lists if inside and p.startswith(_pattern(inside[0]))), default=0
            )
            return inside[-1] if inside and _pattern(inside[-1]).count("#") == deepest else None
        if any(self._inside):
            return numbered[0] if numbered else None
        top = path.partition(".")[0]
        return top or None

    def _is_stack(self, members: Sequence[str], feeds: set[tuple[str, str]]) -> bool:
        """Whether modules are blocks: equal modules of modules, each of which reads the result of the one before."""
        first = self._inside[members[0]]
        if not all(any("." in name for name in self._inside[member]) for member in members):
            return False
        alike = all(
            len(first & self._inside[member]) >= _ALIKE * len(first | self._inside[member]) for member in members
        )
        siblings = [pair for pair in pairwise(members) if pair[0].rpartition(".")[0] == pair[1].rpartition(".")[0]]
        return alike and all(pair in feeds for pair in siblings)

    def _feeding(self) -> set[tuple[str, str]]:
        """(Module, module): the second reads a result of the first; numbered modules alone."""
        pairs: set[tuple[str, str]] = set()
        for operator in self._graph.operators:
            if operator.phase is not Phase.FORWARD or operator.is_view:
                continue
            for value in operator.inputs:
                producer = self._graph.values[self._bases[value]].producer
                if producer is not None and self._graph.operators[producer].module_path != operator.module_path:
                    made = _numbered(self._graph.operators[producer].module_path)
                    read = _numbered(operator.module_path)
                    pairs.update((one, other) for one in made for other in read if one != other)
        return pairs


def _numbered(path: str) -> list[str]:
    """Prefixes of a path that end with a number, the shortest first."""
    return [path[: match.end()] for match in _NUMBER.finditer(path)]


def _pattern(path: str) -> str:
    return _NUMBER.sub("#", path)


def _sort_key(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


def _named_apart(regions: list[Region]) -> list[Region]:
    """Regions with unique names: modules that run again get a number."""
    count: dict[str, int] = {}
    result = []
    for region in regions:
        seen = count[region.name] = count.get(region.name, 0) + 1
        name = region.name if seen == 1 else f"{region.name} ({seen})"
        result.append(Region(name, region.block, region.role, region.operators))
    return result


# ----------------------------------------------------------------------- modules


def _cut(graph: OperatorGraph, blocks: _Blocks, block: str, operators: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Cut a block where a module with parameters begins behind an attention module, or another attention module."""
    inside = [
        at for at, index in enumerate(operators) if f"{graph.operators[index].module_path}.".startswith(f"{block}.")
    ]
    operators, tail = operators[: inside[-1] + 1], operators[inside[-1] + 1 :]
    behind = [(TAIL, list(tail))] if any(blocks.reads_parameter(graph.operators[index]) for index in tail) else []
    parts: list[tuple[str, list[int]]] = []
    owners = _owners(graph)
    current, part = "", list[int]()
    for index in operators if behind else [*operators, *tail]:
        operator = graph.operators[index]
        attention = _attention_of(operator.module_path[len(block) + 1 :])
        begins = attention != current if attention else operator.module_path in owners
        if current and begins:
            parts.append((ATTENTION, part))
            current, part = attention, []
        current = attention or current
        part.append(index)
    parts.append((ATTENTION if current else FEED_FORWARD, part))
    if all(role == FEED_FORWARD for role, _ in parts):
        return [("", part), *behind]
    crossed = [position for position, (role, _) in enumerate(parts) if role == ATTENTION]
    return [
        (CROSS_ATTENTION if role == ATTENTION and position != crossed[0] else role, part)
        for position, (role, part) in enumerate(parts)
    ] + behind


def _attention_of(path: str) -> str:
    """Path of the attention module that a module lies in; empty outside."""
    parts = path.split(".")
    for position, part in enumerate(parts):
        name = part.lower()
        if ("attn" in name or "attention" in name) and "norm" not in name:
            return ".".join(parts[: position + 1])
    return ""


def _owners(graph: OperatorGraph) -> frozenset[str]:
    """Paths of modules that have parameters of their own."""
    return frozenset(name.rpartition(".")[0] for value in graph.parameters for name in (value.name, *value.aliases))

"""Blocks of a model: the repeated parts that its module paths number, such as ``layers.3`` or ``encoder.block.0``."""

from __future__ import annotations

from planner.graph.operator_graph import OperatorGraph


def block_of_path(path: str) -> str | None:
    """Path of the block that a module lies in: up to the first number; None outside numbered modules.

    ``transformer.h.3.mlp.c_fc`` lies in ``transformer.h.3``, and T5's ``encoder.block.0.layer.1`` in
    ``encoder.block.0``: of nested numbers the outermost counts.
    """
    parts = path.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: position + 1])
    return None


def operator_blocks(graph: OperatorGraph) -> tuple[str | None, ...]:
    """Block of every operator by index, views included; backward operators have their module's."""
    return tuple(block_of_path(operator.module_path) for operator in graph.operators)

"""Frees of a schedule: every buffer goes after its last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.schedule.instructions import Free, Instruction, Reshard, Wait, bucket_ends, creates, reads


def with_frees(
    instructions: Sequence[Instruction], kept: set[int], sends_copy: Callable[[Reshard], bool] = lambda _: False
) -> tuple[Instruction, ...]:
    """Insert a :class:`Free` after the last use of every buffer that is not kept.

    An overlapped resharding uses its source up to its wait, unless it ``sends_copy``; a bucket reads all of its sources
    with its last part.
    """
    last: dict[int, int] = {}
    sent: dict[int, int] = {}
    ends = bucket_ends(instructions)
    for position, instruction in enumerate(instructions):
        for buffer in (*reads(instruction), *creates(instruction)):
            last[buffer] = ends.get(position, position)
        match instruction:
            case Reshard(source, target, overlapped=True) if position not in ends and not sends_copy(instruction):
                sent[target] = source
            case Wait(buffer) if buffer in sent:
                last[sent[buffer]] = position
    freed: dict[int, list[int]] = {}
    for buffer, position in last.items():
        if buffer not in kept:
            freed.setdefault(position, []).append(buffer)
    found: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        found.append(instruction)
        if position in freed:
            found.append(Free(tuple(sorted(freed[position]))))
    return tuple(found)

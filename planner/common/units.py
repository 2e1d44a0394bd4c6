"""Bytes, seconds and gaps as text, the same everywhere."""

from __future__ import annotations

import re
from decimal import Decimal

UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
"""Bytes per unit; binary units as ``GiB``, decimal ones as ``GB``."""

_BINARY_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_bytes(count: int) -> str:
    """Bytes in the largest binary unit that they fill, as ``1.25 GiB``."""
    for unit, size in _BINARY_UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def format_limit(tensor_bytes: int, reserve_bytes: int) -> str:
    """The limit on tensors of one device, and the reserve beside them, as ``1.50 GiB for tensors, beside ...``."""
    beside = f", beside a reserve of {format_bytes(reserve_bytes)}" if reserve_bytes else ""
    return f"{format_bytes(tensor_bytes)} for tensors{beside}"


def axis_unit(largest: float) -> tuple[str, int]:
    """Unit for an axis of bytes up to a largest value, and its bytes: the largest binary unit that the value fills.

    Never below KiB.
    """
    return next(((unit, size) for unit, size in _BINARY_UNITS if largest >= size), _BINARY_UNITS[-1])


def format_seconds(seconds: float) -> str:
    """Seconds with four digits in s, ms or µs."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{abs(seconds) / 1e-6:.4g} µs"


def format_gap(gap: float | None) -> str:
    """Relative gap in per cent; a dash where there is none. Only a closed gap is printed as zero."""
    if gap is None:
        return "-"
    return "< 0.01 %" if 0 < gap < 1e-4 else f"{100 * gap:.2f} %"


def bytes_in(size: int | str, name: str) -> int:
    """Read a size such as ``4GiB``, ``1.5GB`` or ``4294967296`` (bytes), rounded down.

    Raises
    ------
    ValueError
        It is no positive number with a known unit; the message begins with the name.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    units = {unit.lower(): factor for unit, factor in UNITS.items()} | {"": 1}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{name}: {size!r} is no size; write 4GiB, 512MiB, 1.5GB or a number of bytes")
    count = int(Decimal(match[1]) * units[match[2].lower()])
    if count == 0:
        raise ValueError(f"{name}: {size!r} is no memory at all; give at least one byte")
    return count

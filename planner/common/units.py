"""Bytes, seconds and gaps as text, the same everywhere."""

from __future__ import annotations

_BINARY_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_bytes(count: int) -> str:
    """Bytes in the largest binary unit that they fill, as ``1.25 GiB``."""
    for unit, size in _BINARY_UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


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

"""Accuracy with which a model counts bytes that depend on three decisions."""

from __future__ import annotations

from enum import StrEnum


class Counting(StrEnum):
    """Count of bytes while the last reader of a value brings it to its layout.

    The value's storage is needed until the reader has computed if it is read directly or held for a later rerun,
    which depends on three decisions.
    """

    EXACT = "exact"
    """By factors of three nodes: to the byte."""
    OVER = "over"
    """Storages that may be held are counted through the computation: never too little."""
    UNDER = "under"
    """Only storages that the last reader reads directly are counted through the computation: never too much."""

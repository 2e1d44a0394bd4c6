"""Equal tables are one object, and tables that are made of others are made once."""

from __future__ import annotations

import gc
from contextlib import suppress

import numpy as np
import pytest

from formulations.problem.gc_pause import gc_paused
from formulations.step.equal_tables import EqualTables


def test_the_first_of_equal_tables_stands_for_all() -> None:
    tables, first = EqualTables(), np.arange(6).reshape(2, 3)
    assert tables.one_of(first) is first
    assert tables.one_of(first.copy()) is first
    assert tables.one_of(np.asfortranarray(first)) is first
    for other in (first.reshape(3, 2), first.astype(np.int32), first + 1, first.ravel()):
        assert tables.one_of(other) is other


def test_a_table_is_made_once_of_the_same_sources_and_key() -> None:
    tables, source = EqualTables(), np.arange(3)
    doubled = tables.made_of((source,), ("times", 2), lambda: 2 * source)
    assert tables.made_of((source,), ("times", 2), lambda: pytest.fail("made again")) is doubled
    assert tables.made_of((source,), ("times", 3), lambda: 3 * source).tolist() == [0, 3, 6]
    assert tables.made_of((source, source), ("sum",), lambda: source + source) is doubled  # equal to what was made


def test_tables_of_sources_that_are_gone_are_not_mistaken_for_others() -> None:
    """An id may be that of a later array once the first is gone; so sources must live on."""
    tables = EqualTables()
    for k in range(200):
        source = np.full(4, k)
        assert tables.made_of((source,), (), lambda source=source: source + 1).tolist() == [k + 1] * 4
        assert tables.one_of(np.full(5, k)).tolist() == [k] * 5
        del source


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_after_a_pause(enabled: bool) -> None:
    try:
        (gc.enable if enabled else gc.disable)()
        with suppress(RuntimeError), gc_paused():
            with gc_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()

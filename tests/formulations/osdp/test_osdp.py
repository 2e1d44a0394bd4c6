"""OSDP's model: the paper's equations by hand, the canonical problem against them, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.problems.osdp_chains import operator, random_case, reference_bytes, reference_nanoseconds

from formulations.layers.layer import LayerChain, SplitPart
from formulations.osdp.parameters import per_parameter
from formulations.osdp.problem import (
    DP,
    ZDP,
    Accounting,
    OsdpError,
    OsdpMachine,
    OsdpSettings,
    Slicing,
    build_osdp,
    operator_table,
    operator_tables,
)
from formulations.problem.checker import check

MACHINE = OsdpMachine(8, 1e-6, 1e-9, 10**9)
LAYER = operator(
    "mlp",
    parameter_bytes=8_000,
    input_bytes=100,
    saved_bytes=900,
    forward_workspace_bytes=40,
    backward_workspace_bytes=70,
    forward_seconds=1e-3,
    backward_seconds=2e-3,
)


def mode_costs(settings: OsdpSettings, mode: Slicing) -> tuple[int, int, int]:
    table = operator_table(LAYER, LAYER, MACHINE, settings)
    place = table.modes.index(mode)
    return int(table.communication[place]), int(table.resident(2)[place]), int(table.extra(2)[place])


def test_the_papers_two_cases_by_hand() -> None:
    # 2 or 3 collectives of 7 steps, each 1000 ns + 1000 bytes at 1 ns; states 4 * 8000 bytes, whole or an eighth.
    assert mode_costs(OsdpSettings(), DP) == (2 * 7 * 2000, 32_000 + 2 * 1000, 2 * 70)
    assert mode_costs(OsdpSettings(), ZDP) == (3 * 7 * 2000, 4_000 + 2 * 1000, 2 * 70)
    table = operator_table(LAYER, LAYER, MACHINE, OsdpSettings())
    assert table.computation(2) == 2 * 3_000_000


def test_one_of_four_slices_by_hand() -> None:
    settings = OsdpSettings(slices=(4,), accounting=Accounting.PEAK)
    # A slice has 2000 bytes: 250 in each step; three slices are DP and one is ZDP.
    assert mode_costs(settings, Slicing(4, 1)) == (7 * (2 * 3 + 3) * 1250, 24_000 + 1_000 + 2000, 2 * 70 + 2000)
    assert mode_costs(replace(settings, gathered_tensors=2), Slicing(4, 4))[2] == 2 * 70 + 4000


def test_checkpointing_gathers_and_computes_once_more() -> None:
    settings = OsdpSettings(checkpointing=True)
    assert mode_costs(settings, DP) == (2 * 7 * 2000, 32_000 + 2 * 100, 2 * 70)
    assert mode_costs(settings, ZDP) == (4 * 7 * 2000, 4_000 + 2 * 100, 2 * 70)
    assert operator_table(LAYER, LAYER, MACHINE, settings).computation(1) == 4_000_000
    peak = replace(settings, accounting=Accounting.PEAK)
    assert mode_costs(peak, ZDP)[2] == 2 * 70 + 8000 + 2 * 900


def test_modes_come_once_and_cut_operators_have_a_zdp_slice() -> None:
    modes = OsdpSettings(slices=(4, 1, 2, 2)).modes(LAYER)
    assert modes == (DP, ZDP, (2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (4, 4))
    assert [str(mode) for mode in OsdpSettings(slices=(2,)).modes(LAYER)] == ["DP", "ZDP", "1/2 ZDP", "2/2 ZDP"]


def test_only_products_are_cut_where_that_is_asked_for() -> None:
    settings = OsdpSettings(slices=(1, 2, 4), products_only=True)
    assert settings.modes(LAYER) == (DP, ZDP)  # a table
    assert settings.modes(replace(LAYER, split=SplitPart(divisor=6))) == (DP, ZDP, (2, 1), (2, 2))
    assert settings.modes(replace(LAYER, split=SplitPart(divisor=12)))[-1] == (4, 4)


def test_replicas_may_be_gathered_too() -> None:
    settings = OsdpSettings(slices=(4,), accounting=Accounting.PEAK, gathered_tensors=1, replica_tensors=2)
    extra = {mode: mode_costs(settings, mode)[2] - 2 * 70 for mode in settings.modes(LAYER)}
    assert (extra[DP], extra[ZDP]) == (2 * 8000, 8000)
    assert (extra[Slicing(4, 1)], extra[Slicing(4, 4)]) == (2 * 2000, 2000)


def test_what_lends_a_parameter_keeps_it_gathered() -> None:
    chain = LayerChain("tied", (LAYER, replace(LAYER, name="head", borrowed_parameter_bytes=8000)))
    settings = OsdpSettings(accounting=Accounting.PEAK)
    for modes in ((ZDP, ZDP), (DP, DP)):
        untied = LayerChain("untied", (LAYER, replace(LAYER, name="head")))
        grown = reference_bytes(chain, MACHINE, settings, modes, 1) - reference_bytes(
            untied, MACHINE, settings, modes, 1
        )
        problem = build_osdp(chain, MACHINE, settings, 1)
        choice = int(modes == (ZDP, ZDP))
        assert check(problem, [choice, choice]).peaks[0].usage == reference_bytes(chain, MACHINE, settings, modes, 1)
        assert grown == 8000 * choice
    assert problem.factors[0].forbidden.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("seed", range(60))
def test_the_canonical_problem_counts_as_the_paper_does(seed: int) -> None:
    case = random_case(seed)
    tables = operator_tables(case.chain, case.machine, case.settings)
    problem = build_osdp(case.chain, case.machine, case.settings, case.batch)
    problem.validate()
    rng = np.random.default_rng(seed)
    for _ in range(5):
        choices = [int(rng.integers(len(table.modes))) for table in tables]
        chosen = tuple(table.modes[choice] for table, choice in zip(tables, choices, strict=True))
        report = check(problem, choices)
        assert report.objective == reference_nanoseconds(case, chosen)
        assert report.peaks[0].usage == reference_bytes(case.chain, case.machine, case.settings, chosen, case.batch)


def test_the_peak_is_at_the_operator_that_needs_most() -> None:
    large = replace(LAYER, name="large", parameter_bytes=80_000)
    chain = LayerChain("three", (replace(LAYER, name="first"), large, replace(LAYER, name="last")))
    problem = build_osdp(chain, MACHINE, OsdpSettings(accounting=Accounting.PEAK), 1)
    peak = check(problem, [1, 1, 1]).peaks[0]
    assert (problem.time_names[peak.time], peak.usage) == ("large", 4_000 * 2 + 40_000 + 3 * 1000 + 80_000 + 70)


def test_parameters_can_be_operators() -> None:
    chain = LayerChain("two", (LAYER, replace(LAYER, name="other", kind="whole")))
    parts = per_parameter(chain, {"operator": [("weight", 7_000), ("bias", 1_000)]})
    assert [layer.name for layer in parts.layers] == ["mlp.bias", "mlp.weight", "other"]
    for settings in (OsdpSettings(), OsdpSettings(checkpointing=True)):
        whole = reference_bytes(chain, MACHINE, settings, [ZDP, DP], 3)
        assert reference_bytes(parts, MACHINE, settings, [ZDP, ZDP, DP], 3) == whole
    with pytest.raises(OsdpError, match="8000 bytes of parameters, but those named for its kind operator have 7000"):
        per_parameter(chain, {"operator": [("weight", 7_000)]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"latency_seconds": -1.0}, "latency_seconds is -1.0"),
        ({"seconds_per_byte": float("inf")}, "seconds_per_byte is inf"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
    ],
)
def test_an_impossible_machine_is_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(OsdpError, match=words):
        replace(MACHINE, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slices": ()}, "slices is"),
        ({"slices": (0, 1)}, "at least 1"),
        ({"state_multiple": 0}, "state_multiple is 0"),
        ({"gathered_tensors": 0}, "gathered_tensors is 0"),
        ({"replica_tensors": -1}, "replica_tensors is -1"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(OsdpError, match=words):
        replace(OsdpSettings(), **changes)


def test_a_step_of_weeks_and_a_batch_of_nothing_are_refused() -> None:
    chain = LayerChain("one", (LAYER,))
    with pytest.raises(OsdpError, match="batch is 0"):
        build_osdp(chain, MACHINE, OsdpSettings(), 0)
    with pytest.raises(OsdpError, match="check the machine's link"):
        build_osdp(chain, replace(MACHINE, latency_seconds=1e6), OsdpSettings(), 1)

"""The inventory of techniques and tunables: what counts, and that each can be replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from formulations.solvers.running import lanes
from formulations.tuning.inventory import Constant, Kind, code_digest, inventory
from formulations.tuning.literals import assignments, evaluate, members
from formulations.tuning.overrides import replaced
from planner.benchmarks.ablation.variants import all_variants

ROOT = Path(__file__).resolve().parents[3]
MOST_TUNABLES = 99
"""May only fall: an ablation says which of them the engine can do without."""

SOURCE = '''
"""A module."""
from numbers import TABLE
_FLAG = True
"""Technique: a flag."""
PLAIN = True
STEPS, _SHARE = 1 << 4, 0.5
"""Of both."""
_BOUNDS: tuple[float, ...] = (1.0, 2.0)
_NEVER = 1e300
"""Not tunable: stands for what is forbidden."""
NAMES = ("one", "two")
"""Techniques: names."""
WORDS = ("one", "two")
_TWICE = 2 * _SHARE
lower = 3
@compiled
def loop(x):
    return x * _TWICE * TABLE
'''


@pytest.fixture
def constants(tmp_path: Path) -> dict[str, Constant]:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "module.py").write_text(SOURCE)
    return {constant.name: constant for constant in inventory(["engine"], tmp_path)}


def test_numbers_are_tunables_and_marked_ones_are_not(constants: dict[str, Constant]) -> None:
    kinds = {name: constant.kind for name, constant in constants.items()}
    tunables = dict.fromkeys(("STEPS", "_SHARE", "_BOUNDS", "_TWICE"), Kind.TUNABLE)
    techniques = dict.fromkeys(("_FLAG", "NAMES"), Kind.TECHNIQUE)
    assert kinds == tunables | techniques | {"_NEVER": Kind.FACT}


def test_values_and_descriptions(constants: dict[str, Constant]) -> None:
    assert [constants[name].value for name in ("STEPS", "_SHARE", "_BOUNDS", "_TWICE")] == [16, 0.5, (1.0, 2.0), 1.0]
    assert constants["NAMES"].value == ("one", "two")
    assert constants["_NEVER"].text == "stands for what is forbidden."
    assert constants["STEPS"].text == constants["_SHARE"].text == "Of both."


def test_loops_read_constants_and_what_these_are_made_of(constants: dict[str, Constant]) -> None:
    assert {name for name, constant in constants.items() if constant.is_compiled} == {"_SHARE", "_TWICE"}


def test_the_digest_is_that_of_the_code_alone(tmp_path: Path) -> None:
    path = tmp_path / "formulations" / "module.py"
    path.parent.mkdir()
    digests = []
    for source in ("A = 1\n", '"""Text."""\n\nA = 1  # comment\n"""More."""\n', "A = 2\n"):
        path.write_text(source)
        digests.append(code_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_every_variant_of_the_engine_can_be_made() -> None:
    variants = [variant for variant in all_variants() if variant.overrides]
    assert len({variant.name for variant in variants}) == len(variants)
    sources: dict[str, str] = {}
    for variant in variants:
        for module, names in variant.overrides.items():
            if module not in sources:
                sources[module] = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()
            found = {each.name: each.node for each in assignments(replaced(sources[module], module, names))}
            for name, value in names.items():
                if isinstance(value, dict):
                    assert value["without"] not in members(found[name])
                else:
                    assert evaluate(found[name], {}) == value


def test_techniques_are_described() -> None:
    assert [c.name for c in inventory() if c.kind is Kind.TECHNIQUE and not c.text] == []


def test_tunables_are_described_rows_of_tables() -> None:
    tunables = [constant for constant in inventory() if constant.kind is Kind.TUNABLE]
    assert len(tunables) <= MOST_TUNABLES
    # The cache of compiled loops looks at their own file: what they read must stay in it.
    assert [c.name for c in tunables if c.module.endswith(".tunables") == c.is_compiled] == []
    assert [constant.name for constant in tunables if not constant.text] == []


def test_every_solver_of_a_lane_is_a_member() -> None:
    named = (lanes.PRICES, lanes.BRANCH_AND_CUT, lanes.PRICES_AND_BRANCH, lanes.FEASIBILITY, lanes.PARTS)
    assert {*named, lanes.PROOF, lanes.CONSTRAINTS, lanes.BLOCKS, lanes.CORES} == set(lanes.MEMBERS)

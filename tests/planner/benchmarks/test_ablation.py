"""Ablations: which variants there are, what counts as a loss, and runs that go on where they ended."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import ClassVar

import pytest

from formulations.tuning.inventory import Constant, Kind
from planner.benchmarks import bench, random_suite
from planner.benchmarks.ablation import (
    AblationError,
    AblationRun,
    Instances,
    Variant,
    ablate,
    all_variants,
    run,
    selected,
    together,
    verdicts_of,
)
from planner.benchmarks.ablation.results import (
    FAILED,
    LOSES_NOTHING,
    AblationResult,
    Outcome,
    Pair,
    Summary,
    load_pairs,
    load_verdicts,
    summarize,
)
from planner.benchmarks.ablation.variants import CONTROL, scaled

FLAG = Constant(Kind.TECHNIQUE, "formulations.solvers.a", "_FLAG", 1, True, "", is_compiled=False)
NAMES = Constant(Kind.TECHNIQUE, "formulations.solvers.a", "NAMES", 2, ("one", "two"), "", is_compiled=False)
STEPS = Constant(Kind.TUNABLE, "formulations.solvers.b", "_STEPS", 1, 5, "", is_compiled=True)
ONE = Constant(Kind.TUNABLE, "formulations.solvers.b", "ONE", 2, 1, "", is_compiled=False)
FACT = Constant(Kind.FACT, "formulations.solvers.b", "NEVER", 3, 1e300, "", is_compiled=False)
VARIANTS = all_variants([STEPS, FLAG, ONE, NAMES, FACT])


def names(variants: list[Variant]) -> list[str]:
    return [variant.name for variant in variants]


def test_variants_of_techniques_come_first() -> None:
    assert names(VARIANTS) == [
        "control",
        "solvers.a:_FLAG=off",
        "solvers.a:NAMES-one",
        "solvers.a:NAMES-two",
        "solvers.b:_STEPS*0.5",
        "solvers.b:_STEPS*2",
        "solvers.b:ONE*2",
    ]
    assert VARIANTS[2].overrides == {"formulations.solvers.a": {"NAMES": {"without": "one"}}}
    assert [variant.is_compiled for variant in VARIANTS] == [False, False, False, False, True, True, False]


@pytest.mark.parametrize(
    ("value", "half", "double"),
    [(5, 2, 10), (1, 1, 2), (0, 0, 0), (0.3, 0.15, 0.6), ((1, (2, 0.5)), (1, (1, 0.25)), (2, (4, 1.0)))],
)
def test_numbers_are_halved_and_doubled(value: object, half: object, double: object) -> None:
    assert (scaled(value, 0.5), scaled(value, 2.0)) == (half, double)


def test_large_integers_stay_exact() -> None:
    assert scaled((1 << 62) + 2, 0.5) == (1 << 61) + 1


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("techniques", 3),
        ("tunables", 3),
        ("one", 1),
        ("STEPS", 2),
        ("_STEPS", 2),
        ("solvers.b:ONE*2", 1),
        ("*STEPS", 2),
        ("solvers.a:*", 3),
        ("control", 0),
    ],
)
def test_selection(only: str, count: int) -> None:
    found = selected(VARIANTS, [only])
    assert found[0] == CONTROL
    assert len(found) == 1 + count


def test_tunables_are_halved_and_doubled_together() -> None:
    control, half, double = together(VARIANTS, ["solvers.b:*"])
    assert (control, half.name) == (CONTROL, "solvers.b:* together*0.5")
    assert half.overrides == {"formulations.solvers.b": {"_STEPS": 2}}
    assert double.overrides == {"formulations.solvers.b": {"_STEPS": 10, "ONE": 2}}
    assert half.is_compiled
    assert double.is_compiled
    assert [variant.name for variant in together(VARIANTS, ["ONE"])] == ["control", "ONE together*2"]


def test_verdicts_of_a_constant_are_its_own_and_those_of_its_table() -> None:
    verdicts = {
        "solvers.b:_STEPS*2": "slow",
        "solvers.b:ONE*2": "dear",
        "solvers.b:* together*0.5": LOSES_NOTHING,
        "solvers.a:NAMES-one": "infeasible",
    }
    assert verdicts_of(STEPS, verdicts) == ["*2: slow", f"with its table *0.5: {LOSES_NOTHING}"]
    assert verdicts_of(NAMES, verdicts) == ["-one: infeasible"]
    assert verdicts_of(FLAG, verdicts) == []


def test_the_last_version_of_the_code_has_the_verdict(tmp_path: Path) -> None:
    good, bad = Outcome("optimal", 10, 10, 0.0, 1.0), Outcome("feasible", 11, 10, 0.1, 1.0)
    pairs = [
        Pair("old", "a", "one", 0, None, 0, good, bad),
        Pair("old", "b", "one", 0, None, 0, good, bad),
        Pair("new", "a", "one", 0, None, 0, good, good),
    ]
    path = tmp_path / "ablation.json"
    AblationResult(tuple(pairs), "new").save(path)
    assert load_verdicts(path) == {"a": LOSES_NOTHING, "b": "loses 10.000 % of objective on one"}
    assert [each["code"] for each in json.loads(path.read_text())["summary"]] == ["old", "old", "new"]


def test_verdicts_need_an_ablation(tmp_path: Path) -> None:
    with pytest.raises(AblationError, match="run one with --json first"):
        load_verdicts(tmp_path / "absent.json")


def test_techniques_are_not_halved() -> None:
    with pytest.raises(AblationError, match=r"solvers\.a:_FLAG=off is a technique"):
        together(VARIANTS, ["solvers.b:*", "FLAG"])


def test_what_is_no_variant_is_named() -> None:
    with pytest.raises(AblationError, match="'three' is no technique"):
        selected(VARIANTS, ["one", "three"])


def solved(objective: int | None = 10_000, bound: int | None = 9_000, seconds: float = 1.0) -> Outcome:
    return Outcome("feasible" if objective else "no_solution", objective, bound, None, seconds)


def pair(before: Outcome, after: Outcome, instance: str = "a", repeat: int = 0) -> Pair:
    return Pair("code", "variant", instance, repeat, 1.0, 0, before, after)


def summary(*pairs: Pair) -> Summary:
    return summarize("variant", pairs)


@pytest.mark.parametrize(
    ("after", "objective", "bound", "time", "verdict"),
    [
        (solved(), 0.0, 0.0, 1.0, LOSES_NOTHING),
        (solved(10_002), 0.02, 0.0, 1.0, LOSES_NOTHING),
        (solved(10_003), 0.03, 0.0, 1.0, "loses 0.030 % of objective on a"),
        (solved(9_000), -10.0, 0.0, 1.0, LOSES_NOTHING),
        (solved(bound=8_000), 0.0, 10.0, 1.0, "loses 10.000 % of bound on a"),
        (solved(seconds=1.04), 0.0, 0.0, 1.0, LOSES_NOTHING),
        (solved(seconds=1.2), 0.0, 0.0, 1.2, "loses 1.20 times the time on a"),
        (solved(None), math.inf, 0.0, 1.0, "loses the assignment on a"),
        (solved(bound=None), 0.0, math.inf, 1.0, "loses the bound or proof on a"),
    ],
)
def test_losses_of_one_instance(after: Outcome, objective: float, bound: float, time: float, verdict: str) -> None:
    found = summary(pair(solved(), after))
    losses = found.objective_percent, found.bound_percent, found.time_worst
    assert losses == pytest.approx((objective, bound, time))
    assert found.verdict == verdict
    assert found.loses_nothing == (verdict == LOSES_NOTHING)


def test_a_proof_of_infeasibility_counts_as_a_bound() -> None:
    proof, doubt = (Outcome(status, None, None, None, 1.0) for status in ("infeasible", "infeasible_unconfirmed"))
    assert summary(pair(proof, proof)).loses_nothing
    assert summary(pair(proof, doubt)).bound_percent == math.inf
    assert summary(pair(doubt, proof)).loses_nothing


def test_short_differences_of_time_are_noise() -> None:
    assert summary(pair(solved(seconds=0.05), solved(seconds=0.09))).time_worst == 1.0


def test_the_worst_instance_counts_and_medians_of_repeats() -> None:
    slow = [pair(solved(), solved(seconds=t), "b", k) for k, t in enumerate((1.0, 9.0, 3.0))]
    found = summary(pair(solved(), solved()), *slow)
    assert (found.instances, found.time_worst, found.time_median) == (2, 3.0, 2.0)
    assert found.verdict == "loses 3.00 times the time on b"


def test_what_the_baseline_loses_against_itself_is_no_loss() -> None:
    """In the pairs of another variant the baseline itself was dearer, weaker or slower."""
    alone = pair(solved(), solved(10_100, 8_500, 2.0))
    noise = pair(solved(10_200, 8_400, 3.0), solved())
    elsewhere = pair(solved(10_200, 8_400, 3.0), solved(), instance="b")
    assert summarize("variant", [alone], [noise]).verdict == LOSES_NOTHING
    assert not summarize("variant", [alone], [elsewhere]).loses_nothing
    assert summarize("variant", [alone], [noise]).objective_percent == 1.0


def test_a_process_that_ends_is_a_loss() -> None:
    found = summary(pair(solved(), Outcome(FAILED, None, None, None, 0.0, "it ended")))
    assert found.verdict == "fails on a: it ended; loses the assignment on a; the bound or proof on a"


class FakeEngine:
    """Solves at once, and is counted."""

    names = ("a", "b")
    solves: ClassVar[list[tuple[str, str]]] = []
    interrupts_after = 10**6

    def __init__(self, variant: Variant, *_: object) -> None:
        self.variant = variant

    def solve(self, name: str) -> Outcome:
        if len(self.solves) >= self.interrupts_after:
            raise KeyboardInterrupt
        if self.variant.name.endswith("-one"):
            raise run.EngineError("gone")
        self.solves.append((self.variant.name, name))
        return solved()

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setattr(run, "_Engine", FakeEngine)
    monkeypatch.setattr(run, "code_digest", lambda: "code")
    monkeypatch.setattr(FakeEngine, "solves", [])
    return FakeEngine


def test_baseline_and_variant_take_turns(engine: type[FakeEngine]) -> None:
    ablate(VARIANTS[:1], AblationRun(repeats=2))
    assert engine.solves == [
        ("baseline", "a"),
        ("control", "a"),
        ("control", "b"),
        ("baseline", "b"),
        ("baseline", "a"),
        ("control", "a"),
        ("control", "b"),
        ("baseline", "b"),
    ]


def test_a_few_variants_share_a_solve_of_the_baseline(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "VARIANTS_A_BASELINE", 2)
    first, second, third, *_ = (variant.name for variant in VARIANTS)
    assert len(ablate(VARIANTS[:3], AblationRun()).pairs) == 6
    assert engine.solves == [
        ("baseline", "a"),
        (first, "a"),
        (second, "a"),
        (first, "b"),
        (second, "b"),
        ("baseline", "b"),
        ("baseline", "a"),
        ("baseline", "b"),
    ]
    assert third.endswith("-one"), "its process does not start"


def test_a_run_goes_on_where_it_was_interrupted(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = AblationRun(path=tmp_path / "rows.json")
    monkeypatch.setattr(engine, "interrupts_after", 5)
    first = ablate(VARIANTS[:2], wanted)
    assert (first.interrupted, len(first.pairs)) == (True, 2)
    assert load_pairs(tmp_path / "rows.json") == first.pairs
    monkeypatch.setattr(engine, "interrupts_after", 10**6)
    second = ablate(VARIANTS[:2], wanted)
    assert (second.interrupted, len(second.pairs), len(engine.solves)) == (False, 4, 8)
    assert len(ablate(VARIANTS[:2], wanted).pairs) == 4
    assert len(engine.solves) == 8


def test_another_version_of_the_code_is_solved_again(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = AblationRun(path=tmp_path / "rows.json")
    ablate(VARIANTS[:1], wanted)
    monkeypatch.setattr(run, "code_digest", lambda: "new")
    result = ablate(VARIANTS[:1], wanted)
    assert len(result.pairs) == 4
    assert [each.instances for each in result.summaries()] == [2]
    assert len(engine.solves) == 8


def test_a_variant_whose_process_ends_does_not_end_the_run(engine: type[FakeEngine]) -> None:
    result = ablate(VARIANTS[:4], AblationRun())
    assert [each.verdict[:11] for each in result.summaries()] == ["loses nothi"] * 2 + ["fails on a:"] + ["loses nothi"]


@pytest.mark.parametrize("text", ["{", "[]", '{"pairs": [{}]}'])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(AblationError, match="holds no ablation"):
        load_pairs(path)


def test_instances_that_do_not_exist_are_refused_early() -> None:
    with pytest.raises(AblationError, match="'giant' is no size"):
        Instances(sizes=("giant",)).check()
    with pytest.raises(AblationError, match="'moon' is no instance"):
        Instances(only=("moon",)).check()
    with pytest.raises(AblationError, match="'osdp' is no suite"):
        Instances(suites=("osdp",)).check()


@pytest.mark.slow
def test_rows_of_the_baseline_are_those_of_a_benchmark(tmp_path: Path) -> None:
    name, seconds = "trees-small-0", 5.0
    only = ["highs"]
    wanted = AblationRun(Instances(only=(name,), time_limit=seconds), path=tmp_path / "rows.json")
    result = ablate(selected(all_variants(), only), wanted)
    rows = bench(random_suite(["small"]), ["portfolio"], time_limit=seconds).rows
    row = next(row for row in rows if (row.instance, row.solver) == (name, "portfolio"))
    assert [pair.variant for pair in result.pairs] == ["control", "solvers.running.lanes:MEMBERS-highs"]
    for each in result.pairs:
        found = each.baseline
        assert (found.status, found.objective, found.bound) == (str(row.status), row.objective, row.bound)
    document = json.loads((tmp_path / "rows.json").read_text())
    assert [each["variant"] for each in document["summary"]] == [pair.variant for pair in result.pairs]

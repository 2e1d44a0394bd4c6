"""The commands that explore a step: they write the plans that they find, and refuse what makes no sense."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest
from support.steps.planned_steps import configuration_file

from planner.layers.plan.document import load_layer_plan
from planner.plan.document import load_plan
from runtime.commands.asked import OF_THE_PLAN
from runtime.commands.explore import price
from runtime.commands.options import as_command

STEP = [
    f"hf:{configuration_file('gpt2')}",
    *("--cluster", "a100-8-nvlink", "--layers", "1", "--seq", "16", "--dropout", "0"),
    *("--solver", "lagrangian", "--time-limit", "10"),
]
OF_LAYERS = ["plan", "hf:gpt2", "--mesh", "2", "--out", "p.json", "--model-formulation", "galvatron"]
LAYER_PLAN = Path(__file__).parents[2] / "fixtures" / "plans" / "galvatron.json"


def test_the_best_mesh_is_written_and_compared(meshwright, tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    outcome = meshwright("best-mesh", *STEP, "--batch", "2", "--ranks", "2", "--out", path, "--json", "-")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    plan = load_plan(path)
    assert (found["mesh"], found["plan"]["mesh"], plan.decision.options.mesh) == ([2], [2], (2,))
    assert found["plan"]["objective_seconds"] == plan.objective_seconds
    assert [row["candidate"] for row in found["rows"]] == ["2"]
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "best.json").write_text(path.read_text())
    table = meshwright("compare", path, tmp_path / "copies" / "best.json", LAYER_PLAN).out
    assert table.startswith("3 plans of ")
    for name in (str(path), str(tmp_path / "copies" / "best.json"), "galvatron.json"):
        assert name in table
    assert "the plans are of different steps" in table


def test_the_largest_batch_is_a_plan_of_it(meshwright, tmp_path: Path) -> None:
    path = tmp_path / "largest.json"
    outcome = meshwright("largest-batch", *STEP, "--mesh", "1", "--multiple", "2", "--most", "4", "--out", path)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("batch 4 fits into 40.00 GiB")
    assert load_plan(path).decision.model.batch == 4


def test_a_change_is_planned_beside_the_present(meshwright, tmp_path: Path) -> None:
    path = tmp_path / "then.json"
    changes = ["--bandwidth", "2", "--to-memory", "20GiB"]
    outcome = meshwright("whatif", *STEP, "--batch", "2", "--mesh", "2", *changes, "--out", path)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("2 x bandwidth, memory 20.00 GiB: ")
    assert load_plan(path).decision.options.memory_bytes == 20 * 2**30


def test_memory_is_priced_at_the_limits_that_are_asked_for(meshwright) -> None:
    outcome = meshwright("price", *STEP, "--batch", "2", "--mesh", "1", "--at", "3GiB", "--at", "4GiB", "--json", "-")
    assert [row["memory_bytes"] for row in json.loads(outcome.out)["rows"]] == [3 * 2**30, 4 * 2**30]


def test_a_finished_plan_is_asked_about(meshwright, tmp_path: Path) -> None:
    path, then = tmp_path / "plan.json", tmp_path / "then.json"
    made = meshwright("plan", *STEP, "--batch", "2", "--mesh", "2", "--out", path, "--json", "-")
    assert made.code == 0, made.err
    quick = ["--solver", "lagrangian", "--time-limit", "5"]
    pin = ["--pin", "*.mlp=recompute"]
    outcome = meshwright("whatif", path, "--bandwidth", "0.5", *pin, *quick, "--out", then, "--json", "-")
    assert outcome.code == 0, outcome.err
    assert load_plan(then).decision.options.pins[0].decision == "recompute"
    before = json.loads(outcome.out)["rows"][0]
    assert before["seconds"] > json.loads(made.out)["objective_seconds"]
    assert before["recomputed"] > 0
    outcome = meshwright("whatif", path, *pin, *quick, "--out", then, "--json", "-")
    assert outcome.code == 0, outcome.err
    free, pinned = json.loads(outcome.out)["rows"]
    assert free["seconds"] == json.loads(made.out)["objective_seconds"] <= pinned["seconds"]
    assert (free["recomputed"], pinned["recomputed"]) == (0, before["recomputed"])
    assert load_plan(then).decision.options.pins[0].target == "*.mlp"
    loose = tmp_path / "loose.json"
    outcome = meshwright("whatif", then, "--unpin", "*.mlp", *quick, "--out", loose, "--json", "-")
    assert outcome.code == 0, outcome.err
    assert load_plan(loose).decision.options.pins == ()
    assert json.loads(outcome.out)["rows"][1]["seconds"] <= pinned["seconds"]
    refused = meshwright("whatif", then, "--unpin", "lm_head")
    assert (refused.code, "'lm_head' is not pinned; pinned are: '*.mlp'" in refused.err) == (2, True)
    outcome = meshwright("price", path, *quick, "--at", "40GiB", "--json", "-")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["rows"][0]["seconds"] == json.loads(made.out)["objective_seconds"]
    for option in (["--batch", "2"], ["--mesh", "2"], ["--memory", "4GiB"], ["--grad-accum", "2"]):
        refused = meshwright("price", path, *option)
        assert refused.code == 2
        assert f"{option[0]}: {path} is a plan, which says that itself; leave it out" in refused.err


def test_options_that_a_plan_answers_are_options_of_the_commands() -> None:
    names = signature(as_command(price)).parameters
    assert set(OF_THE_PLAN) <= set(names)
    assert {name for name in names if name not in OF_THE_PLAN} == {
        *("context", "model", "cluster", "seed", "solver", "workers", "time_limit", "gap"),
        *("at", "pin", "forbid", "allow_code", "json_file"),
    }


def test_layers_are_explored_too(meshwright, tmp_path: Path) -> None:
    layers = [*STEP[:3], "--dropout", "0", "--layers", "2", "--seq", "16", "--batch", "2", "--mesh", "2"]
    layers += ["--model-formulation", "osdp"]
    outcome = meshwright("price", *layers, "--at", "3GiB", "--at", "4GiB", "--json", "-")
    assert outcome.code == 0, outcome.err
    assert [row["memory_bytes"] for row in json.loads(outcome.out)["rows"]] == [3 * 2**30, 4 * 2**30]
    path = tmp_path / "then.json"
    outcome = meshwright("whatif", *layers, "--bandwidth", "2", "--out", path, "--json", "-")
    assert outcome.code == 0, outcome.err
    plan = load_layer_plan(path)
    assert "GiB for tensors, beside a reserve of 2.00 GiB; predicted peaks" in plan.summary()
    assert json.loads(outcome.out)["plan"]["objective_seconds"] == plan.objective_seconds


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["whatif", "hf:gpt2", "--mesh", "2"], "whatif: nothing changes; give a change, such as --bandwidth 2"),
        (["whatif", "hf:gpt2", "--mesh", "2", "--unpin", "*.mlp"], "--unpin *.mlp: pins of a plan file are taken back"),
        (["whatif", "hf:gpt2", "--mesh", "2", "--bandwidth", "0"], "bandwidth 0.0: give a factor above 0"),
        (["whatif", "hf:gpt2", "--mesh", "2", "--to-memory", "much"], "--to-memory: 'much' is no size"),
        (["price", "hf:gpt2", "--mesh", "2", "--at", "much"], "--at: 'much' is no size"),
        (["price", "hf:gpt2"], "--mesh: give the ranks along each mesh axis of hf:gpt2, such as 2 or 2x4"),
        (["price", "absent.json"], "MODEL|PLAN: there is no plan file 'absent.json'"),
        (["price", "hf:gpt2", "--mesh", "2", "--pin", "mlp"], "--pin: 'mlp' is no pin"),
        (["price", "hf:gpt2", "--mesh", "2", "--grad-accum", "3"], "--grad-accum 3: it does not divide --batch 8"),
        (["best-mesh", "hf:gpt2", "--ranks", "2", "--out", "absent/p.json"], "--out: the folder 'absent'"),
        (["largest-batch", "hf:gpt2", "--mesh", "0"], "--mesh: '0' is no mesh"),
        (["compare", "absent.json"], "PLAN: there is no file 'absent.json'"),
        *(
            (
                ["plan", "hf:gpt2", "--mesh", "2", "--out", "p.json", "--model-formulation", "galvatron", *option],
                message,
            )
            for option, message in [
                (["--solver", "highs"], "--solver highs: galvatron plans layers by a search of its own; leave it out"),
                (["--solver", "portfolio"], "--solver portfolio: galvatron plans layers"),
                (["--gap", "0.1"], "--gap 0.1: galvatron plans layers"),
                (["--workers", "1"], "--workers 1: galvatron plans layers"),
                (["--host-memory", "1GiB"], "--host-memory 1GiB: galvatron plans layers"),
            ]
        ),
        (
            ["best-mesh", "hf:gpt2", "--ranks", "2", "--model-formulation", "osdp", "--gap", "0.1"],
            "--gap 0.1: osdp plans layers",
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    meshwright, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = meshwright(*arguments)
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1
    assert words in outcome.err


def test_an_interrupted_command_says_so(meshwright, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.layers.plan.document.is_layer_plan", interrupted)
    outcome = meshwright("compare", LAYER_PLAN)
    assert (outcome.code, outcome.err) == (130, "meshwright: interrupted\n")

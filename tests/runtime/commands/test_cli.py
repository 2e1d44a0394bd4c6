"""The command line: what it writes, and that bad input is one clear line and code 2."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from support.processes.command_line import TINY_PROBLEM, Outcome
from support.steps.planned_steps import configuration_file

from formulations.solvers.processes.worker import WorkerStartError
from formulations.solvers.running.ledger import SolverContradiction
from planner.graph.optimizers import OPTIMIZERS
from planner.layers.planning import LAYER_FORMULATIONS
from planner.plan.document import load_plan
from planner.session.formulations import FORMULATIONS
from runtime import rank_main
from runtime.commands import main as cli
from runtime.commands import options as cli_options
from runtime.job.rank_job import RunOptions

TINY = ["hf:gpt2", "--cluster", "a100-8-nvlink", "--layers", "1", "--batch", "2", "--seq", "16", "--dropout", "0"]


def refused(outcome: Outcome, *words: str) -> None:
    """Hold an outcome to the promise about bad input: code 2, one line on stderr, all the words in it."""
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("meshwright: ")
    for word in words:
        assert word in outcome.err
    assert "Traceback" not in outcome.err


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    small = [f"hf:{configuration_file('gpt2')}", *TINY[1:]]
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", *small, "--mesh", "2", "--memory", "40GiB", "--time-limit", "10", "--out", str(path)])
    assert left.value.code is None or left.value.code == 0
    return path


def test_version(meshwright) -> None:
    outcome = meshwright("--version")
    assert (outcome.code, outcome.out) == (0, f"meshwright {version('meshwright')}\n")


def test_every_command_has_help_with_examples_that_it_accepts(meshwright) -> None:
    commands = typer.main.get_command(cli.app).commands
    assert set(commands) == {name for name, _ in cli.COMMANDS.values()}
    for name, examples in cli.COMMANDS.values():
        outcome = meshwright(*name.split(), "--help")
        assert outcome.code == 0
        words = " ".join(outcome.out.split())
        for arguments in examples:
            assert " ".join(f"meshwright {name} {arguments}".split()[:4]) in words
            commands[name].make_context(name, shlex.split(arguments))


def test_help_takes_half_a_second_of_processor_time() -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "runtime.commands.main", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) <= 0.5  # beside other processes caches are cold


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    words = {"bash": {"COMP_WORDS": "meshwright pl", "COMP_CWORD": "1"}}
    environment = words.get(shell, {"_TYPER_COMPLETE_ARGS": "meshwright pl", "_TYPER_COMPLETE_FISH_ACTION": "get-args"})
    asked = "import sys; sys.argv = ['meshwright']; from runtime.commands.main import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", asked],
        env=os.environ | environment | {"_MESHWRIGHT_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
    )
    assert "plan" in found.stdout
    assert "bench" not in found.stdout


def test_the_help_names_what_may_be_chosen_and_imports_nothing_heavy(meshwright) -> None:
    assert cli_options.FORMULATIONS == FORMULATIONS
    assert tuple(LAYER_FORMULATIONS) == cli_options.LAYER_FORMULATIONS
    words = re.sub(r"[│\s]+", " ", meshwright("plan", "--help").out)
    for name in (*FORMULATIONS, *LAYER_FORMULATIONS, *OPTIMIZERS):
        assert re.search(rf"\b{name}\b", words)
    heavy = {"torch", "numpy", "formulations.problem.strategy_problem"}
    asked = f"import sys, runtime.commands.main; print({heavy!r} & sys.modules.keys())"
    imported = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert imported.stdout.strip() == "set()"


def test_without_a_command_the_help_is_printed_and_the_code_says_so(meshwright) -> None:
    outcome = meshwright()
    assert outcome.code == 2
    assert "calibrate" in outcome.out
    assert outcome.err == ""


@pytest.mark.slow_cases("arguments11-words11")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plna"], ["plna"]),
        (["plan"], ["MODEL"]),
        (["plan", *TINY, "--mesh", "2"], ["--out"]),
        (["plan", *TINY, "--mesh", "2x", "--out", "p.json"], ["--mesh", "2x4"]),
        (["plan", *TINY, "--mesh", "2", "--memory", "4G", "--out", "p.json"], ["--memory", "4GiB"]),
        (["plan", *TINY, "--mesh", "2", "--host-memory", "much", "--out", "p.json"], ["--host-memory", "much", "4GiB"]),
        (["plan", *TINY, "--mesh", "2", "--host-memory", "0", "--out", "p.json"], ["--host-memory", "one byte"]),
        (["plan", *TINY, "--mesh", "2", "--out", "absent/p.json"], ["--out", "absent"]),
        (["plan", *TINY, "--mesh", "2", "--time-limit", "-1", "--out", "p.json"], ["--time-limit"]),
        (["plan", *TINY, "--mesh", "2", "--grad-accum", "4", "--out", "p.json"], ["--grad-accum", "4"]),
        (["plan", *TINY, "--mesh", "2", "--solver", "oracle", "--out", "p.json"], ["oracle", "lagrangian"]),
        (["plan", *TINY, "--mesh", "2", "--model-formulation", "alpa", "--out", "p.json"], ["alpa", "sharding"]),
        (["plan", *TINY, "--mesh", "2", "--memory", "1GiB", "--out", "p.json"], ["memory", "reserve"]),
        (["fits", *TINY, "--mesh", "2", "--memory", "1GiB"], ["memory", "reserve"]),
        (["fits", *TINY, "--mesh", "3x3"], ["3x3", "a100-8-nvlink"]),
        (["fits", *TINY, "--mesh", "2", "--optimizer", "lion"], ["lion", "adamw, sgd, sgd_momentum, adamw_mixed"]),
        (["fits", *TINY, "--mesh", "2", "--dtype", "int3"], ["int3", "float32"]),
        (["fits", *TINY, "--mesh", "2", "--reduce-dtype", "int3"], ["int3", "float32", "same"]),
        (["fits", *TINY, "--mesh", "2", "--seed", "-4"], ["seed", "-4"]),
        (["fits", "hf:no-such-model", "--mesh", "2", "--cluster", "a100-8-nvlink"], ["no-such-model", "gpt2"]),
        (["fits", "no-colon", "--mesh", "2", "--cluster", "a100-8-nvlink"], ["no-colon", "hf:NAME"]),
        (["fits", "nowhere:model", "--mesh", "2", "--cluster", "a100-8-nvlink"], ["nowhere"]),
        (["fits", "math:nothing", "--mesh", "2", "--cluster", "a100-8-nvlink"], ["math", "nothing"]),
        (["fits", "hf:gpt2", "--mesh", "2", "--cluster", "cray"], ["cray", "a100-8-nvlink"]),
        (["fits", "hf:gpt2", "--mesh", "2", "--cluster", "absent.json"], ["absent.json"]),
        (["run", "absent.json"], ["PLAN", "absent.json"]),
        (["explain", "absent.json"], ["PLAN", "absent.json"]),
        (["solve", "absent.json", "--out", "s.json"], ["PROBLEM", "absent.json"]),
        (["calibrate", "--ranks", "1"], ["--ranks"]),
        (["calibrate", "--device", "tpu"], ["--device", "cpu or cuda"]),
        (["calibrate", "--out", "/proc/c.json"], ["--out", "/proc"]),
        (["calibrate", "--model", "hf:gpt2"], ["--model", "--mesh"]),
        (["validate"], ["PLAN", "--sample"]),
        (["validate", "absent.json"], ["PLAN", "absent.json"]),
        (["validate", "--sample", "3"], ["--sample", "--model", "--mesh"]),
        (["validate", "--model", "hf:gpt2", "--mesh", "2", "--sample", "0"], ["--sample"]),
        (["validate", "--sample", "1", "--model", "hf:gpt2", "--mesh", "2", "--device", "tpu"], ["tpu", "cpu or cuda"]),
        (["calibrate", "--mesh", "2"], ["--mesh", "--model"]),
        (["calibrate", "--model", "hf:gpt2", "--mesh", "2", "--memory", "4G"], ["--memory", "4GiB"]),
    ],
)
def test_bad_input_is_one_clear_line(
    meshwright, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(meshwright(*arguments), *words)


def test_an_error_of_another_library_is_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> int:
        raise ValueError("cannot reshape tensor")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(ValueError, match="cannot reshape"):
        cli.main([])

    def broken_kernel(*_: object, **__: object) -> int:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(cli, "app", broken_kernel)
    with pytest.raises(RuntimeError, match="size mismatch"):
        cli.main([])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SolverContradiction("bound 5 is above objective 4"), "bound 5 is above objective 4"),
        (WorkerStartError("no worker started"), "no worker started"),
        (PermissionError(13, "Permission denied", "/root/s.json"), "/root/s.json: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_failing_solver_or_file_is_one_clear_line(
    meshwright, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def failing(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(cli, "app", failing)
    refused(meshwright(), words)


def test_an_interrupt_leaves_with_130(meshwright, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    outcome = meshwright()
    assert (outcome.code, outcome.err) == (130, "meshwright: interrupted\n")


@pytest.mark.slow
def test_an_interrupt_that_a_destructor_swallows_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    former = sys.unraisablehook
    monkeypatch.setattr(sys, "unraisablehook", former)

    class Swallowing:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    cli.repeat_lost_interrupts()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        del_me = Swallowing()
        del del_me
        time.sleep(5)


def test_a_limit_that_no_plan_meets_names_one_that_is_met(meshwright, tmp_path: Path) -> None:
    outcome = meshwright("plan", *TINY, "--mesh", "2", "--memory", "2.2GiB", "--out", tmp_path / "p.json")
    refused(outcome, "memory")
    assert re.search(r"\d+(\.\d+)? (MiB|GiB)", outcome.err)
    assert not (tmp_path / "p.json").exists()


def test_fits_prints_what_fits(meshwright) -> None:
    outcome = meshwright("fits", *TINY, "--mesh", "2", "--memory", "40GiB")
    assert outcome.code == 0
    assert outcome.out.count("fits") >= 4
    assert "does not fit" in meshwright("fits", *TINY, "--mesh", "2", "--memory", "2100MiB").out


def test_a_limit_on_tensors_is_beside_the_reserve(meshwright) -> None:
    with_reserve = meshwright("fits", *TINY, "--mesh", "2", "--memory", "2100MiB").out
    assert "52.00 MiB for tensors, beside a reserve of 2.00 GiB" in " ".join(with_reserve.split())
    assert meshwright("fits", *TINY, "--mesh", "2", "--tensor-memory", "52MiB").out == with_reserve
    both = meshwright("fits", *TINY, "--mesh", "2", "--memory", "4GiB", "--tensor-memory", "2GiB")
    refused(both, "--tensor-memory", "2GiB", "--memory 4GiB")


def test_plan_and_explain(meshwright, plan_file: Path) -> None:
    decision = json.loads(plan_file.read_text())["decision"]
    assert decision["options"]["mesh"] == [2]
    assert decision["model"]["layers"] == 1
    outcome = meshwright("explain", plan_file, "--time-limit", "2")
    assert outcome.code == 0
    for heading in ("Costliest reshardings", "Recomputed", "Alive at the peak", "Price of memory"):
        assert heading in outcome.out


def test_a_plan_keeps_its_pins(meshwright, tmp_path: Path) -> None:
    small = [f"hf:{configuration_file('gpt2')}", *TINY[1:], "--mesh", "2", "--time-limit", "5"]
    path = tmp_path / "pinned.json"
    pins = ["--pin", "transformer.h.0.mlp=recompute", "--forbid", "transformer.wpe.weight=R"]
    made = meshwright("plan", *small, *pins, "--out", str(path))
    assert made.code == 0, made.err
    assert "pinned                transformer.h.0.mlp recompute" in made.out
    options = load_plan(path).decision.options
    assert [str(pin) for pin in options.pins] == ["transformer.h.0.mlp recompute", "transformer.wpe.weight not R"]
    refused(meshwright("plan", *small, "--pin", "mlp", "--out", str(path)), "--pin", "'mlp'", "PART=DECISION")
    refused(meshwright("plan", *small, "--pin", "a.b=keep", "--out", str(path)), "'a.b' names no operator")
    of_layers = [*small, "--model-formulation", "osdp", "--out", str(path), "--pin"]
    refused(meshwright("plan", *of_layers, "a=keep"), "'a' names no layer of this step")
    made = meshwright("plan", *of_layers, "transformer.h.0.mlp=sharding=zero3")
    assert made.code == 0, made.err
    assert "pinned: transformer.h.0.mlp sharding=zero3" in made.out


def test_a_rank_of_a_job_needs_no_plan_file_and_ends_with_the_verdict_of_the_job(
    meshwright, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[RunOptions] = []

    def run_rank(options: RunOptions, show: object) -> int:
        started.append(options)
        return 1

    monkeypatch.setattr(rank_main, "run_rank", run_rank)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    there = tmp_path / "on_rank_0"
    outputs = ("--report", there / "r.json", "--profile", there / "t.json")
    outcome = meshwright("run", tmp_path / "on_rank_0.json", *outputs, "--check")
    assert (outcome.code, outcome.err) == (1, "")
    assert started[0].plan == tmp_path / "on_rank_0.json"
    assert started[0].check
    assert started[0].profile


def test_an_edited_plan_is_refused(meshwright, plan_file: Path, tmp_path: Path) -> None:
    document = json.loads(plan_file.read_text())
    document["decision"]["options"]["memory_bytes"] += 1
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(document))
    for command in ("run", "explain"):
        refused(meshwright(command, edited), "edited.json", "digest")
    refused(meshwright("run", plan_file, "--profile", tmp_path / "absent" / "t.json"), "--profile", "absent")
    unknown = ("--profile", tmp_path / "t.json", "--cluster", "tpu")
    refused(meshwright("run", plan_file, *unknown), "--profile", "--cluster", "tpu")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 99}', '{"version": 2}', "\x00\x01"])
def test_what_is_no_plan_is_refused(meshwright, tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    refused(meshwright("explain", path), "broken.json")


@pytest.mark.parametrize("packed", [False, True])
def test_solve_writes_what_the_contest_and_the_bench_read(meshwright, tmp_path: Path, packed: bool) -> None:
    problem = tmp_path / ("tiny.json.gz" if packed else "tiny.json")
    text = json.dumps(TINY_PROBLEM).encode()
    problem.write_bytes(gzip.compress(text) if packed else text)
    solution = tmp_path / "solution.json"
    outcome = meshwright("solve", problem, "--solver", "brute_force", "--time-limit", "10", "--out", solution)
    assert outcome.code == 0, outcome.err
    found = json.loads(solution.read_text())
    # Of the four assignments (0, 0) needs 11 and (0, 1) needs 15 at time 1; (1, 0) costs 15 and (1, 1) costs 10.
    assert found["choices"] == [1, 1]
    assert (found["status"], found["objective"], found["bound"], found["gap"]) == ("optimal", 10, 10, 0.0)
    assert {"seconds", "solver", "peak_usage"} <= found.keys()


def test_a_solver_that_does_not_exist_is_refused(meshwright, tmp_path: Path) -> None:
    problem = tmp_path / "tiny.json"
    problem.write_text(json.dumps(TINY_PROBLEM))
    refused(meshwright("solve", problem, "--solver", "oracle", "--out", tmp_path / "s.json"), "oracle", "lagrangian")


@pytest.mark.parametrize(
    ("field", "value"),
    [("nodes", None), ("costs", [[1], [2, 3]]), ("usage_limit", -1), ("edges", {"nodes": [[0, 7]], "costs": [[1]]})],
)
def test_a_malformed_problem_is_refused(meshwright, tmp_path: Path, field: str, value: object) -> None:
    document = json.loads(json.dumps(TINY_PROBLEM))
    holder = document["problem"]["nodes"] if field == "costs" else document["problem"]
    holder[field] = value
    path = tmp_path / "malformed.json"
    path.write_text(json.dumps(document))
    refused(meshwright("solve", path, "--out", tmp_path / "s.json"), "malformed.json", field)

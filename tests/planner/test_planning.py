"""How long each stage of planning GPT-2 takes; `make bench` runs and prints them, the suite does not."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from formulations.problem.solution import SolveOptions
from formulations.solvers import solve_in_process
from planner.api import ModelReference, PlanningSession, PlanRequest

pytestmark = pytest.mark.bench

REFERENCE = ModelReference("hf:gpt2", batch=4, sequence=256, dtype="float32", seed=0, dropout=0.0)
MESHES = {"2": (2,), "2x2": (2, 2)}


@pytest.fixture(scope="module", params=MESHES.values(), ids=MESHES)
def session(request: pytest.FixtureRequest) -> PlanningSession:
    return prepared(request.param)


def prepared(mesh: tuple[int, ...]) -> PlanningSession:
    made = PlanningSession(REFERENCE, "v100-8-nvlink", mesh)
    _ = made.space
    return made


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_capture_rules_and_costs(benchmark: BenchmarkFixture, mesh: tuple[int, ...]) -> None:
    session = benchmark.pedantic(prepared, args=(mesh,), rounds=1)
    assert session.traced.graph.operators


def test_building_the_problem(benchmark: BenchmarkFixture, session: PlanningSession) -> None:
    built = benchmark.pedantic(session.problem, args=(PlanRequest(),), rounds=3)
    assert built.problem.nodes


@pytest.mark.parametrize("solver", ["greedy", "lagrangian"])
def test_solving_without_a_tight_limit(benchmark: BenchmarkFixture, session: PlanningSession, solver: str) -> None:
    problem, options = session.problem(PlanRequest()).problem, SolveOptions(time_limit=60.0)
    result = benchmark.pedantic(solve_in_process, args=(problem, solver, options), rounds=3, warmup_rounds=1)
    assert result.choices is not None


def test_schedule_and_replay(benchmark: BenchmarkFixture, session: PlanningSession) -> None:
    built = session.problem(PlanRequest())
    choices = solve_in_process(built.problem, "greedy", SolveOptions(time_limit=60.0)).choices
    assert choices is not None

    def build_and_replay() -> int:
        return len(session.replay(session.schedule(built.decode(choices))).violations)

    assert benchmark.pedantic(build_and_replay, rounds=3) == 0

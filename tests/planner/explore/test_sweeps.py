"""Sweeps: rows of a grid, kept by content, interrupted and gone on with, by several executors."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.steps.planned_steps import configuration_file, step_reference

from planner import api
from planner.explore import sweeping
from planner.explore.errors import ExploreError
from planner.explore.grid import Grid
from planner.explore.sweeping import Sweep, run_sweep
from planner.explore.warm import WarmSolver
from planner.machine.cluster import load_cluster
from planner.models.references import ModelReference
from planner.plan.document import load_plan
from planner.session import PlanningSession, PlanRequest

CLUSTER = "a100-8-nvlink"
REQUEST = PlanRequest(time_limit=20.0, workers=1)
SHORT = PlanRequest(time_limit=4.0)
GIB = 2**30


def grid(**changes) -> Grid:
    values = {
        "reference": step_reference("mlp"),
        "cluster": CLUSTER,
        "meshes": [(2,)],
        "memories": [3 * GIB, None],
        "formulations": ["sharding", "kiwi_reduced"],
        "solvers": ["lagrangian"],
        "request": REQUEST,
    }
    return Grid(**(values | changes))


@pytest.fixture
def planned(monkeypatch) -> list:
    """Cells that were planned, in order."""
    seen = []
    true_plan = sweeping.plan_cell

    def counted(cell, plan_file="", on_cell=None):
        seen.append(cell)
        return true_plan(cell, plan_file)

    monkeypatch.setattr(sweeping, "plan_cell", counted)
    return seen


def swept(folder, cells=None, **options) -> Sweep:
    with ThreadPoolExecutor(1) as executor:
        return run_sweep("mlp", list(cells or grid()), executor, folder, **options)


def test_a_short_limit_is_used_although_another_formulation_was_planned(tmp_path):
    """A plan of layouts alone is one of ``kiwi_chain`` too, but under this limit a worse one by several per cent."""
    reference = ModelReference(f"hf:{configuration_file('gpt2')}", batch=4, sequence=32, dropout=0.0)
    free = api.plan(reference, cluster=CLUSTER, mesh=(2,), formulation="sharding", time_limit=4)
    memory = int(0.8 * free.peak_bytes) + load_cluster(CLUSTER).device.reserve_bytes
    both = [
        swept(tmp_path / name, list(of))
        for name, of in (
            (
                "both",
                Grid(reference, CLUSTER, [(2,)], [memory], formulations=("sharding", "kiwi_chain"), request=SHORT),
            ),
            ("alone", Grid(reference, CLUSTER, [(2,)], [memory], formulations=("kiwi_chain",), request=SHORT)),
        )
    ]
    beside, alone = both[0].sweep_rows[1], both[1].sweep_rows[0]
    assert beside.formulation == alone.formulation == "kiwi_chain"
    for row in (beside, alone):
        assert row.seconds < both[0].sweep_rows[0].seconds


def test_an_interrupted_sweep_goes_on_without_repeating(tmp_path, planned):
    cells = list(grid())
    assert len(cells) == 4
    rows = []

    def interrupt(row):
        rows.append(row)
        if len(rows) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, cells, on_row=interrupt)
    kept = len(list(tmp_path.glob("*.json")))
    assert 2 <= kept < 4
    before = len(planned)
    whole = swept(tmp_path, cells)
    assert whole.known == kept
    assert len(planned) - before == 4 - kept
    assert len(whole.sweep_rows) == 4
    assert set(rows) <= set(whole.sweep_rows)
    again = swept(tmp_path, cells)
    assert again.sweep_rows == whole.sweep_rows
    assert again.known == 4
    assert len(planned) == before + 4 - kept


def test_a_row_whose_search_was_interrupted_is_not_kept(tmp_path, monkeypatch):
    """Searches return what they have at Ctrl-C; in the sweep's own thread it ends the sweep all the same."""
    true_plan, begun = sweeping.plan_cell, []

    def interrupted(cell, plan_file="", on_cell=None):
        begun.append(cell)
        if len(begun) == 2:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return true_plan(cell, plan_file, on_cell)

    monkeypatch.setattr(sweeping, "plan_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep("mlp", list(grid()), None, tmp_path, on_cell=lambda cell: lambda progress: None)
    assert len(begun) == 2
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_rows_are_those_of_plans_made_one_by_one(tmp_path):
    found = swept(tmp_path)
    for row, cell in zip(found.sweep_rows, grid(), strict=True):
        plan = PlanningSession(cell.reference, cell.cluster, cell.mesh).plan(cell.request)
        assert row.status == "optimal"
        assert row.seconds == plan.objective_seconds
        assert row.mesh == "x".join(map(str, cell.mesh))
        assert row.costs.endswith(" modelled")  # the cluster is a preset
        assert row.bound_seconds <= row.seconds
    best = found.best()
    assert best.seconds == min(row.seconds for row in found.sweep_rows)


def test_kept_plans_are_plan_files(tmp_path):
    found = swept(tmp_path, grid(meshes=[(2,)], memories=[None], formulations=["sharding"]), keep_plans=True)
    (row,) = found.sweep_rows
    assert load_plan(Path(row.plan_file)).digest == row.digest
    Path(row.plan_file).unlink()
    again = swept(tmp_path, grid(meshes=[(2,)], memories=[None], formulations=["sharding"]), keep_plans=True)
    assert again.known == 0, "a plan that is gone is made again"


def test_no_plan_is_a_row_with_the_reason(tmp_path):
    reserve = load_cluster(CLUSTER).device.reserve_bytes
    found = swept(tmp_path, grid(memories=[reserve + 1], meshes=[(2,), (3,)], formulations=["sharding"]))
    assert [row.status for row in found.sweep_rows] == ["no_plan", "no_plan"]
    assert "too little" in found.sweep_rows[0].reason
    assert "do not divide the 8 devices" in found.sweep_rows[1].reason
    assert found.best() is None


def test_a_digest_depends_on_all_that_a_row_depends_on(tmp_path):
    (cell,) = grid(meshes=[(2,)], memories=[None], formulations=["sharding"])
    others = [
        replace(cell, reference=replace(cell.reference, batch=8)),
        replace(cell, mesh=(4,)),
        replace(cell, optimizer="sgd"),
        replace(cell, cluster=cell.cluster.model_copy(update={"nodes": 2, "inter_node": cell.cluster.intra_node})),
        replace(cell, request=replace(cell.request, time_limit=2.0)),
        replace(cell, request=replace(cell.request, memory=GIB)),
    ]
    assert len({cell.digest(), *(other.digest() for other in others)}) == 7
    file = tmp_path / "config.json"
    file.write_text(configuration_file("gpt2").read_text())
    of_file = replace(cell, reference=replace(cell.reference, source=f"hf:{file}"))
    before = of_file.digest()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_embd": 64}))
    assert of_file.digest() != before


def test_a_digest_depends_on_the_files_of_a_solver_that_is_not_built_in(tmp_path, monkeypatch):
    (cell,) = grid(meshes=[(2,)], memories=[None], formulations=["sharding"])
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {"exe:{}": tmp_path / "executable", "own_solver_of_sweeps:solve": tmp_path / "own_solver_of_sweeps.py"}
    for name, file in files.items():
        digests = set()
        for content in ("first", "second"):
            file.write_text(f"# {content}\n")
            file.chmod(0o755)
            for solver in (name.format(file), f"large_neighbourhood:{name.format(file)}"):
                digests.add(replace(cell, request=replace(cell.request, solver=solver)).digest())
        assert len(digests) == 4
    elsewhere = replace(cell, request=replace(cell.request, solver="exe:absent-solver"))
    assert elsewhere.digest() != cell.digest()


def test_a_sweep_that_asks_for_more_is_searched_in_the_worker_that_planned_the_one_before(tmp_path, monkeypatch):
    seen, true_whole = [], WarmSolver._whole
    free = api.plan(step_reference("gpt2"), cluster=CLUSTER, mesh=(2,), formulation="sharding", solver="lagrangian")
    memory = int(0.7 * free.peak_bytes) + load_cluster(CLUSTER).device.reserve_bytes

    def counted(self, request, *rest):
        seen.append((request.time_limit, request.gap, request.seed, len(self.knowledge.solutions)))
        return true_whole(self, request, *rest)

    monkeypatch.setattr(WarmSolver, "_whole", counted)
    first = replace(SHORT, time_limit=1.0, gap=0.5, workers=1)
    asked = [first, replace(first, time_limit=2.0), replace(first, gap=0.0), replace(first, seed=1)]
    rows = []
    with ThreadPoolExecutor(1) as executor:
        for request in (*asked, first):
            cells = grid(
                reference=step_reference("gpt2"), memories=[memory], formulations=["kiwi_chain"], request=request
            )
            rows += run_sweep("gpt2", list(cells), executor, tmp_path).sweep_rows
    assert seen == [(request.time_limit, request.gap, request.seed, 0) for request in asked]
    assert rows[4] == rows[0]


@pytest.mark.slow
def test_one_process_is_the_default_and_gives_the_same_rows(tmp_path):
    cells = grid(meshes=[(2,)], memories=[None], formulations=["sharding"])
    here = swept(tmp_path / "threads", cells)
    there = run_sweep("mlp", list(cells), None, tmp_path / "process")
    same = {"planning_seconds": 0.0}
    assert [replace(row, **same) for row in here.sweep_rows] == [replace(row, **same) for row in there.sweep_rows]


def test_a_damaged_row_is_planned_again(tmp_path, planned):
    cells = grid(meshes=[(2,)], memories=[None], formulations=["sharding"])
    swept(tmp_path, cells)
    (file,) = tmp_path.glob("*.json")
    file.write_text("{}")
    assert swept(tmp_path, cells).known == 0
    assert len(planned) == 2


def test_what_is_no_grid_is_refused():
    with pytest.raises(ExploreError, match="meshes: give at least one"):
        grid(meshes=[])
    with pytest.raises(ExploreError, match="formulation 'osdb' is not known"):
        grid(formulations=["osdb"])


def test_cells_of_one_step_follow_each_other_with_most_memory_first():
    cells = list(grid(meshes=[(1,), (2,)], batches=[4, 8], memories=[GIB, None, 3 * GIB]))
    steps = [cell.step for cell in cells]
    assert len(set(steps)) == 4
    assert sum(a != b for a, b in pairwise(steps)) == 3
    assert [cell.request.memory for cell in cells[:3]] == [None, 3 * GIB, GIB]


@pytest.mark.slow
def test_a_dask_cluster_is_an_executor(tmp_path):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    cells = list(grid(request=replace(REQUEST, time_limit=60.0)))
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        found = run_sweep("mlp", cells, client.get_executor(), tmp_path)
        again = run_sweep("mlp", cells, client.get_executor(), tmp_path)
    assert [row.status for row in found.sweep_rows] == ["optimal"] * len(cells)
    assert (again.known, again.sweep_rows) == (len(cells), found.sweep_rows)

"""The suite ``osdp``: the paper's models and machines, and what its rows claim."""

from __future__ import annotations

import pytest

from formulations.osdp.scheduler import Method
from formulations.problem.solution import Status
from planner.benchmarks import bench
from planner.benchmarks.suites import SuiteError
from planner.machine.cluster import load_cluster
from planner.papers.osdp.adapter import data_parallel_machine
from planner.papers.osdp.bench import exact_plan, loss_of, osdp_suite
from planner.papers.osdp.cases import FORMULATIONS, MODELS, OsdpCase
from planner.papers.osdp.report import DEPTH_FIRST

TITAN = "titan-rtx-8-pcie"


def test_the_ring_has_the_slowest_link_of_the_machine() -> None:
    titan = data_parallel_machine(load_cluster(TITAN), 8, 10)
    assert (titan.devices, titan.latency_seconds, titan.memory_bytes) == (8, 8e-6, 10)
    assert titan.seconds_per_byte == pytest.approx(1 / 11.06e9)
    servers = data_parallel_machine(load_cluster("a100-2x8-nvlink"), 16, 10)
    assert (servers.devices, servers.latency_seconds) == (16, 1e-5)
    assert servers.seconds_per_byte == pytest.approx(8 / (0.9 * 100e9))


def test_rows_of_wide_models() -> None:
    suite = osdp_suite(["titan", "milp"], ["W&S-2x8192"])
    result = bench(suite)
    assert result.contradictions() == []
    rows = {(row.instance, row.solver): row for row in result.rows}
    assert {row.formulation for row in result.rows} == set(FORMULATIONS)
    for row in result.rows:
        exact = rows[row.instance, "knapsack"]
        if row.objective is None:
            assert row.status in (Status.NO_SOLUTION, Status.INFEASIBLE)
        else:
            assert exact.objective is not None
            assert exact.objective <= row.objective
        # Six operators: even the paper's own search ends if it has the time, and says what the exact one does.
        if row.solver.startswith("dfs") and row.status is Status.OPTIMAL:
            assert row.objective == exact.objective
    for (instance, solver), row in rows.items():
        if solver == "highs" and row.status is Status.OPTIMAL:
            assert row.objective == rows[instance, "knapsack"].objective
    assert sum(solver == "highs" for _, solver in rows) == 2
    assert suite.summarize is not None
    lines = suite.summarize(result.rows)
    assert lines[0].startswith("samples/s: FSDP | published | published, grouped | exact |")
    (wide,) = (line for line in lines if line.startswith(f"{TITAN}, 16 GiB, W&S-2x8192: "))
    cells = wide.partition(": ")[2].split(" | ")
    exact = rows[f"{TITAN}-16GiB-W&S-2x8192-osdp", "knapsack"].objective
    assert cells[3] == f"{8 / (exact * 1e-12):.2f}"
    assert sum("beside exact, same problems: loses" in line for line in lines) == len(DEPTH_FIRST)
    assert any("W&S: osdp_peak over FSDP at most" in line and "paper: over all pure" in line for line in lines)
    assert any(line.startswith("figure 8, titan, all models: osdp_peak over osdp_peak_base") for line in lines)
    assert any(line.startswith("figure 9, titan, all models: osdp_checkpointing over FSDP") for line in lines)
    assert not any("figure 6" in line for line in lines)  # the other machine was not asked for


def test_fsdp_leaves_more_memory_where_the_batch_grows_in_larger_units() -> None:
    """What is left is all that OSDP can turn into DP: why its gains over FSDP depend on the unit of the batch."""
    fine, coarse = (OsdpCase("N&D-96x1024", TITAN, 16, name) for name in ("osdp", "osdp_units"))
    left, gained = [], []
    for case in (fine, coarse):
        fsdp, exact = case.plan(Method.SHARDED), exact_plan(case)
        assert fsdp.objective is not None
        left.append(case.machine().memory_bytes - fsdp.memory_bytes)
        gained.append(loss_of(fsdp.objective, case))
        assert exact.batch % FORMULATIONS[case.formulation].batch_step == 0
    assert left[1] > 5 * left[0]
    assert gained[1] > 5 * gained[0] > 0


def test_cutting_is_what_lets_a_wide_model_fit() -> None:
    """Figure 8's point: FSDP gathers a whole MLP, which alone is a third of 8 GiB."""
    whole, cut = (exact_plan(OsdpCase("W&S-2x8192", TITAN, 8, name)) for name in ("osdp_peak_base", "osdp_peak"))
    assert whole.status is Status.INFEASIBLE
    assert cut.status is Status.OPTIMAL
    assert any(mode.slices > 1 for mode in cut.modes.values())


@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_their_own_sum_up_to_their_modules(model: str) -> None:
    """Every module's, which :func:`per_parameter` checks."""
    modules, parameters = (OsdpCase(model, TITAN, 16, name).chain() for name in ("osdp_base", "osdp_by_parameter"))
    assert parameters.parameter_bytes == modules.parameter_bytes
    # Samples are left out of the sum for the first operator alone, which is a parameter without any.
    assert parameters.activation_bytes == modules.activation_bytes + modules.layers[0].input_bytes
    assert len(parameters) > 4 * (len(modules) - 2)


def test_the_loss_is_a_share_of_the_exact_time() -> None:
    case = OsdpCase("W&S-2x8192", TITAN, 16, "osdp")
    best = exact_plan(case).objective
    assert best is not None
    assert loss_of(best, case) == 0
    assert loss_of(best + best // 4, case) == pytest.approx(0.25)


@pytest.mark.parametrize(("parts", "models", "words"), [(["v100"], None, "'v100'"), (None, ["GPT"], "'GPT'")])
def test_unknown_names_are_refused(parts: list[str] | None, models: list[str] | None, words: str) -> None:
    with pytest.raises(SuiteError, match=words):
        osdp_suite(parts, models)

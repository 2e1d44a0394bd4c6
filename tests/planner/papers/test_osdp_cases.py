"""OSDP's cases: rings, units of the batch, cutting, parameters of their own."""

from __future__ import annotations

import pytest

from formulations.osdp.scheduler import Method
from formulations.problem.solution import Status
from planner.machine.cluster import load_cluster
from planner.papers.osdp.adapter import data_parallel_machine
from planner.papers.osdp.cases import FORMULATIONS, MODELS, OsdpCase, exact_plan
from planner.papers.osdp.search_tables import DEPTH_FIRST, SEARCHED

TITAN = "titan-rtx-8-pcie"


def test_the_ring_has_the_slowest_link_of_the_machine() -> None:
    titan = data_parallel_machine(load_cluster(TITAN), 8, 10)
    assert (titan.devices, titan.latency_seconds, titan.memory_bytes) == (8, 8e-6, 10)
    assert titan.seconds_per_byte == pytest.approx(1 / 11.06e9)
    servers = data_parallel_machine(load_cluster("a100-2x8-nvlink"), 16, 10)
    assert (servers.devices, servers.latency_seconds) == (16, 1e-5)
    assert servers.seconds_per_byte == pytest.approx(8 / (0.9 * 100e9))


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_no_method_beats_the_exact_plan_of_a_wide_model(formulation: str) -> None:
    """Six operators: even the paper's own search ends if it has the time, and says what the exact one does."""
    case = OsdpCase("W&S-2x8192", TITAN, 16, formulation)
    exact = exact_plan(case)
    for method in (Method.REPLICATED, Method.SHARDED, *(DEPTH_FIRST if formulation in SEARCHED else ())):
        found = case.plan(method, 2.0)
        if found.objective is None:
            assert found.status in (Status.NO_SOLUTION, Status.INFEASIBLE)
            continue
        assert exact.objective is not None
        assert exact.objective <= found.objective
        if method in DEPTH_FIRST and found.status is Status.OPTIMAL:
            assert found.objective == exact.objective


def test_fsdp_leaves_more_memory_where_the_batch_grows_in_larger_units() -> None:
    """What is left is all that OSDP can turn into DP: why its gains over FSDP depend on the unit of the batch."""
    fine, coarse = (OsdpCase("N&D-96x1024", TITAN, 16, name) for name in ("osdp", "osdp_units"))
    left, gained = [], []
    for case in (fine, coarse):
        fsdp, exact = case.plan(Method.SHARDED), exact_plan(case)
        assert fsdp.objective is not None
        left.append(case.machine().memory_bytes - fsdp.memory_bytes)
        gained.append(fsdp.objective / exact.objective - 1)
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

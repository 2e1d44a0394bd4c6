"""Last readers of values, compared with what random plans read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.steps.planned_steps import strategy_space
from support.steps.random_plans import with_reruns_twice
from support.tiers import first

from planner.graph.last_reads import OUTPUT, last_reads
from planner.graph.operator_graph import Phase
from planner.graph.view_chains import ViewChain
from planner.schedule.instructions import Compute, Reshard, reads
from planner.scheduling.builder import build_schedule
from planner.strategies.random_decision import random_decision


def readers_in(graph, chains, schedule):
    """Operators by the stored value that they read in a schedule, in order; what an operator reads goes before it."""
    found, waiting = {}, []
    for instruction in schedule.instructions:
        if isinstance(instruction, Compute) and graph.operators[instruction.operator].is_view:
            continue
        if isinstance(instruction, (Compute, Reshard)):
            waiting += [chains[schedule.buffers[buffer].value].base for buffer in reads(instruction)]
        if isinstance(instruction, Compute):
            for base in waiting:
                found.setdefault(base, []).append(instruction.operator)
            waiting = []
    return found


@pytest.mark.parametrize("name", first(2, ("gpt2", "vit", "llama", "res_net")))
def test_no_plan_reads_a_value_after_its_last_reader(name):
    space = strategy_space(name, (2, 2))
    known = last_reads(space.graph, space.chains)
    assert len({reader for reader in known.values() if reader != OUTPUT}) > 10
    phases = {space.graph.operators[reader].phase for reader in known.values() if reader != OUTPUT}
    assert phases == {Phase.BACKWARD}
    for seed in range(8):
        decision = with_reruns_twice(space.model, random_decision(space, seed), seed)
        for base, reading in readers_in(space.graph, space.chains, build_schedule(space, decision)).items():
            if known.get(base, OUTPUT) != OUTPUT:
                assert reading[-1] == known[base], space.graph.values[base].name


def test_values_with_a_reader_that_may_run_again_later_have_none():
    space = strategy_space("gpt2", (2,))
    known = last_reads(space.graph, space.chains)
    read_forward = {
        space.chains[value].base
        for operator in space.graph.operators
        if operator.phase is Phase.FORWARD and not operator.is_view
        for value in operator.inputs
    }
    computed = {base for base in read_forward if space.graph.values[base].producer is not None}
    without = computed - known.keys()
    read_backward = {
        space.chains[value].base
        for operator in space.graph.operators
        if operator.phase is Phase.BACKWARD and not operator.is_view
        for value in operator.inputs
    }
    assert without - read_backward
    assert not known.keys() & set(space.graph.inputs)


@pytest.mark.parametrize(("reads_f", "last"), [(2, 3), (4, None)])
def test_a_rerun_of_a_reader_may_be_later_than_the_last_reader(reads_f, last):
    """A forward operator f reads x; operator 3 of backward does, and 2 or 4 reads what f makes."""
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    inputs = {0: (), 1: (0,), 2: (), 3: (0,), 4: ()}
    inputs[reads_f] = (1,)
    operators = [
        SimpleNamespace(index=k, is_view=False, inputs=inputs[k], outputs=(k,), phase=forward if k < 2 else backward)
        for k in inputs
    ]
    values = [SimpleNamespace(producer=k) for k in inputs]
    graph = SimpleNamespace(operators=operators, values=values, outputs=[SimpleNamespace(value=4)])
    found = last_reads(graph, [ViewChain(k, ()) for k in inputs])
    assert found.get(0) == last
    assert found[1] == reads_f
    assert found[4] == OUTPUT

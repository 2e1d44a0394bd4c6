"""When the events of a step begin at least and at most, against replays of random decisions."""

from __future__ import annotations

import numpy as np
import pytest
from support.steps.offload_steps import offload_step
from support.steps.random_steps import decisions

from formulations.step.kiwi_chain import chain_moments
from formulations.step.modes import once_or_twice
from formulations.step.offload.times import step_times
from formulations.step.replay import BrokenDecisionError, replay_decision
from formulations.step.timeline import build_timeline


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_without_reruns_is_quicker_or_slower(seed):
    model = offload_step(seed, 3, 2)
    times = step_times(model, build_timeline(model, {}))
    costs = [_cost(model, decision) for decision in decisions(model, {})]
    assert all(times.begins[-1] <= cost <= times.begins[-1] + times.excess[-1] for cost in costs if cost is not None)


@pytest.mark.parametrize("seed", range(20))
def test_with_one_layout_the_times_are_those_of_the_only_plan(seed):
    model = offload_step(seed, 3, 1)
    times = step_times(model, build_timeline(model, {}))
    assert not times.excess.any()
    (decision,) = decisions(model, {})
    assert times.begins[-1] == _cost(model, decision)
    assert (np.diff(times.begins) >= 0).all()
    assert (times.begins <= times.ready).all()
    assert (times.ready[:-1] <= times.begins[1:]).all()


@pytest.mark.parametrize("seed", range(20))
def test_reruns_take_no_time_but_what_layouts_let_their_arguments_take(seed):
    model = offload_step(seed, 3, 2)
    modes = once_or_twice(model, chain_moments(model))
    moments = {i: sorted({moment for mode in found for moment in mode}) for i, found in modes.items()}
    alone, again = (step_times(model, build_timeline(model, reruns)) for reruns in ({}, moments))
    assert alone.begins[-1] == again.begins[-1]
    arguments = {i: [edge.cost for edge in model.edges if edge.consumer == i] for i in moments}
    more = sum(len(times) * sum(int(np.ptp(cost)) for cost in arguments[i]) for i, times in moments.items())
    assert again.excess[-1] == alone.excess[-1] + more


def _cost(model, decision) -> int | None:
    try:
        return replay_decision(model, decision).cost
    except BrokenDecisionError:
        return None

"""Decision trees, estimator, schedules and partitions: what can be counted or computed by hand."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations, product
from math import prod

import numpy as np
import pytest

from formulations.galvatron.costs import CostModel, DeviceLinks, layer_tables
from formulations.galvatron.partition import balanced_partition, moved_layer
from formulations.galvatron.pipeline import (
    MicroBatchRule,
    PipelineProblem,
    SearchSpace,
    balance_degree,
    pipeline_problem,
)
from formulations.galvatron.slips import REPAIRED, Slip
from formulations.galvatron.strategies import Dimension, LayerStrategy, Level, decision_trees, pipeline_degrees
from formulations.layers.layer import LayerChain, LayerProfile, ProfileSource, SplitPart, tied_layers
from formulations.layers.pipeline_schedule import Schedule

LINKS = DeviceLinks(devices_per_node=8, inside=10.0, between=1.0)


def layer(**changes) -> LayerProfile:
    """100 bytes of parameters, 6 + 14 of activations, 1 s forward and 2 s backward; tensors divide 80, 10 and all."""
    split = SplitPart(
        divisor=8, parameter_bytes=80, saved_bytes=10, forward_seconds=1.0, backward_seconds=2.0, reduced_bytes=20
    )
    fields = {
        "name": "layer",
        "kind": "layer",
        "parameter_bytes": 100,
        "input_bytes": 6,
        "output_bytes": 6,
        "saved_bytes": 14,
        "forward_workspace_bytes": 0,
        "backward_workspace_bytes": 0,
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
        "split": split,
        "bytes_source": ProfileSource.PRESET,
        "seconds_source": ProfileSource.PRESET,
    }
    return LayerProfile(**fields | changes)


def tables_of(devices, micro_batch, slips=REPAIRED, links=LINKS, **changes):
    """Tables of one layer with a quantum of a millisecond, and the column of every strategy by its name."""
    strategies = decision_trees(devices, data_with_sharded=True)
    model = CostModel(links, seconds_per_cost=1e-3, slips=slips)
    tables = layer_tables(LayerChain("one", (layer(**changes),)), strategies, micro_batch, model)
    return tables, {str(strategy): column for column, strategy in enumerate(strategies)}


def test_eight_devices_have_as_many_strategies_as_the_paper_says() -> None:
    def count(**options):
        return sum(len(decision_trees(8 // stages, **options)) for stages in pipeline_degrees(8))

    assert count(data_with_sharded=True) == 68
    assert count() == 44
    assert count(checkpoint=False) == 22
    data_tensor = decision_trees(8, (Dimension.DATA, Dimension.TENSOR), checkpoint=False)
    assert len({frozenset(strategy.levels) for strategy in data_tensor}) == 4
    assert len(data_tensor) == 6
    assert sum(len(decision_trees(8 // p, (Dimension.DATA,), checkpoint=False)) for p in pipeline_degrees(8)) == 4


def test_levels_may_be_kept_in_one_order() -> None:
    trees = decision_trees(8, data_with_sharded=True, checkpoint=False, any_order=False)
    assert {str(tree) for tree in trees} == {
        *("dp8", "sdp8", "tp8", "dp2-sdp4", "dp4-sdp2", "dp2-tp4", "dp4-tp2", "sdp2-tp4", "sdp4-tp2"),
        "dp2-sdp2-tp2",
    }


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 12, 16, 30, 64])
def test_trees_are_all_lists_of_dimensions_that_fill_the_group(devices: int) -> None:
    trees = decision_trees(devices, data_with_sharded=True, checkpoint=False)
    divisors = [degree for degree in range(2, devices + 1) if devices % degree == 0]
    expected = [
        tuple(map(Level, order, degrees))
        for count in range(4)
        for order in permutations(Dimension, count)
        for degrees in product(divisors, repeat=count)
        if prod(degrees) == devices
    ]
    assert sorted(map(str, trees)) == sorted(str(LayerStrategy(levels, False)) for levels in expected)
    assert len(set(trees)) == len(trees)
    assert {tree.devices for tree in trees} == {devices}


@pytest.mark.parametrize(("devices", "primes"), [(6, 2), (12, 3), (30, 3), (36, 4)])
def test_groups_of_all_trees_in_one_order_divide_one_another(devices: int, primes: int) -> None:
    """So all lie on one mesh; of 12 devices groups of 2 and 4, never of 3 or 6."""
    trees = decision_trees(devices, data_with_sharded=True, any_order=False)
    sizes = sorted({tree.stride(level.dimension) * level.degree for tree in trees for level in tree.levels})
    assert all(larger % smaller == 0 for smaller, larger in pairwise(sizes))
    assert sizes[-1] == devices
    assert len(sizes) == primes


def test_stages_divide_the_devices() -> None:
    assert pipeline_degrees(12) == (1, 2, 3, 4, 6, 12)
    with pytest.raises(ValueError, match="group of 0 devices"):
        decision_trees(0)
    with pytest.raises(ValueError, match="group of 0 devices"):
        pipeline_degrees(0)


def test_layouts_follow_the_order_of_the_levels() -> None:
    by_name = {str(tree): tree for tree in decision_trees(4, checkpoint=False)}
    assert by_name["dp2-tp2"].layout().part_of_device == (0, 0, 1, 1)
    assert by_name["tp2-dp2"].layout().part_of_device == (0, 1, 0, 1)
    assert by_name["tp4"].layout().part_of_device == (0, 0, 0, 0)
    assert by_name["tp2-dp2"].stride(Dimension.TENSOR) == 2
    assert by_name["tp2-dp2"].stride(Dimension.DATA) == 1


def test_seconds_of_two_devices() -> None:
    tables, column = tables_of(2, 4)
    seconds = {
        "dp2": (2 + 10 + 0.3 * 4, 6),  # 10 s of gradients hide 4 s of backward
        "sdp2": (2 + 5 + 5 + 5 + 0.3 * 4, 2 + 5 + 5 + 4),  # two gathers of 5 s, and 5 s of gradients
        "tp2": (2 + 8 + 4 + 8, 2 + 8 + 4 + 8),  # two all-reduces of 80 bytes
        "tp2-ckpt": (2 + 8 + 4 + 8 + 10, 2 + 8 + 4 + 8 + 10),
        "sdp2-ckpt": (7 + 5 + 5 + 0.3 * 4 + 7, 7 + 5 + 4 + 7),
    }
    for name, (synchronised, repeated) in seconds.items():
        assert tables.synchronised[0, column[name]] == pytest.approx(1000 * synchronised), name
        assert tables.repeated[0, column[name]] == pytest.approx(1000 * repeated), name


def test_subtracting_all_gradient_traffic_is_too_much() -> None:
    printed, column = tables_of(2, 4, Slip.EQ8_OVERLAP)
    assert printed.repeated[0, column["dp2"]] == 3200  # 13.2 s less 10, where computing alone takes 6
    assert printed.repeated[0, column["tp2"]] == 22000


def test_bytes_of_two_devices() -> None:
    tables, column = tables_of(2, 4)
    expected = {
        "dp2": (2 * 20, 0, 400),
        "dp2-ckpt": (2 * 6, 2 * 14, 400),
        "sdp2": (2 * 20, 0, 200),
        "tp2": (4 * (6 + 4 + 5), 0, 4 * (20 + 40)),
        "tp2-ckpt": (4 * 6, 4 * 9, 240),
    }
    for name, numbers in expected.items():
        found = tuple(int(table[0, column[name]]) for table in (tables.forward, tables.backward, tables.states))
        assert found == numbers, name
    more, column = tables_of(2, 4, backward_workspace_bytes=3, borrowed_parameter_bytes=10, fixed_saved_bytes=1)
    assert more.backward[0, column["dp2"]] == 2 * 3
    assert more.backward[0, column["dp2-ckpt"]] == 2 * 3 + 2 * 14 + 1
    assert (more.states[0, column["dp2"]], more.borrowed[0, column["dp2"]]) == (400, 40)
    assert more.borrowed[0, column["sdp2"]] == 20


def test_a_stage_holds_a_shared_parameter_once() -> None:
    """The first layer lends 10 and 15 bytes to the third and the last."""
    names = ("first", "second", "third", "last")
    lent = (0, 0, 10, 15)
    layers = (layer(name=name, borrowed_parameter_bytes=lent) for name, lent in zip(names, lent, strict=True))
    chain = LayerChain("tied", tuple(layers))
    tables = layer_tables(chain, decision_trees(2), 4, CostModel(LINKS))
    states = 400 * np.ones(4, dtype=np.int64)
    expected = {(0, 4): [0, 0, 0, 0], (1, 4): [0, 0, 40, 20], (2, 4): [0, 0, 40, 20], (3, 4): [0, 0, 0, 60]}
    column = [str(strategy) for strategy in tables.strategies].index("dp2")
    for (first, end), borrowed in expected.items():
        stage = tables.stage(first, end, 1, 10**6)
        assert stage.states[:, column].tolist() == (states + borrowed)[first:end].tolist()
    assert tied_layers(chain) == (0, 2, 3)
    assert len({tables.kinds[0], tables.kinds[1]}) == 2  # a stage with the lender is not one without


def test_what_does_not_come_out_whole_is_not_allowed() -> None:
    tables, column = tables_of(4, 2)
    allowed = {name for name, s in column.items() if tables.allowed[0, s]}
    assert {"tp4", "dp2-tp2", "sdp2-tp2"} <= allowed
    assert not {"dp4", "sdp4", "dp2-sdp2"} & allowed
    narrow, column = tables_of(4, 8, split=SplitPart(divisor=2))
    assert not narrow.allowed[0, column["tp4"]]
    assert narrow.allowed[0, column["dp2-tp2"]]


def test_traffic_of_replicated_shards() -> None:
    """Of eight devices: 2.625 times the parameters for shards alone, less with replicas, more as it was counted."""
    for slips, expected in ((REPAIRED, (2.5, 2.25)), (Slip.FULL_GRADIENTS, (3.25, 3.0))):
        tables, column = tables_of(8, 8, slips, forward_seconds=0.0, backward_seconds=0.0, split=SplitPart())
        traffic = tables.synchronised[0] / 1000 * LINKS.inside / 100
        assert traffic[column["sdp8"]] == pytest.approx(2.625)
        assert traffic[column["dp2-sdp4"]] == pytest.approx(expected[0])
        assert traffic[column["dp4-sdp2"]] == pytest.approx(expected[1])


def test_groups_that_leave_a_node_share_its_link() -> None:
    links = DeviceLinks(4, 10.0, 6.0)
    assert links.bandwidth(1, 4) == 10.0
    assert links.bandwidth(1, 8) == 6.0
    assert links.bandwidth(2, 4) == 3.0
    assert links.bandwidth(4, 2) == 1.5
    assert links.bandwidth(8, 2) == 1.5
    assert links.bandwidth(1, 3) == 6.0  # the second three of eight devices are in two nodes
    assert DeviceLinks(6, 10.0, 6.0).bandwidth(1, 3) == 10.0


def test_handing_over_between_layouts() -> None:
    """Six bytes of each of eight samples."""
    tables, column = tables_of(4, 8, links=DeviceLinks(4, 10.0, 10.0))
    change = tables.transformation[0][np.ix_(tables.layouts, tables.layouts)] / 1000
    gathered = 48 * 3 / 4 / 10
    assert change[column["dp4"], column["tp4"]] == pytest.approx(gathered)
    assert change[column["tp4"], column["dp4"]] == pytest.approx(gathered)  # the gradient goes back
    assert change[column["dp4"], column["sdp4-ckpt"]] == 0
    assert change[column["dp2-tp2"], column["dp4"]] == pytest.approx(48 / 4 / 10)
    nodes, _ = tables_of(4, 8, links=DeviceLinks(2, 10.0, 4.0))
    change = nodes.transformation[0][np.ix_(nodes.layouts, nodes.layouts)] / 1000
    assert change[column["dp4"], column["tp4"]] == pytest.approx(48 / 4 / 10 + 48 / 2 / 4)
    assert change[column["dp2-tp2"], column["dp4"]] == pytest.approx(48 / 4 / 10)


def test_halves_become_thirds() -> None:
    """Of six devices the third has the half 0-2 of six cells, then the third 2-3; the fourth 3-5, then 2-3."""
    tables, column = tables_of(6, 6, links=DeviceLinks(6, 10.0, 1.0))
    change = tables.transformation[0][np.ix_(tables.layouts, tables.layouts)] / 1000
    halves, thirds = column["dp2-tp3"], column["dp3-tp2"]
    # One cell of 6 x 6 bytes there; back, where the third device needs two cells, two.
    assert change[halves, thirds] == change[thirds, halves] == pytest.approx((6 + 12) / 10)


def test_what_is_in_flight() -> None:
    assert [Schedule.ONE_F_ONE_B.in_flight(4, i, 8) for i in range(4)] == [4, 3, 2, 1]
    assert [Schedule.ONE_F_ONE_B.in_flight(4, i, 2) for i in range(4)] == [2, 2, 2, 1]
    assert [Schedule.GPIPE.in_flight(4, i, 8) for i in range(4)] == [8] * 4
    assert Schedule.GPIPE.in_flight(1, 0, 8) == 1
    assert [Schedule.ONE_F_ONE_B_IF_FILLED.in_flight(4, i, 4) for i in range(4)] == [4, 3, 2, 1]
    assert [Schedule.ONE_F_ONE_B_IF_FILLED.in_flight(4, i, 3) for i in range(4)] == [3] * 4
    assert Schedule.ONE_F_ONE_B_IF_FILLED.in_flight(1, 0, 8) == 1


def test_numbers_of_micro_batches() -> None:
    assert MicroBatchRule.DIVISORS.counts(12, 2) == (1, 2, 3, 4, 6, 12)
    assert MicroBatchRule.TWICE_THE_STAGES.counts(32, 4) == (8,)
    assert MicroBatchRule.TWICE_THE_STAGES.counts(12, 4) == (6,)
    assert MicroBatchRule.TWICE_THE_STAGES.counts(32, 1) == (1,)


def test_impossible_requests_say_what_is_possible() -> None:
    chain, model = LayerChain("one", (layer(),)), CostModel(LINKS)
    with pytest.raises(ValueError, match="group of 0 devices"):
        pipeline_problem(chain, 0, 100, (8,), model)
    with pytest.raises(ValueError, match="batches are"):
        pipeline_problem(chain, 2, 100, (), model)
    with pytest.raises(ValueError, match="at most 1 stages"):
        PipelineProblem(1, lambda stages, micro_batch: None, (2, 4), (8,), 100)
    assert pipeline_problem(chain, 4, 100, (8,), model).usable_degrees == (1,)
    assert pipeline_problem(chain, 4, 100, (8,), model, SearchSpace(pipeline=False)).degrees == (1,)


def test_a_balanced_partition_has_the_smallest_largest_stage() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        layers = int(rng.integers(1, 8))
        stages = int(rng.integers(1, layers + 1))
        loads = rng.integers(0, 9, (stages, layers)).astype(float)

        def largest(borders, loads=loads):
            return max(loads[i, first:end].sum() for i, (first, end) in enumerate(pairwise(borders)))

        every = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
        assert largest(balanced_partition(loads)) == min(map(largest, every))
    assert balanced_partition(np.ones((4, 48))) == (0, 12, 24, 36, 48)
    with pytest.raises(ValueError, match="3 stages for 2 layers"):
        balanced_partition(np.ones((3, 2)))


def test_earlier_stages_get_fewer_layers_where_they_hold_more() -> None:
    """Table IV has [11, 21] and [16, 32]."""
    assert balanced_partition(np.outer([2, 1], np.ones(32))) in ((0, 11, 32), (0, 10, 32))
    assert balanced_partition(np.outer([2, 1], np.ones(48))) == (0, 16, 48)


def test_balance_degrees_of_figure_4() -> None:
    """Of partitions of 48 equal layers; the paper prints them for time."""
    printed = {(7, 10, 13, 18): 0.625, (12, 12, 12, 12): 0.750, (8, 11, 15, 14): 0.688}
    for partition, degree in printed.items():
        assert balance_degree(partition) == pytest.approx(degree, abs=5e-4)


def test_a_layer_moves_to_a_neighbour() -> None:
    assert moved_layer((0, 2, 4), 0, True) == (0, 1, 4)
    assert moved_layer((0, 2, 4), 1, False) == (0, 3, 4)
    assert moved_layer((0, 2, 4), 0, False) is None
    assert moved_layer((0, 2, 4), 1, True) is None
    assert moved_layer((0, 1, 4), 0, True) is None

"""Process groups of layer plans: one for the same ranks and purpose, in the meshes of all layers and plans."""

from __future__ import annotations

from support.layers.layer_runs import staged_plan

from planner.layers.plan.document import LayerPlan
from runtime.layers.mesh import REPLICAS, SHARDS, plan_meshes

PAIRS = {"data_parallel": 2, "tensor_parallel": 2}
SHARDED_PAIRS = {**PAIRS, "sharding": "zero3"}


def groups_on_rank(*texts: str) -> list[dict[str, tuple[str, list[int]]]]:
    """By axis of each layer of some plans, the name of its group and the ranks in it."""
    import torch.distributed as dist

    found = []
    for text in texts:
        plan = LayerPlan.model_validate_json(text)
        meshes = plan_meshes(plan, "cpu")
        for layer in plan.layers:
            parameters, tensor = meshes.parameters(layer), meshes.tensor(layer)
            groups = {"replicas": parameters.get_group(REPLICAS), "shards": parameters.get_group(SHARDS)}
            groups |= {"tensor": tensor.get_group(), "pipeline": meshes.pipeline_group} if meshes.is_even else {}
            assert parameters.shape == (layer.replicas, layer.shards)
            found.append({k: (str(g.group_name), dist.get_process_group_ranks(g)) for k, g in groups.items()})
    return found


def names_by_ranks(layers, axes) -> dict[tuple[int, ...], set[str]]:
    """Names of all groups of some ranks."""
    found: dict[tuple[int, ...], set[str]] = {}
    for layer in layers:
        for axis in axes:
            if axis in layer:
                name, ranks = layer[axis]
                found.setdefault(tuple(ranks), set()).add(name)
    return found


def test_layers_share_the_groups_of_the_same_ranks(four_ranks):
    whole = {"data_parallel": 4, "sharding": "zero3"}
    layers = [PAIRS, SHARDED_PAIRS, whole, whole, SHARDED_PAIRS, PAIRS]
    plan, other = (staged_plan("deep", given, devices=4) for given in (layers, [SHARDED_PAIRS] * 6))
    for rank, found in enumerate(four_ranks.run(groups_on_rank, plan.model_dump_json(), other.model_dump_json())):
        pair, row = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        assert found[0]["replicas"] == found[1]["shards"] == found[7]["shards"]
        assert found[0]["replicas"][1] == list(pair)
        assert found[0]["tensor"] == found[1]["tensor"]
        assert found[0]["tensor"][1] == list(row)
        assert found[2]["shards"][1] == [0, 1, 2, 3]
        names = names_by_ranks(found, ("replicas", "shards", "tensor", "pipeline"))
        assert {ranks: len(of) for ranks, of in names.items()} == {pair: 1, row: 1, (rank,): 1, (0, 1, 2, 3): 1}


def test_what_should_overlap_has_groups_of_its_own(four_ranks):
    """The first layers gather parameters among the ranks that share products of the last."""
    gathered, shared = {"data_parallel": 2, "sharding": "zero3"}, {"tensor_parallel": 2}
    plan = staged_plan("deep", [gathered] * 3, [shared] * 3, devices=4, micro_batches=2)
    for rank, found in enumerate(four_ranks.run(groups_on_rank, plan.model_dump_json())):
        row = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert found[0]["shards"][1] == found[3]["tensor"][1] == list(row)
        assert found[0]["shards"][0] != found[3]["tensor"][0]
        assert len(names_by_ranks(found, ("replicas", "shards"))[row]) == 1

"""Weights into shards and out again: what is read, what is held, and what other libraries make of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.layers.layer_runs import staged_plan
from support.processes.library_runs import ADAMW, batches, full_tensors
from support.steps.planned_steps import configuration_file, random_plan, real_step, step_reference
from support.tiers import slow
from torch import Tensor
from torch.distributed.tensor import DTensor

import runtime
from planner.layers.plan.document import LayerPlan
from planner.plan.document import Plan, PlannedModel
from planner.torch_adapter.meters.storage_meter import StorageMeter
from runtime.layers.training import LayerTraining
from runtime.library.errors import WeightsError
from runtime.library.sources import place, seeded_step
from runtime.library.weights import INDEX, SINGLE, TORCH_INDEX, open_weights
from runtime.measure.initial_state import map_tensors

SMALL = 64
"""Bytes of a module's own buffers (frequencies of rotations), which are copied while they are placed."""


def other_weights(name: str) -> dict[str, Tensor]:
    """Weights that are not those of the seed; a tied parameter once."""
    generator = torch.Generator().manual_seed(7)
    named = real_step(name).module.named_parameters()
    return {key: torch.randn(tensor.shape, generator=generator) * 0.02 for key, tensor in named}


def pretrained_folder(folder: Path, name: str, index: str = INDEX) -> dict[str, Tensor]:
    """A folder of two shards and an index, as transformers writes it, or wrote it before safetensors."""
    weights = other_weights(name)
    names = sorted(weights)
    stem, suffix, *_ = index.split(".")
    shards = {f"{stem}-0000{number}-of-00002.{suffix}": names[number - 1 :: 2] for number in (1, 2)}
    save = save_file if index == INDEX else torch.save
    for file, held in shards.items():
        save({key: weights[key] for key in held}, folder / file)
    where = {key: file for file, held in shards.items() for key in held}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(configuration_file(name).read_text())
    return weights


class LocalMeter(StorageMeter):
    """Counts tensors that have memory: neither those on meta nor the DTensors over local ones."""

    def _count(self, tensor: Tensor, operator: object) -> None:
        if not tensor.is_meta and not isinstance(tensor, DTensor):
            super()._count(tensor, operator)


def metered_load(plan: Plan | LayerPlan, folder: Path) -> tuple[dict[str, Tensor], int, int, int]:
    """All tensors; most bytes of tensors while they were placed, bytes of this rank's, and of the largest one."""
    meter = LocalMeter()

    of_layers = isinstance(plan, LayerPlan)
    place_tensors = LayerTraining if of_layers else place

    def metered(*arguments: Any) -> Any:
        with meter, patch("runtime.library.weights.map_tensors", unmetered_map):
            return place_tensors(*arguments)

    def unmetered_map(path: Path) -> dict[str, Tensor]:
        """Pages of a mapped file that nobody reads are no memory: a tensor counts when it is read."""
        meter.__exit__(None, None, None)
        try:
            return map_tensors(path)
        finally:
            meter.__enter__()

    place_in = "runtime.library.layer_step.LayerTraining" if of_layers else "runtime.library.loading.place"
    with patch(place_in, metered):
        step = runtime.load(plan, weights=folder, optimizer=ADAMW, device="cpu", allow_code=True)
    held = sum(tensor.nbytes for tensor in step.state.values())
    largest = max(tensor.nbytes for tensor in step.state_dict().values())
    return full_tensors(step.state_dict()), meter.peak_bytes, held, largest


@pytest.mark.parametrize(("name", "index"), [("gpt2", INDEX), ("gpt2", TORCH_INDEX), slow("llama", INDEX)])
def test_a_folder_goes_straight_into_shards(name, index, two_ranks, tmp_path):
    expected = pretrained_folder(tmp_path, name, index)
    plan = random_plan(name, (2,), 1)
    whole = sum(tensor.nbytes for tensor in expected.values())
    for tensors, peak, held, largest in two_ranks.run(metered_load, plan, tmp_path):
        assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())
        assert held < 0.9 * whole
        assert held <= peak <= held + largest


@pytest.mark.slow
def test_layers_are_never_whole_on_a_rank(two_ranks, tmp_path):
    """Blocks whose products are shared, between shards of FSDP2."""
    expected = pretrained_folder(tmp_path, "llama")
    sharded, shared = {"data_parallel": 2, "sharding": "zero3"}, {"tensor_parallel": 2, "sequence_parallel": True}
    model = PlannedModel(**asdict(step_reference("llama")))
    plan = staged_plan("llama", [sharded, shared, sharded, sharded], devices=2, model=model)
    whole = sum(tensor.nbytes for tensor in expected.values())
    for tensors, peak, held, largest in two_ranks.run(metered_load, plan, tmp_path):
        assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())
        assert held < 0.6 * whole
        assert held <= peak <= held + largest + SMALL


def mapped_files(folder: Path) -> set[str]:
    """Files of a folder that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.rpartition("/")[2] for line in lines if f"{folder}/" in line}


def test_one_file_of_torch_is_mapped_at_a_time(tmp_path):
    expected = pretrained_folder(tmp_path, "gpt2", TORCH_INDEX)
    source, seen = open_weights(tmp_path), []
    for name, tensor in expected.items():
        (block,) = source.blocks(name, [(slice(1, 2),)])
        assert torch.equal(block, tensor[1:2])
        assert source.shape(name) == tuple(tensor.shape)
        seen.append(mapped_files(tmp_path))
        del block
    assert all(len(files) == 1 for files in seen)
    assert len(set.union(*seen)) == 2
    source.close()
    assert mapped_files(tmp_path) == set()


@pytest.mark.parametrize("index", [INDEX, TORCH_INDEX])
def test_an_index_whose_files_lack_something_is_refused(index, tmp_path):
    names = sorted(pretrained_folder(tmp_path, "gpt2", index))
    stem, suffix, *_ = index.split(".")
    one, two = sorted(path.name for path in tmp_path.glob(f"{stem}-*.{suffix}"))
    written = json.loads((tmp_path / index).read_text())["weight_map"]

    def refusal(weight_map: Any) -> str:
        (tmp_path / index).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(WeightsError) as refused:
            open_weights(tmp_path)
        return str(refused.value)

    at = f"weights {tmp_path / index}: "
    assert refusal({**written, "w": one}) == f"{at}it names w in {one}, but no file holds it: fetch them again"
    for outside in (f"../{tmp_path.name}/{one}", str(tmp_path / one)):
        expected = f"{at}it names {outside}, outside of its folder: put all files beside the index"
        assert refusal({**written, names[0]: outside}) == expected
    assert refusal([one]).startswith(f"{at}no index of weights")
    (tmp_path / two).unlink()
    assert refusal(written) == f"{at}it names {two}, which is not there: fetch all files of the weights"


def loaded_from(plan: Plan, weights) -> dict[str, Tensor]:
    return full_tensors(
        runtime.load(plan, weights=weights, optimizer=ADAMW, device="cpu", allow_code=True).state_dict()
    )


@pytest.mark.slow
def test_files_state_dicts_and_base_models_are_the_same(two_ranks, tmp_path):
    plan, expected = random_plan("gpt2", (2,), 1), other_weights("gpt2")
    base = {key.removeprefix("transformer."): tensor for key, tensor in expected.items()}
    half = {key: tensor.bfloat16() for key, tensor in expected.items()}
    save_file(base, tmp_path / "base.safetensors")
    torch.save(expected, tmp_path / "weights.pt")
    (tmp_path / "single").mkdir()
    save_file(half, tmp_path / "single" / SINGLE)
    for weights in (expected, tmp_path / "base.safetensors", str(tmp_path / "weights.pt")):
        for tensors in two_ranks.run(loaded_from, plan, weights):
            assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())
    for tensors in two_ranks.run(loaded_from, plan, tmp_path / "single"):
        assert all(torch.equal(tensors[key], tensor.float()) for key, tensor in half.items())


@pytest.mark.slow
def test_the_seed_gives_the_tensors_of_one_process(two_ranks):
    expected = real_step("res_net").module.state_dict()
    for tensors in two_ranks.run(loaded_from, random_plan("res_net", (2,), 0), None):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())


def metered_seed(plan: Plan) -> tuple[list[int], int, int]:
    """Most bytes of tensors while the model was built and while it was placed, bytes of this rank's, of the largest."""
    peaks = []

    def metered(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with LocalMeter() as meter:
                found = function(*arguments)
            peaks.append(meter.peak_bytes)
            return found

        return call

    with (
        patch("runtime.library.loading.seeded_step", metered(seeded_step)),
        patch("runtime.library.loading.place", metered(place)),
    ):
        step = runtime.load(plan, optimizer=ADAMW, device="cpu", allow_code=True)
    held = sum(tensor.nbytes for tensor in step.state.values())
    return peaks, held, max(tensor.nbytes for tensor in step.state_dict().values())


@pytest.mark.parametrize("name", ["gpt2", slow("llama")])
def test_no_rank_ever_holds_the_model_that_the_seed_makes(name, two_ranks):
    whole = sum(tensor.nbytes for tensor in real_step(name).module.parameters())
    for (built, placed), held, largest in two_ranks.run(metered_seed, random_plan(name, (2,), 1)):
        assert held < 0.9 * whole
        assert built <= 2 * largest + 4096  # a parameter, the numbers that are drawn for it, and the example batch
        assert built < 0.5 * whole
        assert held <= placed <= held + 2 * largest  # on rank 0 a parameter is made, and sent from a copy


def exported_by_rank(plan: Plan, name: str, path: Path) -> dict[str, Tensor]:
    step = runtime.load(plan, real_step(name).module, optimizer=ADAMW, device="cpu")
    step(batches(name, 1)[0])
    step.export(path)
    return full_tensors(step.state_dict())


def test_an_export_loads_in_transformers(four_ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    tensors, *_ = four_ranks.run(exported_by_rank, random_plan("llama", (2, 2), 0), "llama", tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("name", ["tied_gpt", "res_net"])
def test_an_export_loads_as_a_state_dict(name, two_ranks, tmp_path):
    path = tmp_path / "weights.safetensors"
    tensors, *_ = two_ranks.run(exported_by_rank, random_plan(name, (2,), 0), name, path)
    module = real_step(name).module
    module.load_state_dict(load_file(path))
    assert all(torch.equal(module.state_dict()[key], tensor) for key, tensor in tensors.items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.safetensors"]


def refusal_on_rank(plan: Plan, weights, on_meta: bool = False) -> str:
    module = real_step("mlp").module.to("meta") if on_meta else None
    try:
        runtime.load(plan, module, weights=weights, optimizer=ADAMW, device="cpu", allow_code=True)
    except WeightsError as error:
        return str(error)
    return ""


def test_weights_that_are_not_the_model_s_are_refused(two_ranks, tmp_path):
    plan, weights = random_plan("mlp", (2,), 0), other_weights("mlp")
    (tmp_path / "code.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (tmp_path / "broken.safetensors").write_bytes(b"\x10\0\0\0")
    cases = {
        r"the weights lack 0.bias of the model; they have 0.weight": {
            k: v for k, v in weights.items() if k != "0.bias"
        },
        "0.bias of the weights has shape (3,), the model (64,)": {**weights, "0.bias": torch.zeros(3)},
        "no such file or folder; give a file": tmp_path / "nothing",
        f"the folder has none of {INDEX}": tmp_path,
        "cannot be read as a state dict of tensors alone": tmp_path / "code.pt",
        "broken.safetensors cannot be read": tmp_path / "broken.safetensors",
    }
    for message, given in cases.items():
        for found in two_ranks.run(refusal_on_rank, plan, given):
            assert message in found
    for found in two_ranks.run(refusal_on_rank, plan, None, True):
        assert "parameter 0.weight has no data, the module is on meta: give weights" in found

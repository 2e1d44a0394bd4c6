"""Plans of layers from a model's name: what they promise, what they refuse, and that the executor takes them."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace

import pytest
from support.layers import folded_layers
from support.layers.folded_layers import small_cluster
from support.layers.layer_models import SWIN
from support.layers.layer_plan_models import layer_names
from support.steps.planned_steps import step_reference
from support.tiers import slow

from formulations.problem.time_limit import interruptible, noticing_interrupts
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.layers import planning as layer_planning
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.choices import CHOICES
from planner.layers.plan.document import LayerPlan, load_layer_plan, save_layer_plan
from planner.layers.planning import LAYER_FORMULATIONS, plan_layers
from planner.layers.profiles.files import LayerFileError, save_layers
from planner.models.references import ModelReference, load_step
from planner.plan.notes import INTERRUPTED
from runtime.layers.check import refusal
from runtime.layers.families.registry import model_family
from runtime.layers.families.units import FamilyError


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_planning, "model_layers", folded_layers.model_layers)


@pytest.fixture(scope="module")
def swin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Source of a Swin of two stages."""
    path = tmp_path_factory.mktemp("swin") / "config.json"
    path.write_text(json.dumps({"model_type": "swin", **SWIN}), encoding="utf-8")
    return f"hf:{path}"


def planned(formulation: str, memory: int | None = None, name: str = "gpt2", **more) -> LayerPlan:
    devices = more.pop("devices", 4)
    reference = step_reference(name)
    return plan_layers(
        reference, cluster=small_cluster(), devices=devices, formulation=formulation, memory=memory, **more
    )


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("formulation", LAYER_FORMULATIONS)
@pytest.mark.parametrize("name", ["gpt2", slow("vit")])
def test_a_plan_names_every_layer_and_keeps_its_promises(formulation, as_published, name, tmp_path):
    plan = planned(formulation, name=name, as_published=as_published)
    check_layer_plan(plan)
    record = plan.record
    assert record is not None
    assert (record.formulation, record.as_published) == (formulation, as_published)
    assert len(record.stage_peak_bytes) == len(plan.stages)
    assert max(record.stage_peak_bytes) <= record.tensor_bytes
    assert record.bound_seconds is None or record.bound_seconds <= record.objective_seconds
    blocks = [layer.name for layer in plan.layers if layer.name not in ("embedding", "head")]
    parts = [""] if formulation != "osdp" else [".attention", ".mlp"]
    assert blocks == [block + part for block in layer_names(step_reference(name))[1:-1] for part in parts]
    save_layer_plan(plan, tmp_path / "plan.json")
    assert load_layer_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("formulation", LAYER_FORMULATIONS)
def test_less_memory_never_costs_less_and_too_little_is_refused(formulation):
    free = planned(formulation).record
    half = planned(formulation, free.stage_peak_bytes[0] * 9 // 10).record
    assert half.stage_peak_bytes[0] <= free.stage_peak_bytes[0] * 9 // 10
    assert half.objective_seconds >= free.objective_seconds * (1 - 0.01)  # the joint search stops within one per cent
    with pytest.raises(InfeasibleError, match="use more devices, more memory or a smaller batch"):
        planned(formulation, 1000)


def test_the_exact_search_is_at_least_as_good_as_the_published_one():
    for formulation in LAYER_FORMULATIONS:
        exact, published = (planned(formulation, as_published=way).record for way in (False, True))
        assert exact.choices == published.choices
        if formulation == "capture":
            assert max(exact.stage_peak_bytes) <= max(published.stage_peak_bytes)
        else:
            assert exact.objective_seconds <= published.objective_seconds


def test_layers_that_share_a_parameter_are_planned_alike():
    """The embedding lends its table to GPT-2's head, and the table has one place."""
    for formulation in LAYER_FORMULATIONS:
        first, *_, last = planned(formulation).layers
        assert (first.name, last.name) == ("embedding", "head")
        assert first.model_copy(update={"name": "head"}) == last


def test_osdp_cuts_and_checkpoints_where_memory_asks_for_it():
    """GPT-2's attention and MLP are operators of their own; tables are never cut."""
    beyond = {"memory_model": "engine", "strategies": "all"}
    free = planned("osdp", choices=beyond)
    assert {layer.slices for layer in free.layers} == {1}
    assert not any(layer.checkpoint for layer in free.layers)
    peak = free.record.stage_peak_bytes[0]
    shares = [planned("osdp", int(peak * share), choices=beyond) for share in (0.8, 0.6, 0.5, 0.4, 0.35)]
    for plan in shares:
        check_layer_plan(plan)
        assert all(layer.slices == 1 for layer in plan.layers if "." not in layer.name)
        assert len({layer.checkpoint for layer in plan.layers}) == 1
    assert any(layer.slices > 1 for plan in shares for layer in plan.layers)
    assert any(layer.checkpoint for plan in shares for layer in plan.layers)


@pytest.mark.parametrize("formulation", LAYER_FORMULATIONS)
@pytest.mark.parametrize(
    "source", ["support.layers.layer_models:experts", "support.steps.models:res_net", slow("swin")]
)
def test_models_of_any_kind_are_planned_though_the_executor_knows_them_not(source, formulation, swin):
    """Experts, convolutions, and Swin's blocks of unequal width; what is no product is left whole."""
    reference = ModelReference(swin if source == "swin" else source, batch=4, sequence=16)
    beyond = {name: values[-1] for name, values in CHOICES[formulation].items()}
    request = {"cluster": small_cluster(), "devices": 4, "formulation": formulation, "choices": beyond}
    free = plan_layers(reference, **request)
    tight = plan_layers(reference, memory=max(free.record.stage_peak_bytes) * 95 // 100, **request)
    for plan in (free, tight):
        check_layer_plan(plan)
        assert max(plan.record.stage_peak_bytes) <= plan.record.tensor_bytes
    whole = ("embedding", "head", "layers.1.mlp", "blocks.0", "blocks.1")
    assert all(layer.slices == 1 for layer in tight.layers if layer.name in whole)
    with pytest.raises(FamilyError, match=r"cannot cut a \w+ into layers; it supports GPT2LMHeadModel"):
        model_family(load_step(reference))


def test_osdp_says_what_the_smallest_modes_need():
    with pytest.raises(InfeasibleError, match="the smallest ones need") as refused:
        planned("osdp", 1000)
    least = float(re.search(r"need ([\d.]+) KiB", str(refused.value)).group(1)) * 2**10
    assert planned("osdp", int(least * 1.001)).record.status == "optimal"
    with pytest.raises(InfeasibleError):
        planned("osdp", int(least * 0.999))


def test_the_batch_may_be_searched():
    plan = planned("osdp", 2**21, search_batch=True)
    assert plan.model.batch % 4 == 0
    assert plan.record.stage_peak_bytes[0] <= 2**21
    assert planned("galvatron", 2**21, search_batch=True).model.batch % step_reference("gpt2").batch == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"formulation": "kiwi_chain"}, "'kiwi_chain' plans no layers; choose one of osdp, galvatron"),
        ({"devices": 3}, "3 of the 8 devices of cluster .*: use a number that divides these, 1, 2, 4, 8"),
        ({"devices": 8}, "batch 4 on 8 devices: OSDP gives all of them as many samples; use 8"),
    ],
)
def test_impossible_requests_say_what_is_possible(change, message):
    with pytest.raises(PlanError, match=message):
        planned(**{"formulation": "osdp", **change})


def test_a_reserve_that_uses_the_memory_up_is_said():
    with pytest.raises(InfeasibleError, match="which leaves nothing for tensors"):
        plan_layers(step_reference("gpt2"), cluster="titan-rtx-8-pcie", devices=4, formulation="osdp", memory=2**20)


@pytest.mark.parametrize("formulation", ["osdp", "galvatron"])
def test_layers_of_a_profile_file_are_planned_as_those_of_the_model(formulation, tmp_path):
    reference = step_reference("gpt2")
    chain = folded_layers.model_layers(reference, small_cluster(), apart=formulation == "osdp")
    save_layers(chain, tmp_path / "profile.json")
    of_file = replace(reference, source=f"layers:{tmp_path / 'profile.json'}")
    plan = plan_layers(of_file, cluster=small_cluster(), devices=4, formulation=formulation)
    assert plan.stages == planned(formulation).stages
    assert "has no module to run" in refusal(plan)
    with pytest.raises(LayerFileError, match="is of float32, not of bfloat16"):
        plan_layers(replace(of_file, dtype="bfloat16"), cluster=small_cluster(), devices=4, formulation=formulation)


def test_ctrl_c_ends_a_search_with_its_best_plan_and_a_valid_bound():
    """The first report interrupts; what was found until then is a plan, and its bound holds for the whole search."""
    seen = []

    def interrupt(progress):
        seen.append(progress)
        if len(seen) == 1:
            signal.raise_signal(signal.SIGINT)

    ask = {"choices": {"strategies": "all", "micro_batches": "all"}, "memory": 1_000_000}
    whole = planned("galvatron", **ask)
    found = planned("galvatron", progress=interrupt, **ask)
    assert seen
    assert found.record.notes[0] == INTERRUPTED
    check_layer_plan(found)
    assert found.record.bound_seconds <= whole.record.objective_seconds <= found.record.objective_seconds
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not any("interrupted" in note for note in planned("galvatron", **ask).record.notes)
    with noticing_interrupts() as noticed, interruptible():
        signal.raise_signal(signal.SIGINT)
        assert noticed.is_set()  # by which what searches several times ends
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

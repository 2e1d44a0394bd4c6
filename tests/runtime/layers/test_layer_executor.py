"""Layer plans on local ranks: one process's losses and gradients, and the memory that each setting promises."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from support.layers.layer_peaks import peak_ratios
from support.layers.layer_plan_models import layer_reference
from support.layers.layer_runs import (
    LayerOutcome,
    check_layer_run,
    gradients_on_rank,
    names_of,
    planned_model,
    staged_plan,
)
from support.tiers import slow
from torch import nn

from planner.common.plan_error import PlanError
from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan
from planner.models.references import TrainingStep, load_step
from runtime.layers.check import check_comparable, check_model
from runtime.layers.families.registry import model_family
from runtime.layers.families.units import FamilyError
from runtime.layers.launch import run_layer_plan
from runtime.layers.report import LayerRunReport


def alike(
    name: str, devices: int, settings: dict[str, object], ends: dict[str, object] | None = None, **options
) -> LayerPlan:
    """A plan of one stage whose blocks are run alike."""
    blocks = len(names_of(planned_model(name))) - 2
    ends = settings if ends is None else ends
    return staged_plan(name, [ends, *[settings] * blocks, ends], devices=devices, **options)


def whole_bytes(name: str) -> int:
    return sum(parameter.nbytes for parameter in load_step(layer_reference(name), "meta").module.parameters())


def peak(outcomes: list[LayerOutcome]) -> int:
    return max(outcome.peak_bytes for outcome in outcomes)


@pytest.mark.slow_cases("gpt2", "t5", "llama")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_parameters_are_sharded_by_data_and_tensor_parallelism(name, two_ranks):
    whole = whole_bytes(name)
    replicated = check_layer_run(two_ranks, alike(name, 2, {"data_parallel": 2}))
    sharded = check_layer_run(two_ranks, alike(name, 2, {"data_parallel": 2, "sharding": "zero3"}))
    assert {outcome.parameter_bytes for outcome in replicated} == {whole}
    assert sum(outcome.parameter_bytes for outcome in sharded) == whole
    shared = check_layer_run(two_ranks, alike(name, 2, {"tensor_parallel": 2}, {"data_parallel": 2}))
    assert whole / 2 < shared[0].parameter_bytes < whole


@pytest.mark.slow_cases("llama")
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_is_learned_nothing_from_wherever_its_row_is(name, two_ranks):
    """Divided by its rows, the table has the row of the padding on one device, and the other has one at its place."""
    plan = alike(name, 2, {"tensor_parallel": 2})
    check_layer_run(two_ranks, plan, padded=True)


def test_half_precision_is_that_of_one_process(two_ranks):
    """Gradients of 16 bits differ by their own rounding; those of a plan that forgets a part of the batch do not."""
    model = planned_model("gpt2", dtype="bfloat16")
    sharded = {"data_parallel": 2, "sharding": "zero3", "checkpoint": True}
    plan = alike("gpt2", 2, {"tensor_parallel": 2, "sequence_parallel": True}, sharded, model=model)
    check_layer_run(two_ranks, plan, coarser=1000.0)


@pytest.mark.parametrize("sharding", ["none", slow("zero3")])
def test_16_bit_gradients_are_summed_in_32_bits_and_memory_counts_that(sharding, two_ranks):
    """Sums over micro-batches and devices; where the user says so, they have 16 bits and take less memory."""
    settings, peaks, errors = {"data_parallel": 2, "sharding": sharding}, {}, {}
    for reduce_dtype in ("float32", "same"):
        model = planned_model("gpt2", dtype="bfloat16").model_copy(update={"reduce_dtype": reduce_dtype})
        plan = alike("gpt2", 2, settings, model=model).model_copy(update={"micro_batches": 4, "optimizer": "sgd"})
        outcomes = check_layer_run(two_ranks, plan, coarser=1000.0)
        (ratio,) = peak_ratios(reduce_dtype, "gpt2", plan, outcomes)
        assert 0.9 <= ratio.engine <= 1.05
        peaks[reduce_dtype] = max(outcome.peak_bytes for outcome in outcomes)
        errors[reduce_dtype] = max(outcome.gradient_error for outcome in outcomes)
    assert peaks["same"] < peaks["float32"]
    assert errors["float32"] < errors["same"]


def test_what_is_dropped_is_dropped_again_when_a_checkpoint_computes_again(two_ranks):
    model = planned_model("gpt2", dropout=0.5)
    settings = {"data_parallel": 2, "sharding": "zero3"}

    def run(**more) -> list[tuple[float, dict[str, list[float]]]]:
        ends = settings
        plan = alike("gpt2", 2, {**settings, **more}, ends, model=model)
        return two_ranks.run(gradients_on_rank, plan.model_dump_json())

    kept = run()
    assert run(checkpoint=True) == kept
    assert run(checkpoint=True, offload_hidden=True) == kept
    other = alike("gpt2", 2, settings, model=model).model_copy(update={"seed": 1})
    assert two_ranks.run(gradients_on_rank, other.model_dump_json())[0][0] != kept[0][0]


def test_hybrid_sharding_shares_a_copy_among_some(four_ranks):
    hybrid = {"data_parallel": 4, "sharding": "zero2", "shard_degree": 2}
    outcomes = check_layer_run(four_ranks, alike("gpt2", 4, hybrid))
    assert sum(outcome.parameter_bytes for outcome in outcomes) == 2 * whole_bytes("gpt2")


@pytest.mark.slow
def test_unlike_neighbours_reshard_hidden_states(four_ranks):
    first = {"data_parallel": 4, "sharding": "zero3"}
    second = {"data_parallel": 2, "tensor_parallel": 2, "sharding": "zero2", "sequence_parallel": True}
    third = {"tensor_parallel": 4, "checkpoint": True}
    ends = {"data_parallel": 4}
    check_layer_run(four_ranks, staged_plan("deep", [ends, first, second, third, second, ends], devices=4))


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("first_is_whole", [True, False])
def test_a_position_bias_is_learned_once_where_devices_compute_the_same(first_is_whole, two_ranks):
    """Its table is in the first block of each stack, and the second block uses it too."""
    divided = {"tensor_parallel": 2}
    whole = {**divided, "undivided": True}
    pair = [whole, divided] if first_is_whole else [divided, whole]
    check_layer_run(two_ranks, staged_plan("t5", [divided, *pair, divided, *pair, divided], devices=2))


@pytest.mark.slow_cases("gpipe")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_of_unlike_layers(schedule, four_ranks):
    outer, inner = {"data_parallel": 2, "sharding": "zero3"}, {"tensor_parallel": 2, "sequence_parallel": True}
    plan = staged_plan("gpt2", [outer, inner], [inner, outer], devices=4, micro_batches=4, schedule=schedule)
    check_layer_run(four_ranks, plan)


@pytest.mark.slow
def test_each_setting_saves_the_memory_that_it_promises(two_ranks):
    """Blocks only: the ends of the model are alike in all runs."""
    ends = {"data_parallel": 2, "sharding": "zero3"}

    def measured(**settings) -> list[LayerOutcome]:
        return check_layer_run(two_ranks, alike("deep", 2, {"data_parallel": 2, **settings}, ends))

    replicated, sharded = measured(), measured(sharding="zero3")
    checkpointed = measured(sharding="zero3", checkpoint=True)
    offloaded = measured(sharding="zero3", offload_hidden=True)
    both = measured(sharding="zero3", checkpoint=True, offload_hidden=True)
    assert peak(sharded) < peak(measured(sharding="zero2")) < peak(replicated)
    assert peak(checkpointed) < peak(sharded)
    assert peak(offloaded) < peak(sharded)
    assert peak(both) < peak(checkpointed)
    assert sharded[0].host_peak_bytes == 0
    # Under a checkpoint the inputs of the blocks alone are saved: four rows of 64 tokens of width 64, four times.
    assert both[0].host_peak_bytes == 4 * 4 * 64 * 64 * 4 < offloaded[0].host_peak_bytes


@pytest.mark.slow
def test_slices_save_gathered_parameters(two_ranks):
    """With little activation memory the peak is what is gathered at once."""
    ends = {"data_parallel": 2, "sharding": "zero3"}
    plain = {**ends, "checkpoint": True}
    model = planned_model("deep").model_copy(update={"sequence": 2})

    def measured(settings: dict[str, object]) -> list[LayerOutcome]:
        plan = alike("deep", 2, settings, ends).model_copy(update={"model": model})
        return check_layer_run(two_ranks, plan)

    assert peak(measured({**plain, "slices": 4})) < peak(measured(plain))
    some = measured({**plain, "slices": 4, "sharded_slices": 2})
    assert measured(plain)[0].parameter_bytes < some[0].parameter_bytes < whole_bytes("deep")


def test_1f1b_keeps_fewer_micro_batches_than_gpipe(two_ranks):
    def first_stage(schedule: str) -> int:
        plan = staged_plan("deep", [{}] * 3, [{}] * 3, devices=2, micro_batches=8, schedule=schedule)
        return check_layer_run(two_ranks, plan)[0].peak_bytes

    assert first_stage("1f1b") < 0.7 * first_stage("gpipe")


def test_optimizer_state_and_parameters_wait_on_the_host(two_ranks):
    sharded = {"data_parallel": 2, "sharding": "zero3"}
    kept = check_layer_run(two_ranks, alike("gpt2", 2, sharded))
    moved = check_layer_run(two_ranks, alike("gpt2", 2, {**sharded, "offload_optimizer": True}))
    assert moved[0].host_peak_bytes == 2 * kept[0].parameter_bytes
    assert peak(moved) < peak(kept)
    check_layer_run(two_ranks, alike("gpt2", 2, {**sharded, "offload_parameters": True}))


def parted_plan() -> LayerPlan:
    """Attention and MLP as layers of their own, and what is in neither."""
    attention = LayerSettings(name="transformer.h.0.attn", data_parallel=2, sharding="zero3", slices=2)
    mlp = LayerSettings(name="transformer.h.0.mlp", data_parallel=2, checkpoint=True)  # by role or by path
    others = [LayerSettings(name=name, data_parallel=2) for name in ("embedding", "transformer.h.1", "head")]
    layers = (others[0], attention, mlp, *others[1:])
    return LayerPlan(model=planned_model("gpt2"), devices=2, stages=(StagePlan(layers=layers),))


def test_attention_and_mlp_are_layers_of_their_own(two_ranks):
    outcomes = check_layer_run(two_ranks, parted_plan())
    # Sharded are the attention's matrices (4 x 32 x 32 and 4 x 32) and, with the first part, the two norms (4 x 32).
    assert outcomes[0].parameter_bytes == whole_bytes("gpt2") - 4 * (4 * 32 * 32 + 4 * 32 + 4 * 32) // 2


def test_what_ranks_draw_for_themselves_is_not_compared_with_one_process():
    for dropout, comparable in ((0.0, True), (0.1, False)):
        family = model_family(load_step(layer_reference("gpt2", dropout=dropout), "meta"))
        with nullcontext() if comparable else pytest.raises(FamilyError, match=r"drops values with probability 0\.1"):
            check_comparable(family)


def refusal(plan: LayerPlan, dropout: float = 0.0, name: str = "gpt2") -> str:
    step = load_step(layer_reference(name, dropout=dropout), "meta")
    with pytest.raises((FamilyError, PlanError)) as error:
        check_model(plan, model_family(step), step.example_kwargs)
    return str(error.value)


def renamed(plan: LayerPlan, old: str, new: str) -> LayerPlan:
    return LayerPlan.model_validate_json(plan.model_dump_json().replace(f'"{old}"', f'"{new}"'))


def test_layers_that_the_model_does_not_have_are_named():
    plan = alike("gpt2", 2, {"data_parallel": 2})
    assert "the model has no layer transformer.h.7: its layers are embedding, transformer.h.0" in refusal(
        renamed(plan, "transformer.h.1", "transformer.h.7")
    )
    assert "choose one of transformer.h.0.(attention|mlp|ln_1|attn|ln_2)" in refusal(
        renamed(parted_plan(), "transformer.h.0.attn", "transformer.h.0.self")
    )
    assert "is inside an attention module" in refusal(
        renamed(parted_plan(), "transformer.h.0.attn", "transformer.h.0.attn.c_attn")
    )
    layers = plan.stages[0].layers
    swapped = plan.model_copy(update={"stages": (StagePlan(layers=(layers[1], layers[0], *layers[2:])),)})
    assert "layer transformer.h.0 is out of order: the next layer of the model is embedding" in refusal(swapped)
    fewer = plan.model_copy(update={"stages": (StagePlan(layers=layers[:-1]),)})
    assert "layer head of the model is in no stage" in refusal(fewer)


def test_what_the_engine_cannot_express_is_refused_with_the_reason():
    tensor = {"tensor_parallel": 2}
    assert "would drop the same values" in refusal(alike("gpt2", 2, tensor), dropout=0.1)
    sequence = {"tensor_parallel": 2, "sequence_parallel": True}
    assert "a sequence of 17 cannot be shared by 2 devices" in refusal(alike("vit", 2, sequence, tensor), name="vit")
    sliced = {"data_parallel": 2, "slices": 2}
    assert "layer embedding cannot be cut into slices" in refusal(alike("gpt2", 2, sliced))
    some = {"tensor_parallel": 2, "sharding": "zero3", "slices": 2, "sharded_slices": 1}
    assert "on one mesh" in refusal(alike("gpt2", 2, some, tensor))
    attention, mlp = ("transformer.h.0.attn", "transformer.h.0.mlp")
    plan = parted_plan()
    layers = [
        layer.model_copy(update={"data_parallel": 1, "tensor_parallel": 2}) if layer.name == mlp else layer
        for layer in plan.stages[0].layers
    ]
    unlike = plan.model_copy(update={"stages": (StagePlan(layers=tuple(layers)),)})
    assert f"layers {attention} and {mlp} are parts of transformer.h.0 and must have the same" in refusal(unlike)


@pytest.mark.parametrize(
    ("settings", "ends", "message"),
    [
        ({"data_parallel": 2, "slices": 3}, {"data_parallel": 2}, "cannot be cut into 3 slices: possible are 1, 2, 4"),
        ({"tensor_parallel": 2, "sequence_parallel": True}, None, "cannot be sequence-parallel, only blocks can"),
    ],
)
def test_what_a_unit_cannot_have(settings, ends, message):
    assert message in refusal(alike("gpt2", 2, settings, ends))


def test_heads_and_vocabulary_that_cannot_be_shared():
    assert "has 4 attention heads, tensor-parallel 8 does not divide them: possible are 1, 2, 4" in refusal(
        alike("gpt2", 8, {"tensor_parallel": 8})
    )
    assert "layer embedding: tokens has a width of 128 to share, tensor-parallel 3 does not divide it" in refusal(
        alike("gpt2", 3, {"tensor_parallel": 3})
    )


def test_layers_that_share_a_parameter_must_be_in_one_place():
    replicated, sharded = {"data_parallel": 2}, {"data_parallel": 2, "sharding": "zero3"}
    plan = staged_plan("gpt2", [replicated, sharded, sharded, sharded], devices=2)
    assert "layers embedding and head share a parameter" in refusal(plan)


@pytest.mark.parametrize("kind", ["Linear", "SwinForImageClassification", "MixtralForCausalLM"])
def test_models_that_cannot_be_cut_are_refused_by_name(kind):
    step = TrainingStep(type(kind, (nn.Module,), {})(), (), {}, None)
    with pytest.raises(
        FamilyError, match=f"cannot cut a {kind} into layers; it supports GPT2LMHeadModel, .* operator plan"
    ):
        model_family(step)


def test_steps_that_the_units_do_not_understand_are_refused():
    gpt2 = load_step(layer_reference("gpt2"), "meta")
    with pytest.raises(FamilyError, match="the arguments input_ids, labels, by name"):
        model_family(replace(gpt2, example_kwargs={**gpt2.example_kwargs, "attention_mask": None}))
    with pytest.raises(FamilyError, match="leave loss_fn out"):
        model_family(replace(gpt2, loss_fn=lambda output: output.loss))


@pytest.mark.slow
def test_a_plan_is_run_by_processes_of_its_own():
    plan = staged_plan("gpt2", [{}] * 2, [{}] * 2, devices=2, micro_batches=2)
    report = run_layer_plan(plan, steps=3, check=True)
    assert report.failures() == []
    assert run_layer_plan(plan, steps=3).loss == report.loss  # whose state is made on the shards
    assert report.reference_loss == pytest.approx(report.loss, rel=1e-4)
    assert report.max_grad_rel_error < 1e-4
    assert report.measured_step_s > 0
    assert min(report.measured_peak_bytes) > whole_bytes("gpt2") / 2


def test_a_report_says_what_differs_from_one_process():
    report = LayerRunReport(
        devices=1, stages=1, micro_batches=1, device="cpu", dtype="float32", steps=1, measured_peak_bytes=[0],
        measured_host_peak_bytes=[0], resident_set_bytes=[0], measured_step_s=None, loss=[1.0], reference_loss=[1.0],
        max_grad_rel_error=0.0, worst_gradient="w", uncompared=[],
    )  # fmt: skip
    assert (report.failures(), report.exit_code) == ([], 0)
    wrong = {"loss": [1.001], "max_grad_rel_error": float("nan"), "uncompared": ["v"]}
    worse = report.model_copy(update=wrong)
    assert worse.exit_code == 1
    assert [line.split()[0:3] for line in worse.failures()] == [
        ["gradient", "of", "v"], ["loss", "of", "the"], ["gradient", "of", "w"],
    ]  # fmt: skip
    assert report.model_copy(update={**wrong, "reference_loss": None}).failures() == []

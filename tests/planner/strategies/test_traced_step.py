"""The traced graph executes exactly the user's step, and says truly what each operator is."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.steps import models
from support.steps.reference_interpreter import run_reference
from torch import Tensor, nn

from planner.graph.operator_graph import Operator, OutputRole, Phase, ValueRole
from planner.models.references import ModelReference, load_step
from planner.strategies.traced_step import TracedStep, input_tensors, trace_step

OWN_STEPS = (
    models.mlp,
    models.gpt,
    models.tied_gpt,
    models.dropout_gpt,
    models.lora_gpt,
    models.conv_net,
    models.res_net,
    models.mixture_of_experts,
)
CASES = [function.__name__ for function in OWN_STEPS] + [
    f"{kind}-{dropout}" for kind in models.SMALL_CONFIGURATIONS for dropout in ("plain", "dropout")
]


def build(case: str, folder: Path) -> models.Step:
    torch.manual_seed(0)
    if "-" not in case:
        return getattr(models, case)()
    kind, dropout = case.split("-")
    source = models.write_configuration(folder, kind)
    step = load_step(ModelReference(source, 2, 16, "float32", 0, dropout=0.1 if dropout == "dropout" else 0.0), "cpu")
    return step.module, step.example_args, step.example_kwargs, step.loss_fn


def eager(module: nn.Module, args: Any, kwargs: Any, loss_fn: Callable[..., Tensor] | None) -> Tensor:
    """Loss by autograd, gradients in ``.grad``; labels go to the loss function that asks for them."""
    if loss_fn is None:
        loss = module(*args, **kwargs).loss
    else:
        labels = {name: kwargs[name] for name in inspect.signature(loss_fn).parameters if name in kwargs}
        rest = {name: value for name, value in kwargs.items() if name not in labels}
        loss = loss_fn(module(*args, **rest), **labels)
    loss.backward()
    return loss.detach()


def assert_equals_eager(step: models.Step, traced: TracedStep | None = None) -> TracedStep:
    module, args, kwargs, loss_fn = step
    traced = traced or trace_step(*step)
    inputs = input_tensors(traced, module, args, kwargs)
    untouched = [tensor.clone() for tensor in inputs]
    torch.manual_seed(7)
    results = run_reference(traced, inputs)
    for before, after in zip(untouched, inputs, strict=True):
        assert torch.equal(before, after)
    buffers_before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    torch.manual_seed(7)
    loss = eager(module, args, kwargs, loss_fn)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    seen = set()
    for output, result in zip(traced.graph.outputs, results, strict=True):
        if output.role is OutputRole.LOSS:
            expected = loss
        elif output.role is OutputRole.GRADIENT:
            expected = parameters[traced.graph.values[output.of].name].grad
        else:
            expected = buffers[traced.graph.values[output.of].name]
        assert torch.equal(result, expected), traced.graph.values[output.value].name
        seen.add((output.role, output.of))
    assert len(seen) == len(results)
    updated = {traced.graph.values[of].name for role, of in seen if role is OutputRole.BUFFER_UPDATE}
    assert {name for name, before in buffers_before.items() if not torch.equal(buffers[name], before)} <= updated
    with_gradient = {name for name, parameter in parameters.items() if parameter.grad is not None}
    assert {value.name for value in traced.graph.parameters if value.trainable} == with_gradient
    return traced


@pytest.mark.slow_cases("t5-dropout", "t5-plain", "bert-plain", "bert-dropout", "llama-dropout")
@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_buffers_equal_eager_bit_by_bit(case: str, tmp_path: Path) -> None:
    traced = assert_equals_eager(build(case, tmp_path))
    assert any(operator.is_random for operator in traced.graph.operators) == ("dropout" in case)


@pytest.mark.slow_cases("t5-plain")
@pytest.mark.parametrize("case", ["gpt", "lora_gpt", "conv_net", "res_net", "mixture_of_experts", "t5-plain"])
def test_views_shapes_strides_and_dtypes_are_those_of_the_real_run(case: str, tmp_path: Path) -> None:
    step = build(case, tmp_path)
    traced = trace_step(*step)
    views = 0

    def compare(operator: Operator, read: Any, results: Any) -> None:
        nonlocal views
        for index, tensor in zip(operator.outputs, results, strict=True):
            assert (index is None) == (tensor is None), operator.identity
            if index is None:
                continue
            spec = traced.graph.values[index].spec
            assert (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}"), operator.identity
            strided = [dim for dim, size in enumerate(spec.shape) if size > 1]
            assert [tensor.stride(dim) for dim in strided] == [spec.stride[dim] for dim in strided], operator.identity
            sources = [source.untyped_storage().data_ptr() for source in read]
            aliased = tensor.untyped_storage().data_ptr() in sources
            assert aliased == operator.is_view, operator.identity
            if aliased:
                assert tensor.untyped_storage().data_ptr() == sources[0], operator.identity
                views += 1

    run_reference(traced, input_tensors(traced, *step[:3]), compare)
    assert views > 5


@pytest.mark.slow_cases("llama-plain")
@pytest.mark.parametrize("case", ["gpt", "res_net", "mixture_of_experts", "gpt2-plain", "llama-plain"])
def test_graph_is_in_order_alive_and_named_uniquely(case: str, tmp_path: Path) -> None:
    graph = trace_step(*build(case, tmp_path)).graph
    available = set(graph.inputs)
    phases = []
    for position, operator in enumerate(graph.operators):
        assert operator.index == position
        assert available.issuperset(operator.inputs)
        assert operator.identity.startswith(f"{operator.module_path}/{operator.phase}/{operator.target}/")
        for output_index, index in enumerate(operator.outputs):
            if index is not None:
                value = graph.values[index]
                assert (value.index, value.producer, value.output_index) == (index, position, output_index)
                available.add(index)
        if operator.forward is not None:
            assert operator.phase is Phase.BACKWARD
            assert graph.operators[operator.forward].phase is Phase.FORWARD
            assert graph.operators[operator.forward].module_path == operator.module_path
        phases.append(operator.phase)
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index)
    assert len({operator.identity for operator in graph.operators}) == len(graph.operators)
    assert len({value.name for value in graph.values}) == len(graph.values)
    needed = {output.value for output in graph.outputs}
    for operator in reversed(graph.operators):
        assert needed.intersection(operator.outputs), f"dead: {operator.identity}"
        needed.update(operator.inputs)


def test_operators_know_module_source_and_forward_partner() -> None:
    graph = trace_step(*models.gpt()).graph
    up = next(o for o in graph.operators if o.module_path == "layers.1.mlp.0" and o.target == "aten.addmm.default")
    assert up.identity == "layers.1.mlp.0/forward/aten.addmm.default/0"
    lines, start = inspect.getsourcelines(models.Block.forward)
    called = start + next(position for position, line in enumerate(lines) if "self.mlp(" in line)
    assert up.source == f"support/steps/models.py:{called}"
    products = [o for o in graph.operators if o.forward == up.index and o.target == "aten.mm.default"]
    assert len(products) == 2
    assert {product.module_path for product in products} == {"layers.1.mlp.0"}
    placed = [o for o in graph.operators if o.phase is Phase.FORWARD and not o.source]
    assert not placed


def test_tied_and_frozen_parameters() -> None:
    tied = trace_step(*models.tied_gpt()).graph
    (shared,) = [value for value in tied.parameters if value.aliases]
    assert (shared.name, shared.aliases, shared.trainable) == ("tokens.weight", ("head.weight",), True)
    lora = trace_step(*models.lora_gpt()).graph
    trainable = {value.name.rsplit(".", 2)[1] for value in lora.parameters if value.trainable}
    assert trainable == {"down", "up"}
    weight_gradients = [o for o in lora.operators if "embedding_dense_backward" in o.target]
    assert not weight_gradients


def test_roles_of_inputs_and_outputs() -> None:
    graph = trace_step(*models.res_net()).graph
    roles = Counter(graph.values[index].role for index in graph.inputs)
    assert roles[ValueRole.INPUT] == 2
    assert roles[ValueRole.TANGENT] == 1
    names = {graph.values[index].name for index in graph.inputs}
    assert {"images", "labels", "blocks.0.norm1.running_mean", "blocks.0.norm1.num_batches_tracked"} <= names
    updated = [graph.values[o.of].name for o in graph.outputs if o.role is OutputRole.BUFFER_UPDATE]
    assert sorted(updated) == sorted(name for name, _ in models.ResNet().named_buffers())
    assert [output.role for output in graph.outputs].count(OutputRole.LOSS) == 1


def test_flop_of_a_gpt_follow_from_its_shapes() -> None:
    batch, length, width, layers, vocabulary = 4, 16, 32, 2, 96
    graph = trace_step(*models.gpt(batch, length)).graph
    tokens = batch * length
    linear = 2 * tokens * width * (layers * 12 * width + vocabulary)
    attention = (
        layers * 4 * batch * length * length * width // 2
    )  # scores and mixing, of which a causal mask needs half
    forward = sum(o.flops for o in graph.operators if o.phase is Phase.FORWARD)
    backward = sum(o.flops for o in graph.operators if o.phase is Phase.BACKWARD)
    assert forward == linear + attention
    assert backward == 2 * linear + attention * 5 // 2  # the scores are computed again


def test_module_and_random_state_are_left_as_found() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.cache, self.calls = None, 0

        def forward(self, hidden: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            self.cache, self.calls = hidden, self.calls + 1
            return self.linear(hidden) + self.mean

    module = Careless()
    state = {name: (tensor, tensor.clone()) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    attributes, random_state = dict(module.__dict__), torch.get_rng_state()
    traced = trace_step(
        module, (torch.randn(2, 4, generator=torch.Generator().manual_seed(0)),), {}, models.mean_square
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.__dict__[name] is value for name, value in attributes.items())
    assert module.__dict__.keys() == attributes.keys()
    assert not module.linear._forward_hooks
    assert not module.linear._forward_pre_hooks
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor is state[name][0]
        assert torch.equal(tensor, state[name][1])
    assert_equals_eager((module, (torch.randn(2, 4),), {}, models.mean_square), traced)


def test_tensors_of_a_closure_become_constants() -> None:
    target = torch.randn(3, 4)
    step = (
        nn.Linear(4, 4),
        (torch.randn(3, 4),),
        {},
        lambda output: ((output - target) * torch.tensor(2.0)).pow(2).mean(),
    )
    traced = assert_equals_eager(step)
    assert sorted(traced.constants) == ["constant.0", "constant.1"]
    assert any(torch.equal(tensor, target) for tensor in traced.constants.values())


def test_unused_parameter_gets_no_gradient_and_a_note() -> None:
    module = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4, bias=False)})
    module.forward = lambda hidden: module["used"](hidden)
    traced = trace_step(module, (torch.randn(2, 4),), {}, models.mean_square)
    idle = next(value for value in traced.graph.parameters if value.name == "idle.weight")
    assert not idle.trainable
    assert traced.graph.notes == ("parameter idle.weight takes no part in the loss and gets no gradient",)


def test_nested_arguments_go_by_name_however_they_are_passed() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, list[Tensor]], *rest: Tensor, scale: Tensor, double: bool) -> Tensor:
            return self.linear(batch["parts"][0]) * scale * (2 if double else 1) + rest[0]

    module, tensor = Nested(), torch.randn(2, 4)
    step = (module, ({"parts": [tensor]}, tensor), {"scale": tensor, "double": True}, models.mean_square)
    traced = assert_equals_eager(step)
    names = [traced.graph.values[i].name for i in traced.graph.inputs if traced.graph.values[i].role == "input"]
    assert names == ["batch['parts'][0]", "args[1]", "scale"]
    linear = nn.Linear(4, 4)
    by_position = trace_step(linear, (tensor,), {}, models.mean_square)
    assert len(input_tensors(by_position, linear, (), {"input": tensor})) == len(by_position.graph.inputs)


def test_input_tensors_refuse_other_shapes() -> None:
    module, args, kwargs, loss_fn = models.mlp()
    traced = trace_step(module, args, kwargs, loss_fn)
    with pytest.raises(ValueError, match=r"input input: traced as float32 \(8, 16\), got float32 \(4, 16\)"):
        input_tensors(traced, module, (torch.randn(4, 16),))
    with pytest.raises(ValueError, match="input input is in the traced step"):
        input_tensors(traced, module)


def test_meta_and_real_modules_give_one_graph() -> None:
    with torch.device("meta"):
        on_meta = trace_step(*models.gpt())
    assert on_meta.fingerprint == trace_step(*models.gpt()).fingerprint


def test_custom_operator_of_a_library_is_one_operator() -> None:
    @torch.library.custom_op("capture_test::cube", mutates_args=())
    def cube(value: Tensor) -> Tensor:
        return value**3

    cube.register_fake(torch.empty_like)
    cube.register_autograd(
        lambda ctx, gradient: 3 * ctx.saved_tensors[0] ** 2 * gradient,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    step = (nn.Linear(4, 4), (torch.randn(2, 4),), {}, lambda output: cube(output).mean())
    traced = assert_equals_eager(step)
    assert "capture_test.cube.default" in {operator.target for operator in traced.graph.operators}


def test_results_that_a_backward_operator_leaves_out_have_no_value() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4))  # nothing before it is trained
    traced = assert_equals_eager((module, (torch.randn(3, 4),), {}, models.mean_square))
    (backward,) = [o for o in traced.graph.operators if "native_batch_norm_backward" in o.target]
    assert [output is None for output in backward.outputs] == [True, False, False]


def test_compiled_module_is_captured_as_the_module_inside() -> None:
    module, args, kwargs, loss_fn = models.mlp()
    compiled = torch.compile(module)
    traced = trace_step(compiled, args, kwargs, loss_fn)
    assert traced.fingerprint == trace_step(module, args, kwargs, loss_fn).fingerprint
    assert torch.equal(input_tensors(traced, compiled, args)[0], module[0].weight)


@pytest.mark.parametrize(
    "loss_of",
    [lambda weight: weight[1, 2], lambda weight: weight.t()[2, 1].reshape(1), lambda weight: weight[1, 2] * 1],
)
def test_loss_that_is_a_view_of_a_parameter_has_its_gradient(loss_of):
    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, scale):
            return self.weight

    traced = trace_step(Weight(), (torch.ones(1),), {}, loss_of)
    gradients = [output for output in traced.graph.outputs if output.role is OutputRole.GRADIENT]
    assert [traced.graph.values[output.of].name for output in gradients] == ["weight"]
    assert traced.graph.values[gradients[0].value].spec.shape == (3, 4)
    assert traced.graph.notes == ()


def test_loss_that_is_a_parameter_has_its_gradient():
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = nn.Parameter(torch.tensor(2.0))

        def forward(self):
            return self.loss

    outputs = trace_step(Scalar(), ()).graph.outputs
    assert [output.role for output in outputs] == [OutputRole.LOSS, OutputRole.GRADIENT]


LABELS = torch.arange(8)


class ClassLoss:
    """A loss whose method reads a variable of the module."""

    def __call__(self, output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, LABELS)


def test_data_that_stay_the_same_in_every_step_are_noted() -> None:
    (note,) = trace_step(nn.Linear(4, 8), (torch.randn(8, 4),), {}, ClassLoss()).graph.notes
    assert "the same in every step: int64 of shape (8,); make labels a parameter of the loss" in note
    scaled = trace_step(nn.Linear(4, 8), (torch.randn(8, 4),), {}, lambda output: (output * torch.tensor(2.0)).sum())
    assert scaled.graph.notes == ()

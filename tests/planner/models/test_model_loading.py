"""References to models: names, files and functions, and what is wrong with bad ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from support.steps import models

from planner import api
from planner.common.model_error import ModelError
from planner.models.references import ModelReference, TrainingStep, load_step, planned_model, reference_of
from planner.plan.decision import PlannedModel
from planner.strategies.traced_step import trace_step

REFERENCE = ModelReference("hf:gpt2", 2, 16, "float32", 0)


def source(folder: Path, content: object) -> str:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return f"hf:{path}"


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which the user keeps ``my_model.py``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_model", raising=False)
    yield tmp_path / "my_model.py"
    __import__("sys").modules.pop("my_model", None)


USER_MODEL = """
import torch
from torch import nn

def build(batch, seq, dtype=torch.float64, seed=5):
    return nn.Linear(seq, 3, dtype=dtype), (torch.randn(batch, seq, dtype=dtype),), None, lambda output: output.mean()

def reads_tensors(batch):
    rates = torch.linspace(0.5, 1.0, 2).tolist()
    return nn.Sequential(nn.Linear(4, int(4 * rates[0]))), (torch.randn(batch, 4),), {}, lambda output: output.mean()

def fixed():
    return nn.Linear(4, 4), (torch.randn(6, 4),), {}, lambda output: output.mean()

def needs_more(batch, hidden):
    return None

def fails():
    raise KeyError("weights")

def incomplete():
    return nn.Linear(4, 4), ()

def wrong_loss():
    return nn.Linear(4, 4), (), {}, "mse"

WIDTH = 5
"""


def load(reference: ModelReference, device: str = "meta") -> TrainingStep:
    return load_step(reference, device)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": "gpt2"}, "write hf:NAME"),
        ({"batch": 0}, "batch 0: it must be at least 1"),
        ({"sequence": -3}, "sequence -3"),
        ({"layers": 0}, "layers 0"),
        ({"dtype": "fp8"}, "dtype 'fp8' is unknown; known are float32, bfloat16"),
        ({"reduce_dtype": "float64"}, "reduce dtype 'float64': it is float32, or same"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        replace(REFERENCE, **changes)


def test_reference_is_plain_data() -> None:
    assert ModelReference(**json.loads(json.dumps(asdict(REFERENCE)))) == REFERENCE


def test_a_plan_keeps_in_which_dtype_gradients_are_summed() -> None:
    half, same = replace(REFERENCE, dtype="bfloat16"), replace(REFERENCE, dtype="bfloat16", reduce_dtype="same")
    assert (REFERENCE.reduce_dtype, half.reduce_dtype) == (None, "float32")
    assert replace(half, dtype="float32") == REFERENCE
    for reference in (REFERENCE, half, same):
        planned = PlannedModel(**asdict(reference))
        assert reference_of(PlannedModel.model_validate_json(planned.model_dump_json())) == reference
        assert ("gradients summed in float32" in planned.dtypes) == (reference == half)
    former = PlannedModel(**{**asdict(half), "reduce_dtype": None})
    assert "reduce_dtype" not in former.model_dump()
    assert reference_of(former) == same


@pytest.mark.parametrize("kind", list(models.SMALL_CONFIGURATIONS))
def test_each_kind_has_a_loss_and_seeded_data(kind: str, tmp_path: Path) -> None:
    reference = ModelReference(models.write_configuration(tmp_path, kind), 2, 16, "bfloat16", 3)
    first, second = load(reference, "cpu"), load(reference, "cpu")
    for tensor, again in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(tensor, again)
        assert tensor.dtype is torch.bfloat16
    for name, tensor in first.example_kwargs.items():
        assert torch.equal(tensor, second.example_kwargs[name])
    assert torch.isfinite(first.module(**first.example_kwargs).loss)
    assert first.module.training
    other = load(replace(reference, seed=4), "cpu")
    assert not torch.equal(next(other.module.parameters()), next(first.module.parameters()))
    with_meta = load(reference)
    assert all(tensor.is_meta for tensor in [*with_meta.module.parameters(), *with_meta.example_kwargs.values()])


def test_loading_leaves_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    load(ModelReference(models.write_configuration(tmp_path, "gpt2"), 2, 16, "float32", 3), "cpu")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow_cases("t5")
@pytest.mark.parametrize("kind", list(models.SMALL_CONFIGURATIONS))
def test_layers_and_dropout_can_be_set(kind: str, tmp_path: Path) -> None:
    reference = ModelReference(models.write_configuration(tmp_path, kind), 2, 16, "float32", 0, layers=1, dropout=0.25)
    step = load(reference)
    drops = {module.p for module in step.module.modules() if isinstance(module, torch.nn.Dropout)}
    assert drops <= {0.25}
    without = load(replace(reference, dropout=0.0))
    random = [
        any(o.is_random for o in trace_step(s.module, (), s.example_kwargs).graph.operators) for s in (step, without)
    ]
    assert random == [True, False]
    deeper = load(replace(reference, layers=3))
    count = [sum(1 for _ in s.module.parameters()) for s in (step, deeper)]
    assert count[1] > count[0]


@pytest.mark.parametrize("chosen", [False, True])
def test_advice_about_weights_and_tokens_is_kept_back_unless_it_was_chosen(
    chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging as transformers_logging

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    transformers_logging.add_handler(handler)
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    if chosen:
        monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
    try:
        content = {
            "model_type": "gpt2",
            **models.SMALL_CONFIGURATIONS["gpt2"],
            "eos_token_id": 50256 + chosen,
        }  # it warns once
        step = load(replace(REFERENCE, source=source(tmp_path, content)))
        trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
        assert transformers_logging.get_verbosity() == transformers_logging.WARNING
    finally:
        transformers_logging.remove_handler(handler)
        transformers_logging.set_verbosity(before)
    assert any("eos_token_id" in record.getMessage() for record in records) == chosen
    assert bool(records) == chosen


def test_masked_language_model_ignores_most_labels(tmp_path: Path) -> None:
    step = load(ModelReference(models.write_configuration(tmp_path, "bert"), 4, 32, "float32", 0), "cpu")
    labels = step.example_kwargs["labels"]
    assert 0.02 < (labels != -100).float().mean() < 0.5


def test_architectures_of_a_configuration_choose_the_task(tmp_path: Path) -> None:
    content = {"model_type": "bert", **models.SMALL_CONFIGURATIONS["bert"], "is_decoder": True}
    causal = load(replace(REFERENCE, source=source(tmp_path, {**content, "architectures": ["BertLMHeadModel"]})))
    assert type(causal.module).__name__ == "BertLMHeadModel"
    masked = load(replace(REFERENCE, source=source(tmp_path, content)))
    assert type(masked.module).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "the file is not JSON"),
        ({"n_layer": 2}, "has no model_type"),
        ({"model_type": "no-such-type"}, "transformers rejects the configuration"),
        ({"model_type": "clap"}, "has no class with a loss"),
        ({"model_type": "vit", "image_size": None}, "transformers rejects the configuration .*'image_size': .*None"),
        ({"model_type": "vit", "num_labels": 0}, "cannot build it from its configuration"),
        ({"model_type": "gpt2", "n_layer": "two"}, "transformers"),
        ({"model_type": "gpt2", "vocab_size": 0}, "cannot build it from its configuration"),
        ({"model_type": "gpt2", "architectures": [["GPT2LMHeadModel"]]}, "TypeError: unhashable|transformers rejects"),
        ({"model_type": ["gpt2"]}, "transformers rejects the configuration"),
    ],
)
def test_bad_configuration_files_are_named(content: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load(replace(REFERENCE, source=source(tmp_path, content)))


def test_unknown_names_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hf:gtp2 is unknown; known are gpt2, "):
        load(replace(REFERENCE, source="hf:gtp2"))
    with pytest.raises(ModelError, match=r"cannot be read \(No such file"):
        load(replace(REFERENCE, source=f"hf:{tmp_path}/config.json"))


def test_sequence_beyond_the_positions_is_refused() -> None:
    with pytest.raises(ModelError, match="has 1024 positions, the sequence has 2048"):
        load(replace(REFERENCE, sequence=2048))


def test_user_function_gets_what_it_asks_for(user_module: Path) -> None:
    user_module.write_text(USER_MODEL, encoding="utf-8")
    reference = ModelReference("my_model:build", 6, 7, "bfloat16", 1)
    step = load(reference, "cpu")
    assert step.example_args[0].shape == (6, 7)
    assert step.module.weight.dtype is torch.bfloat16
    assert torch.equal(step.module.weight, load(reference, "cpu").module.weight)
    assert load(reference).module.weight.is_meta
    assert trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn).graph.outputs


def test_model_that_reads_tensors_is_built_with_data(user_module: Path) -> None:
    user_module.write_text(USER_MODEL, encoding="utf-8")
    step = load(ModelReference("my_model:reads_tensors", 2, 4, "float32", 0))
    assert step.module[0].weight.shape == (2, 4)
    assert trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn).graph.outputs


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_model:missing", "has no function 'missing'; it has .*needs_more"),
        ("my_model.py:build", "write the module without .py: my_model:build"),
        ("my_model:WIDTH", "WIDTH is a int, not a function"),
        ("my_model:needs_more", "its function needs 'hidden'"),
        ("my_model:fails", "failed: KeyError: 'weights'"),
        ("my_model:incomplete", r"must return \(module, example_args, example_kwargs, loss_fn\), got a tuple of 2"),
        ("my_model:wrong_loss", "loss_fn is a str"),
        ("no_such_module:build", "no module named 'no_such_module'"),
    ],
)
def test_bad_user_functions_are_named(name: str, words: str, user_module: Path) -> None:
    user_module.write_text(USER_MODEL, encoding="utf-8")
    with pytest.raises(ModelError, match=words):
        load(ModelReference(name, 2, 4, "float32", 0))


def test_option_that_a_user_function_does_not_take_is_refused(user_module: Path) -> None:
    user_module.write_text(USER_MODEL, encoding="utf-8")
    with pytest.raises(ModelError, match="has no parameter 'layers'"):
        load(ModelReference("my_model:build", 2, 4, "float32", 0, layers=2))


@pytest.mark.parametrize(
    ("function", "wanted"), [("build", (2, 16)), ("reads_tensors", (2, None)), ("fixed", (6, None))]
)
def test_a_plan_names_what_its_function_takes(function: str, wanted: tuple[int, int | None], user_module: Path) -> None:
    user_module.write_text(USER_MODEL)
    plan = api.plan(
        replace(REFERENCE, source=f"my_model:{function}"), cluster="a100-8-nvlink", mesh=(2,), time_limit=9.0
    )
    model = plan.decision.model
    assert (model.batch, model.sequence) == wanted
    assert ("sequence" in dict(plan.rows())["model"]) == (wanted[1] is not None)
    assert ("sequence" in model.model_dump()) == (wanted[1] is not None)
    assert reference_of(model).source == f"my_model:{function}"


def test_models_of_images_have_no_sequence_in_a_plan(tmp_path: Path) -> None:
    found = {
        kind: planned_model(replace(REFERENCE, source=models.write_configuration(tmp_path, kind))).sequence
        for kind in ("gpt2", "vit")
    }
    assert found == {"gpt2": 16, "vit": None}
    assert planned_model(replace(REFERENCE, source="no_such_module:step")).sequence == 16


def test_the_digest_of_a_plan_with_a_sequence_stays() -> None:
    written = {"source": "my_model:fixed", "batch": 2, "sequence": 256, "dtype": "float32", "seed": 0}
    kept = {"layers": None, "dropout": None, "loss_chunks": 1}
    assert PlannedModel(**written).model_dump() == {**written, **kept}

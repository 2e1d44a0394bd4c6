from __future__ import annotations

import pytest
import torch
from support.steps.models import gpt, mlp
from torch import nn

from planner.torch_adapter.tracing.step_module import StepArguments
from runtime.measure.batches import Batches, DataError


def batches_of(step, data):
    module, args, kwargs, _ = step
    arguments = StepArguments.of(module, args, kwargs)
    return Batches.of(module, arguments, arguments.tensors, data)


def written(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return path


def test_without_a_text_every_step_is_the_example_batch():
    step = gpt()
    batches = batches_of(step, None)
    assert batches.names == ("input_ids", "labels")
    for number in (0, 3):
        tokens, labels = batches.tensors(number)
        assert torch.equal(tokens, step[2]["input_ids"])
        assert torch.equal(labels, step[2]["labels"])


def test_rows_are_consecutive_bytes_and_labels_the_next_byte(tmp_path):
    content = bytes(range(90)) * 3
    tokens, labels = batches_of(gpt(batch=2, sequence=16), written(tmp_path, content)).tensors(1)
    assert tokens[0].tolist() == list(content[32:48])
    assert tokens[1].tolist() == list(content[48:64])
    assert labels[1, :-1].tolist() == list(content[49:64])
    # The example ignores the last position of every row.
    assert labels[:, -1].tolist() == [-100, -100]


def test_bytes_are_taken_modulo_the_vocabulary(tmp_path):
    tokens, _ = batches_of(gpt(batch=1, sequence=16), written(tmp_path, b"z" * 40)).tensors(0)
    assert tokens.unique().tolist() == [ord("z") % 96]


def test_a_model_that_shifts_by_itself_gets_labels_equal_to_its_tokens(tmp_path):
    module, args, kwargs, loss_fn = gpt(batch=1, sequence=16)
    kwargs["labels"] = kwargs["input_ids"].clone()
    tokens, labels = batches_of((module, args, kwargs, loss_fn), written(tmp_path, bytes(range(80)))).tensors(0)
    assert torch.equal(tokens, labels)


def test_a_long_training_wraps_around(tmp_path):
    batches = batches_of(gpt(batch=2, sequence=16), written(tmp_path, bytes(range(60))))
    seen = [batches.tensors(number)[0] for number in range(40)]
    assert all(tokens.shape == (2, 16) for tokens in seen)
    assert len({tuple(tokens.flatten().tolist()) for tokens in seen}) > 10


@pytest.mark.parametrize(
    ("step", "content", "message"),
    [
        (mlp(), b"words " * 50, "takes no token ids"),
        (gpt(sequence=16), b"short", "has 5 bytes, a sequence has 16 tokens"),
        ((nn.Linear(2, 2), (), {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}, None), b"long enough", "embedding"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path, step, content, message):
    with pytest.raises(DataError, match=message):
        batches_of(step, written(tmp_path, content))


def test_a_missing_text_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"missing\.txt cannot be read"):
        batches_of(gpt(), tmp_path / "missing.txt")

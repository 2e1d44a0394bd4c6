"""Rules of traced steps: what exists, what is refused, what is remembered."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from support.steps import models
from support.steps.traced_steps import ALL_STEPS, traced_step
from torch import nn

from planner.graph.placement import divides, is_partial
from planner.models.references import ModelReference, load_step
from planner.strategies import sharding_rules
from planner.strategies.sharding_rules import AxisRule, axis_rules, compose
from planner.strategies.traced_step import TracedStep, trace_step
from planner.torch_adapter.rules import cache as rule_cache
from planner.torch_adapter.rules import table as rule_table
from planner.torch_adapter.rules.cache import RuleCache
from planner.torch_adapter.rules.table import RuleTable

PLANNER = Path(rule_cache.__file__).parents[2]
RULE_FILES = [
    "graph/axis_rule.py",
    *(str(path.relative_to(PLANNER)) for path in (PLANNER / "torch_adapter" / "rules").glob("*.py")),
    *(str(path.relative_to(PLANNER)) for path in (PLANNER / "torch_adapter" / "local").glob("*.py")),
]
"""Files of the code that makes and checks rules."""
AT_LEAST = {
    "aten.mm.default": 4,
    "aten.bmm.default": 4,
    "aten.addmm.default": 4,
    "aten.embedding.default": 4,
    "aten.embedding_dense_backward.default": 4,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": 3,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 3,
    "aten._log_softmax.default": 3,
    "aten._log_softmax_backward_data.default": 3,
    "aten.nll_loss_forward.default": 3,
    "aten.nll_loss_backward.default": 3,
    "aten.native_layer_norm.default": 2,
    "aten.native_layer_norm_backward.default": 2,
    "aten.native_dropout.default": 4,
    "aten.native_dropout_backward.default": 4,
    "aten.convolution.default": 3,
    "aten.convolution_backward.default": 3,
    "aten.native_group_norm.default": 3,
    "aten.native_group_norm_backward.default": 3,
    "aten._native_batch_norm_legit_functional.default": 2,
    "aten.native_batch_norm_backward.default": 2,
    "aten.max_pool2d_with_indices.default": 3,
    "aten.max_pool2d_with_indices_backward.default": 3,
    "aten.view.default": 3,
    "aten._unsafe_view.default": 3,
    "aten.transpose.int": 4,
    "aten.t.default": 3,
    "aten.permute.default": 3,
    "aten.expand.default": 3,
    "aten.cat.default": 3,
    "aten.split.Tensor": 3,
    "aten.slice.Tensor": 2,
    "aten.slice_backward.default": 2,
    "aten.select.int": 2,
    "aten.select_backward.default": 2,
    "aten.constant_pad_nd.default": 2,
    "aten.topk.default": 2,
    "aten.cumsum.default": 2,
    "aten.scatter.src": 2,
    "aten.where.self": 3,
    "aten.index.Tensor": 2,
    "aten.gather.default": 2,
    "aten.arange.default": 2,
    "aten.new_zeros.default": 3,
    "aten.gelu.default": 3,
    "aten.add.Tensor": 4,
    "aten.sum.dim_IntList": 3,
    "aten.mean.dim": 3,
    "aten._softmax.default": 3,
    "aten._softmax_backward_data.default": 3,
}
"""Fewest rules that the best-off operator of a target must have, all-replicate included."""


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))


def as_a_new_process(monkeypatch):
    """From now on every question finds only the cache on disk."""
    monkeypatch.setattr(sharding_rules, "rule_table", lambda size: RuleTable(size, RuleCache(rule_cache.cache_path())))


def rules_of(step: TracedStep, axis_size: int, target: str) -> list[tuple[AxisRule, ...]]:
    rules, _ = axis_rules(step, axis_size)
    found = [rules[operator.index] for operator in step.graph.operators if operator.target == target]
    assert found, f"{target} is not in the step"
    return found


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("axis_size", [2, 4])
def test_every_target_of_every_model_has_rules(axis_size):
    best: dict[str, int] = defaultdict(int)
    for name in ALL_STEPS:
        step = traced_step(name)
        rules, report = axis_rules(step, axis_size)
        assert report.without_rule == {}, name
        for operator, own in zip(step.graph.operators, rules, strict=True):
            best[operator.target] = max(best[operator.target], len(own))
    missing = {target: (best[target], least) for target, least in AT_LEAST.items() if 0 < best[target] < least}
    assert missing == {}
    assert sum(best[target] > 0 for target in AT_LEAST) >= len(AT_LEAST) - 2


@pytest.mark.parametrize("name", ALL_STEPS)
def test_rules_are_consistent(name):
    step = traced_step(name)
    rules, _ = axis_rules(step, 2)
    delivered: dict[int, set[str]] = defaultdict(set)
    for operator, own in zip(step.graph.operators, rules, strict=True):
        assert all(word == "R" for word in own[0].placements)
        assert list(own) == sorted(own, key=lambda rule: rule.sort_key)
        assert len(set(own)) == len(own)
        for rule in own:
            for index, word in zip(operator.inputs, rule.inputs, strict=True):
                assert divides(step.graph.values[index].spec.shape, (word,), (2,))
                assert not is_partial(word) or word in delivered[index]
            for index, word in zip(operator.outputs, rule.outputs, strict=True):
                assert (index is None) == (word is None)
                if index is not None and word is not None:
                    assert divides(step.graph.values[index].spec.shape, (word,), (2,))
                    delivered[index].add(word)


def test_rules_that_matter_for_language_models():
    gpt2 = traced_step("gpt2")
    (embedding, *_) = rules_of(gpt2, 2, "aten.embedding.default")
    assert AxisRule(("Psum",), ("S0", "R")) in embedding, "rows of the vocabulary"
    assert AxisRule(("S0",), ("R", "S0")) in embedding, "batch"
    for attention in rules_of(gpt2, 2, "aten._scaled_dot_product_flash_attention_for_cpu.default"):
        assert AxisRule(("S0", "S0"), ("S0",) * 3) in attention
        assert AxisRule(("S1", "S1"), ("S1",) * 3) in attention
    for linear in rules_of(gpt2, 2, "aten.addmm.default"):
        assert AxisRule(("S1",), ("S0", "R", "S1")) in linear, "column-parallel"
        assert AxisRule(("Psum",), ("R", "S1", "S0")) in linear, "row-parallel, bias added once"
        assert AxisRule(("S0",), ("R", "S0", "R")) in linear, "batch"
    (softmax,) = rules_of(gpt2, 2, "aten._log_softmax.default")
    rows = 4 * 16
    assert AxisRule(("S1",), ("S1",), (("all_reduce", rows * 4),) * 2) in softmax, "vocabulary"
    (loss,) = rules_of(gpt2, 2, "aten.nll_loss_forward.default")
    assert AxisRule(("Psum", "R"), ("S1", "R")) in loss, "vocabulary"
    assert AxisRule(("Psum", "R"), ("S0", "S0"), (("all_reduce", 4),)) in loss, "batch, counted over all ranks"
    assert not any("Pavg" in rule.outputs for rule in loss), "an average of means is wrong with ignored labels"


def test_rules_of_convolutions():
    for rules in rules_of(traced_step("conv_net"), 2, "aten.convolution.default"):
        inputs = {rule.inputs[:2] for rule in rules}
        assert {("S0", "R"), ("R", "S0"), ("S1", "S1")} <= inputs
    for rules in rules_of(traced_step("res_net"), 2, "aten._native_batch_norm_legit_functional.default"):
        assert AxisRule(("S1", "S0", "S0", "S0", "S0"), ("S1", "S0", "S0", "S0", "S0")) in rules
        assert not any(rule.inputs[0] == "S0" for rule in rules), "statistics need the whole batch"


def test_masked_attention_follows_the_masks_broadcast():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, hidden, mask):
            query = self.project(hidden)
            return nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask).sum()

    step = trace_step(Masked(), (torch.randn(4, 4, 8, 8), torch.randn(4, 1, 8, 8)))
    (rules,) = rules_of(step, 2, "aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert AxisRule(("S0", "S0"), ("S0", "S0", "S0", "S0")) in rules
    assert AxisRule(("S1", "S1"), ("S1", "S1", "S1", "R")) in rules


def test_wrong_rules_are_dropped_and_counted(monkeypatch, tmp_path):
    wrong = {
        "aten.gelu.default": AxisRule(("Psum",), ("Psum",)),
        "aten.addmm.default": AxisRule(("S0",), ("R", "R", "S0")),
        "aten.native_layer_norm.default": AxisRule(("S2", "R", "R"), ("S2", "S0", "S0")),
        "aten.transpose.int": AxisRule(("S1",), ("S1",)),
    }
    right = rule_table.candidate_rules

    def with_wrong(call, inputs, outputs, axis_size):
        extra = wrong.get(str(call.target))
        return (*(right(call, inputs, outputs, axis_size) or ()), *([extra] if extra else ()))

    step = traced_step("vit")
    before, _ = axis_rules(step, 4)
    monkeypatch.setattr(rule_table, "candidate_rules", with_wrong)
    as_a_new_process(monkeypatch)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "other"))
    after, report = axis_rules(step, 4)
    assert after == before
    assert set(wrong) <= set(report.dropped)


def test_dimensions_that_do_not_divide_are_reported():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 97, bias=False)

        def forward(self, hidden):
            return self.linear(hidden).square().mean()

    _, report = axis_rules(trace_step(Head(), (torch.randn(4, 8),)), 2)
    assert report.not_dividing["aten.mm.default"] == 2
    even, _ = axis_rules(
        trace_step(nn.Sequential(nn.Linear(8, 4)), (torch.randn(4, 8),), loss_fn=models.mean_square), 2
    )
    assert all(even)


def test_an_operator_without_a_rule_is_replicated_and_named():
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.points = nn.Parameter(torch.randn(4, 8))

        def forward(self, hidden):
            return torch.cdist(hidden, self.points, compute_mode="donot_use_mm_for_euclid_dist").mean()

    step = trace_step(Distances(), (torch.randn(4, 8),))
    rules, report = axis_rules(step, 2)
    assert report.without_rule == {"aten._cdist_backward.default": 1, "aten._cdist_forward.default": 1}
    for operator, own in zip(step.graph.operators, rules, strict=True):
        if "cdist" in operator.target:
            assert len(own) == 1


def test_one_rank_only_replicates_and_no_rank_is_refused():
    rules, report = axis_rules(traced_step("gpt2"), 1)
    assert all(len(own) == 1 for own in rules)
    assert report.dropped == report.not_dividing == {}
    with pytest.raises(ValueError, match="axis size is 0"):
        axis_rules(traced_step("gpt2"), 0)


def test_rules_are_cached_on_disk(tmp_path, monkeypatch):
    step = traced_step("conv_net")
    first, _ = axis_rules(step, 2)
    file = rule_cache.cache_path()
    assert file.parent == tmp_path
    assert json.loads(file.read_text())["entries"]

    def unexpected(*arguments):
        raise AssertionError("verified again")

    as_a_new_process(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(rule_table, "verified_rules", unexpected)
        assert axis_rules(step, 2)[0] == first

    for damaged in ("{", '{"code": 1}', json.dumps({"code": rule_cache.code_digest(), "entries": {"x": 3}}), ""):
        file.write_text(damaged)
        assert axis_rules(step, 2)[0] == first
        assert json.loads(file.read_text())["entries"].keys() != {"x"}

    content = json.loads(file.read_text())
    for entry in content["entries"].values():
        entry["rules"] = entry["rules"][:1]
    file.write_text(json.dumps(content | {"code": "of other code"}))
    assert axis_rules(step, 2)[0] == first


@pytest.mark.parametrize("file", RULE_FILES)
def test_the_digest_of_the_cache_covers_every_file_of_the_rules(file, tmp_path):
    for name in RULE_FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PLANNER / name, tmp_path / name)
    before = rule_cache.code_digest(tmp_path)
    assert before == rule_cache.code_digest()
    rule_cache.code_digest.cache_clear()
    with (tmp_path / file).open("a") as stream:
        stream.write("# changed\n")
    assert rule_cache.code_digest(tmp_path) != before


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "file" / "folder"))
    rules, _ = axis_rules(traced_step("conv_net"), 2)
    assert max(map(len, rules)) > 3


def test_one_entry_of_a_parameter_as_the_loss_has_rules():
    step = trace_step(nn.Linear(4, 4), (torch.randn(2, 4),), {}, lambda output: output[1, 2])
    rules, _ = axis_rules(step, 2)
    assert all(rules)


def test_composition_keeps_joint_divisibility():
    step = traced_step("gpt2")
    for mesh in ((2, 2), (4, 2)):
        per_axis = [axis_rules(step, count)[0] for count in mesh]
        for operator in step.graph.operators[:80]:
            rules = [own[operator.index] for own in per_axis]
            strategies = compose(operator, step.graph, rules, mesh)
            assert strategies == compose(operator, step.graph, rules, mesh)
            assert len(set(strategies)) == len(strategies) <= len(rules[0]) * len(rules[1])
            first = strategies[0]
            assert set(sum((*first.inputs, *(words for words in first.outputs if words)), ())) <= {"R"}
            for strategy in strategies:
                for index, placement in zip(operator.inputs, strategy.inputs, strict=True):
                    assert divides(step.graph.values[index].spec.shape, placement, mesh)


def test_composition_divides_the_bytes_of_collectives():
    step = traced_step("gpt2")
    (operator,) = [op for op in step.graph.operators if op.target == "aten._log_softmax.default"]
    rules = axis_rules(step, 2)[0][operator.index]
    found = {s.inputs[0]: s.collectives for s in compose(operator, step.graph, (rules, rules), (2, 2))}
    rows = 4 * 16 * 4
    assert found["S1", "R"] == ((0, "all_reduce", rows),) * 2
    assert found["S0", "S1"] == ((1, "all_reduce", rows // 2),) * 2
    assert found["S1", "S1"] == ((0, "all_reduce", rows),) * 2 + ((1, "all_reduce", rows),) * 2


def test_composition_keeps_groups_whole():
    module = nn.Sequential(nn.Conv2d(16, 16, 3, groups=2), nn.Conv2d(16, 16, 3, groups=4))
    step = trace_step(module, (torch.randn(4, 16, 8, 8),), loss_fn=models.mean_square)
    rules, _ = axis_rules(step, 2)
    channels = []
    for operator in step.graph.operators:
        if operator.target == "aten.convolution.default":
            own = rules[operator.index]
            assert ("S1", "S0", "S0") in {rule.inputs for rule in own}
            strategies = compose(operator, step.graph, (own, own), (2, 2))
            channels.append(("S1", "S1") in {strategy.inputs[0] for strategy in strategies})
    assert channels == [False, True]


def test_a_large_model_costs_seconds_and_little_memory():
    reference = ModelReference("hf:gpt2-xl", batch=512, sequence=1024, dtype="bfloat16", seed=0, layers=2)
    step_of = load_step(reference)
    step = trace_step(step_of.module, step_of.example_args, step_of.example_kwargs, step_of.loss_fn)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    rules, report = axis_rules(step, 8)
    assert time.perf_counter() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
    assert report.without_rule == {}
    assert max(map(len, rules)) >= 5

"""Operators of the root module have a name in texts, and a user may give them by it."""

from __future__ import annotations

import pytest
from support.steps import models
from torch import nn

from planner import api
from planner.common.infeasibility import InfeasibleError
from planner.common.root_name import identity, shown
from planner.graph.names import operators_named
from planner.models.references import ModelReference
from planner.strategies.traced_step import trace_step


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/forward/aten.mm.default/0#0", "(root)/forward/aten.mm.default/0#0"),
        ("compute of /backward/aten.mm.default/0", "compute of (root)/backward/aten.mm.default/0"),
        ("buffer 3 (/forward/aten.t/0 as [R])", "buffer 3 ((root)/forward/aten.t/0 as [R])"),
        ("a / /forward/x/0", "a / (root)/forward/x/0"),
        ("h.0/forward/aten.mm.default/0", "h.0/forward/aten.mm.default/0"),
        ("/home/forward/x", "/home/forward/x"),
    ],
)
def test_only_names_of_the_root_are_written_out(text: str, wanted: str) -> None:
    assert shown(text) == wanted
    assert shown(wanted) == wanted


def test_names_that_are_shown_can_be_given() -> None:
    graph = trace_step(*models.mlp()).graph
    of_root = [operator for operator in graph.operators if not operator.module_path]
    assert of_root
    for operator in of_root:
        assert operator.identity.startswith("/")
        assert operators_named(graph, shown(operator.identity)) == (operator,)
    assert operators_named(graph, "(root)") == operators_named(graph, "")
    assert identity("h.0/forward/x") == "h.0/forward/x"


def test_a_refusal_names_the_root() -> None:
    reference = ModelReference(f"{__name__}:model", batch=8, sequence=1)
    with pytest.raises(InfeasibleError) as caught:
        api.plan(reference, cluster="a100-8-nvlink", mesh=(2,), memory=2**31 + 2**20, time_limit=10.0)
    message = str(caught.value)
    assert "(root)/" in message
    assert " /" not in message.replace(" / ", "")


def model(batch: int = 8) -> models.Step:
    import torch

    return nn.Linear(512, 512), (torch.randn(batch, 512),), {}, lambda output: output.square().mean()

"""Fingerprint of a traced step: equal for the same model in any process and on any machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from planner.graph.operator_graph import Operator, OperatorGraph, TensorSpec
from planner.torch_adapter.local.calls import OperatorCall
from planner.torch_adapter.local.operator_traits import arguments_by_name

_ATTENTION = re.compile(r"aten\._scaled_dot_product_\w*?attention\w*?(_backward)?\.default")
"""Which of these kernels is traced depends on the device; they compute one and the same function."""

_SHARED_CONSTANTS = ("dropout_p", "is_causal", "scale")
"""Arguments that every variant of the attention kernel has; the others belong to one variant."""


def fingerprint(graph: OperatorGraph, calls: Sequence[OperatorCall]) -> str:
    """SHA-256 of identities, targets, shapes, dtypes, constants and edges, as a hexadecimal string.

    Variants of the attention kernel count as one: of them only queries, keys, values, incoming gradient,
    the first result (three of a backward operator) and the shared constants enter.
    """
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update("|".join(map(str, parts)).encode())
        digest.update(b"\n")

    for index in graph.inputs:
        value = graph.values[index]
        add("input", value.name, value.role, value.trainable, value.aliases, *_spec(value.spec))
    for operator, call in zip(graph.operators, calls, strict=True):
        attention = _ATTENTION.fullmatch(operator.target)
        if attention is None:
            inputs, outputs, constants = operator.inputs, operator.outputs, _constants(call)
        else:
            backward = attention.group(1) is not None
            inputs = operator.inputs[: 4 if backward else 3]
            outputs = operator.outputs[: 3 if backward else 1]
            constants = _attention_constants(call)
        add(_neutral(operator), operator.phase, constants)
        add(*(_edge(graph, index) for index in inputs))
        for output in outputs:
            add("nothing" if output is None else _spec(graph.values[output].spec))
    for result in graph.outputs:
        add(result.role, _edge(graph, result.value), "" if result.of is None else graph.values[result.of].name)
    return digest.hexdigest()


def _spec(spec: TensorSpec) -> tuple[object, ...]:
    return spec.shape, spec.stride, spec.dtype


def _neutral(operator: Operator) -> str:
    """Identity with the variant of an attention kernel left out."""
    return _ATTENTION.sub(lambda match: f"attention{match.group(1) or ''}", operator.identity)


def _edge(graph: OperatorGraph, index: int) -> str:
    value = graph.values[index]
    if value.producer is None:
        return value.name
    return f"{_neutral(graph.operators[value.producer])}#{value.output_index}"


def _constants(call: OperatorCall) -> str:
    """Every argument with its structure; the strings of torch's objects (dtypes, devices) hold no addresses."""
    args, kwargs = call.template()
    return f"{args} {sorted(kwargs.items())}"


def _attention_constants(call: OperatorCall) -> str:
    args, kwargs = call.template()
    given = arguments_by_name(call.target, args, kwargs)
    return str([(name, given.get(name)) for name in _SHARED_CONSTANTS])

"""Layers of a model for tests that plan it several times: each model is captured and folded once."""

from __future__ import annotations

from formulations.layers import LayerChain
from planner import layer_folding
from planner.cluster import ClusterSpec
from planner.models import ModelReference

_KNOWN: dict[tuple[ModelReference, str, bool], LayerChain] = {}


def model_layers(reference: ModelReference, cluster: ClusterSpec, *, apart: bool = False) -> LayerChain:
    """As :func:`planner.layer_folding.model_layers`; in its place by ``monkeypatch``."""
    key = (reference, cluster.name, apart)
    if key not in _KNOWN:
        _KNOWN[key] = layer_folding.model_layers(reference, cluster, apart=apart)
    return _KNOWN[key]

"""Layers of a model for tests that plan it several times: each model is traced and folded once."""

from __future__ import annotations

from functools import cache

from formulations.layers.layer import LayerChain
from planner.layers.profiles import folding as layer_folding
from planner.machine.cluster import ClusterSpec, load_cluster
from planner.models.references import ModelReference

_KNOWN: dict[tuple[ModelReference, str, bool], LayerChain] = {}


def model_layers(reference: ModelReference, cluster: ClusterSpec, *, apart: bool = False) -> LayerChain:
    """As :func:`planner.layers.profiles.folding.model_layers`; in its place by ``monkeypatch``."""
    key = (reference, cluster.name, apart)
    if key not in _KNOWN:
        _KNOWN[key] = layer_folding.model_layers(reference, cluster, apart=apart)
    return _KNOWN[key]


@cache
def small_cluster() -> ClusterSpec:
    """Eight devices that reserve nothing, so that a tiny step may use them up."""
    cluster = load_cluster("titan-rtx-8-pcie")
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"reserve_bytes": 0})})

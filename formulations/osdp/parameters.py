"""A variant of OSDP: a mode for each parameter tensor instead of each module.

The paper's operators are modules (its Table 1 counts two for each layer, the embedding and the head), but section 3.1
does not require that. Here every module becomes as many operators as it has parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from formulations.layers.layer import UNDIVIDED, LayerChain, LayerProfile
from formulations.osdp.problem import OsdpError


def per_parameter(chain: LayerChain, parameters: Mapping[str, Sequence[tuple[str, int]]]) -> LayerChain:
    """Make an operator of every parameter.

    Time, activations and temporaries of a module go to its largest parameter, which is therefore the last of its
    operators; the others only communicate. All sums are unchanged.

    Parameters
    ----------
    chain
        Modules.
    parameters
        Kind of a module -> name and bytes of each of its parameters; modules of other kinds stay whole.

    Raises
    ------
    OsdpError
        If the parameters of a module are not as large as it.
    """
    layers: list[LayerProfile] = []
    for layer in chain.layers:
        layers += _parts(layer, parameters[layer.kind]) if parameters.get(layer.kind) else [layer]
    return replace(chain, layers=tuple(layers))


def _parts(layer: LayerProfile, parameters: Sequence[tuple[str, int]]) -> list[LayerProfile]:
    total = sum(nbytes for _, nbytes in parameters)
    if total != layer.parameter_bytes:
        raise OsdpError(
            f"layer {layer.name} has {layer.parameter_bytes} bytes of parameters, but those named for its kind "
            f"{layer.kind} have {total}; name all of them"
        )
    idle = LayerProfile(
        name=layer.name,
        kind=layer.kind,
        parameter_bytes=0,
        input_bytes=0,
        output_bytes=0,
        saved_bytes=0,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        forward_seconds=0.0,
        backward_seconds=0.0,
        bytes_source=layer.bytes_source,
        seconds_source=layer.seconds_source,
    )
    *smaller, largest = sorted(parameters, key=lambda parameter: parameter[1])
    return [
        replace(base, name=f"{layer.name}.{name}", kind=f"{layer.kind}.{name}", parameter_bytes=nbytes, split=UNDIVIDED)
        for base, (name, nbytes) in [*((idle, parameter) for parameter in smaller), (layer, largest)]
    ]

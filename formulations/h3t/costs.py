"""What the operations of an H3T step cost: a chain of layers on devices that share the data.

The first layer of the chain is the embedding and the last one the head with the loss; those between are H3T's. What the
paper measures in the first steps comes from layer profiles here. All devices hold the parameters of embedding and head,
with their gradients, and what the embedding keeps for backward during the whole step; forward and
backward of the head are one operation, the loss. What later layers read again is there all the time too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from formulations.h3t.problem import H3tBorders, H3tError, H3tLayer, H3tStep, Optimizer
from formulations.layers.layer import LayerChain, LayerProfile

__all__ = ["SECONDS_PER_COST", "H3tMachine", "Link", "h3t_step"]

SECONDS_PER_COST = 1e-6
"""Quantum of times: they are rounded up."""


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds of latency of a message, and seconds per byte."""

    latency_seconds: float
    seconds_per_byte: float

    def ring(self, devices: int, nbytes: int) -> float:
        """Seconds of an all-gather or reduce-scatter over a ring, `nbytes` the larger side on one device."""
        return (devices - 1) * (self.latency_seconds + self.seconds_per_byte * nbytes / devices)

    def copy(self, nbytes: int) -> float:
        """Seconds of a copy of so many bytes."""
        return self.latency_seconds + self.seconds_per_byte * nbytes if nbytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class H3tMachine:
    """Equal devices that share the data.

    Parameters
    ----------
    devices
        How many.
    between
        The slowest link of a ring over all of them.
    host
        Link of one device to its host's memory.
    device_link
        Whether devices have links of their own (NVLink); else `between` and `host` share one.
    update_seconds_per_byte
        The CPU optimizer's time for one byte of a shard.

    Raises
    ------
    H3tError
        If there is no device, or the optimizer's time is negative or not finite.
    """

    devices: int
    between: Link
    host: Link
    device_link: bool
    update_seconds_per_byte: float

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise H3tError(f"devices is {self.devices}; at least one device must train")
        if not (math.isfinite(self.update_seconds_per_byte) and self.update_seconds_per_byte >= 0):
            raise H3tError(f"update_seconds_per_byte is {self.update_seconds_per_byte}; it must be finite and >= 0")


def h3t_step(
    chain: LayerChain, machine: H3tMachine, batch: int, memory_limit: int, optimizer: Optimizer = Optimizer.OVERLAPPED
) -> H3tStep:
    """Write down a step.

    Parameters
    ----------
    chain
        Embedding, layers and head.
    machine
        Where it runs.
    batch
        Samples of all devices together.
    memory_limit
        What tensors may take on one device.
    optimizer
        How its time counts.

    Raises
    ------
    H3tError
        If there is nothing between embedding and head, or the devices cannot share the batch equally.
    """
    if len(chain) < 3:
        raise H3tError(f"model {chain.name} has {len(chain)} layers; H3T needs one at least between embedding and head")
    samples, rest = divmod(batch, machine.devices)
    if rest or not samples:
        multiple = max(1, -(-batch // machine.devices)) * machine.devices
        raise H3tError(
            f"batch {batch} on {machine.devices} devices: H3T gives all of them as many samples; use {multiple}"
        )
    embedding, *layers, head = chain.layers
    return H3tStep(
        layers=tuple(_layer(layer, machine, samples) for layer in layers),
        borders=_borders(embedding, head, samples, samples * max(layer.carried_bytes for layer in chain.layers)),
        device_link=machine.device_link,
        memory_limit=memory_limit,
        optimizer=optimizer,
    )


def _layer(layer: LayerProfile, machine: H3tMachine, samples: int) -> H3tLayer:
    parameters, hidden = layer.parameter_bytes, samples * layer.input_bytes
    shard = -(-parameters // machine.devices)
    gradients = samples * (layer.input_bytes + layer.output_bytes)
    collective = _quanta(machine.between.ring(machine.devices, parameters))
    return H3tLayer(
        parameter_bytes=parameters,
        shard_bytes=shard,
        hidden_bytes=hidden,
        activation_bytes=samples * layer.saved_bytes + layer.fixed_saved_bytes,
        forward_bytes=samples * layer.forward_workspace_bytes + layer.forward_fixed_workspace_bytes,
        # A profile counts the gradients of hidden states as workspace; they are tensors of their own here.
        backward_bytes=max(
            0, samples * layer.backward_workspace_bytes + layer.backward_fixed_workspace_bytes - gradients
        ),
        forward=max(1, _forward(layer, samples)),
        backward=max(1, _backward(layer, samples)),
        gather=collective,
        scatter=collective,
        hidden_copy=_quanta(machine.host.copy(hidden)),
        shard_copy=_quanta(machine.host.copy(shard)),
        update=_quanta(machine.update_seconds_per_byte * shard),
    )


def _borders(embedding: LayerProfile, head: LayerProfile, samples: int, carried_bytes: int) -> H3tBorders:
    parameters = 2 * (embedding.parameter_bytes + head.parameter_bytes)
    embedded = samples * (embedding.input_bytes + embedding.saved_bytes) + embedding.fixed_saved_bytes
    loss_bytes = head.fixed_saved_bytes + max(
        samples * (head.saved_bytes + head.output_bytes + head.forward_workspace_bytes)
        + head.forward_fixed_workspace_bytes,
        # The gradient of the head's input is a tensor of its own.
        samples * (head.saved_bytes + head.backward_workspace_bytes - head.input_bytes)
        + head.backward_fixed_workspace_bytes,
    )
    return H3tBorders(
        fixed_bytes=parameters + embedded + carried_bytes,
        output_bytes=samples * head.input_bytes,
        embedding_bytes=samples * embedding.forward_workspace_bytes + embedding.forward_fixed_workspace_bytes,
        loss_bytes=max(0, loss_bytes),
        embedding_forward=_forward(embedding, samples),
        embedding_backward=_backward(embedding, samples),
        loss=_forward(head, samples) + _backward(head, samples),
    )


def _forward(layer: LayerProfile, samples: int) -> int:
    return _quanta(samples * layer.forward_seconds + layer.forward_fixed_seconds)


def _backward(layer: LayerProfile, samples: int) -> int:
    return _quanta(samples * layer.backward_seconds + layer.backward_fixed_seconds)


def _quanta(seconds: float) -> int:
    return math.ceil(seconds / SECONDS_PER_COST)

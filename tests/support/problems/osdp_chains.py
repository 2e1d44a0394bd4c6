"""Small random OSDP problems, and section 3.1 of the paper written out once more, without tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np

from formulations.layers.layer import LayerChain, LayerProfile, ProfileSource, SplitPart
from formulations.osdp.problem import Accounting, OsdpMachine, OsdpSettings, Slicing

SLICES = ((1,), (1, 2), (1, 4), (3,), (1, 2, 4))


def operator(name: str, **changes: Any) -> LayerProfile:
    """An operator of which only what is named is not zero."""
    numbers = dict.fromkeys(
        (
            "parameter_bytes",
            "input_bytes",
            "output_bytes",
            "saved_bytes",
            "forward_workspace_bytes",
            "backward_workspace_bytes",
        ),
        0,
    )
    preset = ProfileSource.PRESET
    return LayerProfile(
        name=name,
        kind="operator",
        bytes_source=preset,
        seconds_source=preset,
        **{**numbers, "forward_seconds": 0.0, "backward_seconds": 0.0, **changes},
    )


@dataclass(frozen=True)
class Case:
    chain: LayerChain
    machine: OsdpMachine
    settings: OsdpSettings
    batch: int


def random_case(seed: int, largest: int = 5) -> Case:
    """Few operators, equal ones among them, some that hold nothing; limits from too small to ample, and exact ones."""
    rng = np.random.default_rng(seed)
    slices = SLICES[int(rng.integers(len(SLICES)))]
    settings = OsdpSettings(
        slices=slices,
        accounting=Accounting.PUBLISHED if seed % 3 else Accounting.PEAK,
        checkpointing=bool(rng.integers(2)),
        state_multiple=int(rng.choice([2, 4])),
        gathered_tensors=int(rng.choice([1, 1, 2])),
        replica_tensors=int(rng.choice([0, 0, 1, 3])),
        products_only=bool(rng.integers(2)),
    )
    kinds = [_numbers(rng) for _ in range(int(rng.integers(1, 4)))]
    count = int(rng.integers(1, largest + 1 if sum(slices) < 6 else 4))
    layers = [operator(f"o{i}", **kinds[int(rng.integers(len(kinds)))]) for i in range(count)]
    if rng.random() < 0.3:
        layers[-1] = replace(layers[-1], borrowed_parameter_bytes=layers[0].parameter_bytes)
    chain = LayerChain(f"random-{seed}", tuple(layers))
    machine = OsdpMachine(
        int(rng.choice([1, 2, 3, 8])), float(rng.choice([0.0, 1e-6, 3e-5])), float(rng.choice([0.0, 1e-9, 7e-9])), 0
    )
    batch = int(rng.integers(1, 4))
    vectors = list(mode_vectors(chain, settings))
    sizes = [
        reference_bytes(chain, machine, settings, vectors[int(rng.integers(len(vectors)))], batch) for _ in range(2)
    ]
    exact = sizes[0] - int(rng.integers(2))
    between = int(rng.integers(0, max(1, 2 * max(sizes))))
    limit = max(0, exact if rng.random() < 0.6 else between)
    machine = OsdpMachine(machine.devices, machine.latency_seconds, machine.seconds_per_byte, limit)
    return Case(chain, machine, settings, batch)


def _numbers(rng: np.random.Generator) -> dict[str, Any]:
    def some(*values: int) -> int:
        return int(rng.choice(values))

    given = some(0, 8, 700, 4096)
    return {
        "parameter_bytes": some(0, 4, 4096, 4096, 5000, 12_288, 1_000_003),
        "input_bytes": given,
        "unread_input_bytes": min(given, some(0, 0, 8)),
        "output_bytes": some(0, 8, 700),
        "saved_bytes": some(0, 0, 900, 10_000),
        "fixed_saved_bytes": some(0, 0, 55),
        "forward_workspace_bytes": some(0, 300, 5000),
        "backward_workspace_bytes": some(0, 450, 20_000),
        "forward_fixed_workspace_bytes": some(0, 0, 4000),
        "backward_fixed_workspace_bytes": some(0, 0, 900),
        "forward_seconds": float(rng.choice([0.0, 1e-6, 3.3e-6])),
        "backward_seconds": float(rng.choice([0.0, 2e-6])),
        "forward_fixed_seconds": float(rng.choice([0.0, 5e-6])),
        "backward_fixed_seconds": float(rng.choice([0.0, 7e-6])),
        "split": SplitPart(divisor=some(0, 2, 4, 6)),
    }


def reference_nanoseconds(case: Case, modes: tuple[Slicing, ...]) -> int:
    """Time of a step: the paper's T, summed."""
    n, b = case.machine.devices, case.batch
    total = 0
    for layer, (g, k) in zip(case.chain.layers, modes, strict=True):
        collectives = 2 * (g - k) + (4 if case.settings.checkpointing else 3) * k
        transfer = layer.parameter_bytes / (g * n) * case.machine.seconds_per_byte
        total += round((n - 1) * collectives * (case.machine.latency_seconds + transfer) / 1e-9)
        forwards = 2 if case.settings.checkpointing else 1
        gamma = forwards * layer.forward_seconds + layer.backward_seconds
        fixed = forwards * layer.forward_fixed_seconds + layer.backward_fixed_seconds
        total += round((b * gamma + fixed) / 1e-9)
    return total


def reference_bytes(
    chain: LayerChain, machine: OsdpMachine, settings: OsdpSettings, modes: list[Slicing] | tuple[Slicing, ...], b: int
) -> int:
    """Memory of a device: the paper's M, summed or at its peak."""
    resident, extra = 0, []
    unread = [0 if settings.checkpointing else layer.unread_input_bytes for layer in chain.layers]
    passing = [*unread[1:], chain.layers[-1].output_bytes]
    for i, (layer, (g, k)) in enumerate(zip(chain.layers, modes, strict=True)):
        states = settings.state_multiple * layer.parameter_bytes
        resident += ceil(states * (Fraction(g - k, g) + Fraction(k, g * machine.devices)))
        resident += b * (layer.input_bytes - unread[i])
        saved = b * layer.saved_bytes + layer.fixed_saved_bytes
        resident += 0 if settings.checkpointing else saved
        forward = b * (layer.forward_workspace_bytes + unread[i] + passing[i]) + layer.forward_fixed_workspace_bytes
        backward = b * layer.backward_workspace_bytes + layer.backward_fixed_workspace_bytes
        here = max(forward, backward)
        if settings.accounting is Accounting.PEAK:
            at_once = max(settings.gathered_tensors if k else 0, settings.replica_tensors if k < g else 0)
            gathered = at_once * ceil(Fraction(layer.parameter_bytes, g))
            lent = i == 0 and any(other.borrowed_parameter_bytes for other in chain.layers[1:])
            resident, here = (resident + gathered, here) if lent else (resident, here + gathered)
        if settings.accounting is Accounting.PEAK and settings.checkpointing:
            here += saved
        extra.append(here)
    return resident + (max(extra) if settings.accounting is Accounting.PEAK else sum(extra))


def mode_vectors(chain: LayerChain, settings: OsdpSettings) -> Iterator[tuple[Slicing, ...]]:
    """Every choice of modes, each operator by itself."""
    return itertools.product(*(settings.modes(layer) for layer in chain.layers))


def _tied_alike(chain: LayerChain, modes: tuple[Slicing, ...]) -> bool:
    borrowers = [mode for layer, mode in zip(chain.layers, modes, strict=True) if layer.borrowed_parameter_bytes]
    return all(mode == modes[0] for mode in borrowers)


def best_by_enumeration(case: Case) -> int | None:
    """Nanoseconds of the best modes at the case's batch; None where none fit."""
    vectors = [modes for modes in mode_vectors(case.chain, case.settings) if _tied_alike(case.chain, modes)]
    return min(
        (
            reference_nanoseconds(case, vector)
            for vector in vectors
            if reference_bytes(case.chain, case.machine, case.settings, vector, case.batch) <= case.machine.memory_bytes
        ),
        default=None,
    )

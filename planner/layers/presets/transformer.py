"""Blocks of a transformer as layers by formula: one layer per block, or one per attention and feed-forward module.

Tensor parallelism is that of Megatron-LM: attention by heads, the feed-forward module by columns and rows, so that each
module ends with one all-reduce (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from formulations.layers.layer import LayerProfile
from planner.layers.presets.formulas import BlockShape, Boundary, FormulaDevice, Work, layer_of


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal or unequal blocks of one model, written as the modules that each consists of.

    Parameters
    ----------
    device
        Where times come from.
    apart
        Whether attention and feed-forward modules are layers of their own (OSDP's operators).
    """

    device: FormulaDevice
    apart: bool

    def block(
        self,
        name: str,
        kind: str,
        shape: BlockShape,
        tokens: int,
        modules: Sequence[tuple[str, list[Work]]],
        carried_bytes: int = 0,
        first_input_bytes: int | None = None,
    ) -> list[LayerProfile]:
        """Layers of one block: one, or one per module, with the hidden states of ``tokens`` between them."""
        states = shape.states(tokens)
        entry = states if first_input_bytes is None else first_input_bytes
        if not self.apart:
            works = [work for _, module in modules[:-1] for work in _with_result_kept(module, states)]
            return [
                layer_of(
                    name,
                    kind,
                    [*works, *modules[-1][1]],
                    Boundary(entry, states, carried_bytes),
                    self.device,
                    divisor=gcd(shape.heads, shape.feed_forward),
                    reduced_bytes=len(modules) * states,
                )
            ]
        return [
            layer_of(
                f"{name}.{module}",
                f"{kind} {module}",
                works,
                Boundary(states if position else entry, states, carried_bytes),
                self.device,
                divisor=shape.feed_forward if module == "mlp" else shape.heads,
                reduced_bytes=states,
            )
            for position, (module, works) in enumerate(modules)
        ]


def _with_result_kept(module: list[Work], states: int) -> list[Work]:
    """A module inside a layer: the states that it hands to the next module stay for the backward pass."""
    last = module[-1]
    return [*module[:-1], replace(last, made_bytes=states, saved_bytes=last.saved_bytes + states)]

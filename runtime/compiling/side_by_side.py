"""Steps compiled under a limit beside those of torch's own budget, at the peak that torch's own reaches.

``python -m runtime.compiling.side_by_side`` compiles each model with torch's ``activation_memory_budget``, measures the
peak, and compiles it again with that peak as the limit. Both then run in turn. One line of JSON per row can be kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from formulations.problem.files import write_text_atomically
from planner.common.units import format_bytes, format_gap
from planner.graph.kernel_graph import CompileError
from planner.models.references import ModelReference, load_step
from planner.torch_adapter.joint_graph.backends import cause_of
from planner.torch_adapter.memory_budget import compiled_under
from planner.torch_adapter.tracing.step_module import StepArguments, step_loss
from runtime.compiling.backend import compile_backend
from runtime.compiling.peak import measure_step

_WIDTH: dict[str, Any] = {"vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 384, "n_layer": 6, "n_head": 6, **_WIDTH},
    "llama": {
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
        **_WIDTH,
    },
    "vit": {
        "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6,
        "image_size": 96, "patch_size": 8, "num_labels": 100, "architectures": ["ViTForImageClassification"],
    },
    "t5": {
        "d_model": 384, "d_ff": 1024, "num_layers": 3, "num_heads": 6, "d_kv": 64, "vocab_size": 8192,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip
"""Model type of transformers -> its configuration: large enough that activations are most of the memory."""

BUDGETS = (0.7, 0.4, 0.1)
BATCH, SEQUENCE = 8, 256
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One model under one budget, by torch and by us.

    Parameters
    ----------
    model, budget
        The model, and torch's budget: the share of its activations that it would keep.
    limit
        Peak of torch's step in bytes, which is the limit of ours.
    predicted, peak
        Peak of our step, as predicted and as measured.
    torch_seconds, seconds
        Medians of steps in turn.
    again, gap
        Kernels that run again in our step, and the proven gap of the decision; None where none fits.
    error
        Why there is no step of ours.
    """

    model: str
    budget: float
    limit: int
    torch_seconds: float
    predicted: int | None = None
    peak: int | None = None
    seconds: float | None = None
    again: int | None = None
    gap: float | None = None
    error: str = ""


class Training:
    """A model with random values whose steps are compiled in several ways.

    Parameters
    ----------
    name
        A name of :data:`MODELS`.
    """

    def __init__(self, name: str) -> None:
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps({"model_type": name, **MODELS[name]}))
            reference = ModelReference(f"hf:{file}", batch=BATCH, sequence=SEQUENCE, dropout=0.0)
            step = load_step(reference, device="cpu")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.module: nn.Module = step.module.to(device).train()
        if getattr(self.module, "loss_type", "") is None:
            self.module.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else transformers warns, which breaks
        self._arguments = StepArguments.of(self.module, step.example_args, step.example_kwargs)
        self.tensors = tuple(tensor.to(device) for tensor in self._arguments.tensors)
        self._loss_fn = step.loss_fn

    def loss(self, *tensors: Tensor) -> Tensor:
        """Loss of a step."""
        args, kwargs = self._arguments.rebuild(tensors)
        return step_loss(self.module, args, kwargs, self._loss_fn)

    def step(self, loss: Callable[..., Tensor]) -> Callable[[], Tensor]:
        """Set gradients to None and return the step that computes them."""
        self.module.zero_grad(set_to_none=True)

        def step() -> Tensor:
            value = loss(*self.tensors)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        return step

    @property
    def resident(self) -> int:
        """Bytes of parameters, buffers and inputs."""
        found = [*self.module.parameters(), *self.module.buffers(), *self.tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in found)


def rows_of(name: str, budgets: Sequence[float] = BUDGETS, rounds: int = ROUNDS) -> Iterator[Row]:
    """Compare a model under all budgets.

    Parameters
    ----------
    name
        A name of :data:`MODELS`.
    budgets
        Of torch.
    rounds
        Steps that are measured, in turn.
    """
    training = Training(name)
    for budget in budgets:
        torch.compiler.reset()
        theirs = compiled_under(training.loss, budget, "inductor")
        training.step(theirs)()  # compiles
        limit = training.resident + measure_step(training.step(theirs)).grown
        backend = compile_backend(limit, quiet=True)
        ours = torch.compile(training.loss, backend=backend, dynamic=False, fullgraph=True)
        try:
            training.step(ours)()
        except RuntimeError as error:
            if not isinstance(cause := cause_of(error), CompileError):
                raise
            seconds = statistics.median(measure_step(training.step(theirs)).seconds for _ in range(rounds))
            yield Row(name, budget, limit, seconds, error=str(cause))
            continue
        pairs = [(measure_step(training.step(theirs)), backend.measure(training.step(ours))) for _ in range(rounds)]
        (plan,) = backend.plans
        yield Row(
            name,
            budget,
            limit,
            statistics.median(their.seconds for their, _ in pairs),
            plan.peak,
            max(mine.measured for _, mine in pairs),
            statistics.median(mine.seconds for _, mine in pairs),
            plan.again,
            plan.gap,
        )


def line_of(row: Row) -> str:
    """A row of the table that is printed, in Markdown."""
    start = f"| {row.model} | {row.budget:.2f} | {format_bytes(row.limit)}"
    if row.peak is None or row.predicted is None or row.seconds is None:
        return f"{start} | - | - | {row.torch_seconds:.3f} s | - | - | {row.error} |"
    sizes = f"{format_bytes(row.predicted)} | {format_bytes(row.peak)}"
    ratio = f"{row.seconds:.3f} s | {row.seconds / row.torch_seconds:.3f}"
    return f"{start} | {sizes} | {row.torch_seconds:.3f} s | {ratio} | {row.again} again, gap {format_gap(row.gap)} |"


HEAD = "| model | budget | torch's peak | predicted | our peak | torch's step | our step | ratio | |"


def main() -> None:
    """Compare steps compiled under a limit with those of torch's own budget of activation memory."""
    parser = argparse.ArgumentParser(prog="python -m runtime.compiling.side_by_side", description=main.__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, help="of torch, from 0 to 1")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps of each, in turn")
    parser.add_argument("--json", type=Path, help="file of rows, written after each")
    given = parser.parse_args()
    print(HEAD, "|---|---|---|---|---|---|---|---|---|", sep="\n")
    rows: list[Row] = []
    for name in given.models:
        for row in rows_of(name, given.budgets, given.rounds):
            rows.append(row)
            print(line_of(row), flush=True)
            if given.json is not None:
                write_text_atomically(given.json, json.dumps([asdict(each) for each in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

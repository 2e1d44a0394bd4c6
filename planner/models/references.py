"""References to training steps, as plans hold them, and the functions that load them.

A reference names either a Hugging Face configuration (``hf:gpt2``, ``hf:path/to/config.json``) or a
function ``module.path:function`` that returns ``(module, example_args, example_kwargs, loss_fn)``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import nn

from planner.common.model_error import ModelError
from planner.graph.operator_graph import HALF
from planner.graph.optimizers import ReduceDtype
from planner.models.closed_over import lift_tensors
from planner.models.hugging_face import hugging_face_step, reads_sequences
from planner.plan.decision import PlannedModel

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

FORMER_MODULES = {"planner.paper_models": "planner.papers.kiwi.models"}
"""Modules of this package whose functions older plans name as their models, and where those functions are now."""

_OWN_MODELS = ("planner.papers.", "planner.benchmarks.")
"""Prefixes of the modules of this package that hold models."""

_named: set[str] = set()
"""Models that the user of this process has named."""


@dataclass(frozen=True)
class TrainingStep:
    """A module, example arguments of its forward, and its loss function.

    ``loss_fn`` is as in :func:`planner.strategies.traced_step.trace_step`: None where the output is the loss or has
    ``.loss``. Labels are its parameters' values among ``example_kwargs``, examples after those of ``forward``, or
    tensors that it closes over.
    """

    module: nn.Module
    example_args: tuple[Any, ...]
    example_kwargs: Mapping[str, Any]
    loss_fn: Callable[..., torch.Tensor] | None


@dataclass(frozen=True)
class ModelReference:
    """Reference to a training step, in plain values that a plan can hold.

    Parameters
    ----------
    source
        ``hf:NAME``, ``hf:PATH/config.json`` or ``module.path:function``.
    batch
        Sequences (images) in the global batch.
    sequence
        Tokens per sequence; models of images ignore it.
    dtype
        Name of the floating-point type of parameters and activations, see :data:`DTYPES`.
    seed
        Seed of initialisation and example data.
    layers
        Number of layers in place of the model's own.
    dropout
        Probability in place of every dropout probability of the model.
    loss_chunks
        Parts of the sequence for which head and loss are computed one after the other
        (:mod:`planner.models.chunked_loss`); for causal language models of transformers.
    reduce_dtype
        Dtype in which gradients of 16-bit parameters are summed over devices and given to the optimizer: "float32",
        which None stands for, or "same" as the parameters. None where the parameters have more bits.

    Raises
    ------
    ModelError
        A value is out of range.
    """

    source: str
    batch: int = 8
    sequence: int = 256
    dtype: str = "float32"
    seed: int = 0
    layers: int | None = None
    dropout: float | None = None
    loss_chunks: int = 1
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.reduce_dtype not in (None, *get_args(ReduceDtype)):
            raise ModelError(f"reduce dtype {self.reduce_dtype!r}: it is float32, or same for that of the parameters")
        object.__setattr__(self, "reduce_dtype", (self.reduce_dtype or "float32") if self.dtype in HALF else None)
        if ":" not in self.source:
            raise ModelError(f"model {self.source!r}: write hf:NAME, hf:PATH/config.json or module.path:function")
        counts = {
            "batch": self.batch,
            "sequence": self.sequence,
            "layers": self.layers,
            "loss chunks": self.loss_chunks,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ModelError(f"{name} {value}: it must be at least 1")
        if self.dtype not in DTYPES:
            raise ModelError(f"dtype {self.dtype!r} is unknown; known are {', '.join(DTYPES)}")
        if not 0 <= self.seed < 2**63:
            raise ModelError(f"seed {self.seed}: it must be from 0 to 2**63 - 1")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ModelError(f"dropout {self.dropout}: it is a probability from 0 to below 1")
        if self.loss_chunks > self.sequence:
            raise ModelError(f"loss chunks {self.loss_chunks}: a sequence of {self.sequence} tokens has no more parts")
        if self.loss_chunks > 1 and not self.source.startswith("hf:"):
            raise ModelError(f"loss chunks {self.loss_chunks}: only models hf:... take them; write yours into its loss")


def reference_of(model: PlannedModel) -> ModelReference:
    """Reference to the step of a plan; those of earlier versions sum gradients in the dtype of the parameters."""
    return ModelReference(**{"reduce_dtype": "same", **model.model_dump()})  # without a sequence it is the default


def planned_model(reference: ModelReference, batch: int | None = None) -> PlannedModel:
    """The step of a reference as a plan holds it, without a sequence where it has none.

    Parameters
    ----------
    reference
        Which step.
    batch
        In place of the reference's.
    """
    fields = {**asdict(reference), "batch": batch or reference.batch}
    return PlannedModel(**{**fields, "sequence": reference.sequence if _has(reference, "sequence") else None})


def has_own_batch(reference: ModelReference) -> bool:
    """Whether a step is a function's that takes no batch, so that the reference does not say which one it has."""
    return not _has(reference, "batch")


def _has(reference: ModelReference, option: str) -> bool:
    """Whether a step has an option; what cannot be looked up counts as one that has."""
    prefix, _, name = reference.source.partition(":")
    if prefix == "layers":
        return True
    try:
        if prefix == "hf":
            return option != "sequence" or reads_sequences(name)
        parameters = inspect.signature(_find_function(prefix, name, reference.source)).parameters
    except ModelError:  # a graph of another origin
        return True
    return option in parameters or (option == "sequence" and "seq" in parameters)


def check_code(source: str, allowed: bool = False) -> None:
    """Refuse a model that a plan names if building it would import code that nobody in this process asked for.

    Parameters
    ----------
    source
        The model of a plan that was read. Configurations, profiles of layers and this package's own models hold no
        code; what was planned or allowed before in this process was named by its user.
    allowed
        Whether the user allows it; kept for later calls.

    Raises
    ------
    ModelError
        The model is a function of another module, and not allowed.
    """
    module = source.partition(":")[0]
    if module in ("hf", "layers") or FORMER_MODULES.get(module, module).startswith(_OWN_MODELS) or source in _named:
        return
    if not allowed:
        raise ModelError(
            f"the plan's model {source!r} is a function: building it imports {module} and runs code; "
            "give --allow-code (allow_code=True) if you trust this plan"
        )
    _named.add(source)


def load_step(reference: ModelReference, device: str = "meta") -> TrainingStep:
    """Build the module and the example arguments that a reference names.

    Parameters
    ----------
    reference
        Which step.
    device
        ``meta``: parameters without storage, for tracing. Any other: initialised there from the seed,
        for running; the random state of the caller is left as it was.

    Returns
    -------
    TrainingStep

    Raises
    ------
    ModelError
        The model is unknown, cannot be built, or returns a value of the wrong type.
    """
    _named.add(reference.source)
    prefix, _, name = reference.source.partition(":")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(reference.seed)
        if prefix == "hf":
            module, kwargs = hugging_face_step(
                name,
                batch=reference.batch,
                sequence=reference.sequence,
                dtype=DTYPES[reference.dtype],
                seed=reference.seed,
                layers=reference.layers,
                dropout=reference.dropout,
                loss_chunks=reference.loss_chunks,
                device=device,
            )
            return TrainingStep(module, (), kwargs, None)
        return _call_function(_find_function(prefix, name, reference.source), reference, device)


def function_options(reference: ModelReference) -> dict[str, Any]:
    """Arguments with which the function that a reference names is called.

    Raises
    ------
    ModelError
        There is no such function, or it does not take them.
    """
    prefix, _, name = reference.source.partition(":")
    return _options(_find_function(prefix, name, reference.source), reference)


def _find_function(module_name: str, function_name: str, source: str) -> Callable[..., Any]:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, so that a model beside the user is found
    try:
        module = importlib.import_module(FORMER_MODULES.get(module_name, module_name))
    except ModuleNotFoundError as error:
        remedy = "run from the folder that holds it or install it"
        if module_name.endswith(".py"):
            remedy = f"write the module without .py: {module_name[:-3]}:{function_name}"
        raise ModelError(f"model {source!r}: no module named {error.name!r}; {remedy}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"model {source!r}: importing {module_name} failed ({reason})") from error
    found = getattr(module, function_name, None)
    if found is None:
        functions = [name for name, each in vars(module).items() if inspect.isfunction(each)]
        own = [name for name in functions if getattr(module, name).__module__ == module_name]
        known = f"; it has {', '.join(own)}" if own else ""
        raise ModelError(f"model {source!r}: module {module_name} has no function {function_name!r}{known}")
    if not callable(found):
        raise ModelError(f"model {source!r}: {function_name} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _call_function(function: Callable[..., Any], reference: ModelReference, device: str) -> TrainingStep:
    options = _options(function, reference)
    # Some models read tensors while they are built (`linspace(...).tolist()`): that needs data.
    attempts = ("meta", "cpu") if device == "meta" else (device,)
    for attempt in attempts:
        torch.manual_seed(reference.seed)
        try:
            with torch.device(attempt):
                result = function(**options)
            break
        except Exception as error:
            if attempt == attempts[-1]:
                raise ModelError(f"model {reference.source!r} failed: {type(error).__name__}: {error}") from error
    return _checked(result, reference.source)


def _options(function: Callable[..., Any], reference: ModelReference) -> dict[str, Any]:
    """Fields of the reference that are parameters of the function, by name."""
    offered = {
        "batch": reference.batch,
        "sequence": reference.sequence,
        "seq": reference.sequence,
        "dtype": DTYPES[reference.dtype],
        "seed": reference.seed,
    }
    overrides = {"layers": reference.layers, "dropout": reference.dropout}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    parameters = inspect.signature(function).parameters
    for name in overrides:
        if name not in parameters:
            raise ModelError(
                f"model {reference.source!r}: its function has no parameter {name!r} that could be set: give it "
                "one, and build the module with it"
            )
    options = {name: value for name, value in (offered | overrides).items() if name in parameters}
    for name, parameter in parameters.items():
        open_ended = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if parameter.default is inspect.Parameter.empty and name not in options and not open_ended:
            raise ModelError(
                f"model {reference.source!r}: its function needs {name!r}, but only batch, sequence (or seq), dtype, "
                "seed, layers and dropout are passed; give it a default"
            )
    return options


def _checked(result: Any, source: str) -> TrainingStep:
    expected = "(module, example_args, example_kwargs, loss_fn)"
    if not isinstance(result, tuple) or len(result) != 4:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ModelError(f"model {source!r} must return {expected}, got {got}")
    module, args, kwargs, loss_fn = result
    kinds: tuple[tuple[str, Any, type | tuple[type, ...]], ...] = (
        ("module", module, nn.Module),
        ("example_args", args, (tuple, list)),
        ("example_kwargs", kwargs, (Mapping, type(None))),
    )
    for name, value, kind in kinds:
        if not isinstance(value, kind):
            raise ModelError(f"model {source!r} must return {expected}: {name} is a {type(value).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise ModelError(f"model {source!r} must return {expected}: loss_fn is a {type(loss_fn).__name__}")
    try:
        loss_fn, kwargs = lift_tensors(module, kwargs or {}, loss_fn)
    except ModelError as error:
        raise ModelError(f"model {source!r}: {error}") from error
    return TrainingStep(module, tuple(args), kwargs, loss_fn)

"""The suite ``kiwi-transformer``: the paper's Figure 5 on our costs, and larger steps, in parts.

=================  =====================================================================================
``encoder``        4 layers on meshes 2x4 and 4x2, all formulations, limits down to where each has no plan
``decoder``        the same with the decoder
``layers``         20 layers of the encoder in primitives on one axis of 8, ``kiwi_chain``
``recompute``      Llama with 32 layers on one device: recomputation alone, and with offload
``llama``          Llama with 4 and 32 layers on 2x4, from the module to the checked plan
=================  =====================================================================================

Limits are all memory of torch's tensors, in per cent of the peak of the fastest sharded plan without a limit; those
of ``recompute`` are in per cent of its dynamic memory, on top of its memory before the first operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from formulations.solvers import DEFAULT_SOLVER
from planner.benchmarks.suites import BenchInstance, Suite, check_names
from planner.common.units import format_bytes
from planner.models.references import ModelReference
from planner.papers.kiwi.cases import DEVICE_BYTES, PreparedCase, StepCase
from planner.papers.kiwi.solvers import SMALLEST_PEAK, plan_from_module, smallest_peak, solve_within

FORMULATIONS = (
    "sharding",
    "alpa_then_checkmate",
    "checkpoint_dots",
    "megatron_selective",
    "full_checkpoint",
    "kiwi_reduced",
    "kiwi_chain",
    "kiwi_offload",
)
"""Formulations of Figure 5; each may begin the search for its smallest peak with plans of those before it."""

SHARES = (90, 70, 50, 40, 32, 26, 22, 18)
"""Limits of the encoder and the decoder in per cent."""

DYNAMIC_SHARES = (90, 80, 70, 60, 50, 40, 30, 20)
"""Limits of ``recompute`` in per cent."""

LAYER_SHARES = (90, 50)
"""Limits of ``layers`` in per cent."""

LOSS_CHUNKS = 8
"""Of the loss in ``recompute``: in one piece the logits alone are more than the lowest limits."""

SECONDS = 10.0
"""Time limit of one solve, unless the row has its own."""

PEAK_SECONDS = 60.0
"""For one search for a smallest peak."""

LLAMA_SECONDS = 20.0
LLAMA_MEMORY = {4: 6 * 2**30, 32: 26 * 2**30}
"""Bytes for tensors on one device, by number of layers."""

CLUSTERS: dict[tuple[int, ...], str] = {(2, 4): "v100-2x4-gcp", (4, 2): "v100-4x2-gcp"}
"""The paper's meshes, nodes first, and the clusters that have them."""


def paper_case(
    model: str,
    mesh: tuple[int, ...],
    *,
    batch: int = 16,
    sequence: int = 1024,
    layers: int = 4,
    optimizer: str = "adamw",
    slowdown: int = 1,
) -> StepCase:
    """A transformer of the paper: hidden size 5120, 40 heads, 32-bit floats, on V100.

    Parameters
    ----------
    model
        Name of a function of :mod:`planner.papers.kiwi.models`.
    mesh
        ``(2, 4)`` and ``(4, 2)`` are on the paper's clusters; others on eight devices of one node.
    batch, sequence, layers
        Size of the step.
    optimizer, slowdown
        As for :class:`StepCase`.
    """
    reference = ModelReference(f"planner.papers.kiwi.models:{model}", batch=batch, sequence=sequence, layers=layers)
    cluster = CLUSTERS.get(mesh, "v100-8-nvlink")
    return StepCase(f"{model}-{layers}-layers", reference, cluster, mesh, optimizer, slowdown)


def llama_case(layers: int, mesh: tuple[int, ...], loss_chunks: int = 1) -> StepCase:
    """A Llama as wide as Llama 3 8B on H100: global batch 8, sequence 2048, bfloat16 and gradients summed in it."""
    reference = ModelReference(
        "hf:llama3-8b",
        batch=8,
        sequence=2048,
        dtype="bfloat16",
        layers=layers,
        loss_chunks=loss_chunks,
        reduce_dtype="same",  # the problem of all tables so far
    )
    chunks = f"-loss-in-{loss_chunks}-chunks" if loss_chunks > 1 else ""
    return StepCase(f"llama-{layers}-layers{chunks}", reference, "h100-8-nvlink", mesh)


def kiwi_transformer_suite(parts: Sequence[str] | None = None, solvers: Sequence[str] | None = None) -> Suite:
    """Make the suite or some parts of it; each step is traced when its first instance runs.

    Parameters
    ----------
    parts
        Names of :data:`PARTS`; all of them if None.
    solvers
        Solvers of the formulations; the default solver if None.

    Raises
    ------
    SuiteError
        There is no such part.
    """
    chosen = list(PARTS) if parts is None else parts
    check_names("kiwi-transformer", "part", chosen, PARTS)
    names = tuple(solvers or (DEFAULT_SOLVER,))
    instances = tuple(instance for part in chosen for instance in PARTS[part](names))
    return Suite("kiwi-transformer", instances, SECONDS, solvers=names, notes=NOTES)


def sweep(
    case: StepCase,
    formulations: Sequence[str],
    shares: Collection[int],
    solvers: Sequence[str] = (DEFAULT_SOLVER,),
    *,
    in_order: bool = False,
) -> list[BenchInstance]:
    """The smallest peak of each formulation, then each formulation at each limit.

    Parameters
    ----------
    case, formulations
        What is solved.
    shares
        Limits in per cent of the peak of the fastest sharded plan without one.
    solvers
        Solvers of the formulations.
    in_order
        Whether a formulation begins with the plans that those before it have within the same limit, and with its own
        within smaller limits, which come first.
    """
    found = [
        BenchInstance(
            f"{case.name}-smallest-peak-in-bytes-{formulation}",
            formulation,
            None,
            own_solvers={SMALLEST_PEAK: partial(smallest_peak, case, formulation)},
            time_limit=PEAK_SECONDS,
        )
        for formulation in formulations
    ]
    for share in sorted(shares) if in_order else shares:
        for position, formulation in enumerate(formulations):
            before = formulations[:position] if in_order else ()
            found.append(within(case, formulation, share, solvers=solvers, begin_with=before, from_smaller=in_order))
    return found


def within(
    case: StepCase,
    formulation: str,
    share: int,
    *,
    of_dynamic: bool = False,
    seconds: float = SECONDS,
    solvers: Sequence[str] = (DEFAULT_SOLVER,),
    begin_with: Sequence[str] = (),
    from_smaller: bool = False,
) -> BenchInstance:
    """A formulation under a limit.

    Parameters
    ----------
    case, formulation
        What is solved.
    share
        Limit in per cent of the peak of the fastest sharded plan without a limit.
    of_dynamic
        Whether the share is of that plan's peak above its memory before the first operator; the latter is added, and
        gradients are not counted.
    seconds
        Time limit of one solve.
    solvers
        Solvers of the instance.
    begin_with
        Formulations whose plans it begins with, where its problem contains them.
    from_smaller
        Whether it begins with its own plans within smaller limits, where these were solved before.
    """
    if of_dynamic:
        case = case.without_gradients()
    memory = "dynamic" if of_dynamic else "all"
    name = f"{case.name}-{share}%-of-{memory}-memory-{formulation}-{seconds:g}s"
    limit = partial(_limit, share, of_dynamic)
    own = {
        solver: partial(
            solve_within, case, formulation, limit, solver, begin_with=tuple(begin_with), from_smaller=from_smaller
        )
        for solver in solvers
    }
    return BenchInstance(name, formulation, None, own_solvers=own, time_limit=seconds)


def _limit(share: int, of_dynamic: bool, ready: PreparedCase) -> int:
    return ready.limit(share, of_dynamic)


def _figure_5(model: str, solvers: tuple[str, ...]) -> Iterator[BenchInstance]:
    for mesh in CLUSTERS:
        yield from sweep(paper_case(model, mesh), FORMULATIONS, SHARES, solvers)


def _layers(solvers: tuple[str, ...]) -> Iterator[BenchInstance]:
    case = paper_case("encoder_of_primitives", (8,), layers=20)
    for share in LAYER_SHARES:
        for seconds in (5.0, 30.0):
            yield within(case, "kiwi_chain", share, seconds=seconds, solvers=solvers)


def _recompute(solvers: tuple[str, ...]) -> Iterator[BenchInstance]:
    case = llama_case(32, (1,), loss_chunks=LOSS_CHUNKS)
    for share in DYNAMIC_SHARES:
        for formulation in ("kiwi_chain", "kiwi_offload"):
            for seconds in (1.0, 5.0):
                yield within(case, formulation, share, of_dynamic=True, seconds=seconds, solvers=solvers)


def _llama(solvers: tuple[str, ...]) -> Iterator[BenchInstance]:
    for layers, memory in LLAMA_MEMORY.items():
        case = llama_case(layers, (2, 4))
        name = f"{case.name}-module-to-checked-plan-{format_bytes(memory)}".replace(" ", "")
        own = {solver: partial(plan_from_module, case, "kiwi_chain", memory, solver) for solver in solvers}
        yield BenchInstance(name, "kiwi_chain", None, own_solvers=own, time_limit=LLAMA_SECONDS)


PARTS: dict[str, Callable[[tuple[str, ...]], Iterator[BenchInstance]]] = {
    "encoder": partial(_figure_5, "encoder"),
    "decoder": partial(_figure_5, "decoder"),
    "layers": _layers,
    "recompute": _recompute,
    "llama": _llama,
}
"""What makes the instances of each part, for the solvers that are to solve them."""

NOTES = (
    f"devices have {format_bytes(DEVICE_BYTES)}, so that a plan without a limit exists; limits are in per cent of what "
    "the fastest sharded plan without one needs, for torch's tensors on one device",
    "seconds include building the problem, but not that plan, which is known before; those of module-to-checked-plan "
    "also trace, schedule and replay",
)

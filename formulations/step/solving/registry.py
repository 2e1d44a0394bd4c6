"""Operator-level models by the name that users give, with the way back from a solution to a decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from formulations.problem.strategy_problem import StrategyProblem
from formulations.step.counting import Counting
from formulations.step.kiwi_chain import (
    build_kiwi_chain,
    build_recompute_policy,
    chain_moments,
    decode_kiwi_chain,
    encode_kiwi_chain,
    latest_moments,
)
from formulations.step.kiwi_reduced import build_kiwi_reduced, reduced_moments
from formulations.step.modes import Modes, once, once_or_twice
from formulations.step.moment_classes import MomentClasses
from formulations.step.offload.model import build_offload
from formulations.step.offload.modes import AtMost, Links
from formulations.step.sharding import build_sharding, within
from formulations.step.solving.merged_moments import MergedMoments
from formulations.step.solving.step_problem import Reruns, StepProblem
from formulations.step.training_step import StepModel

LARGEST_EXACT = 60_000
"""Table entries up to which bytes are counted to the byte by factors of three nodes."""

LARGEST_TWICE = 20_000
"""Table entries up to which operators may run again twice: the problems that are then still solved in seconds."""

LARGEST_REACHED = 3_000_000
"""Table entries up to which chains reach further."""

REACHES = (6, 4, 3, 2)
"""Numbers of moments that are tried for an operator, longest first."""


class UnknownFormulationError(ValueError):
    """A name of no formulation; the message lists those that exist."""


def sharding_problem(model: StepModel, memory_limit: int | None) -> StepProblem:
    """Sharding alone."""
    return _counted(model, {}, memory_limit, partial(build_sharding, model))


def kiwi_reduced_problem(model: StepModel, memory_limit: int | None) -> StepProblem:
    """KIWI with reduced complexity."""
    modes = once(reduced_moments(model))
    return _counted(model, modes, memory_limit, partial(build_kiwi_reduced, model))


def kiwi_chain_problem(
    model: StepModel,
    memory_limit: int | None,
    plans: Sequence[Reruns] = (),
    reach: int | None = None,
    *,
    twice: bool = True,
) -> StepProblem:
    """KIWI with chains.

    Parameters
    ----------
    model
        The step.
    memory_limit
        Bytes on one device, or None.
    plans
        Reruns with moments that stay possible whatever the reach.
    reach
        Moments of an operator at most; None for as many as keep the tables of a size that solves well.
    twice
        Whether an operator may run again twice, where the tables stay small.
    """
    modes = _modes_in_reach(model, plans, reach, twice)
    chain = _counted(model, modes, memory_limit, partial(build_kiwi_chain, model, modes))
    chain = _with_smaller(chain, model, memory_limit, modes, plans)
    if memory_limit is not None and chain.restrictions and _entries(model, modes) > LARGEST_EXACT:

        def merged(classes: MomentClasses) -> StepProblem:
            of_classes = classes.merged(modes)
            return _chain_like(model, of_classes, None, partial(build_kiwi_chain, model, of_classes, Counting.UNDER))

        return replace(chain, merged=MergedMoments(model, modes, memory_limit, merged))
    return chain


def kiwi_offload_problem(
    model: StepModel,
    memory_limit: int | None,
    links: Links,
    plans: Sequence[Reruns] = (),
    reach: int | None = None,
) -> StepProblem:
    """KIWI with chains and offload; parameters as for :func:`kiwi_chain_problem`.

    Parameters
    ----------
    model
        The step, with the time of copies.
    memory_limit
        Bytes on one device, or None.
    links
        Memory and links of the host.
    plans, reach
        As for :func:`kiwi_chain_problem`.
    """
    modes = _modes_in_reach(model, plans, reach)

    def build(counting: Counting, reruns: Modes = modes) -> StepProblem:
        built = build_offload(model, reruns, links, counting)
        problem = cache(lambda: within(built.problem, memory_limit))
        return StepProblem(
            problem, memory_limit, built.decode, built.encode, _layouts(model), complete=built.complete, modes=reruns
        )

    def merged(classes: MomentClasses) -> StepProblem:
        return build(Counting.UNDER, classes.merged(modes))

    def relaxed(best: int) -> StrategyProblem:
        bounded = replace(links, at_most=AtMost(best, memory_limit))
        return within(build_offload(model, modes, bounded, Counting.UNDER).problem, memory_limit)

    offload = replace(
        build(Counting.UNDER),
        overestimate=lambda: build(Counting.OVER),
        relaxation=None if links.blocking else relaxed,  # with blocking copies the problem itself is exact
        base_problem=lambda: kiwi_chain_problem(model, memory_limit, plans, reach),
    )
    offload = _with_smaller(offload, model, memory_limit, modes, plans)
    is_exact = links.blocking and links.host_bytes is None
    if is_exact and memory_limit is not None and offload.restrictions and _entries(model, modes) > LARGEST_EXACT:
        return replace(offload, merged=MergedMoments(model, modes, memory_limit, merged))
    return offload


def policy_problem(model: StepModel, memory_limit: int | None, recomputed: Iterable[int]) -> StepProblem:
    """Sharding with recomputation set by a rule: exactly these nodes run again, as late as they may."""
    reruns = latest_moments(model, dict.fromkeys(recomputed))
    modes = once({i: (moment,) for i, moment in reruns.items()})
    return _chain_like(model, modes, memory_limit, lambda: build_recompute_policy(model, reruns))


MODELS: dict[str, Callable[[StepModel, int | None], StepProblem]] = {
    "sharding": sharding_problem,
    "kiwi_reduced": kiwi_reduced_problem,
    "kiwi_chain": kiwi_chain_problem,
}


def step_problem(name: str, model: StepModel, memory_limit: int | None) -> StepProblem:
    """Build the canonical problem of the model called ``name``.

    Raises
    ------
    UnknownFormulationError
        If there is no such model; the message lists the known ones.
    """
    if name not in MODELS:
        raise UnknownFormulationError(f"model formulation {name!r} is not known; choose one of {', '.join(MODELS)}")
    return MODELS[name](model, memory_limit)


def _unlimited_problem(model: StepModel) -> StepProblem:
    """Sharding alone without a limit, which no counting changes."""
    return replace(sharding_problem(model, None), overestimate=None)


def _counted(
    model: StepModel, modes: Modes, memory_limit: int | None, build: Callable[[Counting], StrategyProblem]
) -> StepProblem:
    """Count to the byte where the tables are small; else too little, with the overestimate at hand."""

    def counted(counting: Counting) -> StepProblem:
        return _chain_like(model, modes, memory_limit, partial(build, counting))

    if _entries(model, modes) <= LARGEST_EXACT:
        return counted(Counting.EXACT)
    return replace(counted(Counting.UNDER), overestimate=partial(counted, Counting.OVER))


def _chain_like(
    model: StepModel, modes: Modes, memory_limit: int | None, build: Callable[[], StrategyProblem]
) -> StepProblem:
    decode, encode = partial(decode_kiwi_chain, model, modes), partial(encode_kiwi_chain, model, modes)
    problem = cache(lambda: within(build(), memory_limit))
    return StepProblem(problem, memory_limit, decode, encode, _layouts(model), modes=modes)


def _with_smaller(
    built: StepProblem, model: StepModel, memory_limit: int | None, modes: Modes, plans: Sequence[Reruns]
) -> StepProblem:
    """A problem of chains with the rules and the smaller problems that it contains."""
    built = replace(built, rules=tuple(plans))
    if max(built.layouts) == 1:  # the reduced problem would be as large, and a rule leaves nothing to decide
        return built
    built = replace(built, unlimited=cache(partial(_unlimited_problem, model)))
    if _entries(model, modes) > LARGEST_REACHED:
        return built  # further problems would be large themselves
    by_rule = [partial(policy_problem, model, memory_limit, tuple(plan)) for plan in plans if plan]
    return replace(built, restrictions=(partial(kiwi_reduced_problem, model, memory_limit), *by_rule))


def _layouts(model: StepModel) -> tuple[int, ...]:
    return tuple(node.size for node in model.nodes)


def _modes_in_reach(model: StepModel, plans: Sequence[Reruns], reach: int | None, may_twice: bool = True) -> Modes:
    """Modes of the moments in reach: twice where that may be and the tables stay small, else once."""
    moments = _moments_in_reach(model, plans, reach)
    if not may_twice:
        return once(moments)
    twice = once_or_twice(model, moments)
    return twice if _entries(model, twice) <= LARGEST_TWICE else once(moments)


def _moments_in_reach(model: StepModel, plans: Sequence[Reruns], reach: int | None) -> dict[int, tuple[int, ...]]:
    """Moments of the longest reach whose tables are of a size that solves well, or of the given reach."""
    reaches = REACHES if reach is None else (reach,)
    for k in reaches[:-1]:
        found = chain_moments(model, k, plans)
        if _entries(model, found) <= LARGEST_REACHED:
            return found
    return chain_moments(model, reaches[-1], plans)


def _entries(model: StepModel, reruns: Mapping[int, tuple[object, ...]]) -> int:
    """Table entries of all arguments over the modes of both nodes; ``reruns`` has those that run an operator again."""
    modes = [1 + len(reruns.get(i, ())) for i in range(len(model.nodes))]
    return sum(edge.cost.size * modes[edge.producer] * modes[edge.consumer] for edge in model.edges)

"""Random small instances of KIWI, and brute force on them that shares no code with the models.

The full problem: per choice of strategies a shortest path over (stage, position, what is held), where any
value may be dropped at any moment. The reduced one: every choice of strategies and of dropped outputs, with
memory counted as equations (3)-(7) are printed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from formulations.kiwi.extras import Extra, Phase
from formulations.kiwi.graph import KiwiEdge, KiwiGraph, KiwiOperator
from formulations.step.training_step import NodeKind


def random_graph(seed: int, forward: int = 3, backward: int | None = None, most_strategies: int = 2) -> KiwiGraph:
    """A forward chain with skips and its backward; zero costs and bytes, ties and single strategies occur."""
    rng = random.Random(seed)
    operators: list[KiwiOperator] = []
    edges: list[KiwiEdge] = []
    tables: dict[tuple[int, int], np.ndarray] = {}

    def vector(size: int, high: int) -> np.ndarray:
        return np.array([rng.randint(0, high) for _ in range(size)], dtype=np.int64)

    def operator(name: str, kind: NodeKind, cost: int, amount: int, stays: bool = False) -> int:
        size = rng.randint(1, most_strategies)
        operators.append(KiwiOperator(name, kind, vector(size, cost), vector(size, amount), stays))
        return len(operators) - 1

    def connect(producer: int, consumer: int) -> None:
        shape = operators[producer].size, operators[consumer].size
        table = np.array([[rng.choice([0, 0, rng.randint(1, 6)]) for _ in range(shape[1])] for _ in range(shape[0])])
        # Strategies that readers cannot tell apart form classes: some rows are equal.
        if shape[0] > 1 and rng.random() < 0.3:
            table[1] = table[0]
        if (producer, consumer) not in tables or rng.random() < 0.2:
            tables[producer, consumer] = table
            edges.append(KiwiEdge(producer, consumer, table.astype(np.int64)))

    residents = [operator("x", NodeKind.INPUT, 0, 3)]
    residents += [operator(f"w{k}", NodeKind.PARAMETER, 0, 4) for k in range(rng.randint(0, 2))]
    made: list[int] = []
    for k in range(forward):
        made.append(operator(f"f{k}", NodeKind.FORWARD, 9, 6, stays=rng.random() < 0.05))
        connect(made[-2] if k else residents[0], made[-1])
        if k > 1 and rng.random() < 0.5:
            connect(rng.choice(made[:-2]), made[-1])
        if rng.random() < 0.5:
            connect(rng.choice(residents), made[-1])
    last = made[-1]
    for k in range(forward if backward is None else backward):
        stays = rng.random() < 0.3
        now = operator(f"b{k}", NodeKind.BACKWARD, 9, 6, stays)
        connect(last, now)
        for i in made:
            if rng.random() < 0.4:
                connect(i, now)
        if rng.random() < 0.4:
            connect(rng.choice(residents), now)
        last = now if not stays or rng.random() < 0.5 else last
    return KiwiGraph(f"random-{seed}", tuple(operators), tuple(edges))


def with_extras(graph: KiwiGraph, seed: int) -> KiwiGraph:
    """The graph with copies, workspaces and, of values that stay, what replaces them."""
    rng = np.random.default_rng(seed)
    extras = []
    for i, operator in enumerate(graph.operators[graph.residents :], graph.residents):
        sizes = {edge.producer: graph.operators[edge.producer].size for edge in graph.edges_into[i]}
        after = (Phase.AFTER, Phase.KEPT) if operator.stays else ()
        for phase in (Phase.BEFORE, Phase.BEFORE, Phase.DURING, *after):
            if rng.random() < 0.6:
                pairs = {
                    j: rng.integers(0, 4, (size, operator.size)) for j, size in sizes.items() if rng.random() < 0.7
                }
                own = -operator.output_bytes if phase is Phase.KEPT else rng.integers(0, 3, operator.size)
                running = [j for j in sizes if j >= graph.residents and phase in (Phase.BEFORE, Phase.DURING)]
                freed = {j: rng.random((sizes[j], operator.size)) < 0.5 for j in running if rng.random() < 0.6}
                extras.append(Extra(i, phase, own, pairs, freed))
    return replace(graph, extras=tuple(extras))


def extra_bytes(
    graph: KiwiGraph, choice: tuple[int, ...], operator: int, phase: Phase
) -> list[tuple[int, frozenset[int]]]:
    """What an operator holds beside outputs in a phase, one after the other, and the inputs that it frees for it.

    While an operator computes there is always a moment.
    """
    found = []
    for extra in graph.extras:
        if (extra.operator, extra.phase) == (operator, phase):
            pairs = [int(table[choice[j], choice[operator]]) for j, table in extra.pairs.items()]
            freed = frozenset(j for j, table in extra.freed.items() if table[choice[j], choice[operator]])
            found.append((int(extra.own[choice[operator]]) + sum(pairs), freed))
    return found or ([(0, frozenset())] if phase is Phase.DURING else [])


def kept_bytes(graph: KiwiGraph, choice: tuple[int, ...]) -> list[int]:
    """What each operator holds to the end beside its output."""
    return [sum(nbytes for nbytes, _ in extra_bytes(graph, choice, i, Phase.KEPT)) for i in range(len(graph.operators))]


def strategies_by_cost(graph: KiwiGraph) -> list[tuple[int, tuple[int, ...]]]:
    """Every choice of strategies with the cost of running each operator once, the cheapest first."""
    choices = product(*(range(operator.size) for operator in graph.operators))
    return sorted((sum(one_pass(graph, choice)), choice) for choice in choices)


def one_pass(graph: KiwiGraph, choice: tuple[int, ...]) -> list[int]:
    """Cost of running each operator once."""
    costs = [int(operator.cost[s]) for operator, s in zip(graph.operators, choice, strict=True)]
    for edge in graph.edges:
        costs[edge.consumer] += int(edge.cost[choice[edge.producer], choice[edge.consumer]])
    return costs


def best_full(graph: KiwiGraph, memory_limit: int) -> int | None:
    """Optimum of the full problem by enumeration, or None where nothing fits."""
    best: int | None = None
    for cost, choice in strategies_by_cost(graph):
        if best is not None and cost >= best:
            break
        found = cheapest_stages(graph, choice, memory_limit, best)
        if found is not None and (best is None or found < best):
            best = found
    return best


def cheapest_stages(graph: KiwiGraph, choice: tuple[int, ...], limit: int, below: int | None) -> int | None:
    """Dijkstra over (stage, next position, held set): skip, compute, or drop one value.

    Behind the last position a stage's own operator has run, and holds its extras of then beside what is not dropped.
    """
    first, count = graph.residents, graph.stages
    amounts = [int(operator.output_bytes[s]) for operator, s in zip(graph.operators, choice, strict=True)]
    costs = one_pass(graph, choice)[first:]
    extras = [{phase: extra_bytes(graph, choice, first + k, phase) for phase in Phase} for k in range(count)]
    kept = kept_bytes(graph, choice)[first:]
    rooms = [limit - sum(amounts[:first]) - sum(kept[:stage]) for stage in range(count)]
    amounts = amounts[first:]
    reads = [0] * count
    for edge in graph.edges:
        if edge.producer >= first:
            reads[edge.consumer - first] |= 1 << (edge.producer - first)
    stays = sum(1 << k for k in range(count) if graph.operators[first + k].stays)

    def size(held: int) -> int:
        return sum(amounts[k] for k in range(count) if held >> k & 1)

    start = (0, 0, 0)
    distance = {start: 0}
    queue: list[tuple[int, tuple[int, int, int]]] = [(0, start)]
    while queue:
        cost, state = heapq.heappop(queue)
        if cost > distance[state]:
            continue
        if below is not None and cost >= below:
            return None
        stage, position, held = state
        if stage == count:
            return cost
        moves: list[tuple[int, tuple[int, int, int]]] = [
            (0, (stage, position, held & ~(1 << k))) for k in range(count) if held >> k & 1 and not stays >> k & 1
        ]
        if position < stage:
            moves.append((0, (stage, position + 1, held)))
        if position > stage:
            if size(held) + max((nbytes for nbytes, _ in extras[stage][Phase.AFTER]), default=0) <= rooms[stage]:
                moves.append((0, (stage + 1, 0, held)))
        elif (
            reads[position] & ~held == 0
            and not held >> position & 1
            and (position == stage or not stays >> position & 1)
        ):
            after = held | 1 << position
            inputs = [1 << k for k in range(count) if reads[position] & ~stays & held >> k << k & 1 << k]
            for flags in product((False, True), repeat=len(inputs)):
                gone = sum(bit for bit, flag in zip(inputs, flags, strict=True) if flag)
                most = max(
                    size(there & ~(gone & sum(1 << (j - first) for j in freed))) + nbytes
                    for there, phase in ((held, Phase.BEFORE), (after, Phase.DURING))
                    for nbytes, freed in extras[position][phase]
                )
                if most <= rooms[stage]:
                    moves.append((costs[position], (stage, position + 1, after & ~gone)))
        for step, target in moves:
            if cost + step < distance.get(target, cost + step + 1):
                distance[target] = cost + step
                heapq.heappush(queue, (cost + step, target))
    return None


def dropped_sets(graph: KiwiGraph) -> Iterator[frozenset[int]]:
    """Every set of forward operators that rule 1 (equation 9) allows to drop."""
    candidates = graph.candidates
    for flags in product((False, True), repeat=len(candidates)):
        dropped = frozenset(i for i, flag in zip(candidates, flags, strict=True) if flag)
        if not any(edge.producer in dropped and edge.consumer in dropped for edge in graph.edges):
            yield dropped


def printed_usage(graph: KiwiGraph, choice: tuple[int, ...], dropped: frozenset[int]) -> list[int]:
    """U after every operator by equations (3)-(7) and (10), as they are printed and repaired, or more with extras."""
    first, end = graph.residents, len(graph.operators)
    amounts = [int(operator.output_bytes[s]) for operator, s in zip(graph.operators, choice, strict=True)]
    readers: list[set[int]] = [set() for _ in range(end)]
    for edge in graph.edges:
        readers[edge.producer].add(edge.consumer)
    backward = [graph.operators[i].kind is NodeKind.BACKWARD for i in range(end)]

    def rerun_at(i: int) -> int:
        return min(j for j in readers[i] if backward[j])

    kept = kept_bytes(graph, choice)
    usage, now = [], sum(amounts[:first])
    for t in range(first, end):
        again = [j for j in dropped if rerun_at(j) == t]
        now += amounts[t] + sum(amounts[j] for j in again)
        freed = []
        for i in range(first, t + 1):
            if graph.operators[i].stays:
                continue
            last = max([i, *readers[i], *(rerun_at(j) for j in readers[i] if j in dropped)])
            last_forward = max([i, *(j for j in readers[i] if not backward[j])])
            freed += [i] * ((last == t) + (i in dropped and last_forward == t))
        after = now - sum(amounts[i] for i in freed)
        moments = [
            now - amounts[t] + nbytes for j in again for nbytes, _ in extra_bytes(graph, choice, j, Phase.DURING)
        ]
        for j in again:
            beside = now - amounts[t] - amounts[j]
            moments += [beside + nbytes for nbytes, _ in extra_bytes(graph, choice, j, Phase.BEFORE)]
        for beside, phase in ((now - amounts[t], Phase.BEFORE), (now, Phase.DURING), (after, Phase.AFTER)):
            for nbytes, copied in extra_bytes(graph, choice, t, phase):
                moments.append(beside + nbytes - sum(amounts[i] for i in copied if i in freed))
        usage.append(max(moments))
        now = after + kept[t]
    return usage


def best_reduced_as_printed(graph: KiwiGraph, memory_limit: int) -> int | None:
    """Optimum of equations (2)-(11) by enumeration, or None where nothing fits."""
    best: int | None = None
    for cost, choice in strategies_by_cost(graph):
        if best is not None and cost >= best:
            break
        costs = one_pass(graph, choice)
        for dropped in dropped_sets(graph):
            total = cost + sum(costs[i] for i in dropped)
            if (best is None or total < best) and max(printed_usage(graph, choice, dropped)) <= memory_limit:
                best = total
    return best


def greatest_peak(graph: KiwiGraph) -> int:
    """Largest one-pass peak over all strategies, to take limits from."""
    return max(max(printed_usage(graph, choice, frozenset())) for _, choice in strategies_by_cost(graph))

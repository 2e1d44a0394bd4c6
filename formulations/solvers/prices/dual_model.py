r"""A smooth model of the dual around the present prices, and projected Newton steps on it.

Nodes and factors respond to a change of prices :math:`\Delta\mu` independently, each by the soft minimum of
its min-marginals :math:`D_b`:

.. math:: \max_{\mu + \Delta\mu \ge 0} \sum_b -\tau \log \sum_s \exp(-(D_b(s) + \sum_t \Delta\mu_t u_b(s, t)) / \tau)
          - \sum_t \Delta\mu_t

with usages and prices scaled so that every limit is 1. Its Hessian is a sum of usage covariances.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray

_NEVER = 1e300
"""Not tunable: above any cost."""

_FAR = 40.0
"""Not tunable: temperatures from which on the exponential is negligible."""


class Blocks(NamedTuple):
    """Nodes and factors that use candidate rows: energies, and usage terms over those rows."""

    energy_start: IntArray
    energy: FloatArray
    term_start: IntArray
    low: IntArray
    high: IntArray
    amount_start: IntArray
    amount: FloatArray
    capacity: FloatArray


@compiled
def last_axis(graph: Graph, rank: IntArray, f: int, forward: bool) -> int:
    """Return the axis of the node of a factor that a sweep visits last."""
    last = 0
    for k in range(1, graph.arity[f]):
        if (rank[graph.scope[f, k]] > rank[graph.scope[f, last]]) == forward:
            last = k
    return last


@compiled
def factor_energies(
    graph: Graph,
    tables: FloatArray,
    messages: FloatArray,
    beliefs: FloatArray,
    share: FloatArray,
    f: int,
    last: int,
    out: FloatArray,
) -> None:
    """Write a factor's min-marginals: what remains in its table plus its share of the last node's belief."""
    size = graph.table_size[f]
    for e in range(size):
        out[e] = tables[graph.table_start[f] + e]
    for k in range(graph.arity[f]):
        node, step = graph.scope[f, k], graph.stride[f, k]
        width = graph.sizes[node]
        for begin in range(0, size, step * width):
            for s in range(width):
                value = -messages[graph.message_start[f, k] + s]
                if k == last:
                    value += share[node] * beliefs[graph.offset[node] + s]
                for e in range(begin + s * step, begin + (s + 1) * step):
                    out[e] += value


@compiled
def most_energies(graph: Graph, usage: Usage) -> int:
    """Return the size of the largest block: of any node, or of a factor with usage."""
    largest = 1
    for i in range(len(graph.sizes)):
        largest = max(largest, graph.sizes[i])
    for f in range(len(graph.arity)):
        if usage.factor_start[f] < usage.factor_start[f + 1]:
            largest = max(largest, graph.table_size[f])
    return largest


@compiled
def energies_within(
    graph: Graph,
    tables: FloatArray,
    messages: FloatArray,
    beliefs: FloatArray,
    share: FloatArray,
    rank: IntArray,
    forward: bool,
    b: int,
    reach: float,
    energy: FloatArray,
    kept: IntArray,
) -> int:
    """Write energies of node ``b``, or of a factor after all nodes, to the front of ``energy``, and their entries.

    Only those within ``reach`` of the least count; return how many there are.
    """
    nodes = len(graph.sizes)
    if b < nodes:
        size = graph.sizes[b]
        for s in range(size):
            energy[s] = beliefs[graph.offset[b] + s]
    else:
        size = graph.table_size[b - nodes]
        last = last_axis(graph, rank, b - nodes, forward)
        factor_energies(graph, tables, messages, beliefs, share, b - nodes, last, energy)
    least = energy[0]
    for s in range(size):
        least = min(least, energy[s])
    count = 0
    for s in range(size):
        if energy[s] - least <= reach:
            energy[count] = energy[s]
            kept[count] = s
            count += 1
    return count


@compiled
def soft_usage(
    graph: Graph,
    usage: Usage,
    tables: FloatArray,
    messages: FloatArray,
    beliefs: FloatArray,
    share: FloatArray,
    rank: IntArray,
    forward: bool,
    temperature: float,
) -> FloatArray:
    """Return the expected usage of every row when each node and factor picks by its soft minimum."""
    rows = len(usage.limit)
    change = np.zeros(rows + 1)
    largest = most_energies(graph, usage)
    energy, kept = np.empty(largest), np.empty(largest, np.int64)
    nodes = len(graph.sizes)
    for b in range(nodes + len(graph.arity)):
        first = usage.node_start[b] if b < nodes else usage.factor_start[b - nodes]
        end = usage.node_start[b + 1] if b < nodes else usage.factor_start[b - nodes + 1]
        if first == end:
            continue
        reach = _FAR * temperature
        count = energies_within(graph, tables, messages, beliefs, share, rank, forward, b, reach, energy, kept)
        least = energy[:count].min()
        total = 0.0
        for k in range(count):
            energy[k] = np.exp((least - energy[k]) / temperature)
            total += energy[k]
        for q in range(first, end):
            mean = 0.0
            for k in range(count):
                mean += energy[k] * usage.amount[usage.amount_start[q] + kept[k]]
            mean /= total
            change[usage.low[q]] += mean
            change[usage.high[q]] -= mean
    running = 0.0
    for t in range(rows):
        running += change[t]
        change[t] = running
    return change[:rows]


@compiled
def gather_blocks(
    graph: Graph,
    usage: Usage,
    tables: FloatArray,
    messages: FloatArray,
    beliefs: FloatArray,
    share: FloatArray,
    rank: IntArray,
    forward: bool,
    rows: IntArray,
    reach: float,
) -> Blocks:
    """Restrict usage to the candidate ``rows`` (ascending) and scale it by their limits.

    Entries whose energy is more than ``reach`` above the least of their node or factor are left out.
    """
    nodes, factors = len(graph.sizes), len(graph.arity)
    count = len(usage.limit)
    position = np.zeros(count + 1, np.int64)
    passed = 0
    for t in range(count + 1):
        position[t] = passed
        if passed < len(rows) and rows[passed] == t:
            passed += 1
    energies = graph.offset[nodes]
    for f in range(factors):
        if usage.factor_start[f] < usage.factor_start[f + 1]:
            energies += graph.table_size[f]
    energy = np.empty(energies)
    energy_start = np.zeros(nodes + factors + 1, np.int64)
    term_start = np.zeros(nodes + factors + 1, np.int64)
    low, high = np.empty(len(usage.low), np.int64), np.empty(len(usage.low), np.int64)
    amount_start = np.empty(len(usage.low), np.int64)
    entries = 0
    for b in range(nodes + factors):
        node = b < nodes
        first = usage.node_start[b] if node else usage.factor_start[b - nodes]
        end = usage.node_start[b + 1] if node else usage.factor_start[b - nodes + 1]
        for q in range(first, end):
            if position[usage.low[q]] < position[usage.high[q]]:
                entries += graph.sizes[b] if node else graph.table_size[b - nodes]
    amount = np.empty(entries)
    largest = most_energies(graph, usage)
    near, kept = np.empty(largest), np.empty(largest, np.int64)
    blocks, used, terms, laid = 0, 0, 0, 0
    for b in range(nodes + factors):
        first = usage.node_start[b] if b < nodes else usage.factor_start[b - nodes]
        end = usage.node_start[b + 1] if b < nodes else usage.factor_start[b - nodes + 1]
        opened, size = terms, 0
        for q in range(first, end):
            a, z = position[usage.low[q]], position[usage.high[q]]
            if a == z:
                continue
            if size == 0:
                size = energies_within(graph, tables, messages, beliefs, share, rank, forward, b, reach, near, kept)
                for k in range(size):
                    energy[used + k] = near[k]
            target = -1
            for p in range(opened, terms):
                if low[p] == a and high[p] == z:
                    target = p
            if target < 0:
                target = terms
                low[terms], high[terms], amount_start[terms] = a, z, laid
                for k in range(size):
                    amount[laid + k] = 0.0
                laid += size
                terms += 1
            scale = 1.0 / max(1.0, usage.limit[usage.low[q]])
            for k in range(size):
                amount[amount_start[target] + k] += usage.amount[usage.amount_start[q] + kept[k]] * scale
        if terms > opened:
            used += size
            blocks += 1
            energy_start[blocks] = used
            term_start[blocks] = terms
    capacity = np.empty(len(rows))
    for c in range(len(rows)):
        capacity[c] = usage.limit[rows[c]] / max(1.0, usage.limit[rows[c]])
    return Blocks(
        energy_start[: blocks + 1],
        energy[:used],
        term_start[: blocks + 1],
        low[:terms],
        high[:terms],
        amount_start[:terms],
        amount[:laid],
        capacity,
    )


@compiled
def evaluate_model(
    blocks: Blocks, shift: FloatArray, temperature: float, curvature: bool
) -> tuple[float, FloatArray, FloatArray]:
    """Return the model's value at a change of prices, expected usage per row, and its negative Hessian."""
    rows = len(shift)
    summed = np.zeros(rows + 1)
    value = 0.0
    for r in range(rows):
        summed[r + 1] = summed[r] + shift[r]
        value -= shift[r] * blocks.capacity[r]
    expected = np.zeros(rows + 1)
    hessian = np.zeros((rows + 1, rows + 1)) if curvature else np.zeros((1, 1))
    widest, most_terms = 1, 1
    for b in range(len(blocks.energy_start) - 1):
        widest = max(widest, blocks.energy_start[b + 1] - blocks.energy_start[b])
        most_terms = max(most_terms, blocks.term_start[b + 1] - blocks.term_start[b])
    weight, means = np.empty(widest), np.empty(most_terms)
    for b in range(len(blocks.energy_start) - 1):
        start, first, end = blocks.energy_start[b], blocks.term_start[b], blocks.term_start[b + 1]
        size = blocks.energy_start[b + 1] - start
        for s in range(size):
            weight[s] = blocks.energy[start + s]
        for q in range(first, end):
            price = summed[blocks.high[q]] - summed[blocks.low[q]]
            if price != 0.0:
                for s in range(size):
                    weight[s] += price * blocks.amount[blocks.amount_start[q] + s]
        least = _NEVER
        for s in range(size):
            least = min(least, weight[s])
        total = 0.0
        for s in range(size):
            distance = (weight[s] - least) / temperature
            weight[s] = np.exp(-distance) if distance < _FAR else 0.0
            total += weight[s]
        value += least - temperature * np.log(total)
        for q in range(first, end):
            mean = 0.0
            for s in range(size):
                mean += weight[s] * blocks.amount[blocks.amount_start[q] + s]
            mean /= total
            means[q - first] = mean
            expected[blocks.low[q]] += mean
            expected[blocks.high[q]] -= mean
        if curvature:
            for q in range(first, end):
                for p in range(q, end):
                    moment = 0.0
                    for s in range(size):
                        own, other = blocks.amount_start[q] + s, blocks.amount_start[p] + s
                        moment += weight[s] * blocks.amount[own] * blocks.amount[other]
                    covariance = (moment / total - means[q - first] * means[p - first]) / temperature
                    if covariance != 0.0:
                        _add_rectangle(hessian, blocks, q, p, covariance)
                        if p != q:
                            _add_rectangle(hessian, blocks, p, q, covariance)
    for r in range(1, rows):
        expected[r] += expected[r - 1]
    if curvature:
        for r in range(rows):
            for c in range(1, rows):
                hessian[r, c] += hessian[r, c - 1]
        for r in range(1, rows):
            for c in range(rows):
                hessian[r, c] += hessian[r - 1, c]
    return value, expected[:rows], hessian


@compiled
def _add_rectangle(hessian: FloatArray, blocks: Blocks, q: int, p: int, value: float) -> None:
    """Add to a rectangle of rows and columns, as a difference array in both directions."""
    hessian[blocks.low[q], blocks.low[p]] += value
    hessian[blocks.low[q], blocks.high[p]] -= value
    hessian[blocks.high[q], blocks.low[p]] -= value
    hessian[blocks.high[q], blocks.high[p]] += value


def newton_step(
    blocks: Blocks, prices: FloatArray, temperature: float, iterations: int, most_change: float
) -> FloatArray:
    """Maximise the model by projected Newton steps with a line search.

    Parameters
    ----------
    prices
        Present scaled prices of the candidate rows: the change may not go below their negative.
    most_change
        Cap on the sum of absolute price changes of one step.

    Returns
    -------
    numpy.ndarray
        Change of the scaled prices.
    """
    count = len(prices)
    shift = np.zeros(count)
    value, expected, hessian = evaluate_model(blocks, shift, temperature, True)
    for _ in range(iterations):
        gradient = expected - blocks.capacity
        free = ~((shift <= -prices + 1e-12 * most_change) & (gradient < 0))
        if not free.any() or float(np.abs(gradient[free]).max()) < 1e-4:
            break
        block = hessian[:count, :count][np.ix_(free, free)]
        diagonal = np.diag(block)
        regular = 1e-6 * diagonal + 1e-4 * float(diagonal.mean()) + 1e-12 / most_change
        step = np.linalg.solve(block + np.diag(regular), gradient[free])
        mass = float(np.abs(step).sum())
        if not np.isfinite(mass):
            break
        if mass > most_change:
            step *= most_change / mass
        length = 1.0
        for _ in range(8):
            trial = shift.copy()
            trial[free] += length * step
            np.maximum(trial, -prices, out=trial)
            trial_value = evaluate_model(blocks, trial, temperature, False)[0]
            if trial_value > value + 1e-12 * abs(value):
                break
            length *= 0.35
        else:
            break
        shift = trial
        value, expected, hessian = evaluate_model(blocks, shift, temperature, True)
    return shift

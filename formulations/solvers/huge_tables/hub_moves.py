r"""Moves of a hub together with all its neighbours: what a strategy of the hub costs once its neighbours have answered.

With fields :math:`F` (:mod:`formulations.solvers.huge_tables.heat_bath`), present strategies :math:`x` and the table
:math:`\theta_{hl}` between hub ``h`` and neighbour ``l``, strategy ``s`` of the hub is estimated to cost

.. math:: F_h(s) + \sum_l \min_t \big(F_l(t) - \theta_{hl}(x_h, t) + \theta_{hl}(s, t)\big)
                 - \big(F_l(x_l) - \theta_{hl}(x_h, x_l) + \theta_{hl}(s, x_l)\big),

exact if no two neighbours share a factor. One node at a time, a hub of hundreds of neighbours hardly ever moves: they
all suit its present strategy. A strategy is drawn by these estimates, the neighbours answer by heat-bath draws, and the
whole move is kept or undone by what it really cost (Metropolis et al. 1953).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.huge_tables.heat_bath import draw_nodes, update_fields
from formulations.solvers.local_search.moves import total_cost, try_move

HUB_ANSWERS = 3
"""Rounds in which the neighbours of a moved hub answer."""

_NEVER = 1e300
"""Not tunable: above any cost."""

_FAR = 30.0
"""Not tunable: temperatures from which on the exponential is negligible."""


@compiled
def answered_costs(
    graph: Graph,
    tables: FloatArray,
    mirror: NDArray[np.float32],
    fields: FloatArray,
    choices: IntArray,
    hub: int,
    out: FloatArray,
) -> None:
    """Write what every strategy of ``hub`` costs once each neighbour of lower degree has answered by itself."""
    size, present = graph.sizes[hub], choices[hub]
    degree = graph.incident_start[hub + 1] - graph.incident_start[hub]
    widest = 1
    for i in range(len(graph.sizes)):
        widest = max(widest, graph.sizes[i])
    without, least = np.empty(widest), np.empty(size)
    for s in range(size):
        out[s] = fields[graph.offset[hub] + s]
    for a in range(graph.incident_start[hub], graph.incident_start[hub + 1]):
        f, axis = graph.incident_factor[a], graph.incident_axis[a]
        if graph.arity[f] != 2:
            continue
        leaf = graph.scope[f, 1 - axis]
        if graph.incident_start[leaf + 1] - graph.incident_start[leaf] >= degree:
            continue
        width, start, own = graph.sizes[leaf], graph.table_start[f], choices[leaf]
        field = fields[graph.offset[leaf] : graph.offset[leaf] + width]
        if axis == 0:
            row = tables[start + present * width : start + (present + 1) * width]
            for t in range(width):
                without[t] = field[t] - row[t]
            for s in range(size):
                row = tables[start + s * width : start + (s + 1) * width]
                best = _NEVER
                for t in range(width):
                    best = min(best, without[t] + row[t])
                out[s] += best - without[own] - row[own]
        else:
            column = mirror[start + present * width : start + (present + 1) * width]
            least[:] = _NEVER
            for t in range(width):
                without[t] = field[t] - np.float64(column[t])
                row = tables[start + t * size : start + (t + 1) * size]
                for s in range(size):
                    least[s] = min(least[s], without[t] + row[s])
            row = tables[start + own * size : start + (own + 1) * size]
            for s in range(size):
                out[s] += least[s] - without[own] - row[s]


@compiled
def move_hubs(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    tables: FloatArray,
    mirror: NDArray[np.float32],
    fields: FloatArray,
    choices: IntArray,
    usage_now: FloatArray,
    hubs: IntArray,
    temperature: float,
    cold: float,
    moves: int,
) -> int:
    """Move random hubs, each with its neighbours.

    Parameters
    ----------
    fields, choices, usage_now
        Changed in place.
    hubs
        Which nodes may lead a move.
    temperature, cold
        Of hubs, and of the neighbours that answer.

    Returns
    -------
    int
        Number of moves that were kept.
    """
    widest = 1
    for i in range(len(graph.sizes)):
        widest = max(widest, graph.sizes[i])
    estimate = np.empty(widest)
    single = np.empty(1, np.int64)
    change = np.zeros(len(usage_now) + 1)
    cost = total_cost(graph, unary, tables, choices)
    kept = 0
    for _ in range(moves):
        hub = hubs[np.random.randint(len(hubs))]  # noqa: NPY002
        before = choices[hub]
        answered_costs(graph, tables, mirror, fields, choices, hub, estimate)
        drawn = _draw_other(estimate[: graph.sizes[hub]], before, temperature)
        choices_before, fields_before, usage_before = choices.copy(), fields.copy(), usage_now.copy()
        proposal = choices.copy()
        proposal[hub], single[0] = drawn, hub
        if not try_move(graph, usage, single, 1, choices, proposal, usage_now, change):
            continue
        update_fields(graph, tables, mirror, choices, hub, before, fields)
        neighbours = _neighbours(graph, hub)
        for _ in range(HUB_ANSWERS):
            draw_nodes(graph, usage, tables, mirror, fields, choices, usage_now, cold, neighbours)
        after = total_cost(graph, unary, tables, choices)
        if after <= cost - temperature * np.log(1.0 - np.random.random()):  # noqa: NPY002
            cost = after
            kept += 1
        else:
            choices[:], fields[:], usage_now[:] = choices_before, fields_before, usage_before
    return kept


@compiled
def _draw_other(costs: FloatArray, present: int, temperature: float) -> int:
    """Draw a strategy other than the present one, the cheaper the likelier."""
    least = _NEVER
    for s in range(len(costs)):
        if s != present:
            least = min(least, costs[s])
    total = 0.0
    weight = np.zeros(len(costs))
    for s in range(len(costs)):
        distance = (costs[s] - least) / temperature
        if s != present and distance < _FAR:
            weight[s] = np.exp(-distance)
            total += weight[s]
    left = np.random.random() * total  # noqa: NPY002
    drawn = present
    for s in range(len(costs)):
        if weight[s] > 0.0:
            drawn = s
            left -= weight[s]
            if left < 0.0:
                break
    return drawn


@compiled
def _neighbours(graph: Graph, node: int) -> IntArray:
    """Return the nodes that share a factor with ``node``, in random order, some of them perhaps more than once."""
    first, end = graph.incident_start[node], graph.incident_start[node + 1]
    found = np.empty(2 * (end - first), np.int64)
    count = 0
    for a in range(first, end):
        f = graph.incident_factor[a]
        for k in range(graph.arity[f]):
            if k != graph.incident_axis[a]:
                found[count] = graph.scope[f, k]
                count += 1
    return np.random.permutation(found[:count])  # noqa: NPY002

"""The strategies of a traced step on a mesh, and the step's tables for the models.

Joins the operator graph, the verified sharding rules and the costs: a node for every input, parameter
and operator that computes, a table for every argument. The result is a
:class:`formulations.step.training_step.StepModel` and the placements of its numbered layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray
from formulations.step.training_step import GradientEdge, NodeKind, ResultEdge, StepEdge, StepModel, StepNode
from planner.graph.last_reads import OUTPUT, last_reads
from planner.graph.operator_graph import Operator, OperatorGraph, OutputRole, Phase, Value, ValueRole
from planner.graph.operator_workspaces import workspace_item_bytes
from planner.graph.optimizers import OptimizerSpec
from planner.graph.placement import REPLICATE, Placement, divides, local_numel, replicated, shard
from planner.graph.view_chains import ViewChain, view_chains
from planner.machine.costs import CostModel, to_quanta
from planner.strategies.baselines import BASELINES
from planner.strategies.chain_routing import ChainRouter, RouteTables
from planner.strategies.sharding_rules import AxisRule, RuleReport, Strategy, axis_rules, compose
from planner.strategies.traced_step import TracedStep


@dataclass(frozen=True, slots=True)
class SpaceNode:
    """A node of the space: an operator, or a graph input (``operator`` is None, ``value`` set)."""

    operator: int | None
    value: int | None


@dataclass(frozen=True, eq=False)
class StrategySpace:
    """Strategies of every operator and input of a step, as placements and as tables.

    Parameters
    ----------
    graph, mesh
        The step's graph and the mesh.
    nodes
        In the order of ``model.nodes``.
    strategies
        Per node its layouts; a graph input's strategy has one output and no inputs.
    operator_strategies
        Strategies of every operator by index, views included.
    chains
        Per value of the graph, the views between it and the storage it reads.
    node_of_value
        Node that owns the storage of a base value.
    router
        Routes of arguments through their chains.
    model
        The tables.
    report
        Operators without rules, dimensions that do not divide, rules that failed verification.
    """

    graph: OperatorGraph
    mesh: tuple[int, ...]
    nodes: tuple[SpaceNode, ...]
    strategies: tuple[tuple[Strategy, ...], ...]
    operator_strategies: dict[int, tuple[Strategy, ...]]
    chains: tuple[ViewChain, ...]
    node_of_value: dict[int, int]
    router: ChainRouter
    model: StepModel
    report: RuleReport

    @cached_property
    def recomputed_by_rule(self) -> dict[str, frozenset[int]]:
        """Nodes that run again under each policy; nodes that must not run again are left out."""
        return {name: self._allowed_to_rerun(policy(self.graph)) for name, policy in BASELINES.items()}

    def _allowed_to_rerun(self, operators: frozenset[int]) -> frozenset[int]:
        allowed = np.flatnonzero(self.model.rerunnable).tolist()
        return frozenset(k for k in allowed if self.nodes[k].operator in operators)


def build_strategy_space(
    traced: TracedStep, costs: CostModel, mesh: tuple[int, ...], optimizer: OptimizerSpec
) -> StrategySpace:
    """Build strategies and tables of a traced step.

    Parameters
    ----------
    traced
        The step.
    costs
        Cost model of the cluster on this mesh.
    mesh
        Size of each mesh axis.
    optimizer
        What each trainable parameter keeps and needs.

    Returns
    -------
    StrategySpace
        Strategies, tables and the way back to placements.
    """
    return _SpaceBuilder(traced, costs, mesh, optimizer).build()


class _SpaceBuilder:
    def __init__(self, traced: TracedStep, costs: CostModel, mesh: tuple[int, ...], optimizer: OptimizerSpec) -> None:
        self.graph = traced.graph
        self.traced = traced
        self.costs = costs
        self.mesh = mesh
        self.optimizer = optimizer
        self.chains = view_chains(self.graph)
        self._last_reads = last_reads(self.graph, self.chains)
        self._shared: dict[object, tuple[Strategy, ...]] = {}
        self._tiled: dict[object, IntArray] = {}

    def build(self) -> StrategySpace:
        by_operator, report = self._operator_strategies()
        self.router = ChainRouter(self.graph, by_operator, self.costs.resharding, self.mesh)
        computing = [op for op in self.graph.operators if not op.is_view]
        input_nodes = [SpaceNode(None, value) for value in self.graph.inputs]
        nodes = (*input_nodes, *(SpaceNode(op.index, None) for op in computing))
        strategies = (
            *(self._input_strategies(self.graph.values[value]) for value in self.graph.inputs),
            *(by_operator[op.index] for op in computing),
        )
        self.strategies = strategies
        self.node_of_value = {value: k for k, value in enumerate(self.graph.inputs)}
        for k, op in enumerate(computing, start=len(input_nodes)):
            self.node_of_value.update({value: k for value in op.outputs if value is not None})

        step_nodes = [
            *(self._input_node(self.graph.values[value], strategies[k]) for k, value in enumerate(self.graph.inputs)),
            *(self._operator_node(op, strategies[k]) for k, op in enumerate(computing, start=len(input_nodes))),
        ]
        edges = [edge for k, op in enumerate(computing, start=len(input_nodes)) for edge in self._argument_edges(op, k)]
        gradients, results = self._output_edges()
        model = StepModel(tuple(step_nodes), tuple(edges), tuple(gradients), tuple(results))
        return StrategySpace(
            self.graph,
            self.mesh,
            nodes,
            strategies,
            by_operator,
            self.chains,
            self.node_of_value,
            self.router,
            model,
            report,
        )

    # ------------------------------------------------------------ strategies

    def _operator_strategies(self) -> tuple[dict[int, tuple[Strategy, ...]], RuleReport]:
        tables = {size: axis_rules(self.traced, size) for size in sorted(set(self.mesh))}
        report = RuleReport.merged([report for _, report in tables.values()])
        found: dict[int, tuple[Strategy, ...]] = {}
        for op in self.graph.operators:
            rules = [tables[size][0][op.index] for size in self.mesh]
            found[op.index] = self._composed(op, rules)
        return found, report

    def _composed(self, op: Operator, rules: Sequence[Sequence[AxisRule]]) -> tuple[Strategy, ...]:
        """Strategies of an operator, composed once per distinct (rules, shapes), so that equal operators share them."""
        values = self.graph.values
        key = (
            tuple(tuple(axis) for axis in rules),
            tuple(values[v].spec.shape for v in op.inputs),
            tuple(values[v].spec.shape if v is not None else None for v in op.outputs),
        )
        if key not in self._shared:
            self._shared[key] = compose(op, self.graph, rules, self.mesh)
        return self._shared[key]

    def _input_strategies(self, value: Value) -> tuple[Strategy, ...]:
        """Placements of a graph input: parameters and data may be sharded, module buffers are replicated."""
        whole = replicated(len(self.mesh))
        if value.role in (ValueRole.BUFFER, ValueRole.TANGENT):
            return (Strategy((whole,), (), ()),)
        choices = [REPLICATE, *(shard(dim) for dim in range(len(value.spec.shape)))]
        key = ("input", value.spec.shape)
        if key not in self._shared:
            self._shared[key] = tuple(
                Strategy((placement,), (), ())
                for placement in product(*(choices if size > 1 else choices[:1] for size in self.mesh))
                if divides(value.spec.shape, placement, self.mesh)
            )
        return self._shared[key]

    # ----------------------------------------------------------------- nodes

    def _bytes(self, value: int, placements: Sequence[Placement | None]) -> IntArray:
        spec = self.graph.values[value].spec
        return np.array(
            [
                0 if placement is None else local_numel(spec.shape, placement, self.mesh) * spec.item_bytes
                for placement in placements
            ],
            dtype=np.int64,
        )

    def _input_node(self, value: Value, strategies: tuple[Strategy, ...]) -> StepNode:
        own = self._bytes(value.index, [strategy.outputs[0] for strategy in strategies])
        parameter = value.role is ValueRole.PARAMETER
        trained = parameter and value.trainable
        nothing = np.zeros_like(own)
        state, update_cost, workspace = nothing, None, None
        if trained:
            dtype, numel = value.spec.dtype, [int(n) for n in own // value.spec.item_bytes]
            state = np.array([self.optimizer.state(dtype).nbytes(n) for n in numel], dtype=np.int64)
            made = self.graph.gradient_specs[value.index]
            held = self.optimizer.workspace(dtype, made.dtype, made.is_contiguous)
            workspace = np.array([held.nbytes(n) for n in numel], dtype=np.int64)
            seconds = [self.costs.update_seconds(n, dtype, made.dtype, self.optimizer.name) for n in numel]
            update_cost = to_quanta(seconds)
        return StepNode(
            name=value.name,
            kind=NodeKind.PARAMETER if parameter else NodeKind.INPUT,
            cost=nothing,
            output_bytes=nothing[:, None],
            resident_bytes=own + state,
            update_cost=update_cost,
            update_bytes=workspace,
        )

    def _operator_node(self, op: Operator, strategies: tuple[Strategy, ...]) -> StepNode:
        inputs = tuple(self.graph.values[v].spec for v in op.inputs)
        outputs = tuple(None if v is None else self.graph.values[v].spec for v in op.outputs)
        key = ("cost", op.target, id(strategies), inputs, outputs, op.flops)
        cost = self._table(key, lambda: to_quanta(self.costs.operator_seconds(self.graph, op, strategies)))
        output_bytes = self._table(
            ("bytes", id(strategies), outputs), lambda: self._output_bytes(op.outputs, strategies)
        )
        workspace = self._table(
            ("workspace", op.target, op.softmax_dim, id(strategies), inputs, outputs),
            lambda: self._workspace(op, strategies),
        )
        forward = op.phase is Phase.FORWARD
        return StepNode(
            name=op.identity,
            kind=NodeKind.FORWARD if forward else NodeKind.BACKWARD,
            cost=cost,
            output_bytes=output_bytes,
            resident_bytes=self._table(("nothing", len(strategies)), lambda: np.zeros(len(strategies), dtype=np.int64)),
            recomputable=forward,
            workspace_bytes=workspace if workspace.any() else None,
        )

    def _workspace(self, op: Operator, strategies: tuple[Strategy, ...]) -> IntArray:
        value = op.outputs[0] if op.outputs else None
        if value is None:
            return np.zeros(len(strategies), dtype=np.int64)
        placements = [strategy.outputs[0] for strategy in strategies]
        item_bytes = [
            workspace_item_bytes(self.graph, op, placement, self.costs.device_kind) for placement in placements
        ]
        numel = self._bytes(value, placements) // self.graph.values[value].spec.item_bytes
        return numel * np.array(item_bytes, dtype=np.int64)

    def _output_bytes(self, outputs: Sequence[int | None], strategies: tuple[Strategy, ...]) -> IntArray:
        columns = [
            np.zeros(len(strategies), dtype=np.int64)
            if value is None
            else self._bytes(value, [strategy.outputs[j] for strategy in strategies])
            for j, value in enumerate(outputs)
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((len(strategies), 0), dtype=np.int64)

    # ----------------------------------------------------------------- edges

    def _peaks(self, base: int, reader: int, tables: RouteTables) -> IntArray:
        """Most bytes beyond a stored value while it is brought to the layout of a reader."""
        return tables.released_bytes if self._last_reads.get(base) == reader else tables.peak_bytes

    def _output_placements(self, node: int, base: int) -> tuple[Placement, ...]:
        """Placement of a base value under each layout of the node that owns it."""
        index = self.graph.values[base].output_index
        found = []
        for strategy in self.strategies[node]:
            placement = strategy.outputs[index]
            assert placement is not None, f"{self.graph.values[base].name} has no placement"
            found.append(placement)
        return tuple(found)

    def _argument_edges(self, op: Operator, consumer: int) -> list[StepEdge]:
        edges = []
        for slot, value in enumerate(op.inputs):
            chain = self.chains[value]
            producer = self.node_of_value[chain.base]
            targets = tuple(strategy.inputs[slot] for strategy in self.strategies[consumer])
            sources = self._output_placements(producer, chain.base)
            tables = self.router.tables(chain, sources, targets)
            forbidden = tables.forbidden
            if op.index in self.graph.gradient_casts:
                forbidden = forbidden | _sums_differ(sources, targets)
            output = self.graph.values[chain.base].output_index
            edges.append(
                StepEdge(
                    producer,
                    output,
                    consumer,
                    slot,
                    tables.cost,
                    tables.copy_bytes,
                    self._peaks(chain.base, op.index, tables),
                    forbidden,
                )
            )
        return edges

    def _output_edges(self) -> tuple[list[GradientEdge], list[ResultEdge]]:
        gradients: list[GradientEdge] = []
        results: list[ResultEdge] = []
        for output in self.graph.outputs:
            chain = self.chains[output.value]
            producer = self.node_of_value[chain.base]
            index = self.graph.values[chain.base].output_index
            sources = self._output_placements(producer, chain.base)
            if output.role is OutputRole.GRADIENT:
                assert output.of is not None
                parameter = self.node_of_value[output.of]
                targets = self._output_placements(parameter, output.of)
                tables = self.router.tables(chain, sources, targets)
                gradients.append(
                    GradientEdge(
                        producer,
                        index,
                        parameter,
                        tables.cost,
                        tables.copy_bytes,
                        self._peaks(chain.base, OUTPUT, tables),
                        tables.forbidden,
                    )
                )
            else:
                tables = self.router.tables(chain, sources, (replicated(len(self.mesh)),))
                results.append(
                    ResultEdge(
                        producer,
                        index,
                        tables.cost[:, 0],
                        tables.copy_bytes[:, 0],
                        self._peaks(chain.base, OUTPUT, tables)[:, 0],
                        tables.forbidden[:, 0],
                    )
                )
        return gradients, results

    def _table(self, key: object, make: Callable[[], IntArray]) -> IntArray:
        if key not in self._tiled:
            self._tiled[key] = make()
        return self._tiled[key]


def _sums_differ(sources: Sequence[Placement], targets: Sequence[Placement]) -> BoolArray:
    """Where a source waits for sums over mesh axes for which the target does not wait; shape (sources, targets)."""
    waits = [tuple(axis[0] == "P" for axis in placement) for placement in sources]
    may = [tuple(axis[0] == "P" for axis in placement) for placement in targets]
    return np.array([[any(a and not b for a, b in zip(s, t, strict=True)) for t in may] for s in waits], dtype=np.bool_)

"""A Pyomo model as exact integer rows, and as a file: what every paper's integer program passes through.

Pyomo keeps Python integers as they are. So rows and costs reach a solver without rounding, whatever their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.integer_program import IntegerProgram
from formulations.problem.gc_pause import gc_paused
from formulations.problem.strategy_problem import ProblemError

Values = NDArray[np.float64]
"""One per column of a program."""

_SUFFIXES = (".lp", ".mps")


class PyomoProgram:
    """The integer program of a Pyomo model, which may grow between two calls.

    Columns are the variables in the order of their declaration, rows the constraints. What is added later comes last;
    what was read once is not read again.

    Parameters
    ----------
    model
        A ``ConcreteModel`` with integer coefficients, finite integer bounds, one objective to be minimised and no fixed
        variables. The objective is read at the first call.
    """

    def __init__(self, model: Any) -> None:
        from pyomo.repn.linear import LinearRepnVisitor

        self.model = model
        self._linear = LinearRepnVisitor({}).walk_expression
        self._variables: list[Any] = []
        self._column: dict[int, int] = {}
        self._read: set[int] = set()
        self._columns: list[tuple[int, int, bool]] = []
        self._cost: dict[int, int] | None = None
        self._row_start, self._row_column, self._row_value = [0], list[int](), list[int]()
        self._row_bounds: list[tuple[int | None, int | None]] = []

    def integer_program(self) -> IntegerProgram:
        """Return the program with everything that the model has by now.

        Raises
        ------
        TypeError
            If a coefficient or a bound is no integer.
        OverflowError
            If one does not fit into 64 bits.
        """
        from pyomo.core import Constraint, Objective, Var

        with gc_paused():
            for variable in self.model.component_data_objects(Var):
                if id(variable) not in self._column:
                    self._add_column(variable)
            for constraint in self.model.component_data_objects(Constraint):
                if id(constraint) not in self._read:
                    self._add_row(constraint)
            if self._cost is None:
                (objective,) = self.model.component_data_objects(Objective)
                self._cost = dict(self._terms(objective.expr)[0])
        lower, upper, is_integer = zip(*self._columns, strict=True)
        cost = np.zeros(len(self._columns), dtype=np.int64)
        cost[list(self._cost)] = list(self._cost.values())
        return IntegerProgram(
            cost,
            np.array(lower, dtype=np.int64),
            np.array(upper, dtype=np.int64),
            np.array(is_integer, dtype=np.bool_),
            np.array(self._row_start, dtype=np.int64),
            np.array(self._row_column, dtype=np.int64),
            np.array(self._row_value, dtype=np.int64),
            tuple(low for low, _ in self._row_bounds),
            tuple(high for _, high in self._row_bounds),
        )

    def load(self, values: Values) -> None:
        """Give the variables of the model the values of a solution; what came later than these keeps its own."""
        for variable, value in zip(self._variables, values.tolist(), strict=False):
            variable.set_value(value, skip_validation=True)

    def _add_column(self, variable: Any) -> None:
        self._column[id(variable)] = len(self._variables)
        self._variables.append(variable)
        lower, upper = variable.bounds
        self._columns.append((index(lower), index(upper), variable.is_integer()))

    def _add_row(self, constraint: Any) -> None:
        self._read.add(id(constraint))
        lower, body, upper = constraint.to_bounded_expression(True)
        terms, constant = self._terms(body)
        for column, coefficient in terms:
            self._row_column.append(column)
            self._row_value.append(coefficient)
        self._row_start.append(len(self._row_column))
        low, high = (None if bound is None else index(bound) - constant for bound in (lower, upper))
        self._row_bounds.append((low, high))

    def _terms(self, expression: Any) -> tuple[list[tuple[int, int]], int]:
        """Columns with their coefficients, and the constant."""
        found = self._linear(expression)
        if found.nonlinear is not None:
            raise TypeError(f"{expression} is not linear")
        return [(self._column[key], index(c)) for key, c in found.linear.items()], _integer(found.constant)


def _integer(number: Any) -> int:
    """An integer; Pyomo's own zero may be a float."""
    return index(number) if number else 0


def add_rows(model: Any, rule: Callable[..., Any], members: Iterable[Any] | None = None) -> None:
    """Add a constraint for every index, or one alone, under the name of its rule and with its docstring.

    Parameters
    ----------
    model
        A ``ConcreteModel``.
    rule
        Called with the model and an index; returns a relation.
    members
        Indices, or None: the rule is called with the model alone.
    """
    from pyomo.core import Constraint

    sets = [] if members is None else [list(members)]
    model.add_component(rule.__name__, Constraint(*sets, rule=rule, doc=rule.__doc__))


def write_program(model: Any, path: str | Path) -> None:
    """Write a Pyomo model to an ``.lp`` or ``.mps`` file, with the names that its components have.

    Parameters
    ----------
    model
        A ``ConcreteModel``.
    path
        Where to. ``.lp`` keeps integers of any size; ``.mps`` has 17 digits.

    Raises
    ------
    ProblemError
        If the suffix is neither.
    """
    import pyomo.environ  # noqa: F401 - it registers the writers

    target = Path(path)
    if target.suffix not in _SUFFIXES:
        raise ProblemError(f"cannot export to {target}: use a path that ends in {' or '.join(_SUFFIXES)}")
    temporary = target.with_name(f".{target.stem}.partial{target.suffix}")
    model.write(str(temporary), io_options={"symbolic_solver_labels": True})
    temporary.replace(target)

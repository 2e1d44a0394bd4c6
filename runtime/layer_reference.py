"""One process's run of a layer plan's training step: ``python -m runtime.layer_reference PLAN FOLDER --steps N``.

It writes what :mod:`runtime.reference` writes for an operator plan.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from planner.layer_plan import LayerPlan, load_layer_plan
from planner.models import ModelReference
from runtime.reference import prepare


def model_reference(plan: LayerPlan) -> ModelReference:
    """Which step a layer plan is of."""
    return ModelReference(**plan.model.model_dump())


def main() -> None:
    """Write the initial state of a run and, with steps, what it is compared with."""
    parser = argparse.ArgumentParser(description="Write the initial state of a layer plan's run.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    plan = load_layer_plan(options.plan)
    prepare(model_reference(plan), plan.optimizer, options.steps, options.data, options.folder)


if __name__ == "__main__":
    main()

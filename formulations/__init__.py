"""The mathematics of the planner: canonical problems, models, solvers and the exact checker."""

import os

# Other constants for an ablation; without the variable nothing more is imported.
if "MESHWRIGHT_OVERRIDES" in os.environ:
    from formulations.tuning.overrides import install

    install(os.environ["MESHWRIGHT_OVERRIDES"])

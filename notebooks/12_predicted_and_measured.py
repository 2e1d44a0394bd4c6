# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Predicted and measured
#
# A plan predicts the time of a step and the most bytes that a rank holds. This notebook runs plans on processes of
# this machine and puts both beside what was measured: of random plans, which have nothing in common but the model, of
# plans that the planner chose, and of the kinds of instructions inside one of them.

# %%
import os

import pandas as pd

from planner import api
from planner.machine.cluster import LOCAL_NAME, ClusterError, load_cluster
from planner.plots import predicted_and_measured
from runtime.calibration.calibrate import calibrate
from runtime.prediction.random_plans import random_plans
from runtime.prediction.validation import validate

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# The tests run this notebook with a smaller model, fewer plans and figures of a machine that need no measuring.
SMALL = "MESHWRIGHT_NOTEBOOK_SECONDS" in os.environ
MODEL = os.environ.get("MESHWRIGHT_NOTEBOOK_MODEL", "hf:gpt2")
CLUSTER = os.environ.get("MESHWRIGHT_NOTEBOOK_CLUSTER", LOCAL_NAME)
SECONDS = float(os.environ.get("MESHWRIGHT_NOTEBOOK_SECONDS", "10"))
PLANS = 1 if SMALL else 12

# %% [markdown]
# ## Random plans
#
# Every operator has a random placement among those that its rules allow; then a share of the operators, different
# from plan to plan, takes the placement that costs the least beside its neighbours. So there are slow plans, which
# reshard much, and faster ones.

# %%
try:
    cluster = load_cluster(CLUSTER)
except ClusterError:
    cluster = calibrate(ranks=2)
reference = api.ModelReference(MODEL, batch=4, sequence=128, dtype="float32", seed=0, layers=2, dropout=0.0)
session = api.PlanningSession(reference, cluster, (2,))
plans = {f"random {number}": plan for number, plan in enumerate(random_plans(session, PLANS, seed=0))}

# %% [markdown]
# ## Chosen plans
#
# The fastest, and plans within 85, 70 and 60 % of its memory.

# %%
fastest = session.plan(api.PlanRequest(time_limit=SECONDS))
plans["fastest"] = fastest
reserve = fastest.decision.options.reserve_bytes
for share in () if SMALL else (85, 70, 60):
    request = api.PlanRequest(memory=fastest.peak_bytes * share // 100 + reserve, time_limit=SECONDS)
    try:
        plans[f"within {share} %"] = session.plan(request)
    except api.InfeasibleError as error:
        print(f"within {share} %: {error}")

# %% [markdown]
# ## The runs
#
# Two processes take a few steps of every plan; the median of all but the first counts.

# %%
found = validate(list(plans.items()), device="cpu")
table = pd.DataFrame(
    {
        "predicted step (ms)": [1e3 * plan.predicted_s for plan in found.plans],
        "measured step (ms)": [1e3 * plan.measured_s for plan in found.plans],
        "error of time (%)": [100 * plan.time_error for plan in found.plans],
        "predicted peak (MiB)": [plan.predicted_bytes / 2**20 for plan in found.plans],
        "measured peak (MiB)": [plan.measured_bytes / 2**20 for plan in found.plans],
        "error of peak (%)": [100 * plan.memory_error for plan in found.plans],
    },
    index=[plan.name for plan in found.plans],
)
table.round(2)

# %%
kinds = {
    "random plans": [plan for plan in found.plans if plan.name.startswith("random")],
    "chosen plans": [plan for plan in found.plans if not plan.name.startswith("random")],
}
predicted_and_measured(
    {kind: [(plan.predicted_s, plan.measured_s) for plan in of_kind] for kind, of_kind in kinds.items()},
    "time of a step",
    "s",
)

# %%
predicted_and_measured(
    {
        kind: [(plan.predicted_bytes / 2**20, plan.measured_bytes / 2**20) for plan in of_kind]
        for kind, of_kind in kinds.items()
    },
    "peak of the fullest rank",
    "MiB",
    tolerance=0.01,
)

# %%
pd.Series(
    {
        "mean error of time (%)": 100 * found.mean_time_error,
        "mean error of peak (%)": 100 * found.mean_memory_error,
        "rank correlation of times": found.rank_correlation,
        "plan predicted fastest over fastest measured": found.chosen_over_best,
    }
).round(3).to_frame("all plans")

# %% [markdown]
# Peaks of plans are exact, since the replay counts every tensor that exists. Where a tensor that only a forward
# operator reads is resharded in several steps, a plan may need less: it ends with the first, and is counted to the
# last, because its reader might run again. No plan needs more.
#
# Times depend on what the machine does beside; a rerun
# differs by some per cent, and more where processes share cores. Costs measured for this model's own instructions
# come closer: `meshwright calibrate --model hf:gpt2 --mesh 2`. `meshwright validate` does all this from the command
# line, and `meshwright run plan.json --profile` looks into one plan.

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
# # Time against memory
#
# How fast can a step be within so much memory, and what does it take to get there? A sweep plans one step for all
# combinations of limits, formulations and meshes. Each row is a checked plan with a proven bound, kept on disk as soon
# as it is there: a sweep that was interrupted goes on, and one with more values plans only what is new. Times of
# searches, and gaps where a time limit ends one, differ from run to run.

# %%
import os
import tempfile
from pathlib import Path

import pandas as pd

from planner import api
from planner.common.units import format_bytes
from planner.plots import ParetoPoint, pareto_curve

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# The tests run this notebook with a smaller model, fewer limits and less time.
SMALL = "MESHWRIGHT_NOTEBOOK_SECONDS" in os.environ
MODEL = os.environ.get("MESHWRIGHT_NOTEBOOK_MODEL", "hf:gpt2")
SECONDS = float(os.environ.get("MESHWRIGHT_NOTEBOOK_SECONDS", "6"))
CLUSTER = "v100-8-nvlink"
SHARES = (100, 85) if SMALL else (100, 85, 70, 55, 45)
FORMULATIONS = ("sharding", "kiwi_chain") if SMALL else ("sharding", "kiwi_reduced", "kiwi_chain", "kiwi_offload")
MESHES = [(2, 2)] if SMALL else [(4,), (2, 2)]

# %% [markdown]
# ## The grid
#
# Limits are shares of what the fastest plan on one axis needs, and the cluster's reserve on top.

# %%
reference = api.ModelReference(MODEL, batch=16, sequence=256, dtype="float32", seed=0, dropout=0.0)
session = api.PlanningSession(reference, CLUSTER, (4,))
fastest = session.plan(api.PlanRequest(time_limit=SECONDS))
reserve = session.cluster.device.reserve_bytes
limits = [fastest.peak_bytes * share // 100 + reserve for share in SHARES]
print(
    "the fastest plan needs", format_bytes(fastest.peak_bytes), "for tensors, and the reserve is", format_bytes(reserve)
)

# %% [markdown]
# ## The sweep

# %%
with tempfile.TemporaryDirectory() as rows:
    swept = api.sweep(
        reference,
        cluster=CLUSTER,
        meshes=MESHES,
        memories=limits,
        formulations=FORMULATIONS,
        request=api.PlanRequest(time_limit=SECONDS),
        folder=Path(rows),
    )
swept

# %% [markdown]
# ## The curves
#
# The line is the best plan found within a limit, the dotted line below it what is proven: no plan of this formulation
# is in the band beneath. Where a line ends, nothing was found within less memory. Formulations that cannot be told
# apart share a panel; the plans of the others are grey in it.


# %%
def curves(mesh):
    """Points of every formulation on one mesh."""
    points = {}
    for name in FORMULATIONS:
        rows = [row for row in swept.sweep_rows if row.formulation == name and row.mesh == mesh]
        if any(row.seconds is not None for row in rows):
            points[name] = [ParetoPoint(row.memory_bytes - reserve, row.seconds, row.bound_seconds) for row in rows]
    return points


name = MODEL.rpartition("/")[2]
first, last = ("x".join(map(str, mesh)) for mesh in (MESHES[0], MESHES[-1]))
pareto_curve(curves(first), f"{name} on a mesh of {first}, {CLUSTER}: bytes for tensors")

# %%
pareto_curve(curves(last), f"{name} on a mesh of {last}, {CLUSTER}: bytes for tensors")

# %% [markdown]
# ## What is given up for memory
#
# Of the formulation that may recompute whole chains: operators that run again, and collectives, at each limit.

# %%
rows = [row for row in swept.sweep_rows if row.formulation == "kiwi_chain" and row.mesh == last]
pd.DataFrame(
    {
        "limit for tensors": [format_bytes(row.memory_bytes - reserve) for row in rows],
        "step (ms)": [None if row.seconds is None else round(1e3 * row.seconds, 2) for row in rows],
        "proven gap (%)": [None if row.gap is None else round(100 * row.gap, 3) for row in rows],
        "operators run again": [row.recomputed for row in rows],
        "collectives": [row.collectives for row in rows],
    }
)

# %% [markdown]
# A wider formulation contains the narrower ones: at one limit its best plan is never slower. In a row whose gap is not
# zero the search had not ended, so that a comparison within the gaps says nothing.

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
# # A first plan
#
# From an unmodified GPT-2 to a plan for two processes, a look at what the plan does, a second plan under a tighter
# memory limit, and a run that shows that what was predicted is what happens.
#
# A plan decides for every operator of the training step how it is sharded and whether its result is kept for backward
# or recomputed. Its figures are bytes of tensors on one device and seconds of one optimizer step.

# %%
import os
from collections import Counter
from pathlib import Path

import pandas as pd

from planner import api
from planner.common.units import format_bytes
from planner.machine.cluster import LOCAL_NAME, ClusterError, load_cluster
from planner.plots import memory_over_time, modules_of_plan
from planner.view.modules import module_tree
from planner.view.opened import open_plan
from runtime.calibration.calibrate import calibrate
from runtime.job.launch import run_plan

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# The tests run this notebook with a smaller model, on figures of a machine that need no measuring.
MODEL = os.environ.get("MESHWRIGHT_NOTEBOOK_MODEL", "hf:gpt2")
CLUSTER = os.environ.get("MESHWRIGHT_NOTEBOOK_CLUSTER", LOCAL_NAME)
SECONDS = float(os.environ.get("MESHWRIGHT_NOTEBOOK_SECONDS", "10"))
MESH = (2,)

# %% [markdown]
# ## The step and the machine
#
# A reference names a model and everything that its training step depends on. `hf:gpt2` is built from its configuration;
# your own model is `module.path:function`. Dropout is 0 so that the run can be compared with one process number by
# number.

# %%
reference = api.ModelReference(MODEL, batch=4, sequence=256, dtype="float32", seed=0, dropout=0.0)

# %% [markdown]
# The cluster is this machine, as measured by `calibrate` (half a minute, once). Any preset or JSON file would do as
# well: planning for a machine needs no access to it.

# %%
try:
    cluster = load_cluster(CLUSTER)
except ClusterError:
    cluster = calibrate(ranks=MESH[0])
print(f"{cluster.name}: {cluster.devices} devices")

# %% [markdown]
# ## Capture
#
# A session captures forward and backward on fake tensors, no parameter is allocated, and holds what every plan of this
# step on this mesh shares.

# %%
session = api.PlanningSession(reference, cluster, MESH)
graph = session.traced.graph
phases = Counter((operator.phase.value, "view" if operator.is_view else "compute") for operator in graph.operators)
pd.Series(phases, name="operators").rename_axis(["phase", "kind"]).to_frame()

# %% [markdown]
# Before any plan: what would one rank need? The figures bracket every plan.

# %%
api.fits(reference, cluster=cluster, mesh=MESH)

# %% [markdown]
# ## A plan without a tight limit
#
# The bound is proven: no plan of this formulation is faster.

# %%
fastest = session.plan(api.PlanRequest(time_limit=SECONDS))
fastest

# %% [markdown]
# Opened in its session a plan has names and prices: the figure names the largest tensors alive at the peak.

# %%
opened = open_plan("fastest", fastest, session=session)
memory_over_time(opened)

# %% [markdown]
# Where the time goes, and where the bytes at the peak are. `meshwright view plan.json` shows the same as a page, with
# every module and stream.

# %%
modules_of_plan(module_tree(opened))

# %% [markdown]
# ## The same step with less memory
#
# The limit is 92 % of what the fastest plan uses. The cluster's reserve, memory that is not for tensors, is on top. A
# limit that no plan meets would be refused, with the smallest one that some plan meets.

# %%
reserve = fastest.decision.options.reserve_bytes
limit = fastest.peak_bytes * 92 // 100
print("tensors may have", format_bytes(limit), "on each device")
tight = session.plan(api.PlanRequest(memory=limit + reserve, time_limit=SECONDS))
memory_over_time(open_plan("tight", tight, session=session))

# %%
api.compare(fastest=fastest, tight=tight)

# %% [markdown]
# A decision of one's own, and what it costs: an exploration keeps what it knows of the step, so that a plan after a pin
# takes a second. `forbid`, `unpin`, `whatif` (another cluster, mesh or limit) and `price_of_memory` work alike.

# %%
with api.Exploration(session, api.PlanRequest(memory=limit + reserve, time_limit=SECONDS)) as exploration:
    change = exploration.pin("*.mlp", "recompute")
change

# %% [markdown]
# What is recomputed in the plan without the pin, by kind of operator:

# %%
recomputed = Counter(
    tight.decision.operators[step.operator].split("/")[2]
    for step in tight.decision.schedule.instructions
    if step.op == "recompute"
)
pd.Series(recomputed, name="executions", dtype="int64").rename_axis("operator").sort_values(ascending=False).to_frame()

# %% [markdown]
# `api.explain(tight)` says more: the costliest reshardings, the tensors alive at the peak, and what one GiB less or
# more would cost.

# %% [markdown]
# ## Run it
#
# Two processes train three steps on bytes of this notebook, and one process does the same without a plan. The measured
# time of a step differs from run to run.

# %%
report = run_plan(tight, steps=3, check=True, data=Path("01_first_plan.py"), device="cpu")
pd.DataFrame({"ranks": report.loss, "one process": report.reference_loss}).rename_axis("step")

# %%
pd.DataFrame(
    {
        "predicted": [tight.peak_bytes / 2**20, report.predicted_step_s],
        "measured": [max(report.measured_peak_bytes) / 2**20, report.measured_step_s],
    },
    index=["peak of the fullest rank (MiB)", "step (s)"],
).round(3)

# %%
assert report.failures() == []
print("largest relative error of a gradient:", f"{report.max_grad_rel_error:.1e}")

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
# # The five papers on one model
#
# KIWI, OSDP, Galvatron-BMW, H3T and CAPTURE plan the same training step, on the same devices, under the same limits on
# the memory of one device. Each of the last four decides three times: as published; exactly on the same problem, so
# that the distance is due to the search alone; and exactly *beyond* it, with choices that are not the paper's
# (`planner.layers.plan.choices`): OSDP counts the memory of torch's engine and cuts and checkpoints as needed,
# Galvatron-BMW has all strategies and numbers of micro-batches, H3T's optimizer overlaps, and CAPTURE looks for the
# fastest step within the limit where its paper asks for the least peak. KIWI is here as its reduced problem and as
# `kiwi_chain`, which also recomputes chains; the programs that it published are refused for a step of this size.
#
# Baselines stand beside them: plans of OSDP's and of Galvatron-BMW's exact problem in which all layers have the same
# settings. `ddp` is data parallelism, `fsdp` the same with all sharded, `tp` tensor parallelism, `1f1b` a pipeline of
# single devices, and `3d` two stages with tensor parallelism in each.
#
# The numbers are from the results files of `meshwright bench papers --part one_model` with each `--paper`
# (`planner.papers.claims.one_model`).
#
# What can be compared: all costs come from one traced graph and one cluster. What cannot: KIWI's memory is that of a
# schedule, instruction by instruction, and its collectives do not overlap with computation. The others add up layers,
# by the formulas of their papers, and let much of the communication run beside computation. H3T keeps gradients and
# optimizer state in host memory and updates there, always. So a layer plan may look faster, or smaller, than it is;
# the columns say what each formulation promises.

# %%
from textwrap import shorten

import pandas as pd
from IPython.display import display

from planner.papers.claims.claim import PAPERS
from planner.papers.claims.one_model import BASELINES, CLUSTER, DEVICES, REFERENCE
from planner.papers.claims.results import kept_results
from planner.plots import overhead_by_group, overhead_over_memory

# %% [markdown]
# ## One axis of limits
#
# Limits are 250, 100, 85, 70, 55 and 40 % of what data parallelism keeps on every device: parameters, gradients and the
# two moments of Adam, and what forward leaves for backward, by the layers' profiles. The cluster's reserve comes on top
# of them. OSDP decides on attention and feed-forward modules, the others on blocks. A search has 5 s.

# %%
kept = pd.concat([pd.DataFrame(kept_results(paper).rows["one_model"]) for paper in PAPERS])
kept["plan"] = kept.planner + kept.way.map(lambda way: f", {way}" if way else "")
kept["limit"] = kept.limit_gb.map("{:.2f} GB".format)
columns = {"step_ms": "step (ms)", "bound_ms": "bound (ms)", "peak_gb": "peak (GB)"}
wide = kept.set_index(["plan", "limit"])[list(columns)].astype(float).unstack().rename(columns=columns)
wide.round(2).astype(object).where(wide.notna(), "-")

# %% [markdown]
# Where there is no plan, and why. KIWI's own programs decide on every operator and strategy in every stage of the
# schedule, of which there are as many as operators; beyond some tens of these they are not built, under any limit.

# %%
notes = kept[kept.note != ""].set_index(["plan", "limit"]).note.map(lambda note: shorten(note, 200)).to_frame()
with pd.option_context("display.max_colwidth", None):
    display(notes)

# %% [markdown]
# ## What each promises against two plans that are exact within 0.1 %
#
# Per cent of the step's time above that of `kiwi_chain`, the joint plan of operators, and above Galvatron-BMW's exact
# plan with all its choices, which decides on stages, micro-batches and the layout of every layer at once. Less than
# nothing means that the formulation promises more, by its own way of counting; these times were not measured. CAPTURE's
# published and exact plans have the least peak, not the least time.

# %%
steps = wide["step (ms)"].dropna(how="all")
against = {name: 100 * (steps / steps.loc[name] - 1) for name in ("kiwi_chain", "galvatron, beyond")}
pd.concat({f"above {name} (%)": table for name, table in against.items()}, axis=1).round(2)

# %%
fastest = kept.step_ms.min()
panels, baselines = {}, {}
for (planner, way), part in kept.dropna(subset="step_ms").groupby(["planner", "way"], sort=False):
    points = list(zip(part.limit_gb, 100 * (part.step_ms.astype(float) / fastest - 1), strict=True))
    if way in BASELINES.get(planner, {}):
        baselines.setdefault(planner, {})[way] = points
    else:
        panels.setdefault(planner if way else "kiwi", {})[way or planner] = points
title = f"{REFERENCE.source.rpartition(':')[2]} on {DEVICES} devices of {CLUSTER}: above the fastest of all"
overhead_by_group(panels, title)

# %% [markdown]
# A limit without a point has no plan; the notes above say why. `published` may find none because of a slip of the
# paper's search, where `exact` has one.
#
# The baselines of Galvatron-BMW's problem beside its exact plans. Where a baseline has a point on the line of `exact`,
# the search has found nothing better than it.

# %%
beside = {"exact": panels["galvatron"]["exact"], **baselines["galvatron"]}
overhead_over_memory(beside, f"{title}, by Galvatron-BMW's costs")

# %% [markdown]
# ## The plans at full size
#
# Every plan that this machine has room for ran one step on four processes of a CPU (`--part one_model_runs`, baselines
# `--part baseline_runs`), equal ones once. Below are the highest peak of tensors as torch's engine is predicted to have
# it, whatever the paper counts, and as it was measured; and the largest error of a gradient beside one process.

# %%
tables = [kept_results(paper).rows for paper in PAPERS]
runs = pd.concat(
    [pd.DataFrame(kept[name]) for kept in tables for name in ("one_model_runs", "baseline_runs") if name in kept]
)
runs["plan"] = runs.planner + runs.way.map(lambda way: f", {way}" if way else "")
peaks = runs[["predicted_bytes", "measured_bytes"]].astype(float)
runs["measured / predicted"] = peaks.measured_bytes / peaks.predicted_bytes
by_plan = runs.groupby("plan", sort=False)
pd.DataFrame(
    {
        "plans": by_plan.size(),
        "least measured peak (GB)": by_plan.measured_bytes.min() / 1e9,
        "largest measured peak (GB)": by_plan.measured_bytes.max() / 1e9,
        "least measured / predicted": by_plan["measured / predicted"].min(),
        "largest measured / predicted": by_plan["measured / predicted"].max(),
        "largest error of a gradient": by_plan.gradient_error.max(),
    }
).style.format(precision=4).format("{:.1e}", subset=["largest error of a gradient"])

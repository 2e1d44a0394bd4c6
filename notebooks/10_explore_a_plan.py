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
# # Exploring a plan
#
# A plan answers one question: what is fastest within this memory? The questions that follow are asked of an
# exploration. It traces the step once and keeps what it has proven, so that an answer takes a second or a few: what if
# this decision were another, what do the next bytes buy, which mesh, which batch? Every answer is a plan that the
# checker has replayed, with a proven bound. Times of searches, and gaps where a time limit ends one, differ from run to
# run.

# %%
import os

from planner import api
from planner.plots import ParetoPoint, memory_over_time, pareto_curve

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# The tests run this notebook with a smaller model, less time and no tight limit.
SMALL = "MESHWRIGHT_NOTEBOOK_SECONDS" in os.environ
MODEL = os.environ.get("MESHWRIGHT_NOTEBOOK_MODEL", "hf:gpt2")
SECONDS = float(os.environ.get("MESHWRIGHT_NOTEBOOK_SECONDS", "10"))
CLUSTER = "v100-8-nvlink"
SHARE = 100 if SMALL else 85

# %% [markdown]
# ## The plan
#
# GPT-2 on four V100, as a mesh of two by two. The limit is 85 % of what the fastest plan needs, so that something has
# to be given up for it.

# %%
reference = api.ModelReference(MODEL, batch=16, sequence=256, dtype="float32", seed=0, dropout=0.0)
session = api.PlanningSession(reference, CLUSTER, (2, 2))
fastest = session.plan(api.PlanRequest(time_limit=SECONDS))
limit = fastest.peak_bytes * SHARE // 100 + fastest.decision.options.reserve_bytes
exploration = api.Exploration(session, api.PlanRequest(memory=limit, time_limit=SECONDS))
first = exploration.plan
first

# %%
memory_over_time(first)

# %% [markdown]
# `exploration.modules` and `exploration.operators` are the names that a question can use; a pattern such as `*.mlp`
# stands for every module that it matches.

# %%
exploration.modules[:8]

# %% [markdown]
# ## Pin a decision
#
# Recompute every attention, as many training scripts do by hand. The table says what that costs beside the plan
# without the pin, and between which two figures the true cost of the pin is proven to be.

# %%
exploration.pin("*.attn", "recompute")

# %% [markdown]
# Beside it the feed-forward networks, and then neither.

# %%
exploration.pin("*.mlp", "recompute")

# %%
exploration.unpin()

# %% [markdown]
# Hold the embedding of tokens whole on every device, which the optimizer then updates everywhere alike. A parameter is
# pinned by its own name and a placement with an entry for each mesh axis.

# %%
exploration.pin("transformer.wte.weight", ("R", "R"))

# %%
exploration.unpin()

# %% [markdown]
# ## What if
#
# The same decision on links of half the bandwidth, and the plan that is best there. What the new plan gains is what
# planning again is worth.

# %%
exploration.whatif(api.ClusterChange(bandwidth=0.5))

# %% [markdown]
# And with devices that compute twice as fast: the links become what limits the step.

# %%
exploration.whatif(api.ClusterChange(flops=2.0))

# %% [markdown]
# ## The price of memory
#
# What do the next bytes buy? At each limit the best plan and its bound; between two limits the seconds that a GiB
# saves, by the plans found, and between which two figures that is proven to be.

# %%
prices = exploration.price_of_memory()
prices

# %%
points = [ParetoPoint(price.memory_bytes, price.seconds, price.bound_seconds) for price in prices.limits]
pareto_curve({"kiwi_chain": points}, f"{MODEL.rpartition('/')[2]} on 2x2 of {CLUSTER}")

# %% [markdown]
# ## Which mesh, which batch
#
# Eight devices as one axis, or as two: meshes whose bound is above the best plan so far are not solved to the end.

# %%
api.best_mesh(reference, 2 if SMALL else 8, cluster=CLUSTER, request=api.PlanRequest(time_limit=SECONDS))

# %% [markdown]
# The largest batch that four devices hold, in multiples of four sequences. A bound refuses what cannot fit without a
# search.

# %%
api.largest_batch(
    reference,
    cluster=CLUSTER,
    mesh=(2, 2),
    memory=limit,
    multiple=4,
    most=16 if SMALL else 128,
    request=api.PlanRequest(time_limit=SECONDS),
)

# %%
exploration.close()

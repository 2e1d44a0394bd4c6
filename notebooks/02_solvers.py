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
# # Solvers side by side
#
# Every formulation ends as one kind of problem: a strategy for every node, costs of nodes and of combinations, memory
# over time, and limits. This notebook makes such problems, reduces them, solves them by several solvers, and draws how
# fast each of them closes the gap between the best assignment found and the best bound proved.

# %%
import os

import pandas as pd

from formulations.instances.random_families import FAMILIES, family_problem
from formulations.presolve import presolve
from planner.benchmarks import Suite, bench, random_suite
from planner.plots import performance_profile

# The tests run this notebook with less time.
SECONDS = float(os.environ.get("MESHWRIGHT_NOTEBOOK_SECONDS", "5"))

# %% [markdown]
# ## Problems
#
# Each family is hard in a way of its own. The same seed gives the same problem.

# %%
pd.set_option("display.max_colwidth", None)  # whole descriptions
pd.DataFrame({"family": FAMILIES, "what is hard": [family.description for family in FAMILIES.values()]})

# %% [markdown]
# ## Presolve
#
# Reductions make a problem smaller without changing its optimum; a solution of what remains is lifted back. On real
# graphs, where most operators only pass layouts on, little remains. These families are made to leave more.

# %%
reduced = {family: presolve(family_problem(family, "middle")) for family in FAMILIES}
pd.DataFrame(
    {
        "nodes": [result.before.nodes for result in reduced.values()],
        "nodes left": [result.after.nodes for result in reduced.values()],
        "table entries": [result.before.entries for result in reduced.values()],
        "table entries left": [result.after.entries for result in reduced.values()],
    },
    index=list(reduced),
)

# %% [markdown]
# ## A benchmark
#
# Every row has status, objective, bound, gap and time, and every objective has been recomputed from the problem in
# exact integers. `seconds / best` compares with the fastest solver that reached the best objective. Seconds, and what
# is found in the time limit, differ from run to run.

# %%
wanted = ("hubs", "isolated", "cliques")
suite = random_suite(["middle"])
chosen = tuple(instance for instance in suite.instances if instance.name.partition("-")[0] in wanted)
result = bench(Suite("three families", chosen), ["portfolio", "lagrangian", "highs"], time_limit=SECONDS)
result

# %% [markdown]
# On the left the mean gap in per cent over time, on the right on how many instances it is closed to 0.1 %.

# %%
performance_profile(result.rows)

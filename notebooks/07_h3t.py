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
# # H3T: published, repaired, exact
#
# H3T gives every layer seven switches that trade memory for time: rematerialization, hidden-state offload, parameter
# partition, lazy prefetching, economical forward and backward, and segment synchronization. Its dynamic program counts
# memory in 128 units of the limit and synchronizes every segment. Here it runs as printed, repaired, and beside the
# exact plan in bytes of the same problem. Costs are our presets; the paper measured its own, so only orders and sizes
# compare.

# %%
import os

import pandas as pd

from formulations.models.h3t import simulate
from formulations.models.h3t_operations import ALL_ON, Switch
from formulations.searches.h3t_dp import search_dp
from formulations.searches.h3t_exact import least_memory
from formulations.searches.h3t_sampling import search_greedy, search_random, search_uniform
from formulations.searches.h3t_slips import AS_PUBLISHED, Rounding
from planner.benchmarks import h3t_paper as paper
from planner.benchmarks.h3t import exact, figure_6_cases, switch_shares, table_6_cases
from planner.benchmarks.h3t_cases import GIGABYTE, table_1_cases
from planner.plots import overhead_over_memory

# The tests run this notebook with fewer columns.
SMALL = "MESHWRIGHT_NOTEBOOK_SECONDS" in os.environ
COLUMNS = (0, 1) if SMALL else range(len(paper.COLUMNS))

# %% [markdown]
# ## One step, switch by switch
#
# BERT-1.8B with 128 samples on 8 x 2080 Ti: seconds and gigabytes of a step with every switch on, and with one of them
# off in all layers. Without a link between devices everything but computation takes turns on PCIe.

# %%
case = table_1_cases()[0]
step = case.step()
rows = [("none", int(ALL_ON)), *((switch.name.lower(), int(ALL_ON ^ switch)) for switch in Switch)]
outcomes = [simulate(step, [switches] * len(step.layers)) for _, switches in rows]
pd.DataFrame(
    {
        "step (s)": [outcome.cost / 1e6 for outcome in outcomes],
        "peak (GB)": [outcome.peak / GIGABYTE for outcome in outcomes],
    },
    index=pd.Index([name for name, _ in rows], name="off"),
).round(3)

# %% [markdown]
# ## Table 1
#
# Seconds of a step at the paper's limits. `over` is what the printed program's plan needs beyond the limit: it rounds
# every term to the nearest unit, and 48 layers of small errors add up. Rounding up always fits and may lose.


# %%
def column(number):
    """Seconds of all searches for one column of Table 1."""
    case = table_1_cases()[number]
    tables, limit = case.tables(), case.memory_limit
    printed = search_dp(tables, limit, slips=AS_PUBLISHED)
    rounded_up = search_dp(tables, limit, rounding=Rounding.UP)
    greedy, best = search_greedy(case.step(), AS_PUBLISHED), exact(case).outcome
    return {
        "machine": case.cluster,
        "model": case.model,
        "batch": case.batch,
        "all on": tables.outcome([63] * tables.layers).cost / 1e6,
        "DP as printed": printed.outcome.cost / 1e6,
        "over (GB)": max(0, printed.outcome.peak - limit) / GIGABYTE,
        "DP, rounded up": rounded_up.outcome.cost / 1e6 if rounded_up.outcome else None,
        "greedy": greedy.outcome.cost / 1e6 if greedy else None,
        "exact": best.cost / 1e6,
        "paper: DP": paper.TABLE_1["dp"][number],
        "paper: all on": paper.TABLE_1["all_on"][number],
    }


pd.DataFrame([column(number) for number in COLUMNS]).round(2)

# %% [markdown]
# Greedy may switch synchronization off, so it may win honestly against what is best with it.
#
# ## Figure 6: searches over memory limits
#
# Time beyond the fastest plan without a limit, on the first column. Random sequences rarely fit at all.

# %%
searches = {
    "dynamic program, rounded up": lambda case: search_dp(case.tables(), case.memory_limit, rounding=Rounding.UP),
    "greedy": lambda case: search_greedy(case.step()),
    "one set for all layers": lambda case: search_uniform(case.step()),
    "random": lambda case: search_random(case.step(), count=1000),
    "exact": exact,
}
limits = figure_6_cases(0)[:: 3 if SMALL else 1]
fastest = exact(limits[-1]).outcome.cost
curves = {}
for name, search in searches.items():
    found = [(case, search(case)) for case in limits]
    curves[name] = [
        (case.limit_gb, 100 * (each.outcome.cost / fastest - 1))
        for case, each in found
        if each is not None and each.outcome is not None
    ]
overhead_over_memory(curves, "BERT-1.8B, batch 128, 8 x 2080 Ti")

# %% [markdown]
# ## Table 6: which switches are on
#
# Percent of the layers. With slow PCIe nothing is partitioned or offloaded and everything is computed again, with more
# memory less is; the shares of rematerialization are the paper's. Where communication is hidden behind computation, as
# here by default, plans with very different shares of the other three take the same time.

# %%
shares = {}
for name, case in table_6_cases().items():
    found = search_dp(case.tables(), case.memory_limit, rounding=Rounding.UP)
    shares[f"{name}: DP"] = switch_shares(found.sequence)
    shares[f"{name}: exact"] = switch_shares(exact(case).sequence)
    shares[f"{name}: paper"] = paper.TABLE_6[name]
headings = ["partition", "lazy prefetching", "rematerialization", "hidden offload"]
pd.DataFrame(shares, index=headings).T.round(0)

# %% [markdown]
# ## The least memory
#
# With all switches on, and the least that any synchronized plan needs, beside Table 3 (measured).

# %%
least = []
for number in COLUMNS:
    case = table_1_cases()[number]
    tables = case.tables()
    on = tables.outcome([63] * tables.layers).peak
    least.append((str(case), on / GIGABYTE, least_memory(tables) / GIGABYTE, paper.TABLE_3[number]))
pd.DataFrame(least, columns=["case", "all on (GB)", "least (GB)", "paper, all on (GB)"]).round(2)

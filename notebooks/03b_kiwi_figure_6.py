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
# # KIWI, Figure 6: slower links
#
# The paper plans its decoder on four devices of one node with the links between them as they are, ten times and a
# hundred times slower, and shows how much faster KIWI is than Alpa and than Alpa with recomputation by rule. With fast
# links, it says, KIWI prefers to shard; it recomputes more when they get slow. The figure has no printed values.
#
# Here are the same model and slowdowns, at 50, 70, 90 and 100 % of the memory that the fastest sharded plan needs when
# nothing limits it. `sharding` stands for Alpa; `kiwi_reduced` is the paper's own reduction, `kiwi_chain` may also
# recompute what a recomputed operator needs. All numbers are from the results file of `meshwright bench papers --paper
# kiwi --part figure_6,figure_6_plans`.
#
# What cannot be the same: the paper prints neither sequence (we choose 1024) nor feed-forward size (we take four times
# the hidden size), and it measured operators on V100 where we use an analytic model of that machine.

# %%
import pandas as pd
from IPython.display import display

from planner.papers.claims.results import kept_results, paper_claims
from planner.papers.kiwi.headline import factors
from planner.plots import overhead_by_group

RESULTS = kept_results("kiwi")
KEPT = {name: pd.DataFrame(rows) for name, rows in RESULTS.rows.items()}

# %% [markdown]
# ## Time of a step
#
# Seconds; a dash is no plan. Each formulation begins with the plans of those to its left that it contains.

# %%
slowed = KEPT["figure_6"].assign(seconds=lambda rows: rows.cost / 1e9)
steps = slowed.set_index(["share", "slowdown", "formulation"]).seconds.unstack()[list(slowed.formulation.unique())]
steps.index = steps.index.set_names(["limit (%)", "bandwidth divided by"])
steps.round(3).astype(object).where(steps.notna(), "-").rename(columns=lambda name: f"{name} (s)")

# %% [markdown]
# Extra time over the fastest sharded plan under the same links. A line ends where no plan was found any more.

# %%
panels = {}
for (slowdown, formulation), part in slowed.groupby(["slowdown", "formulation"], sort=False):
    points = part.dropna(subset="extra_percent")
    links = "links as they are" if slowdown == 1 else f"links {slowdown} times slower"
    panels.setdefault(links, {})[formulation] = list(zip(points.share, points.extra_percent, strict=True))
overhead_by_group(panels, "decoder on mesh 1x4", "limit (% of the fastest plan's memory)")

# %% [markdown]
# ## How much faster KIWI is
#
# Time of each baseline over that of `kiwi_chain` within the same limit, where both have a plan. The paper says that its
# gain over Alpa grows as links get slower, and that with links as they are both rules lose to Alpa.

# %%
gains = pd.DataFrame(factors(RESULTS.rows, "figure_6")).set_index(["share", "slowdown", "formulation"]).factor.unstack()
gains.index = gains.index.set_names(["limit (%)", "bandwidth divided by"])
gains.round(4).astype(object).where(gains.notna(), "-").rename(columns=lambda name: f"{name} / kiwi_chain")

# %% [markdown]
# ## What the plans do
#
# The plan of `kiwi_chain` at 60 % of that memory. Nothing is asserted about it: a step that communicates less
# leaves more to recomputation, but the layouts may change as well, and with them what that share is.

# %%
plans = KEPT["figure_6_plans"].assign(free_cost=lambda rows: rows.free_cost / 1e6).drop(columns="share")
plans.rename(
    columns={
        "slowdown": "bandwidth divided by",
        "free_cost": "step without a limit (ms)",
        "recomputed": "operators that run again",
        "peak_gb": "peak (GB)",
    }
).round(2)

# %% [markdown]
# ## What the paper says, and ours
#
# Why ours differ: with slower links the fastest sharded plan communicates less and holds more, as the limits in GB
# of the results file show, so that the same share of it is more memory and leaves less to gain. With links as they are
# Alpa has no plan under any limit but its own, so that there is nothing to compare there.

# %%
found = [row.cells()[1:] for row in paper_claims(RESULTS) if row.claim.key.startswith("figure_6/")]
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame(found, columns=["claim", "printed", "ours", "verdict", "reason"]).set_index("claim"))

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
# # KIWI, Figure 7 and Tables 1 and 2: time of the solver
#
# How long it takes to plan one to twenty layers, how many operators that is, and what the reduced problem loses
# against the full one on a small perceptron. The paper's machine, costs and solver (Gurobi) differ from ours, so its
# seconds stand beside ours only for their size. All numbers are from the results file of `meshwright bench papers
# --paper kiwi`.

# %%
import pandas as pd

from planner.papers.claims.results import kept_results
from planner.plots import seconds_over_layers

KEPT = {name: pd.DataFrame(rows) for name, rows in kept_results("kiwi").rows.items()}

# %% [markdown]
# ## Table 2 and Figure 7
#
# The encoder, with normalisation, softmax and GELU written out in sums, products and exponentials, on one mesh axis
# of eight devices. Limits are 90 % and 100 % of what the fastest sharded plan needs. `sharding` stands for Alpa,
# `checkpoint_dots` and `megatron_selective` for Alpa with recomputation by rule; `kiwi_reduced` is the paper's reduced
# problem, and these three are timed at 4, 12 and 20 layers. A solve ends with a proof or after ten seconds; the time
# shown includes building the problem.

# %%
figure_7 = KEPT["figure_7"]
times = figure_7.set_index(["share", "layers", "formulation"])[["seconds", "gap_percent"]].unstack()
times = times.reindex(columns=list(figure_7.formulation.unique()), level="formulation")
times.index = times.index.set_names(["limit (%)", "layers"])
times.rename(columns={"gap_percent": "gap (%)", "seconds": "time (s)"}).round(3)

# %% [markdown]
# The number of operators beside the paper's. Its counts follow 30 + 278 per layer, except for four layers: 1192 is
# printed where that line gives 1142. Ours are operators of torch's backend, forward, backward and views; XLA counts
# others, so only the growth compares.

# %%
PAPER = {1: 308, 4: 1192, 8: 2254, 12: 3366, 16: 4478, 20: 5590}
counts = KEPT["operators"].set_index("layers").operators
pd.DataFrame({"ours": counts, "paper, Table 2": pd.Series(PAPER)})


# %%
def curves(share):
    """Seconds over layers at one limit, one line for each formulation."""
    rows = figure_7[figure_7.share == share]
    lines = {
        name: list(zip(part.layers, part.seconds, strict=True))
        for name, part in rows.groupby("formulation", sort=False)
    }
    return seconds_over_layers(lines, f"encoder in primitives on mesh 8, limit {share} %, at most 10 s for a solve")


curves(90)

# %%
curves(100)

# %% [markdown]
# The paper finds KIWI comparable to Alpa below 12 layers and slower above; it prints no seconds for this figure, and
# no gap. Where our line is at the time limit, the plan has the gap that the table shows.
#
# ## Table 1
#
# The full problem and its reductions on a perceptron of seven layers, 26 operators. The paper gives neither its
# widths nor its links; ours are printed by `meshwright bench kiwi-mlp`. Limits are shares of the memory of the fastest
# plan without a limit.
#
# In the paper the cost is the latency over that of Alpa without a limit. The paper's text names 11.6 % at the limit
# of 80 % as the largest loss of the reduced problem, its table 15.5 % at 60 %; and the text says that the full
# problem took 26 minutes, the table 1717 s, which are 28.6 minutes. Both are repeated here.

# %%
PAPER_FULL = {20: (8.35, 1717.18), 40: (4.88, 660.41), 60: (2.71, 718.49), 80: (1.54, 39.71)}
PAPER_REDUCED = {20: (8.35, 0.79), 40: (5.09, 0.91), 60: (3.13, 0.80), 80: (1.72, 0.67)}
PAPER_TABLE_1 = {"kiwi_full": PAPER_FULL, "kiwi_reduced": PAPER_REDUCED}


def beside_the_paper(rows):
    """Rows of Table 1 with the paper's figures for the same problem."""
    table = rows.rename(columns={"share": "limit (%)", "ratio": "cost", "seconds": "time (s)"})
    printed = [
        PAPER_TABLE_1.get(name.removesuffix("_published"), {}).get(share, (None, None))
        for name, share in zip(table.formulation, table["limit (%)"], strict=True)
    ]
    table[["cost, paper", "time, paper (s)"]] = pd.DataFrame(printed, index=table.index)
    return table.round(3)


beside_the_paper(KEPT["table_1"])

# %% [markdown]
# A status `infeasible` is a proof that no plan of that formulation fits.
#
# The same problems by the paper's own programs, linearised as the paper does it and solved by HiGHS on one core: times
# stand beside the paper's for the same program. The full one has 20 s, the reduced one 8 s; within that the full one
# finds plans far from the optimum. The reduced one is claimed optimal at the time in its own column, and the rest of
# its seconds is the attempt to confirm that by a solver of another kind. A claimed gap is the solver's.

# %%
names = {"claimed_seconds": "claimed optimal after (s)", "claimed_gap_percent": "claimed gap (%)"}
beside_the_paper(KEPT["table_1_published"]).rename(columns=names)

# %% [markdown]
# No plan of theirs is cheaper than that of our formulation of the same problem, in any row.

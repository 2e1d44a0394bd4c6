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
# # KIWI, Figure 7: time of the solver
#
# The paper plans one to twenty layers of its encoder and shows how long the solver takes, beside Alpa's. Its Table 2
# has the number of operators that these layers are. Here are both from the results file of `meshwright bench papers
# --paper kiwi --part figure_7,operators`.
#
# What cannot be the same: the paper's machine, costs and solver (Gurobi) differ from ours, so only the shape of the
# curves compares.

# %%
import pandas as pd
from IPython.display import display

from planner.papers.claims.results import kept_results, paper_claims
from planner.papers.printed import printed
from planner.plots import seconds_over_layers

RESULTS = kept_results("kiwi")
KEPT = {name: pd.DataFrame(rows) for name, rows in RESULTS.rows.items()}
PAPER = printed("kiwi")

# %% [markdown]
# ## Time over layers
#
# The encoder, with normalisation, softmax and GELU written out in sums, products and exponentials, on one mesh axis
# of eight devices. Limits are 90 % and 100 % of what the fastest sharded plan needs. `sharding` stands for Alpa,
# `checkpoint_dots` and `megatron_selective` for Alpa with recomputation by rule; `kiwi_reduced` is the paper's reduced
# problem. A solve ends with a proof or after ten seconds; the time shown includes building the problem.

# %%
figure_7 = KEPT["figure_7"]
times = figure_7.set_index(["share", "layers", "formulation"])[["seconds", "gap_percent"]].unstack()
times = times.reindex(columns=list(figure_7.formulation.unique()), level="formulation")
times.index = times.index.set_names(["limit (%)", "layers"])
times.rename(columns={"gap_percent": "gap (%)", "seconds": "time (s)"}).round(3)


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
# Where a line is at the time limit, the plan has the gap that the table shows; the paper prints no gap.
#
# ## Operators, Table 2
#
# The number of operators beside the paper's. Its counts are on a line, except for those of four layers. Ours are
# operators of torch's backend, forward, backward and views; XLA counts others, so only the growth compares.

# %%
counts = {"ours": KEPT["operators"].set_index("layers").operators}
for name, values in {"paper": PAPER["table_2_encoder_operators"], "line": PAPER["table_2_check"]["fit_values"]}.items():
    counts[name] = pd.Series({int(layers): count for layers, count in values.items()})
pd.DataFrame(counts).rename(columns={"paper": "paper, Table 2", "line": PAPER["table_2_check"]["fit"]})

# %% [markdown]
# ## What the paper says, and ours
#
# The paper prints no seconds for this figure.

# %%
found = [row.cells()[1:] for row in paper_claims(RESULTS) if row.claim.key.startswith("figure_7/")]
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame(found, columns=["claim", "printed", "ours", "verdict", "reason"]).set_index("claim"))

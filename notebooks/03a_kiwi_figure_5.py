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
# # KIWI, Figure 5: time against memory, and the headline of the abstract
#
# The KIWI paper plans sharding and recomputation together for a transformer of four layers (hidden size 5120, 40
# heads, batch 16, 32-bit floats) and compares it with sharding alone and with recomputation by rule. Its Figure 5 has
# the time of a step under limits of memory, for an encoder and a decoder on two meshes of eight devices; the headline
# of the abstract is of its best points, and stands at the end here.
#
# Here are Meshwright's formulations of the same: `kiwi_reduced` is the paper's own reduction, `kiwi_chain` may also
# recompute what a recomputed operator needs. `sharding` stands for Alpa; the paper's baselines `checkpoint_dots` and
# `megatron_selective` recompute by rule. All numbers are from the results file of `meshwright bench papers --paper
# kiwi --part figure_5_encoder,figure_5_decoder,sequence_lengths`; the benchmark `meshwright bench kiwi-transformer` has
# more formulations, limits and time.
#
# What cannot be the same: the paper gives no sequence length (we choose 1024, and sweep it below) and no feed-forward
# size (we take four times the hidden size), it measured operators on V100 and prints no table (we use an analytic model
# of the same machine), and its operators are XLA's. So shapes and ratios can be compared, times cannot.

# %%
import pandas as pd
from IPython.display import display

from planner.papers.claims.results import kept_results, paper_claims
from planner.papers.kiwi.headline import FIGURE_5, PRINTED, factors, largest
from planner.papers.printed import printed
from planner.plots import overhead_over_memory

RESULTS = kept_results("kiwi")
KEPT = {name: pd.DataFrame(rows) for name, rows in RESULTS.rows.items()}
FLOORS = printed("kiwi")["feasibility_floor_gb"]

# %% [markdown]
# ## How far down each formulation goes
#
# First the peak of each formulation is made small. All bytes of torch's tensors count: parameters, gradients, AdamW's
# state, activations, resharded copies. The paper does not say whether its limits count gradients and optimizer state.
# Its prose names a limit for each model and mesh at which only KIWI found a plan; they are in the last column. We read
# them as bytes on one device: the weights of four blocks alone are 5.03 GB, so they cannot be totals over the mesh.

# %%
sweeps = pd.concat([KEPT["figure_5_encoder"], KEPT["figure_5_decoder"]])
smallest = sweeps[sweeps.share.isna()].set_index(["model", "mesh", "formulation"])[["peak_gb", "least_gb"]]
planned = sweeps[sweeps.cost.notna()].groupby(["model", "mesh", "formulation"]).limit_gb.min()
smallest["least limit with a plan (GB)"] = planned.reindex(smallest.index)
smallest["KIWI in the paper (GB)"] = [FLOORS[model][f"mesh_{mesh}"] for model, mesh, _ in smallest.index]
smallest.rename(columns={"peak_gb": "smallest peak found (GB)", "least_gb": "no plan below (GB)"}).round(3)

# %% [markdown]
# The truth lies between what was found and the bound. The search for a small peak has twelve seconds, so that a plan
# under one of the limits below may need less than it found. Where no bound is given, the problem that finds plans
# leaves some out.
#
# ## What less memory costs
#
# Limits are shares of what the fastest sharded plan needs when nothing limits it, and the extra time is over that
# plan's. A dash is no plan.

# %%
limited = sweeps[sweeps.share.notna()]
wide = limited.set_index(["model", "mesh", "share", "limit_gb", "formulation"]).extra_percent.unstack("formulation")
wide = wide.reindex(columns=list(limited.formulation.unique()))
wide.index = wide.index.set_names(["model", "mesh", "limit (%)", "limit (GB)"])
wide.round(2).astype(object).where(wide.notna(), "-").rename(columns=lambda name: f"{name} (extra %)")


# %%
def curves(model, mesh):
    """Extra time over the limit of one model on one mesh, one line for each formulation."""
    rows = limited[(limited.model == model) & (limited.mesh == mesh)].dropna(subset="extra_percent")
    lines = {
        name: list(zip(part.limit_gb, part.extra_percent, strict=True))
        for name, part in rows.groupby("formulation", sort=False)
    }
    floor = {"paper: smallest for KIWI": FLOORS[model][f"mesh_{mesh}"]}
    return overhead_over_memory(lines, f"{model} on mesh {mesh}", floor)


curves("encoder", "2x4")

# %%
curves("encoder", "4x2")

# %%
curves("decoder", "2x4")

# %%
curves("decoder", "4x2")

# %% [markdown]
# Each line ends at the smallest of the limits where a plan was found. The last sweep in numbers; a gap is what is
# left between the plan and the proven bound, after at most six seconds.

# %%
columns = {"limit_gb": "limit (GB)", "extra_percent": "extra time (%)", "gap_percent": "gap (%)", "seconds": "time (s)"}
decoder = limited[(limited.model == "decoder") & (limited.mesh == "4x2")]
decoder[["formulation", "limit_gb", "extra_percent", "gap_percent", "status", "seconds"]].rename(columns=columns).round(
    2
)

# %% [markdown]
# ## What the paper leaves open: sequence and optimizer
#
# The encoder on mesh 2x4 with sequences of 512, 1024 and 2048, and with AdamW's two states for each parameter or SGD's
# none, at 60 % of what the fastest sharded plan needs; at most three seconds for a solve. A dash is no plan. The longer
# the sequence, the larger the part of activations, which only recomputation can lower. One mesh and one limit, as the
# question here is what two choices change that the paper leaves open; limits and meshes are those of the tables above.

# %%
swept = KEPT["sequence_lengths"].set_index(["sequence", "optimizer", "limit_gb", "formulation"]).extra_percent
swept = swept.unstack("formulation")[list(KEPT["sequence_lengths"].formulation.unique())]
swept.index = swept.index.set_names(["sequence", "optimizer", "limit (GB)"])
swept.round(2).astype(object).where(swept.notna(), "-").rename(columns=lambda name: f"{name} (extra %)")

# %% [markdown]
# ## The headline of the abstract
#
# The abstract says up to how many times as fast KIWI is as Alpa, and as Alpa with either rule, and that it is never
# slower. Beside it the time of each over that of `kiwi_chain` within the same limit, over all rows above where both
# have a plan.

# %%
pairs = factors(RESULTS.rows, *FIGURE_5)
headline = []
for baseline, factor in PRINTED.items():
    ratios = [row["factor"] for row in pairs if row["formulation"] == baseline]
    headline.append({**largest(pairs, baseline), "factor, paper": factor, "least factor": min(ratios)})
pd.DataFrame(headline).set_index("formulation").rename(
    columns={"factor": "largest factor", "share": "limit (%)", "sequence": "sequence (tokens)"}
).drop(columns="slowdown").round(4)

# %% [markdown]
# Why ours differ: a factor depends on how much time layouts cost that fit without recomputation, or with what a rule
# recomputes, just above the limit where a baseline has no plan any more. That follows from costs of operators,
# bandwidths and the sequence, none of which the paper prints; it does not say at which points its maxima are either.
# With another sequence or optimizer the factors change as the table above shows; for slower links see Figure 6.
#
# All that the paper says about this figure, and what we say to it:

# %%
found = [
    row.cells()[1:] for row in paper_claims(RESULTS) if row.claim.key.startswith(("headline/", "feasibility_floor_gb/"))
]
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame(found, columns=["claim", "printed", "ours", "verdict", "reason"]).set_index("claim"))

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
# seconds stand beside ours only for their size.

# %%
import os

import pandas as pd

from formulations.kiwi.mlp import MlpInstance
from planner.benchmarks import Suite, bench
from planner.papers import kiwi_mlp_suite
from planner.papers.kiwi.cases import prepared
from planner.papers.kiwi.transformer import paper_case, within
from planner.plots import seconds_over_layers

# The tests run this notebook with a smaller step and less time.
SMALL = "MESHWRIGHT_NOTEBOOK_SECONDS" in os.environ
SECONDS = float(os.environ.get("MESHWRIGHT_NOTEBOOK_SECONDS", "10"))
SIZES = {"batch": 8, "sequence": 128} if SMALL else {"batch": 16, "sequence": 1024}
LAYERS = (1,) if SMALL else (1, 4, 8, 12, 16, 20)
LIMITS = (90,) if SMALL else (90, 100)

# %% [markdown]
# ## Table 2 and Figure 7
#
# The encoder, with normalisation, softmax and GELU written out in sums, products and exponentials, on one mesh axis
# of eight devices. Limits are 90 % and 100 % of what the fastest sharded plan needs. `sharding` stands for Alpa. A
# solve ends with a proof or after the time limit; the time shown includes building the problem.

# %%
rows = []
for layers in LAYERS:
    case = paper_case("encoder_of_primitives", (8,), layers=layers, **SIZES)
    wanted = [(name, limit) for limit in LIMITS for name in ("sharding", "kiwi_chain")]
    found = bench(Suite(case.name, tuple(within(case, *each) for each in wanted)), time_limit=SECONDS).rows
    operators = len(prepared(case).session.traced.graph.operators)
    for row, (name, limit) in zip(found, wanted, strict=True):
        gap = None if row.gap is None else 100 * row.gap
        rows.append((layers, operators, name, limit, str(row.status), gap, row.seconds))
names = ["layers", "operators", "formulation", "limit (%)", "status", "gap (%)", "time (s)"]
measured = pd.DataFrame(rows, columns=names)
measured.round(3)

# %% [markdown]
# The number of operators beside the paper's. Its counts follow 30 + 278 per layer, except for four layers: 1192 is
# printed where that line gives 1142. Ours are operators of torch's backend, forward, backward and views; XLA counts
# others, so only the growth compares.

# %%
PAPER = {1: 308, 4: 1192, 8: 2254, 12: 3366, 16: 4478, 20: 5590}
counts = measured.groupby("layers")["operators"].first()
pd.DataFrame({"ours": counts, "paper, Table 2": pd.Series(PAPER).reindex(counts.index)})

# %%
curves = {
    f"{name}, limit {limit} %": list(zip(part["layers"], part["time (s)"], strict=True))
    for (name, limit), part in measured.groupby(["formulation", "limit (%)"])
}
seconds_over_layers(curves, f"encoder in primitives on mesh 8, at most {SECONDS:g} s for a solve")

# %% [markdown]
# The paper finds KIWI comparable to Alpa below 12 layers and slower above; it prints no seconds for this figure, and
# no gap. Where our line is at the time limit, the plan has the gap that the table shows.
#
# ## Table 1
#
# The full problem and its reductions on a perceptron of seven layers, 26 operators. The paper gives neither its
# widths nor its links; ours are printed. Limits are shares of the memory of the fastest plan without a limit.

# %%
suite = kiwi_mlp_suite(MlpInstance(devices=2, batch=512, widths=(256, 512, 128)) if SMALL else None)
for note in suite.notes:
    print(note)
result = bench(suite, time_limit=SECONDS if SMALL else None)

# %% [markdown]
# In the paper the cost is the latency over that of Alpa without a limit. The paper's text names 11.6 % at the limit
# of 80 % as the largest loss of the reduced problem, its table 15.5 % at 60 %; and the text says that the full
# problem took 26 minutes, the table 1717 s, which are 28.6 minutes. Both are repeated here.

# %%
PAPER_FULL = {20: (8.35, 1717.18), 40: (4.88, 660.41), 60: (2.71, 718.49), 80: (1.54, 39.71)}
PAPER_REDUCED = {20: (8.35, 0.79), 40: (5.09, 0.91), 60: (3.13, 0.80), 80: (1.72, 0.67)}
ratios = {}
for line in suite.summarize(result.rows):
    instance, _, ratio = line.partition(": ")
    ratios[instance] = float(ratio.split()[0])
table = []
for row in result.rows:
    share = next(share for share in PAPER_FULL if f"-{share}%-" in row.instance)
    paper = {"kiwi_full": PAPER_FULL, "kiwi_reduced": PAPER_REDUCED}.get(row.formulation, {}).get(share, (None, None))
    cost = ratios.get(row.instance) if row.objective is not None else None
    table.append((share, row.formulation, row.solver, str(row.status), cost, paper[0], row.seconds, paper[1]))
headings = ["limit (%)", "formulation", "solver", "status", "cost", "cost, paper", "time (s)", "time, paper (s)"]
pd.DataFrame(table, columns=headings).round(3)

# %% [markdown]
# A status `infeasible` is a proof that no plan of that formulation fits.

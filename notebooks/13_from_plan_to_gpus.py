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
# # From a plan to GPUs
#
# A plan is made where solvers are, and runs where GPUs are. This notebook plans a Llama 3 8B for a node of eight H100
# on a machine without any, looks at what would run there, writes the files that travel, and rehearses the same kind of
# plan on processes of this machine.

# %%
import json
import os
import tempfile
from pathlib import Path

import pandas as pd

from planner import api
from planner.common.units import format_bytes
from planner.plots import memory_over_time, modules_of_plan, streams_over_time
from planner.view.modules import module_tree
from planner.view.opened import open_plan
from planner.view.page import page
from planner.view.snapshot import snapshot_bytes
from planner.view.trace import chrome_trace, predicted_events
from runtime.job.launch import run_plan

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# The tests run this notebook with a smaller model and less time.
SMALL = "MESHWRIGHT_NOTEBOOK_SECONDS" in os.environ
MODEL = os.environ.get("MESHWRIGHT_NOTEBOOK_MODEL", "hf:llama3-8b")
SECONDS = float(os.environ.get("MESHWRIGHT_NOTEBOOK_SECONDS", "20"))

# %% [markdown]
# ## Plan
#
# Parameters in bfloat16, their master copies and moments in 32 bits (`adamw_mixed`), as mixed precision has them. The
# mesh has an inner axis of four and an outer axis of two; the planner chooses what each is for.

# %%
SIZE = {"batch": 8, "sequence": 128} if SMALL else {"batch": 16, "sequence": 2048}
reference = api.ModelReference(MODEL, **SIZE, dtype="bfloat16", seed=0, dropout=0.0)
session = api.PlanningSession(reference, "h100-8-nvlink", (2, 4), "adamw_mixed")
plan = session.plan(api.PlanRequest(time_limit=SECONDS))
plan

# %%
opened = open_plan("plan", plan, session=session)
memory_over_time(opened)

# %%
modules_of_plan(module_tree(opened))

# %% [markdown]
# What runs when: the computation, and the links of each mesh axis; a tenth of the step, from the middle of forward.

# %%
step_ms = opened.time.total / 1e6
streams_over_time(opened, 0.15 * step_ms, 0.25 * step_ms)

# %% [markdown]
# How the parameters of one layer are laid out: `S0` is sharded on its dimension 0 over a mesh axis, `R` is replicated.

# %%
layout = {
    session.graph.values[plan_buffer.value].name: " ".join(map(str, plan_buffer.placement))
    for plan_buffer in (opened.schedule.buffers[number] for number in opened.schedule.inputs)
}
pd.Series({name: placement for name, placement in layout.items() if ".1." in name}, name="placement").to_frame()

# %% [markdown]
# ## What travels
#
# The plan is one JSON file. The page is for looking around, the trace for Perfetto, the snapshot for torch's memory
# visualizer. On the node, torch, NumPy and pydantic are enough, and transformers for the model:
#
# ```
# torchrun --nproc-per-node 8 -m runtime.rank_main plan.json --steps 20 --report report.json
# ```
#
# Ranks refuse a plan that holds more than their devices have, before anything is allocated. In a training script
# of your own `runtime.load("plan.json", module, optimizer=...)` makes the step (`runtime/library/README.md`).

# %%
with tempfile.TemporaryDirectory() as folder:
    files = {name: Path(folder) / name for name in ("plan.json", "plan.html", "trace.json", "memory.pickle")}
    api.save(plan, files["plan.json"])
    files["plan.html"].write_text(page([opened]))
    files["trace.json"].write_text(
        json.dumps(chrome_trace(predicted_events(opened.graph, opened.schedule, opened.time)))
    )
    files["memory.pickle"].write_bytes(snapshot_bytes(opened))
    again = api.load(files["plan.json"])
    assert again == plan
    sizes = {name: format_bytes(path.stat().st_size) for name, path in files.items()}
pd.Series(sizes, name="size").to_frame()

# %% [markdown]
# ## Rehearse
#
# A small Llama of the same kind, planned for the same devices on a mesh of two by two, within four fifths of what its
# fastest plan needs. It runs on four processes here. They do what GPUs would: the same local operators and the same
# collectives in the same order. One process without a plan says what losses and gradients should be.

# %%
SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 1 if SMALL else 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 5003,
}
with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(SMALL_LLAMA))
    small = api.ModelReference(f"hf:{config}", batch=8, sequence=128, dtype="float32", seed=0, dropout=0.0)
    rehearsal = api.PlanningSession(small, "h100-8-nvlink", (2,) if SMALL else (2, 2))
    free = rehearsal.plan(api.PlanRequest(time_limit=SECONDS))
    limit = free.peak_bytes * 4 // 5 + free.decision.options.reserve_bytes
    tight = rehearsal.plan(api.PlanRequest(memory=limit, time_limit=SECONDS))
    report = run_plan(tight, steps=1 if SMALL else 3, check=True, device="cpu")
pd.DataFrame({"ranks": report.loss, "one process": report.reference_loss}).rename_axis("step")

# %%
assert report.failures() == []
pd.Series(
    {
        "predicted peak of the fullest rank": f"{tight.peak_bytes:,} bytes",
        "measured peak of the fullest rank": f"{max(report.measured_peak_bytes):,} bytes",
        "operators that run again": str(tight.recomputed),
        "largest relative error of a gradient": f"{report.max_grad_rel_error:.1e}",
    }
).to_frame("rehearsal")

# %% [markdown]
# The peak is that of the plan, on GPUs as well. The time is not: this machine computes and communicates as it can, and
# the plan's seconds are those of H100.

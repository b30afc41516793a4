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
# # Is the simulator right?
#
# Needs `pip install 'cdpsim[torch,notebooks]'` and Jupyter.
#
# The harness replays a schedule's program with real tensors, by torch. Before the replay, the simulation predicts the
# memory of each device in each slot, all messages, and the final parameters. This notebook replays three schedules on
# this machine's CPU, and compares. Files go to a temporary folder.

# %%
import json
import os
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt

try:
    from cdpsim_validation.__main__ import main as validate  # the command cdpsim-validate
except ImportError:
    from validation.__main__ import main as validate  # in a checkout: python -m validation

os.chdir(mkdtemp())

# %% [markdown]
# ## Three schedules, replayed now
#
# The model is a small transformer of four equal stages, with as many micro-batches. `--single-process` plays all
# devices in this process, in the order of slots; without it each device has a process of its own. A report is a JSON
# file. It also has the times, which are this machine's and not shown here.

# %%
# %%capture
names = ["single-dp", "single-cdp", "mp-cdp"]
for name in names:
    command = f"replay {name} -n 4 --steps 2 --model transformer --single-process"
    validate([*command.split(), "-o", f"report-{name}.json"])

# %%
reports = {name: json.loads(Path(f"report-{name}.json").read_text()) for name in names}
for name, report in reports.items():
    memory, messages = report["memory"]["total"], report["messages"]
    print(f"{name:10}  parameters {'bit-equal' if report['parameters']['bit_equal'] else 'different'}")
    print(f"{'':10}  messages   {messages['simulated']:10,} simulated  {messages['measured']:10,} measured")
    print(f"{'':10}  bytes sent {messages['bytes_simulated']:10,} simulated  {messages['bytes_measured']:10,} measured")
    print(f"{'':10}  peak bytes {memory['simulated_bytes']:10,} simulated  {memory['measured_bytes']:10,} measured")

# %% [markdown]
# The peak is that of the activations of all devices together. It is right in every other slot, too: the lines are
# simulated, the dots measured. A storage counts from when torch allocates it until torch frees it.

# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 2.6), layout="constrained", sharey=True)
for axes, (name, report) in zip(panels, reports.items(), strict=True):
    curve = report["memory"]["curve"]
    axes.step(curve["slot"], [size / 1e3 for size in curve["simulated_bytes"]], where="mid", linewidth=1)
    axes.plot(curve["slot"], [size / 1e3 for size in curve["measured_bytes"]], "k.", markersize=3)
    axes.set_title(name)
    axes.set_xlabel("slot")
panels[0].set_ylabel("activations, kB")
panels[0].set_ylim(bottom=0)
# %% [markdown]
# ## What cyclic execution saves
#
# The paper claims $N(N+1)/2$ stage-activations at the peak instead of $N^2$. A replay measures more than $(N+1)/2N$,
# because a backward also needs room for its own work and for the gradient of a boundary, and CDP does not reduce
# these. The simulation counts them, too.

# %%
dp, cdp = (reports[name]["memory"]["total"] for name in ("single-dp", "single-cdp"))
print(f"(N+1)/2N   {(4 + 1) / (2 * 4):.4f}")
print(f"simulated  {cdp['simulated_bytes'] / dp['simulated_bytes']:.4f}")
print(f"measured   {cdp['measured_bytes'] / dp['measured_bytes']:.4f}")

# %% [markdown]
# ## More
#
# From a shell it is `cdpsim-validate replay` (in a checkout, `python -m validation replay`), with torchrun or without.
# It replays pipelines, GPUs and models of real size, and compares the time as well. `docs/results.md` sums up
# all stored results.

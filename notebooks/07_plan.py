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
# # Which schedule: a plan and its front
#
# Needs `pip install 'cdpsim[notebooks]'` and Jupyter.
#
# Llama 2 7B has to be trained on 8 A100 with 64 samples in a training step. Which schedule, on how many stages, with
# how many data ranks that share states and ranks that split layers, and with which recomputation? `plan` tries all of
# them. It simulates those that lower bounds do not rule out, so that its answer is proved.

# %%
import matplotlib.pyplot as plt

import cdpsim

question = {"model": "llama2-7b", "cluster": "a100-nodes", "devices": 8, "batch": 64}
names = "dp,1f1b,interleaved-1f1b,zb-h1,zbv,pipedream-2bw,pipemare"
found = cdpsim.plan(**question, schedules=names)
print(found)

# %% [markdown]
# The status and the counts say how that is known. Candidates that *cannot be asked* have sizes that a schedule does
# not take. Those that are *too large* or *worse* by their bounds need no simulation.

# %%
print(found.status)
print(found.searched)

# %% [markdown]
# ## The front
#
# No other candidate is as good in step, memory and staleness as one of the front, and better in one. From the
# first row on, each next one is slower, and needs less memory or has less staleness.

# %%
front = [(row["schedule"], row.measured.memory / 1e9, row.measured.step, row.measured.staleness) for row in found.front]
for name, memory, step, staleness in front:
    print(f"{name:24} {memory:6.2f} GB  {step:6.2f} s  staleness {staleness:.3g}")

# %% [markdown]
# Time over memory, with a ring where parameters are stale:

# %%
figure, axes = plt.subplots(figsize=(8, 4))
for name in dict.fromkeys(name for name, *_ in front):
    mine = [(memory, step) for other, memory, step, _ in front if other == name]
    axes.plot(*zip(*mine, strict=True), "o", label=name)
stale = [(memory, step) for _, memory, step, staleness in front if staleness]
if stale:
    axes.plot(*zip(*stale, strict=True), "o", markersize=11, markerfacecolor="none", color="black", label="stale")
axes.set(xlabel="memory of the fullest device, GB", ylabel="training step, s")
axes.legend()
plt.show()

# %% [markdown]
# ## A smaller memory
#
# How much slower is training on devices with less memory? Each limit is a plan of its own. The front answers it, too:
# its fastest row within the limit is the plan's first row.

# %%
for limit in (80, 40, 20):
    best = cdpsim.plan(**question, schedules=names, memory=f"{limit} GB", staleness=0, top=1).best
    within = min(step for _, memory, step, staleness in front if memory <= limit and not staleness)
    assert best.measured.step == within
    print(f"{limit} GB: {best.measured.step:.2f} s by {best.command}")

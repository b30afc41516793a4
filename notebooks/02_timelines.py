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
# # Timelines
#
# Needs `pip install 'cdpsim[notebooks]'` and Jupyter.
#
# A schedule is easiest to understand in pictures. This notebook shows data parallelism (DP) beside cyclic data
# parallelism (CDP) slot by slot: computation, memory, messages, the age of the parameters, and the effect of real
# costs.

# %%
import cdpsim
from cdpsim.draw.text import timetable

# %% [markdown]
# ## As text
#
# Three stages, three micro-batches, a device for each. A column is a slot; `B1.0` is the backward of micro-batch 1 on
# stage 0. Every micro-batch starts two slots after the one before it. So in each slot some go forward and some
# backward, and each stage is at work exactly once. A `/` marks a task that reads older parameters than the newest
# that exist.

# %%
dp = cdpsim.simulate("multi-dp", n=3)
v1 = cdpsim.simulate("multi-cdp", n=3, rule="cdp-v1")
v2 = cdpsim.simulate("multi-cdp", n=3, rule="cdp-v2")
print(timetable(v2))

# %% [markdown]
# ## As the paper's Fig. 1
#
# The same as a picture: a mark per task, its colour the micro-batch, ↑ forward and ↓ backward. DP waits for all
# devices at the end of a training step, and so, later, does CDP-v1: the double bars. CDP-v2 reads new parameters
# wherever they arrive in time. It has no such bar, only messages from one device to another.

# %%
cdpsim.plot("timeline", [dp, v1, v2])

# %% [markdown]
# ## Memory
#
# All devices together hold $N^2$ stage-activations at DP's peak, and $N(N+1)/2$ all the time under CDP: 64 and 36 for
# eight devices.

# %%
dp, cdp = (cdpsim.simulate(name, n=8) for name in ("multi-dp", "multi-cdp"))
cdpsim.plot("memory", [dp, cdp], sums=True)

# %% [markdown]
# The memory of every single device still goes up and down as before, but the devices do not peak together. Only the
# sum falls, so CDP saves memory where micro-batches share it (a device that runs them all, or model parallelism with
# fewer devices).

# %%
cdp.plot("memory")

# %% [markdown]
# One slot of this run, device by device:

# %%
cdp.plot("snapshot", slot=24)

# %% [markdown]
# ## Messages
#
# DP sends everything at the end of a training step. CDP passes partial sums and new parameters on as they come, about
# as much in every slot. (In total it sends less in these three steps, because it does not send parameters that no
# task of the run reads.)

# %%
cdpsim.plot("traffic", [dp, cdp])

# %%
for run in (dp, cdp):
    gradients = run.messages[run.messages.content == "gradient"]
    print(run.request["schedule"], "sends gradients in", len(set(gradients.start)), "slots")

# %% [markdown]
# ## Versions and their age
#
# CDP has a price: some of its tasks read parameters that are one training step old. The mean age is 1 step for v1 and
# $(N-1)/2N$ for v2. Where each worker has its own copy of the parameters (`multi-cdp`), v2 keeps one version, and
# only v1's updater keeps two. A pipeline (`pp-cdp`) keeps two on every stage but the last, because some micro-batches
# have done their forward with the old version, and their backward is still to come.

# %%
cdpsim.plot("versions", "pp-cdp", n=4)

# %%
several = [
    cdpsim.simulate(name, n=4, rule=rule)
    for name, rule in (("multi-dp", "dp"), ("multi-cdp", "cdp-v1"), ("multi-cdp", "cdp-v2"), ("pp-cdp", "cdp-v2"))
]
for run in several:
    print(f"{run.request['schedule']:10} {run.summary()['mean_staleness']:5} steps old")
cdpsim.plot("versions", several)

# %% [markdown]
# ## Real costs
#
# With a model and a cluster, slots become seconds and stage-activations become bytes. A backward takes twice as long
# as a forward here, and a message takes time. The steps are not even any more. The schedule does not state the gaps:
# they follow from the dependencies.

# %%
stage = {
    "repeat": 4,
    "forward": "8 ms",
    "backward": "16 ms",
    "activation": "1.5 GB",
    "boundary": "16 MB",
    "parameters": "400 MB",
}
costs = {
    "model": {"name": "toy", "stages": [stage]},
    "cluster": {"name": "box", "link": {"latency": "5 us", "bandwidth": "100 GB/s"}},
}
dp, cdp = (cdpsim.simulate(name, n=4, **costs) for name in ("multi-dp", "multi-cdp"))
cdpsim.plot("memory", [dp, cdp])

# %%
cdpsim.plot("traffic", [dp, cdp])

# %% [markdown]
# DP's devices wait for their all-reduce. CDP's wait, too: a device pulls new parameters just in time, and stands
# still while they travel. With `prefetch=1` it pulls them one task earlier, and they travel while it computes: a step
# takes no longer than its work, 4 × 24 ms.

# %%
early = cdpsim.simulate("multi-cdp", n=4, prefetch=1, **costs)
comparison = cdpsim.compare(dp, cdp, early)
for name, row in zip(("multi-dp", "multi-cdp", "multi-cdp, prefetch=1"), comparison, strict=True):
    print(f"{name:22} step {1e3 * row.step:6.2f} ms, waits {row.exposed:.1%}, holds {row.memory / 1e9:.2f} GB")

# %% [markdown]
# A run shows itself: its metrics, and a timeline.

# %%
display(early)

# %% [markdown]
# ## Explore
#
# `cdpsim timeline` writes one self-contained HTML file to pan, zoom and search, or a trace for
# [Perfetto](https://ui.perfetto.dev):
#
#     cdpsim timeline multi-cdp -n 8 -o run.html
#     cdpsim timeline multi-cdp -n 8 -o run.json
#     cdpsim timeline multi-cdp -n 8 -o run.svg --style gantt
#     cdpsim plot memory multi-dp multi-cdp -n 8 -o memory.pdf

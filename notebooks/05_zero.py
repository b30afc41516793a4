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
# # ZeRO's table, and when FSDP's gathers hide
#
# Needs `pip install 'cdpsim[notebooks]'` and Jupyter.
#
# In data parallelism every rank holds all parameters, all gradients and all of the optimizer's state. ZeRO
# ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054)) splits them over $k$ ranks, in three stages: the
# optimizer's state, gradients too, parameters too. The last stage is also known as FSDP. This notebook reads the
# paper's table off runs. Then it finds the bandwidth from which on FSDP costs no time.

# %%
import matplotlib.pyplot as plt
import numpy as np

import cdpsim

# %% [markdown]
# ## What a rank holds
#
# The paper's example has 7.5 billion parameters in fp16, trained by Adam in mixed precision: 2 bytes for a parameter,
# 2 for its gradient, 12 for the optimizer. The layers have nothing else here. Their updates take a second, so that
# there is a moment at which all gradients are summed and no update has ended.

# %%
PARAMETERS, LAYERS = 7_500_000_000, 60
layer = cdpsim.Stage(forward=1.0, backward=2.0, parameters=2 * PARAMETERS // LAYERS, update=1.0)
training = {"optimizer": "adam", "mixed_precision": True}
model = cdpsim.Model(stages=[layer] * LAYERS, precision="fp16", training=training)


def held(zero, k):
    """Return what the first rank holds when the updates begin: bytes by category."""
    run = cdpsim.simulate("dp", zero=zero, shard=k, model=model, steps=1)
    update = min(task.start for task in run.tasks if task.kind == "U")
    rows = [row for row in run.memory if row.device == 0 and row.time <= update]
    return {row.category: row.size for row in rows}  # the last row of each category stays


measured = {(zero, k): held(zero, k) for k in (1, 4, 16, 64) for zero in range(4)}
print("ranks", *(f"stage {zero}" for zero in range(4)), sep="  ")
for k in (1, 4, 16, 64):
    print(f"{k:5}", *(f"{sum(measured[zero, k].values()) / 1e9:7.2f}" for zero in range(4)), "GB", sep="  ")

# %% [markdown]
# These are the paper's 120, 31.4, 16.6 and 1.88 GB for 64 ranks, and all other cells of that column. Each is
# $16$, $4 + 12/k$, $2 + 14/k$ or $16/k$ bytes a parameter, which no cell above used.

# %%
for (zero, k), categories in measured.items():
    split = (0, 12, 14, 16)[zero]
    assert sum(categories.values()) * k == PARAMETERS * ((16 - split) * k + split)

fig, axes = plt.subplots(figsize=(6, 3))
left = np.zeros(4)
for category in ("parameters", "gradients", "optimizer"):
    sizes = np.array([measured[zero, 64].get(category, 0) / 1e9 for zero in range(4)])
    axes.barh(range(4), sizes, left=left, label=category)
    left += sizes
axes.set_yticks(range(4), [f"--zero {zero}" for zero in range(4)])
axes.invert_yaxis()
axes.set_xlabel("GB on each of 64 ranks")
axes.legend(frameon=False)
fig.tight_layout()

# %% [markdown]
# ## What a rank sends
#
# Sums and gathers go around a ring of $k$ ranks. Of a whole step, in units of $(k - 1)/k$ times all parameters:

# %%
K = 8


def bytes_sent(zero, steps):
    links = {"link": {"latency": 0, "bandwidth": 1e12}}
    run = cdpsim.simulate("dp", zero=zero, shard=K, model=model, cluster=links, collective="ring", steps=steps)
    return run.summary()["bytes_sent"][0]["bytes"]


for zero in range(4):
    volume = bytes_sent(zero, 3) - bytes_sent(zero, 2)  # without what only the first or the last step has
    print(f"--zero {zero}: {volume / ((K - 1) / K * 2 * PARAMETERS):.3f}")

# %% [markdown]
# Stages 1 and 2 send as much as an all-reduce of the gradients, which is a reduce-scatter and an all-gather. Stage 3
# gathers parameters twice, for the forward and for the backward: half as much again.
#
# ## When gathers hide
#
# FSDP gathers a layer while it computes with the one before. A layer has $P$ bytes of parameters, and its forward takes
# $f$. The gather takes $g = \frac{k-1}{k} P / \beta$ on links of bandwidth $\beta$. Forwards of equal layers hide it if
# $g \le f$. In the backward, which takes $b$, a gather and a reduction of the same size share the link: $2g \le b$.
# With $b = 2f$ both are the same bandwidth:
#
# $$\beta^* = \frac{k-1}{k} \frac{P}{f}$$

# %%
FORWARD, SIZE = 0.010, 400_000_000  # seconds and bytes of a layer
hidden = (K - 1) / K * SIZE / FORWARD
layers = cdpsim.Model(stages=[cdpsim.Stage(forward=FORWARD, backward=2 * FORWARD, parameters=SIZE)] * 8)


def fsdp(bandwidth, steps=2):
    links = {"link": {"latency": 0, "bandwidth": bandwidth}}
    return cdpsim.simulate("fsdp", shard=K, model=layers, cluster=links, collective="ring", steps=steps)


print(f"gathers hide from {hidden / 1e9:g} GB/s on")
timeline = fsdp(hidden, 1)
timeline.plot("timeline", width="24 cm", title="gathers and reductions at the break-even")

# %% [markdown]
# At this bandwidth links are hardly ever idle. What is left is the first gather, that of the last layer,
# which has just been dropped, and the last reduction. Below, the step is as long as its messages.

# %%
bandwidths = hidden * np.geomspace(0.25, 8, 21)
steps = np.array([float(fsdp(bandwidth).steady_state.period) for bandwidth in bandwidths])
compute = 8 * 3 * FORWARD
gather = (K - 1) / K * SIZE / bandwidths

fig, axes = plt.subplots(figsize=(6, 3.5))
axes.loglog(bandwidths / 1e9, steps * 1e3, "o", label="simulated")
axes.loglog(bandwidths / 1e9, 8 * 3 * gather * 1e3, label="messages alone: 3 of each layer")
axes.axhline(compute * 1e3, color="grey", label="computation alone")
axes.axvline(hidden / 1e9, color="black", linestyle="dotted", label="break-even")
axes.set(xlabel="bandwidth, GB/s", ylabel="step, ms")
axes.legend(frameon=False)
fig.tight_layout()

# %%
above = bandwidths >= hidden * (1 - 1e-9)
exposed = (steps - compute) / gather
print(
    "gathers that are not hidden, from the break-even on:", sorted({round(float(count), 3) for count in exposed[above]})
)
print("step over messages alone, at a quarter of it:", round(float(steps[0] / (24 * gather[0])), 3))

# %% [markdown]
# A layer's forward takes two operations for each of its parameters and each token. So with $s$ FLOP/s and $t$ tokens of
# a rank's micro-batch, and 2 bytes for a parameter, $P/f$ is $s/t$: the break-even depends on no size of the model.
# H100 at 400 TFLOP/s with 8,192 tokens needs

# %%
print(f"{(K - 1) / K * 400e12 / 8192 / 1e9:.1f} GB/s")

# %% [markdown]
# `cdpsim breakeven fsdp --shard 8 --model llama3-8b --cluster h100-nodes` finds the bandwidth for a real model, whose
# layers are not equal, and whose first gather, which nothing hides, counts as well.

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
# # Table 1, measured
#
# Needs `pip install 'cdpsim[notebooks]'` and Jupyter.
#
# A model of $N$ stages is trained on mini-batches that are cut into $N$ micro-batches. In one *slot*, one stage does
# the forward or the backward of one micro-batch; a training step of a micro-batch is $2N$ slots. Data parallelism
# (DP) starts all micro-batches together. *Cyclic* data parallelism (CDP, [Fournier & Oyallon
# 2024](https://arxiv.org/abs/2403.08837)) starts them two slots apart, so that everything which DP does at once
# happens one after another.
#
# The paper's Table 1 gives the consequences for nine implementations. This notebook measures every cell of it: it
# runs a schedule, and reads the number off the run. No formula feeds it.

# %%
from fractions import Fraction

import matplotlib.pyplot as plt
import numpy as np

import cdpsim
from cdpsim.draw.text import timetable

# %% [markdown]
# ## Nine implementations
#
# A schedule declares its timing, its placement, and which parameters a task reads; and nothing else. All messages,
# and the lifetime of everything in memory, follow from that.

# %%
table = cdpsim.table1(4)
for row in table:
    print(f"{row['schedule']:11} {cdpsim.SCHEDULES[row['schedule']].about}")

# %% [markdown]
# The smallest example, three stages on three devices: `F1.0` is the forward of micro-batch 1 on stage 0, and `/`
# marks a task that reads older parameters than the newest. First DP, then CDP.

# %%
for name in ("multi-dp", "multi-cdp"):
    print(timetable(cdpsim.simulate(name, n=3, steps=2)), end="\n\n")

# %% [markdown]
# ## The table for N = 4
#
# Each cell has three numbers: the paper's, the exact value, and the measured one. $B\Psi_A$ are the activations of
# one micro-batch in all stages, $\Psi_P$ the parameters of all stages; a stage has $1/N$ of both.

# %%
display(table)

# %% [markdown]
# ## One cell by hand: activations
#
# One device runs all micro-batches: how many of their activations are in its memory? A stage's activations of one
# micro-batch are there from the start of its forward to the end of its backward. Under DP all $N$ micro-batches have
# done their $N$ forwards before the first backward frees anything: $N^2$ stage-activations, which is $N \cdot
# B\Psi_A$. Under CDP one micro-batch is at its peak when another has almost nothing, and the sum is $N(N+1)/2$ in
# *every* slot.

# %%
n = 4
dp, cdp = cdpsim.simulate("single-dp", n=n), cdpsim.simulate("single-cdp", n=n)
cdpsim.plot("memory", [dp, cdp])

# %% [markdown]
# The total falls only from 21 to 20: a device that runs all micro-batches cyclically holds a second version of some
# parameters, and sums of gradients for longer. The next notebook shows the versions.
#
# The same number, counted from the tasks: in a slot, memory has the activations of all passes that have begun their
# forward and not ended their backward.


# %%
def held(run: cdpsim.Run, slot: int) -> int:
    """Return how many passes through a stage are between the start of their forward and the end of their backward."""
    tasks = run.tasks
    begun = ((tasks.kind == "F") & (tasks.start <= slot)).sum()
    done = ((tasks.kind == "B") & (tasks.end <= slot)).sum()
    return int(begun - done)


for name, run in (("single-dp", dp), ("single-cdp", cdp)):
    curve = [held(run, slot) for slot in range(2 * n, 4 * n)]
    print(f"{name:10} {curve}  peak {max(curve)} stages of N = {Fraction(max(curve), n)} BΨA")

# %% [markdown]
# ## Another cell by hand: a volume
#
# `mp-cdp` is the pyramid: $N-j$ devices for stage $j$. Each of them adds its micro-batches' gradients to a partial
# sum that passes along, so a stage with $k$ devices needs $k-1$ gradient messages: $3 + 2 + 1 + 0$ for $N = 4$.

# %%
messages = cdpsim.simulate("mp-cdp", n=n, steps=4).messages
sums = messages[(messages.content == "gradient") & (messages.step == 1)]
for sent in sums:
    print(f"stage {sent.stage}: the sum goes from device {sent.src} to {sent.dst} at slot {sent.start}")
volume = Fraction(len(sums), n * n)  # a stage is 1/N of ΨP, and there are N micro-batches
print(f"{len(sums)} messages = {volume} ΨP per micro-batch; with N² devices (mp-dp) it is {Fraction(n - 1, n)}")

# %% [markdown]
# ## What changes with N
#
# Model parallelism needs $N^2$ devices under DP and $N(N+1)/2$ under CDP; the peak of activations on one device falls
# to $(N+1)/2N$, towards a half. Dots are measured, lines are the formulas.

# %%
sizes = np.array([1, 2, 3, 4, 6, 8, 12])
devices = {name: [cdpsim.simulate(name, n=k).devices for k in sizes] for name in ("mp-dp", "mp-cdp")}
peaks = {
    name: np.array([cdpsim.simulate(name, n=k).peak_memory[0]["activations"] for k in sizes])
    for name in ("single-dp", "single-cdp")
}

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.set_title("Devices that model parallelism needs")
left.plot(sizes, sizes**2, "-", color="C0", label="mp-dp: N²")
left.plot(sizes, sizes * (sizes + 1) / 2, "--", color="C1", label="mp-cdp: N(N+1)/2")
left.plot(sizes, devices["mp-dp"], "o", color="C0")
left.plot(sizes, devices["mp-cdp"], "s", color="C1")
right.set_title("Peak of activations, CDP over DP")
right.plot(sizes, (sizes + 1) / (2 * sizes), color="C2", label="(N+1)/2N")
right.plot(sizes, peaks["single-cdp"] / peaks["single-dp"], "o", color="C2")
right.set_ylim(0, 1.05)
for axes in (left, right):
    axes.set_xlabel("N")
    axes.legend(frameon=False)

# %% [markdown]
# ## Rounds and volume
#
# *Rounds* are the communication steps that have to fall between two slots. An all-reduce of $N$ devices takes
# $\mathcal{O}(\log N)$ rounds or more, however it is done, and they all fall between two training steps. CDP sends a
# partial sum on as soon as it has it: one message between two slots, for every $N$. In total it sends as much as DP
# with a device per micro-batch, and exactly half as much with model parallelism.

# %%
heads = [" N", "doubling", "tree", "ring", "multi-cdp", "volume: multi-dp", "multi-cdp", "mp-dp", "mp-cdp"]
print("  ".join(heads))
for k in (2, 4, 8, 12):
    cells = {row["schedule"]: row for row in cdpsim.table1(k)}
    row = [k]
    for collective in ("recursive-doubling", "tree", "ring"):
        multi_dp = cdpsim.table1(k, collective=collective)[2]
        row.append(multi_dp["rounds"]["simulated"])
    row.append(cells["multi-cdp"]["rounds"]["simulated"])
    row += [cells[name]["gradient_volume"]["simulated"] for name in ("multi-dp", "multi-cdp", "mp-dp", "mp-cdp")]
    print("  ".join(str(value).rjust(len(head)) for head, value in zip(heads, row, strict=True)))

# %% [markdown]
# From the shell: `cdpsim table1 -n 4`, with `--format latex` for a paper and `--collective ring` for other rounds.
# The next notebook, `02_timelines`, looks at the runs themselves.

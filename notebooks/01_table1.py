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
# A model of $N$ stages is trained on mini-batches that are cut into $N$ micro-batches. In one *slot*, one stage does
# the forward or the backward of one micro-batch; a training step of a micro-batch is $2N$ slots. Data parallelism
# (DP) starts all micro-batches together. *Cyclic* data parallelism (CDP, [Fournier & Oyallon
# 2024](https://arxiv.org/abs/2403.08837)) starts them two slots apart, so that everything which DP does at once
# happens one after another.
#
# The paper's Table 1 gives the consequences for nine implementations. This notebook measures every cell of it: it
# runs a schedule, and reads the number off the run. No formula feeds it.

# %%
# %matplotlib inline
# %config InlineBackend.figure_formats = ["retina"]
import sys
from pathlib import Path

root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "cdpsim").is_dir())
sys.path.insert(0, str(root))

from fractions import Fraction

import numpy as np
from matplotlib.figure import Figure

import cdpsim
from cdpsim.draw.canvas import plain
from cdpsim.draw.curves import memory_over_time
from cdpsim.draw.palette import colour
from cdpsim.draw.text import timetable
from cdpsim.files import tables
from cdpsim.studies import table1_forms
from cdpsim.studies.table1 import compute_table1

# %% [markdown]
# ## Nine implementations
#
# A schedule declares its timing, its placement, and which parameters a task reads; and nothing else. All messages,
# and the lifetime of everything in memory, follow from that.

# %%
for name, schedule in cdpsim.SCHEDULES.items():
    print(f"{name:11} {schedule.about}")

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
table = compute_table1(4)
print(table1_forms.TABLE1_FORMS["text"](table))
assert all(row["agree"] for row in table.rows)

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
memory_over_time([dp, cdp])

# %% [markdown]
# The total falls less here, by one stage's parameters: one device that runs all micro-batches cyclically needs two
# versions of its early stages at once. The next notebook shows which.


# %% [markdown]
# The same number, counted from the tasks without `memory.csv`: in a slot, memory has the activations of all passes
# that have begun their forward and not ended their backward.


# %%
def held(trace: cdpsim.Trace, slot: int) -> int:
    """Return how many passes through a stage are between the start of their forward and the end of their backward."""
    tasks = trace.tasks
    begun = int(((tasks["kind"] == "F") & (tasks["start"] <= slot)).sum())
    done = int(((tasks["kind"] == "B") & (tasks["end"] <= slot)).sum())
    return begun - done


peaks = {}
for name, trace in (("single-dp", dp), ("single-cdp", cdp)):
    curve = [held(trace, slot) for slot in range(2 * n, 4 * n)]
    print(f"{name:10} {curve}  peak {max(curve)} stages of N = {Fraction(max(curve), n)} BΨA")
    peaks[name] = Fraction(max(curve), n)

cells = {row["schedule"]: row for row in table.rows}
assert peaks["single-dp"] == n == cells["single-dp"]["activations"]["simulated"]
assert peaks["single-cdp"] == Fraction(n + 1, 2) == cells["single-cdp"]["activations"]["simulated"]

# %% [markdown]
# ## Another cell by hand: a volume
#
# `mp-cdp` is the pyramid: $N-j$ devices for stage $j$. Each of them adds its micro-batches' gradients to a partial
# sum that passes along, so a stage with $k$ devices needs $k-1$ gradient messages: $3 + 2 + 1 + 0$ for $N = 4$.

# %%
messages = cdpsim.simulate("mp-cdp", n=n, steps=4).messages
rows = (messages["content"] == "gradient") & (messages["step"] == 1)
for stage, src, dst, slot in zip(
    *(messages[name][rows].tolist() for name in ("stage", "src", "dst", "start")), strict=True
):
    print(f"stage {stage}: the sum goes from device {src} to {dst} at slot {slot}")
volume = Fraction(int(rows.sum()), n * n)  # a stage is 1/N of ΨP, and there are N micro-batches
print(f"{rows.sum()} messages = {volume} ΨP per micro-batch; with N² devices (mp-dp) it is {Fraction(n - 1, n)}")
assert volume == cells["mp-cdp"]["gradient_volume"]["simulated"] == Fraction(n - 1, 2 * n)

# %% [markdown]
# ## What changes with N
#
# Model parallelism needs $N^2$ devices under DP and $N(N+1)/2$ under CDP; the peak of activations on one device falls
# to $(N+1)/2N$, towards a half. Dots are measured, lines are the formulas.

# %%
sizes = [1, 2, 3, 4, 6, 8, 12]
devices = {name: [cdpsim.simulate(name, n=k).summary()["devices"] for k in sizes] for name in ("mp-dp", "mp-cdp")}
held_most = {
    name: [cdpsim.simulate(name, n=k).summary()["peak_memory"][0]["activations"] for k in sizes]
    for name in ("single-dp", "single-cdp")
}
ratio = np.array(held_most["single-cdp"]) / np.array(held_most["single-dp"])


def against_n() -> Figure:
    """Draw devices and peaks over N."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = np.linspace(1, sizes[-1], 100)
    plain(left, "Devices that model parallelism needs")
    left.plot(x, x**2, "-", color=colour(0), label="mp-dp: N²")
    left.plot(x, x * (x + 1) / 2, "--", color=colour(1), label="mp-cdp: N(N+1)/2")
    for number, name in enumerate(devices):
        left.plot(sizes, devices[name], "os"[number], color=colour(number))
    plain(right, "Peak of activations, CDP over DP")
    right.plot(x, (x + 1) / (2 * x), color=colour(2), label="(N+1)/2N")
    right.plot(sizes, ratio, "o", color=colour(2))
    right.set_ylim(0, 1.05)
    for axes in (left, right):
        axes.set_xlabel("N")
        axes.legend(frameon=False, fontsize=8)
    return figure


against_n()

# %%
assert devices == {"mp-dp": [k * k for k in sizes], "mp-cdp": [k * (k + 1) // 2 for k in sizes]}
assert ratio.tolist() == [(k + 1) / (2 * k) for k in sizes]

# %% [markdown]
# ## Rounds and volume
#
# *Rounds* are the communication steps that have to fall between two slots. An all-reduce of $N$ devices takes
# $\mathcal{O}(\log N)$ rounds or more, however it is done, and they all fall between two training steps. CDP sends a
# partial sum on as soon as it has it: one message between two slots, for every $N$. In total it sends as much as DP
# with a device per micro-batch, and exactly half as much with model parallelism.

# %%
lines = []
for k in (2, 4, 8, 12):
    rows_of = {row["schedule"]: row for row in cdpsim.table1(k)}
    rounds = {
        how: cdpsim.table1(k, collective=how)[2]["rounds"]["simulated"]
        for how in ("recursive-doubling", "tree", "ring")
    }
    volumes = [rows_of[name]["gradient_volume"]["simulated"] for name in ("multi-dp", "multi-cdp", "mp-dp", "mp-cdp")]
    assert volumes[0] == volumes[1] == volumes[2] == 2 * volumes[3] == Fraction(k - 1, k)
    assert rounds["ring"] == 2 * (k - 1)
    assert rows_of["multi-cdp"]["rounds"]["simulated"] == 1
    lines.append([str(k), *map(str, rounds.values()), "1", str(volumes[2]), str(volumes[3])])
header = ["N", "doubling", "tree", "ring", "multi-cdp", "volume mp-dp", "volume mp-cdp"]
print(tables.as_text(header, lines))

# %% [markdown]
# From the shell: `cdpsim table1 -n 4`, with `--format latex` for a paper and `--collective ring` for other rounds.
# The next notebook, `02_timelines`, looks at the runs themselves.

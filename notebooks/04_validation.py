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
# The harness replays a schedule's program with real tensors. Before the replay, the simulation predicts the memory of
# each device, all messages, and the final parameters. This notebook replays four schedules, and shows every result
# under `validation/results`, too.

# %%
import sys
from pathlib import Path

root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "validation").is_dir())
sys.path.insert(0, str(root))

from fractions import Fraction

from IPython.display import Image

from cdpsim.draw import canvas
from validation.comparison.replays import SingleProcess, compare_replay
from validation.replay.case import Case, profiled
from validation.report import command as report


def shown(found: list[report.StoredReport]) -> Image:
    """Draw reports."""
    return Image(canvas.rendered(report.reports_figure(found), "figure.png"), width=1100)


# %% [markdown]
# ## Four schedules, replayed now
#
# This process plays all devices, in the order of slots. The model is a small transformer of four equal stages, with
# as many micro-batches. `profiled` finds the memory of a stage without computing anything; only that enters the
# simulation.

# %%
played = []
for schedule in ("single-dp", "single-cdp", "multi-cdp", "mp-cdp"):
    case = Case(schedule, n=4, steps=3, model="transformer", sizes=(("width", 64), ("length", 32)))
    outcome = compare_replay(profiled(case), SingleProcess())
    played.append(report.StoredReport("just now", outcome))
print(report.reports_table(played, "text"))

# %% [markdown]
# The lines are simulated, the dots measured: a storage counts from when torch allocates it until torch frees it.

# %%
shown(played)

# %% [markdown]
# ## What cyclic execution saves
#
# The paper claims $N(N+1)/2$ stage-activations at the peak instead of $N^2$. A replay measures more than $(N+1)/2N$,
# because a backward also needs room for its own work and for the gradient of a boundary, and CDP does not reduce
# these. The simulation counts them, too.

# %%
total = {each.report.asked.schedule: each.report.memory.total for each in played}
dp, cdp = total["single-dp"], total["single-cdp"]
for name, ratio in (
    ("(N+1)/2N ", float(Fraction(4 + 1, 2 * 4))),
    ("simulated", cdp.simulated_bytes / dp.simulated_bytes),
    ("measured ", cdp.measured_bytes / dp.measured_bytes),
):
    print(name, f"{ratio:.4f}")

# %% [markdown]
# ## Stored results
#
# `python -m validation replay` has written each, with its machine and its versions.

# %%
results = root / "validation" / "results"
kept = report.find_reports(results).found
print(report.reports_table(kept, "text"))

# %%
shown(kept)

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
# A schedule is easiest to understand in pictures. This notebook shows data parallelism (DP) beside cyclic data
# parallelism (CDP) slot by slot: computation, memory, messages, the age of the parameters, and the effect of real
# costs.

# %%
# %matplotlib inline
# %config InlineBackend.figure_formats = ["retina"]
import sys
from pathlib import Path

root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "cdpsim").is_dir())
sys.path.insert(0, str(root))

from tempfile import TemporaryDirectory

import cdpsim
from cdpsim import Cluster, Model, Stage
from cdpsim.cluster import Devices, Link
from cdpsim.draw.curves import memory_over_time, traffic_over_time, versions_over_time
from cdpsim.draw.paper import paper
from cdpsim.draw.text import timetable
from cdpsim.export import pictures

# %% [markdown]
# ## As text
#
# Three stages, three micro-batches, a device for each. A column is a slot; `B1.0` is the backward of micro-batch 1 on
# stage 0. Every micro-batch starts two slots after the one before it, so in each slot some go forward and some
# backward. A `/` marks a task that reads older parameters than the newest that exist.

# %%
n = 3
dp, v1, v2 = (
    cdpsim.simulate(name, n=n, rule=rule)
    for name, rule in (("multi-dp", "dp"), ("multi-cdp", "cdp-v1"), ("multi-cdp", "cdp-v2"))
)
print(timetable(v2))

# %% [markdown]
# In each steady slot each stage is at work exactly once, whatever the rule:

# %%
for trace in (v1, v2):
    tasks = trace.tasks
    for slot in range(2 * (n - 1), 2 * n * 3):
        busy = (tasks["start"] == slot) & (tasks["kind"] != "U")
        assert sorted(tasks["stage"][busy].tolist()) == list(range(n))

# %% [markdown]
# ## As the paper's Fig. 1
#
# The same as a picture: a mark per task, its colour the micro-batch, ↑ forward and ↓ backward. DP waits for all
# devices at the end of a training step, and so, later, does CDP-v1: the double bars. CDP-v2 reads new parameters
# wherever they arrive in time. It has no such bar, only messages from one device to another.

# %%
paper([dp, v1, v2])

# %% [markdown]
# ## Memory
#
# All devices together hold $N^2$ stage-activations at DP's peak, and $N(N+1)/2$ all the time under CDP.

# %%
n = 8
dp, cdp = (cdpsim.simulate(name, n=n) for name in ("multi-dp", "multi-cdp"))
memory_over_time([dp, cdp])


# %%
def held(trace: cdpsim.Trace, slot: int) -> int:
    """Return the activations in the memory of all devices in a slot: the sum of each device's last row until then."""
    rows = (trace.memory["category"] == "activations") & (trace.memory["time"] <= slot)
    return sum(
        dict(zip(trace.memory["device"][rows].tolist(), trace.memory["size"][rows].tolist(), strict=True)).values()
    )


assert max(held(dp, slot) for slot in range(2 * n * 3)) == n * n
assert {held(cdp, slot) for slot in range(2 * (n - 1), 2 * n * 3)} == {n * (n + 1) // 2}

# %% [markdown]
# The memory of every single device still goes up and down as before, but the devices do not peak together. Only the
# sum falls, so CDP saves memory where micro-batches share it (a device that runs them all, or model parallelism with
# fewer devices).

# %%
memory_over_time([cdp])

# %% [markdown]
# ## Messages
#
# DP sends everything at the end of a training step. CDP passes partial sums and new parameters on as they come, about
# as much in every slot. (In total it sends less in these three steps, because it does not send parameters that no
# task of the run reads.)

# %%
traffic_over_time([dp, cdp])

# %%
for trace in (dp, cdp):
    gradients = trace.messages["content"] == "gradient"
    print(
        trace.summary()["request"]["schedule"],
        "sends gradients in",
        len(set(trace.messages["start"][gradients])),
        "slots",
    )
assert set(dp.messages["start"].tolist()) == {2 * n, 4 * n, 6 * n}

# %% [markdown]
# ## Versions and their age
#
# CDP has a price: some of its tasks read parameters that are one training step old. The mean age is 1 step for v1 and
# $(N-1)/2N$ for v2. Where each worker has its own copy of the parameters (`multi-cdp`), v2 keeps one version, and
# only v1's updater keeps two. A pipeline (`pp-cdp`) keeps two on every stage but the last, because some micro-batches
# have done their forward with the old version, and their backward is still to come.

# %%
pipeline = cdpsim.simulate("pp-cdp", n=4)
versions_over_time([pipeline])

# %%
several = [
    cdpsim.simulate(name, n=4, rule=rule)
    for name, rule in (("multi-dp", "dp"), ("multi-cdp", "cdp-v1"), ("multi-cdp", "cdp-v2"), ("pp-cdp", "cdp-v2"))
]
assert [trace.summary()["mean_staleness"] for trace in several] == [0, 1, 3 / 8, 3 / 8]
versions_over_time(several)

# %% [markdown]
# ## Real costs
#
# With a model and a cluster, slots become seconds and stage-activations become bytes. A backward takes twice as long
# as a forward here, and a message takes time. The steps are not even any more. The schedule does not state the gaps:
# they follow from the dependencies.

# %%
stage = Stage(forward="8 ms", backward="16 ms", activation="1.5 GB", boundary="16 MB", parameters="400 MB")
model = Model(name="toy", stages=(stage,) * 4)
cluster = Cluster(name="box", devices=(Devices(),), link=Link(latency="5 us", bandwidth="100 GB/s"))
real = {name: cdpsim.simulate(name, model=model, cluster=cluster) for name in ("multi-dp", "multi-cdp")}
memory_over_time(list(real.values()))

# %%
traffic_over_time(list(real.values()))

# %% [markdown]
# DP's devices wait for their all-reduce. CDP's wait, too: a device pulls new parameters just in time, and stands
# still while they travel. With `prefetch=1` it pulls them one task earlier, and they travel while it computes: a step
# takes no longer than its work, 4 x 24 ms. (CDP's devices begin and end one after another. In a run as short as this
# one, that is most of their idle time.)

# %%
real["multi-cdp, early"] = cdpsim.simulate("multi-cdp", model=model, cluster=cluster, prefetch=1)
for name, trace in real.items():
    summary = trace.summary()
    print(f"{name:16} one step {summary['period']:.4f} s, bubble {summary['bubble']:.1%}")
times = {name: trace.summary()["period"] for name, trace in real.items()}
assert round(times["multi-cdp, early"], 9) == 4 * 0.024 < times["multi-dp"] < times["multi-cdp"]

# %% [markdown]
# ## A page to zoom into, and to send to a colleague
#
# `cdpsim timeline` writes one self-contained HTML file to pan, zoom and search, or a trace for
# [Perfetto](https://ui.perfetto.dev):
#
#     cdpsim timeline multi-cdp -n 8 -o run.html
#     cdpsim timeline multi-cdp -n 8 -o run.json
#     cdpsim timeline multi-cdp -n 8 -o run.svg --style gantt
#     cdpsim plot memory multi-dp multi-cdp -n 8 -o memory.pdf

# %%
with TemporaryDirectory() as folder:
    for form in ("html", "json", "svg"):
        path = Path(folder) / f"run.{form}"
        pictures.write_timeline(cdp, path)
        print(f"{path.name:9} {path.stat().st_size / 1e3:7.1f} kB")
        assert path.stat().st_size

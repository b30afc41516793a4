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
# # Which schedule, how much memory, how fast?
#
# This notebook goes from a configuration of Hugging Face's transformers and a cluster to answers in seconds and
# bytes. The model is a Llama of 1.1 billion parameters (TinyLlama's sizes). The cluster is that of the ACCO paper
# (Nabli et al. 2024): nodes of eight A100 with 80 GB, NVLink inside, one network card of 100 Gb/s for each node. No
# GPU, no weights and no download are needed.

# %%
# %matplotlib inline
# %config InlineBackend.figure_formats = ["retina"]
import json
import subprocess
import sys
from collections.abc import Callable
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory

root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "validation").is_dir())
sys.path.insert(0, str(root))

from IPython.display import Image
from matplotlib.figure import Figure

import cdpsim
from cdpsim import Model, presets
from cdpsim.draw import canvas
from cdpsim.draw.break_even_curves import break_even_curves
from cdpsim.draw.comparison import comparison_bars
from cdpsim.files.tables import FORMATS
from cdpsim.schedules import TABLE_1
from cdpsim.studies.breakeven import bandwidth_factors, find_break_even, step_times_at
from cdpsim.studies.compare import Measured, measure
from cdpsim.studies.comparison import Comparison
from cdpsim.studies.montecarlo import sample_runs


def table(rows: list[dict[str, object]]) -> None:
    """Print rows of the same columns."""
    print(FORMATS["text"](tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))


# %% [markdown]
# ## A model
#
# `profile` runs each layer on tensors without contents. It finds, to the byte, what a forward stores for its
# backward, and counts operations. A micro-batch is two sequences of 2,048 tokens, in bf16.

# %%
config = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
with TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "validation", "profile", f"{folder}/config.json", "--dtype", "bfloat16"]
    subprocess.run([*command, "--batch", "2", "-o", f"{folder}/llama.toml"], cwd=root, check=True, capture_output=True)
    llama = Model.load(f"{folder}/llama.toml")

parameters = llama.size("parameters").sum() // 2
print(f"{llama.n} layers, {parameters / 1e9:.2f} billion parameters")
assert parameters == 1_100_048_384

# %% [markdown]
# ## How much memory
#
# With Adam and mixed precision a parameter weighs 16 bytes: weights and gradients in two each, a master copy and two
# moments in four each. The rest of a device's memory depends on the schedule, and on recomputation. With eight
# stages:

# %%
adam = {"optimizer": "adam", "mixed_precision": True}
accos = {"cluster": "a100-nodes", "steps": 12, "ignore_memory": True}


def measured(name: str, n: int, **more: object) -> Measured:
    """Run the model by a schedule; one that pulls parameters does so one task ahead."""
    pulls = "prefetch" in cdpsim.SCHEDULES[name].options
    return measure(cdpsim.simulate(name, n, model=llama, prefetch=int(pulls), **adam, **(accos | more)))


rows = []
for name in ("single-dp", "single-cdp", "pp-cdp", "zero-dp"):
    row: dict[str, object] = {"schedule": name}
    for recompute in ("none", "sqrt", "full"):
        one = measured(name, 8, recompute=recompute)
        row[recompute] = f"{one.memory / 1e9:.1f} GB" + ("" if one.fits else ", too much")
    rows.append(row)
table(rows)

# %% [markdown]
# One device that runs all eight micro-batches side by side needs more memory than it has. With CDP's stagger it has
# enough, because only half of the activations exist at any time: the paper's first claim, in bytes. With
# recomputation there is little left to halve, and CDP's second version of some parameters weighs more.

# %%
dp, cdp = (measured(name, 8) for name in ("single-dp", "single-cdp"))
assert dp.memory > 80e9 > cdp.memory
assert 0.5 < cdp.activations / dp.activations < 0.6  # (N + 1) / 2N, and boundaries beside

# %% [markdown]
# ## How fast, within a node
#
# Eight stages on the eight devices of one node, or on as many as a schedule takes.


# %%
def shown(figure: Figure) -> Image:
    """Show a figure as it is written to a file."""
    return Image(canvas.rendered(figure, "figure.png"), width=1100)


inside = {name: measured(name, 8) for name in TABLE_1}
shown(comparison_bars(Comparison([*inside.values()], slots=False)))

# %% [markdown]
# Data parallelism, its cyclic form and a pipeline take nearly the same time on eight devices: NVLink hides what they
# send. The pipeline sends the least and needs half of the replicas' memory. `zero-cdp` moves entire states from
# device to device all the time, and that does not hide.

# %%
assert all(inside[name].exposed < 0.05 for name in ("multi-dp", "multi-cdp", "pp-cdp"))
assert inside["pp-cdp"].memory < 0.6 * inside["multi-dp"].memory
assert inside["zero-cdp"].exposed > 0.1

# %% [markdown]
# ## How fast, beyond a node
#
# With sixteen stages on two nodes messages go through network cards. *Alone* is the time of every message if there
# were no other; *shared* lets all messages that go through one card at a time share its bandwidth, max-min fair.
# All-reduces are rings.

# %%
rings = {"multi-dp": {"collective": "ring"}, "multi-cdp": {}, "pp-cdp": {}}
alone, shared = (
    {name: measured(name, 16, contention=contention, **ring) for name, ring in rings.items()}
    for contention in ("none", "fair")
)
table(
    [
        {
            "schedule": name,
            "alone": f"{1e3 * alone[name].step:.0f} ms",
            "shared": f"{1e3 * shared[name].step:.0f} ms",
            "samples": f"{shared[name].sample_rate:.0f} /s",
            "waits for messages": f"{shared[name].exposed:.0%}",
        }
        for name in rings
    ]
)

# %% [markdown]
# Without contention data parallelism would still win. With contention the cards are the bottleneck, and the pipeline,
# which sends an eighth, is the fastest: the two models of communication recommend different schedules.

# %%
best = min(rings, key=lambda name: shared[name].step)
assert (min(rings, key=lambda name: alone[name].step), best) == ("multi-dp", "pp-cdp")
assert isclose(alone["pp-cdp"].step, shared["pp-cdp"].step)  # none of its messages meets another one
assert alone["multi-dp"].sent > 8 * alone["pp-cdp"].sent

# %% [markdown]
# From which bandwidth on would messages be hidden? The curves show the waiting share of a step over the bandwidth of
# all links; the dashed line is the cluster's own. (Each message is alone: with shared links it takes more.)

# %%
cluster = presets.find_cluster("a100-nodes")


def run_of(name: str) -> Callable[[cdpsim.Cluster], cdpsim.Trace]:
    """Return a function that runs a schedule on a cluster."""
    pulls = "prefetch" in cdpsim.SCHEDULES[name].options
    asked = {"model": llama, "prefetch": int(pulls), **rings[name], **adam, **accos}
    return lambda changed: cdpsim.simulate(name, 16, **(asked | {"cluster": changed}))


found = {name: find_break_even(run_of(name), cluster) for name in rings}
factors = bandwidth_factors([*found.values()], points=17)
curves = [(found[name], step_times_at(run_of(name), cluster, factors)) for name in rings]
shown(break_even_curves([*found.values()], factors, curves, share=0.01))

# %%
assert found["pp-cdp"].break_even < found["multi-cdp"].break_even < found["multi-dp"].break_even

# %% [markdown]
# ## One slow device, and chance
#
# A device that is four times slower, as in ACCO's appendix C, makes a step of either four times as long: all devices
# wait for it. If tasks take longer by chance, 20 % here, DP pays for the slowest of all in every step. One sweep
# computes a thousand runs.

# %%
rows = []
for name in ("multi-dp", "multi-cdp"):
    slow = measured(name, 8, slow=["3:4"])
    pulls = "prefetch" in cdpsim.SCHEDULES[name].options
    trace = cdpsim.simulate(name, 8, model=llama, prefetch=int(pulls), jitter="lognormal:0.2", **adam, **accos)
    quantiles = sample_runs(trace, 1000).summary()["period"]
    row = {"schedule": name, "as it should be": inside[name].step, "one slow": slow.step}
    row |= {"chance, 5 %": quantiles["5%"], "50 %": quantiles["50%"], "95 %": quantiles["95%"]}
    rows.append({key: value if isinstance(value, str) else f"{1e3 * value:.0f} ms" for key, value in row.items()})
    assert 3.5 < slow.step / inside[name].step < 4.1
table(rows)

# %% [markdown]
# ## ACCO's Fig. 3
#
# The paper measures that averaging the gradients of Llama-2-7B beyond one node can take more than four times as long
# as a forward and a backward. Here it is data parallelism of an undivided model (`-n 1`), on this cluster, with 8, 16
# and 32 devices:

# %%
rows = []
for m in (8, 16, 32):
    asked = {"m": m, "model": "llama2-7b", "cluster": "a100-nodes", "collective": "ring", "ignore_memory": True}
    trace = cdpsim.simulate("multi-dp", 1, steps=4, **asked)
    computing = (trace.tasks["end"] - trace.tasks["start"])[trace.tasks["device"] == 0].sum() / 4
    averaging = (trace.messages["end"] - trace.messages["start"])[0]
    rows.append(
        {
            "devices": m,
            "forward + backward": f"{computing:.2f} s",
            "averaging": f"{averaging:.2f} s",
            "quotient": f"{averaging / computing:.2f}",
        }
    )
table(rows)

# %% [markdown]
# Beyond a node, averaging takes 25 times as long as within, and as long as most of the computation. It does not take
# four times as long with this model file: weights, gradients and two sequences of 4,096 tokens in bf16 fill the
# device. With unfused attention or in fp32 only 2,048 tokens fit, and then averaging takes more than three times as
# long. The paper does not say which case it measured; `docs/assumptions/break-even.md` has the table.

# %%
inside_node, _, beyond = (float(str(row["quotient"])) for row in rows)
assert beyond > 20 * inside_node

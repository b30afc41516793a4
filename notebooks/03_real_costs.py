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
# Needs `pip install 'cdpsim[torch,models,notebooks]'` and Jupyter.
#
# This notebook goes from a configuration of Hugging Face's transformers and a cluster to answers in seconds and
# bytes. The model is a Llama of 1.1 billion parameters (TinyLlama's sizes). The cluster is that of the ACCO paper
# (Nabli et al. 2024): nodes of eight A100 with 80 GB, NVLink inside, one network card of 100 Gb/s for each node. No
# GPU, no weights and no download are needed. Files go to a temporary folder.

# %%
import json
import os
from pathlib import Path
from tempfile import mkdtemp

from IPython.display import Image

import cdpsim

try:
    from cdpsim_validation.__main__ import main as validate  # the command cdpsim-validate
except ImportError:
    from validation.__main__ import main as validate  # in a checkout: python -m validation

os.chdir(mkdtemp())

# %% [markdown]
# ## A model
#
# `profile` runs each layer on tensors without contents. It finds, to the byte, what a forward stores for its
# backward, and counts operations. A micro-batch is two sequences of 2,048 tokens, in bf16.

# %%
# %%capture
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
Path("tiny-llama").mkdir()
Path("tiny-llama", "config.json").write_text(json.dumps(config))
validate(["profile", "tiny-llama", "--dtype", "bfloat16", "--batch", "2", "-o", "llama.toml"])

# %%
llama = cdpsim.Model.load("llama.toml")
parameters = llama.size("parameters").sum() // 2  # of two bytes each
print(f"{llama.n} layers, {parameters:,} parameters")

# %% [markdown]
# ## How much memory
#
# With Adam and mixed precision a parameter weighs 16 bytes: weights and gradients in two each, a master copy and two
# moments in four each. The rest of a device's memory depends on the schedule, and on recomputation. With eight
# stages:

# %%
setting = {"model": llama, "cluster": "a100-nodes", "optimizer": "adam", "mixed_precision": True, "prefetch": 1}
names = ["single-dp", "single-cdp", "pp-cdp", "zero-dp"]
memory = cdpsim.compare(names, n=8, recompute=["none", "sqrt", "full"], **setting)
for row in memory:
    fits = "" if row.fits else "  too much"
    print(f"{row.schedule:10}  recompute {row.asked['recompute']:4}  {row.memory / 1e9:5.1f} GB{fits}")

# %% [markdown]
# One device that runs all eight micro-batches side by side needs more memory than it has. With CDP's stagger it has
# enough, because only half of the activations exist at any time: the paper's first claim, in bytes. With
# recomputation there is little left to halve, and CDP's second version of some parameters weighs more.
#
# ## How fast, within a node
#
# Eight stages on the eight devices of one node, or on as many as a schedule takes.

# %%
cdpsim.compare("multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "pp-cdp", "zero-dp", "zero-cdp", n=8, **setting)

# %% [markdown]
# Data parallelism, its cyclic form and a pipeline take nearly the same time on eight devices: NVLink hides what they
# send. The pipeline sends the least and needs half of the replicas' memory. `zero-cdp` moves entire states from
# device to device all the time, and that does not hide.
#
# ## How fast, beyond a node
#
# With sixteen stages on two nodes messages go through network cards. Alone, every message takes as long as if there
# were no other. With fair shares (`contention`), all messages that go through one card at a time share its bandwidth.
# All-reduces are rings.

# %%
names = ["multi-dp", "multi-cdp", "pp-cdp"]
alone = cdpsim.compare(names, n=16, collective="ring", **setting)
shared = cdpsim.compare(names, n=16, collective="ring", contention="fair", **setting)
for one, other in zip(alone, shared, strict=True):
    print(
        f"{one.schedule:9}  alone {1e3 * one.step:3.0f} ms  shared {1e3 * other.step:3.0f} ms, "
        f"{other.sample_rate:2.0f} samples/s, waits {other.exposed:3.0%}, sends {other.sent / 1e9:5.1f} GB"
    )

# %% [markdown]
# Without contention data parallelism would still win. With contention the cards are the bottleneck, and the pipeline,
# which sends less than an eighth, is the fastest: the two models of communication recommend different schedules.
#
# From which bandwidth on would messages be hidden? `breakeven` scales all links of the cluster and simulates. The
# curves show the waiting share of a step; the dashed line is the cluster's own bandwidth. (Each message is alone:
# with shared links it takes more.)

# %%
options = "--cluster a100-nodes --optimizer adam --mixed-precision --collective ring --prefetch 1"
# %run -m cdpsim breakeven multi-dp multi-cdp pp-cdp -n 16 --model llama.toml {options} -q -o breakeven.png
Image("breakeven.png", width=900)

# %% [markdown]
# ## One slow device, and chance
#
# A device that is four times slower, as in ACCO's appendix C, makes a step of either four times as long: all devices
# wait for it.

# %%
names = ["multi-dp", "multi-cdp"]
even, slow = cdpsim.compare(names, n=8, **setting), cdpsim.compare(names, n=8, slow={3: 4}, **setting)
for one, other in zip(even, slow, strict=True):
    print(f"{one.schedule:9}  {1e3 * one.step:3.0f} ms, with one slow device {1e3 * other.step:4.0f} ms")

# %% [markdown]
# If tasks take longer by chance, 20 % here, DP pays for the slowest of all in every step. One sweep computes a
# thousand runs.

# %%
cdpsim.compare(names, n=8, jitter="lognormal:0.2", runs=1000, **setting)

# %% [markdown]
# ## ACCO's Fig. 3
#
# The paper measures that averaging the gradients of Llama-2-7B beyond one node can take more than four times as long
# as a forward and a backward. Here it is data parallelism of an undivided model (`n=1`), on this cluster, with 8, 16
# and 32 devices:

# %%
for m in (8, 16, 32):
    run = cdpsim.simulate(
        "multi-dp", 1, m=m, model="llama2-7b", cluster="a100-nodes", collective="ring", ignore_memory=True, steps=1
    )
    computing = sum(task.end - task.start for task in run.tasks if task.device == 0)
    averaging = run.messages[0].end - run.messages[0].start
    print(f"{m:2} devices: forward and backward {computing:.2f} s, averaging {averaging:.2f} s")

# %% [markdown]
# Beyond a node, averaging takes 22 times as long as within, and a third longer than the computation. It does not take
# four times as long: weights, gradients and two sequences of 4,096 tokens in bf16 fill the device. With unfused
# attention one such sequence fills it, and averaging takes twice as long as the computation. The paper does not say
# which case it measured; the page on break-even in the documentation has a table.

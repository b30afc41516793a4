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
# # ACCO: gradients computed while others are summed
#
# Needs `pip install 'cdpsim[notebooks]'` and Jupyter.
#
# ACCO ([Nabli et al. 2024](https://arxiv.org/abs/2406.02613)) trains replicas of a model that never wait for each
# other's gradients. Each goes on with further micro-batches while the last gradients are summed. This notebook
# draws its two streams, follows its rounds, and recomputes its Fig. 3, Table 3 and Fig. 12. The paper leaves much
# open. So each result here stands beside what it assumes.

# %%
import matplotlib.pyplot as plt
import numpy as np

import cdpsim

# %% [markdown]
# ## Two streams
#
# Fig. 1 of the paper has a fast and a slow worker. Micro-batches go in one stream. In the other go a sum of
# gradients, an update of each worker's share, and a gather of the new parameters. Here a micro-batch takes 3 s,
# twice that on the slow worker, and a communication 2.5 s.

# %%
stage = cdpsim.Stage(forward=1.0, backward=2.0, parameters=2_000_000_000, update=0.5)
pair = {
    "replicas": 2,
    "slow": {1: 2},
    "model": cdpsim.Model(stages=[stage]),
    "cluster": {"link": {"latency": 0, "bandwidth": 1e9}},
    "collective": "ring",
}
streams = cdpsim.simulate("acco", **pair, steps=2)
streams.plot("timeline", width="26 cm", title="ACCO, a fast and a slow worker")

# %% [markdown]
# Neither stream of tasks has a gap. An update is a full bar, an update that makes an estimate a frame. Tasks that read
# an estimate have a dark edge.
#
# ## Rounds
#
# A worker computes one micro-batch and hands its gradient over: the *seed*. After each further micro-batch it looks
# whether the communication is through. If so, it takes the new parameters, hands over what it has, and goes on. How
# many micro-batches that are follows from times:

# %%
print("round  handed over  communication")
for number in range(len(streams.rounds) // 2 - 1):
    rows = streams.rounds[streams.rounds.round == number]
    begun, ended = float(rows.begun[0]), float(rows.ended[0])
    print(f"{number:5}  {rows.micro_batches.tolist()!s:11}  {begun:g} s to {ended:g} s")

# %% [markdown]
# Rounds come in pairs. The first communication of a pair makes an *estimate* of the next parameters, of half the
# gradients. The second half is computed meanwhile. The second communication starts from the same parameters again, and
# takes both halves. So each update is of gradients at its own parameters, or at an estimate of these.

# %%
made = streams.tasks[(streams.tasks.kind == "U") & (streams.tasks.device == 0)]
for task in made:
    what = "estimate of theta" if task.estimate else "theta"
    print(f"{float(task.end):5.1f} s: {what}_{task.version} from theta_{task.base}")

# %% [markdown]
# `dpu` takes each round's gradients for the next version: they are one version old. `wp` makes an estimate by applying
# the same gradients twice. Their staleness, in versions:

# %%
for name in ("ddp", "dpu", "wp", "acco"):
    summary = cdpsim.simulate(name, **pair, steps=4).summary()
    print(f"{name:5} {summary['mean_staleness']:g}")

# %% [markdown]
# ## What a worker holds
#
# Table 1 of the paper: 7.5 billion parameters, 64 workers, Adam in mixed precision. Its 120, 31 and 46 GB come out
# of runs. They leave out what nobody can do without: the gradient of the share in fp32, and a copy of the
# optimizer's state while an estimate is made. `runtime="held"` has both.

# %%
large = cdpsim.Model(
    stages=[cdpsim.Stage(forward=1.0, backward=2.0, parameters=15_000_000_000, update=0.5)],
    precision="bf16",
    training={"optimizer": "adam", "mixed_precision": True},
)
many = {"replicas": 64, "model": large, "cluster": {"link": {"latency": 0, "bandwidth": 1e12}}, "collective": "ring"}
for name, options in (("ddp", {}), ("zero-1", {}), ("acco", {}), ("acco", {"runtime": "held"})):
    run = cdpsim.simulate(name, **many, **options, steps=2, ignore_memory=True)
    print(f"{name:6} {options.get('runtime', 'paper'):5}  {run.peak_memory[0]['total'] / 1e9:.5f} GB")

# %% [markdown]
# ## Fig. 3: how long averaging takes
#
# The paper measures Llama-2-7B on A100 with a batch that fills the memory: averaging gradients across nodes "can
# take more than four times" a forward and backward. It names neither the tokens, nor the type of gradients, nor the
# attention kernel, nor what NCCL reaches. Three settings fill the memory. The network is one card of 12.5 GB/s for
# 8 workers.

# %%
LLAMA = 6_738_415_616
SETTINGS = {  # tokens of a micro-batch, their length, FLOP/s, bytes of a gradient, FLOPs of attention over its forward
    "bf16, fused attention": (8192, 4096, 312e12, 2, 3.5),
    "bf16, plain attention": (2048, 2048, 312e12, 2, 3.0),
    "fp32 in tf32, fused attention": (2048, 2048, 156e12, 4, 3.5),
}


def averaging(setting, workers, share):
    """Return the time of averaging over that of a forward and backward, at 44 % of the peak."""
    tokens, length, speed, number, attention = SETTINGS[setting]
    flop = 6 * tokens * (LLAMA - 32_000 * 4096) + attention * 4 * length * 4096 * 32 * tokens
    alone = flop / (0.44 * speed)
    model = cdpsim.Model(stages=[cdpsim.Stage(forward=alone / 3, backward=2 * alone / 3, parameters=number * LLAMA)])
    topology = {
        "kind": "nodes",
        "per_node": 8,
        "nics": 1,
        "link": {"latency": "1.7 us", "bandwidth": 300e9, "achieved": share},
        "network": {"latency": "7 us", "bandwidth": 12.5e9, "achieved": share},
    }
    asked = {"replicas": workers, "m": 1, "buckets": "none", "collective": "ring"}
    run = cdpsim.simulate("ddp", model=model, cluster={"topology": topology}, **asked, steps=1)
    return float(run.makespan) / alone - 1


WORKERS = (8, 16, 24, 32)
fig, axes = plt.subplots(figsize=(6.5, 3.4))
places = np.arange(len(WORKERS))
for number, (setting, share) in enumerate([*((each, 1.0) for each in SETTINGS), ("bf16, fused attention", 0.186)]):
    quotients = [averaging(setting, workers, share) for workers in WORKERS]
    words = f"{setting}, {share:.1%} of links"
    print(f"{words:47} {'  '.join(f'{quotient:5.2f}' for quotient in quotients)}")
    axes.bar(places + 0.2 * (number - 1.5), quotients, 0.18, label=words)
axes.axhline(4, color="black", linewidth=1, label="the paper: more than this")
axes.set_xticks(places, [str(workers) for workers in WORKERS])
axes.set(ylim=(0, 6.8), xlabel="workers, 8 in a node", ylabel="averaging over\nforward and backward")
axes.legend(frameon=False, fontsize=7, loc="upper left")
fig.tight_layout()

# %% [markdown]
# None of the three reaches four with the whole card. In bf16 it takes a fifth of the card, with fp32 or plain attention
# four fifths. And a ring's time hardly grows from two nodes to four.
#
# ## Table 3: what each saving needs
#
# The paper prints how much time ACCO saves against DistributedDataParallel. Since ACCO's workers never idle, the
# time of a micro-batch follows from ACCO's own minutes. What is left open is the baseline: the type of its
# gradients, when it sums them, what its links reach, and how unlike its micro-batches are. The published program
# trains the baseline in fp32, sums after every micro-batch, and sends updated weights in fp32 as well.

# %%
ROWS = {  # parameters, nodes, workers of each, GB/s of a link in it, DDP's micro-batches, minutes, micro-batches of all
    "125M, 1 x 8 H100": (125e6, 1, 8, 25, 2, 281, 265, 6e9 / 24_576),
    "125M, 4 x 8 A100": (125e6, 4, 8, 300, 2, 881, 655, 50e9 / 24_576),
    "2.7B, 1 x 8 A100": (2.651e9, 1, 8, 300, 4, 43, 25, 50_000),
    "2.7B, 2 x 4 A100": (2.651e9, 2, 4, 300, 4, 226, 29, 50_000),
}


def baseline(row, number=2, reduce="last", share=1.0, broadcast=False, jitter=0.0):
    """Return how much time ACCO saves, in per cent, with equal buckets of 25 MiB beside the backward."""
    parameters, nodes, per_node, inside, accumulated, _, minutes, micro_batches = ROWS[row]
    alone = 60 * minutes * nodes * per_node / micro_batches
    size, many = number * parameters, round(number * parameters / (25 * 2**20))
    stages = [
        cdpsim.Stage(forward=alone / 3 / many, backward=2 * alone / 3 / many, parameters=round(size / many))
    ] * many
    if jitter:  # a micro-batch is two tasks then, all of the forward and all of the backward
        last = cdpsim.Stage(forward=1e-12, backward=2 * alone / 3, parameters=round(size / many))
        stages = [last, cdpsim.Stage(forward=alone / 3, backward=1e-12, parameters=round(size - size / many))]
    link = {"latency": 0, "bandwidth": inside * 1e9, "achieved": share}
    network = {"latency": 0, "bandwidth": 12.5e9, "achieved": share}
    topology = {"kind": "nodes", "per_node": per_node, "nics": 1, "link": link, "network": network}
    run = cdpsim.simulate(
        "ddp",
        model=cdpsim.Model(stages=stages),
        cluster={"topology": topology} if nodes > 1 else {"link": link},
        replicas=nodes * per_node,
        m=accumulated,
        reduce=reduce,
        buckets="none",
        collective="ring",
        steps=100 if jitter else 3,
        **({"jitter": f"lognormal:{jitter * 3 / 5**0.5:.6f}"} if jitter else {}),
    )
    step = float(run.makespan) / 100 if jitter else float(run.steady_state.period)
    step += 4 * parameters / (share * (12.5e9 if nodes > 1 else inside * 1e9)) * broadcast
    return 100 * (1 - accumulated * alone / step)


ASSUMED = {
    "the text: bf16, once a step, whole links": [{}] * 4,
    "fp32, once a step, 19 % of links": [{"number": 4, "share": 0.19}] * 4,
    "fp32, each micro-batch, 80 % of links": [{"number": 4, "reduce": "each", "share": 0.8, "broadcast": True}] * 4,
    "the same, with jitter": [
        {"number": 4, "reduce": "each", "share": 0.8, "broadcast": True, "jitter": jitter}
        for jitter in (0.15, 0.15, 0.4, 0.4)
    ],
}
printed = [100 * (1 - row[6] / row[5]) for row in ROWS.values()]
savings = {
    words: [baseline(row, **asked) for row, asked in zip(ROWS, each, strict=True)] for words, each in ASSUMED.items()
}
print(f"{'saved, %':42}", *(f"{row:>18}" for row in ROWS))
for words, found in {"printed": printed, **savings}.items():
    print(f"{words:42}", *(f"{each:18.2f}" for each in found))

# %%
fig, axes = plt.subplots(figsize=(7, 3.4))
places = np.arange(len(ROWS))
for number, (words, found) in enumerate(savings.items()):
    axes.bar(places + 0.19 * (number - 1.5), found, 0.17, label=words)
for place, each in zip(places, printed, strict=True):
    label = "printed" if place == 0 else None
    axes.hlines(each, place - 0.42, place + 0.42, color="black", linewidth=1.2, label=label)
axes.set_xticks(places, list(ROWS))
axes.set_ylabel("time saved, %")
axes.legend(frameon=False, fontsize=7)
fig.tight_layout()

# %% [markdown]
# * As the text says it, no row comes out.
# * The last row needs gradients in fp32, on slow links or summed after each micro-batch.
# * The second and third need unlike micro-batches, for the slowest of which all workers wait. The coefficients of
#   variation are 0.15 in pre-training and 0.4 in fine-tuning, where batches are padded to their longest sequence.
# * The first row is not met with the same jitter: 20 % are saved, and 5.69 % are printed. A jitter of 0.02 would do.
#
# ## Fig. 12: one worker four times slower
#
# Three workers take 1 s for a micro-batch, one takes 4 s. DDP accumulates two.

# %%
unlike = {
    "replicas": 4,
    "slow": {3: 4},
    "model": cdpsim.Model(stages=[cdpsim.Stage(forward=0.25, backward=0.75, parameters=1_000_000_000)]),
    "collective": "ring",
    "steps": 6,
}
fast = {"link": {"latency": 0, "bandwidth": 1e18}}
times = np.array([0.5, 2, 3.5, 5, 7])
for seconds in times:
    link = {"link": {"latency": 0, "bandwidth": 1.5e9 / seconds}}
    run = cdpsim.simulate("acco", cluster=link, **unlike)
    counts = run.rounds.micro_batches.reshape(-1, 4)
    period = float(run.steady_state.period)
    print(
        f"communication {seconds:3} s: {counts[-3:-1].sum()} micro-batches each {period:.0f} s, {counts[-2].tolist()}"
    )
ddp = cdpsim.simulate("ddp", cluster=fast, m=2, **unlike)
own = ddp.tasks[(ddp.tasks.device == 0) & (ddp.tasks.kind != "U")]
idle = 1 - float((own.end - own.start).sum()) / float(ddp.makespan)
print(f"DDP: 8 micro-batches each {float(ddp.steady_state.period):.0f} s, fast workers idle {idle:.0%}")

# %% [markdown]
# 26 micro-batches against 8 are 3.25 times as many. The rate does not fall with a longer communication, but updates do.
# The fast workers' data are twelve thirteenths of each update.
#
# ## Where the paper errs, or is silent
#
# * *Idle a third of the time*, it says of the fast workers of DDP. With a worker four times slower it is three
#   quarters, as above. A later version of the paper says so.
# * *Perfectly matching the training dynamic* holds where estimates are the parameters themselves, as when all
#   micro-batches are the same data. Half of each mini-batch is computed at an estimate of the other half.
# * *No additional momentum*: while an estimate is made, the state that it changes has to be kept. That is 12 bytes for
#   each parameter of the share, which Table 1 leaves out, as it does the share's gradient in fp32.
# * *Communication is hidden*, and also doubled: each update of the parameters takes two reduce-scatters and two
#   gathers.
# * *A total batch size of 128 for all methods* holds while a communication is shorter than a block of micro-batches. On
#   two nodes it is not:

# %%
row = "2.7B, 2 x 4 A100"
parameters, nodes, per_node, _, _, _, minutes, micro_batches = ROWS[row]
alone = 60 * minutes * nodes * per_node / micro_batches
stage = cdpsim.Stage(forward=alone / 3, backward=2 * alone / 3, parameters=round(2 * parameters))
asked = {"model": cdpsim.Model(stages=[stage]), "replicas": 8, "collective": "ring", "steps": 4}
for share in (1.0, 0.72, 0.36):
    card = {"link": {"latency": 0, "bandwidth": 12.5e9, "achieved": share}}
    run = cdpsim.simulate("acco", cluster=card, m=2, **asked)
    ddp = cdpsim.simulate("ddp", cluster=card, m=4, **asked)
    samples = 4 * run.rounds.micro_batches.reshape(-1, 8)[-3:-1].sum()
    sent = run.summary()["bytes_sent"][0]["bytes"] / ddp.summary()["bytes_sent"][0]["bytes"]
    print(f"{share:.0%} of the card: {samples} samples an update, {sent:g} times the bytes of DDP's updates in bf16")

# %% [markdown]
# * *Algorithm 1* does not give the equations (1) and (2) as printed: it never clears its sums of gradients, adds
#   sums that were reduced already once for each worker, and nowhere restores the optimizer's state.
# * *Table 3 and Fig. 3* state neither the type of gradients nor what links reach, on which most of their size depends.
#
# The page of results (`docs/results.md`) has Table 3 with more columns, and `cdpsim rounds acco` prints the
# rounds of any model and cluster.

"""Fifty things a Jupyter user would try from Python, written from the README alone."""

THINGS: list[tuple[str, str]] = [
    # first: what a plain user does first
    (
        "A run shows itself in one informative line",
        """\
run = cdpsim.simulate("multi-cdp", n=4, steps=4)
text = repr(run)
assert "\\n" not in text and " object at 0x" not in text and len(text) <= 200
assert "multi-cdp" in text and "38" in text
""",
    ),
    (
        "Request, model, cluster and program show themselves in one line",
        """\
request = cdpsim.Request("multi-cdp", n=8, model="gpt2", cluster="a100-nodes")
things = [request, cdpsim.Model.load("gpt2"), cdpsim.Cluster.load("a100-nodes"), cdpsim.assemble(request)]
for thing, word in zip(things, ["multi-cdp", "gpt2", "a100-nodes", "multi-cdp"]):
    assert word in repr(thing) and "\\n" not in repr(thing) and " object at 0x" not in repr(thing)
    assert len(repr(thing)) <= 200
""",
    ),
    (
        "The makespan is an attribute",
        """\
run = cdpsim.simulate("multi-cdp", n=4, steps=4)
assert run.makespan == 38
assert run.makespan == run.summary()["makespan"] == run.tasks["end"].max()
""",
    ),
    (
        "The bubble of GPipe and of 1F1B is (n-1)/(m+n-1)",
        """\
for name in ["gpipe", "1f1b"]:
    run = cdpsim.simulate(name, n=4, m=8, steps=1)
    assert run.makespan == 2 * (8 + 4 - 1)
    assert abs(float(run.bubble) - 3 / 11) < 1e-9
""",
    ),
    (
        "Peak memory is an attribute: CDP needs (N+1)/2 where DP needs N",
        """\
dp = cdpsim.simulate("single-dp", n=4, steps=3)
cdp = cdpsim.simulate("single-cdp", n=4, steps=3)
assert dp.peak_memory[0]["activations"] == 16
assert cdp.peak_memory[0]["activations"] == 10
""",
    ),
    (
        "How many devices a run uses: N squared, N(N+1)/2, N",
        """\
n = 4
assert cdpsim.simulate("mp-dp", n=n).devices == n * n
assert cdpsim.simulate("mp-cdp", n=n).devices == n * (n + 1) // 2
assert cdpsim.simulate("pp-cdp", n=n).devices == n
""",
    ),
    (
        "help(cdpsim.simulate) names the options",
        """\
import pydoc

text = pydoc.plain(pydoc.render_doc(cdpsim.simulate))
for word in ["schedule", "steps", "model", "cluster", "prefetch"]:
    assert word in text
""",
    ),
    (
        "Tab completion on the module offers the functions of the README",
        """\
offered = [name for name in dir(cdpsim) if not name.startswith("_")]
for name in ["simulate", "compare", "assemble", "price", "run", "sweep", "Request", "Schedule", "Model", "Cluster"]:
    assert name in offered and getattr(cdpsim, name).__doc__
assert cdpsim.__version__
""",
    ),
    (
        "Tab completion on a run and on its tasks offers attributes and columns",
        """\
run = cdpsim.simulate("pp-cdp", n=3)
for name in ["tasks", "messages", "memory", "makespan", "bubble", "peak_memory", "summary", "frame", "plot", "save"]:
    assert name in dir(run)
for name in ["kind", "stage", "micro_batch", "device", "start", "end"]:
    assert name in dir(run.tasks)
""",
    ),
    (
        "A mistyped schedule is answered with the right name, in one line",
        """\
try:
    cdpsim.simulate("mp-cpd", n=4)
    message = ""
except ValueError as error:
    message = str(error)
assert "mp-cpd" in message and "mp-cdp" in message and "\\n" not in message
""",
    ),
    (
        "A mistyped keyword is answered with the right one",
        """\
try:
    cdpsim.simulate("multi-cdp", n=4, stpes=2)
    message = ""
except (TypeError, ValueError) as error:
    message = str(error)
assert "stpes" in message and "steps" in message
""",
    ),
    (
        "List the schedules",
        """\
names = list(cdpsim.schedules())
paper = "single-dp single-cdp multi-dp multi-cdp mp-dp mp-cdp pp-cdp zero-dp zero-cdp".split()
assert set(paper) <= set(names)
assert {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "chimera"} <= set(names)
""",
    ),
    (
        "List models and clusters, and load one of each",
        """\
assert {"gpt2", "vit-b16", "llama2-7b"} <= set(cdpsim.models())
assert {"a100-nodes", "h100-nodes", "h200-node"} <= set(cdpsim.clusters())
model = cdpsim.Model.load("gpt2")
assert model.name == "gpt2" and len(model.stages) == 14
assert cdpsim.Cluster.load("a100-nodes").name == "a100-nodes"
""",
    ),
    (
        "A run, a model and a cluster as the last line of a notebook cell",
        """\
run = cdpsim.simulate("multi-cdp", n=4)
model, cluster = cdpsim.Model.load("gpt2"), cdpsim.Cluster.load("h200-node")
for thing, word in [(run, "multi-cdp"), (model, "gpt2"), (cluster, "h200")]:
    html = thing._repr_html_()
    assert isinstance(html, str) and "<table" in html and word in html
""",
    ),
    (
        "Equality, deepcopy and pickle of a run",
        """\
import copy
import pickle

run = cdpsim.simulate("mp-cdp", n=3)
assert run == cdpsim.simulate("mp-cdp", n=3) and run != cdpsim.simulate("mp-cdp", n=4)
assert copy.deepcopy(run) == run and pickle.loads(pickle.dumps(run)) == run
""",
    ),
    # tables: pandas, numpy, files
    (
        'run.frame("tasks") is a DataFrame with the columns of tasks.csv',
        """\
import pandas as pd

tasks = cdpsim.simulate("mp-cdp", n=3).frame("tasks")
assert isinstance(tasks, pd.DataFrame)
assert list(tasks.columns) == "kind stage micro_batch step device start end version stale".split()
assert (tasks["start"] <= tasks["end"]).all() and set(tasks["kind"]) >= {"F", "B"}
""",
    ),
    (
        "pd.DataFrame(run.messages) simply works",
        """\
import pandas as pd

run = cdpsim.simulate("mp-cdp", n=3)
frame = pd.DataFrame(run.messages)
assert {"op", "content", "src", "dst", "size", "start", "end"} <= set(frame.columns)
assert len(frame) == len(run.messages) == len(run.frame("messages"))
""",
    ),
    (
        "A column by attribute or by key",
        """\
import numpy as np

tasks = cdpsim.simulate("multi-cdp", n=4, steps=4).tasks
assert isinstance(tasks.start, np.ndarray)
assert (tasks.start == tasks["start"]).all()
assert tasks.start[:6].tolist() == [0, 1, 2, 2, 3, 3]
""",
    ),
    (
        "Loop over the tasks",
        """\
run = cdpsim.simulate("gpipe", n=2, m=2, steps=1)
done = [(t.device, t.kind, t.micro_batch, t.start) for t in run.tasks if t.kind in ("F", "B")]
assert len(done) == 8
assert (0, "F", 0, 0) in done and (1, "F", 0, 1) in done and (1, "B", 0, 3) in done
assert run.tasks[0].kind == "F" and run.tasks[0].start == 0
""",
    ),
    (
        "Slice the tasks and filter them with a mask",
        """\
tasks = cdpsim.simulate("1f1b", n=4, m=8, steps=1).tasks
assert len(tasks) >= 64 and len(tasks[:5]) == 5
forward = tasks[(tasks["kind"] == "F") & (tasks["device"] == 0)]
assert len(forward) == 8
assert sorted(forward["micro_batch"].tolist()) == list(range(8))
""",
    ),
    (
        "Busy time of each device by groupby",
        """\
tasks = cdpsim.simulate("gpipe", n=4, m=8, steps=1).frame("tasks")
busy = (tasks["end"] - tasks["start"]).groupby(tasks["device"]).sum()
assert busy.tolist() == [16, 16, 16, 16]
assert tasks.groupby("device")["start"].min().tolist() == [0, 1, 2, 3]
""",
    ),
    (
        "Traffic of each link and of each device by groupby",
        """\
messages = cdpsim.simulate("1f1b", n=4, m=8, steps=1).frame("messages")
links = messages.groupby(["src", "dst"])["size"].sum()
assert len(links) == 6 and links.loc[(0, 1)] == 8 and links.loc[(1, 0)] == 8
assert messages.groupby("src")["size"].sum().tolist() == [8, 16, 16, 8]
assert (messages["content"] == "activation").sum() == 24
""",
    ),
    (
        "Peak activations of each device from the memory table: 1F1B has 4, 3, 2, 1",
        """\
run = cdpsim.simulate("1f1b", n=4, m=8, steps=1)
memory = run.frame("memory")
peaks = memory[memory["category"] == "activations"].groupby("device")["size"].max()
assert peaks.tolist() == [4, 3, 2, 1]
assert [run.peak_memory[d]["activations"] for d in range(4)] == [4, 3, 2, 1]
""",
    ),
    (
        "numpy integers are as good as ints",
        """\
import json

import numpy as np

run = cdpsim.simulate("pp-cdp", n=np.int64(4), steps=np.int32(2))
assert run == cdpsim.simulate("pp-cdp", n=4, steps=2)
assert json.loads(json.dumps(run.request))["n"] == 4
""",
    ),
    (
        "A loop over n with a DataFrame at the end",
        """\
import pandas as pd

rows = []
for n in pd.Series([2, 4, 8]):
    run = cdpsim.simulate("single-cdp", n=n, steps=3)
    rows.append({"n": n, "activations": run.peak_memory[0]["activations"], "makespan": run.makespan})
assert pd.DataFrame(rows)["activations"].tolist() == [3, 10, 36]
""",
    ),
    (
        "Slots are exact integers, seconds are floats",
        """\
slots = cdpsim.simulate("multi-cdp", n=4)
assert slots.tasks["start"].dtype.kind == "i" and slots.tasks["end"].dtype.kind == "i"
assert isinstance(slots.makespan, int)
seconds = cdpsim.simulate("multi-cdp", n=4, model="gpt2", cluster="a100-nodes")
assert seconds.tasks["end"].dtype.kind == "f" and 0 < seconds.makespan < 10
""",
    ),
    (
        "A model and a cluster made of dicts",
        """\
stage = {"repeat": 4, "forward": "2.5 TFLOP", "backward": "5 TFLOP", "activation": "1.5 GB", "boundary": "16 MB"}
model = {"name": "toy", "stages": [stage | {"parameters": "400 MB", "optimizer": "800 MB"}]}
link = {"latency": "5 us", "bandwidth": "300 GB/s"}
cluster = {"name": "box", "devices": {"speed": "312 TFLOPS", "memory": "80 GB"}, "link": link}
run = cdpsim.simulate("multi-cdp", n=4, model=model, cluster=cluster, steps=1)
assert run.makespan > 4 * 7.5 / 312 and run.peak_memory[0]["activations"] == 6e9
""",
    ),
    (
        "A model made of Stage objects",
        """\
costs = dict(backward=4e12, activation=1e9, parameters=4e8)
stages = [cdpsim.Stage(name=f"block{i}", forward=2e12, **costs) for i in range(3)]
stages.append(cdpsim.Stage(name="head", forward="1 TFLOP", backward="2 TFLOP", activation="1 GB", parameters="400 MB"))
model = cdpsim.Model(name="mine", stages=stages)
assert len(model.stages) == 4 and model.stages[-1].name == "head" and model.stages[-1].forward == 1e12
assert cdpsim.simulate("pp-cdp", n=4, model=model, cluster="a100-nodes").makespan > 0
""",
    ),
    (
        "The summary goes into json and back",
        """\
import json

run = cdpsim.simulate("zero-cdp", n=4)
back = json.loads(json.dumps(run.summary()))
assert back["makespan"] == run.makespan and back["request"]["schedule"] == "zero-cdp"
assert cdpsim.simulate(**run.request) == run
""",
    ),
    (
        "Save a run to a folder, read its CSV with pandas, load it back",
        """\
import pathlib
import tempfile

import pandas as pd

out = pathlib.Path(tempfile.mkdtemp()) / "out"
run = cdpsim.simulate("mp-cdp", n=3)
run.save(out)
assert len(pd.read_csv(out / "tasks.csv")) == len(run.tasks) and (out / "summary.json").exists()
assert cdpsim.load(out) == run
""",
    ),
    # pictures
    (
        'run.plot("timeline") is a matplotlib Figure',
        """\
from matplotlib.figure import Figure

fig = cdpsim.simulate("multi-cdp", n=4).plot("timeline")
assert isinstance(fig, Figure)
assert len(fig.axes) >= 1 and fig.axes[0].has_data()
""",
    ),
    (
        'run.plot("timeline", ax=ax) draws where I say',
        """\
import matplotlib.pyplot as plt

fig, ax = plt.subplots(figsize=(10, 3))
result = cdpsim.simulate("1f1b", n=4, m=8, steps=1).plot("timeline", ax=ax)
assert result is fig and fig.axes[0] is ax
assert len(ax.patches) + len(ax.collections) > 0 and ax.get_xlim()[1] >= 22
""",
    ),
    (
        "Two timelines below each other in one figure",
        """\
import matplotlib.pyplot as plt

fig, (top, bottom) = plt.subplots(2, 1, sharex=True)
cdpsim.simulate("gpipe", n=4, m=8, steps=1).plot("timeline", ax=top)
cdpsim.simulate("1f1b", n=4, m=8, steps=1).plot("timeline", ax=bottom)
assert all(len(ax.patches) + len(ax.collections) > 0 for ax in (top, bottom)) and top.get_xlim() == bottom.get_xlim()
""",
    ),
    (
        "Save a figure as png, svg and pdf",
        """\
import pathlib
import tempfile

fig = cdpsim.simulate("pp-cdp", n=4).plot("timeline", style="gantt")
for name in ["pipeline.png", "pipeline.svg", "pipeline.pdf"]:
    path = pathlib.Path(tempfile.mkdtemp()) / name
    fig.savefig(path, dpi=80)
    assert path.stat().st_size > 1000
""",
    ),
    (
        "Memory of two runs on the same axes, with labels in the legend",
        """\
import matplotlib.pyplot as plt

fig, ax = plt.subplots()
for name in ["multi-dp", "multi-cdp"]:
    cdpsim.simulate(name, n=8).plot("memory", ax=ax, label=name)
assert {"multi-dp", "multi-cdp"} <= set(ax.get_legend_handles_labels()[1]) and ax.get_ylabel()
""",
    ),
    (
        "`cdpsim plot memory multi-dp multi-cdp -n 8` copied into Python",
        """\
from matplotlib.figure import Figure

fig = cdpsim.plot("memory", ["multi-dp", "multi-cdp"], n=8)
assert isinstance(fig, Figure)
assert fig.axes[0].has_data() and fig.axes[-1].get_xlabel() and fig.axes[0].get_ylabel()
""",
    ),
    (
        "Figures 1 and 2 of the paper",
        """\
from matplotlib.figure import Figure

assert isinstance(cdpsim.figure(1), Figure)
assert isinstance(cdpsim.figure(2, n=4), Figure)
""",
    ),
    (
        "A plot appears once in the notebook, not twice",
        """\
import matplotlib.pyplot as plt

plt.close("all")
fig = cdpsim.simulate("mp-cdp", n=3).plot("timeline")
assert fig is not None and plt.get_fignums() == []
""",
    ),
    (
        "A mistyped plot says which plots there are",
        """\
try:
    cdpsim.simulate("multi-cdp", n=4).plot("timelin")
    message = ""
except ValueError as error:
    message = str(error)
assert "timelin" in message and "timeline" in message.replace("'timelin'", "") and "memory" in message
""",
    ),
    (
        "A picture of my own from the tables",
        """\
import matplotlib.pyplot as plt

tasks = cdpsim.simulate("gpipe", n=4, m=4, steps=1).tasks
tasks = tasks[(tasks.kind == "F") | (tasks.kind == "B")]
bars = plt.barh(tasks.device, tasks.end - tasks.start, left=tasks.start)
assert len(bars) == 32 and bars[0].get_width() == 1
""",
    ),
    # choosing and comparing
    (
        "Compare pipelines in a DataFrame and sort it",
        """\
table = cdpsim.compare(["1f1b", "zb-h1", "chimera", "pipedream"], n=4)
frame = table.frame().sort_values("bubble")
assert frame["schedule"].tolist() == ["pipedream", "zb-h1", "chimera", "1f1b"]
assert abs(frame["bubble"].iloc[-1] - 3 / 7) < 1e-9 and frame["step"].tolist() == [3, 15, 16, 21]
""",
    ),
    (
        "A comparison in a cell: text, html and length",
        """\
table = cdpsim.compare(["multi-dp", "multi-cdp", "pp-cdp"], n=8)
assert len(table) == 3
assert all(name in str(table) for name in ["multi-dp", "multi-cdp", "pp-cdp"])
assert "<table" in table._repr_html_() and "pp-cdp" in table._repr_html_()
""",
    ),
    (
        "Names may be given one by one, and the best row is min() of the rows",
        """\
table = cdpsim.compare("gpipe", "1f1b", "zb-h1", n=4, m=8)
best = min(table, key=lambda row: row["bubble"])
assert best["schedule"] == "zb-h1"
assert [row["schedule"] for row in table] == ["gpipe", "1f1b", "zb-h1"]
""",
    ),
    (
        "Which schedule for eight devices and a batch of 256?",
        """\
table = cdpsim.compare(devices=8, batch=256, model="llama2-7b", cluster="a100-nodes")
frame = table.frame()
assert len(frame) > 3 and (frame["devices"] == 8).all()
assert {"schedule", "step", "memory"} <= set(frame.columns)
assert (frame["step"] > 0).all()
""",
    ),
    (
        "Sweep n with a list",
        """\
frame = cdpsim.compare(["mp-dp", "mp-cdp"], n=[2, 4, 8]).frame()
assert len(frame) == 6
wide = frame.pivot(index="n", columns="schedule", values="devices")
assert wide["mp-dp"].tolist() == [4, 16, 64] and wide["mp-cdp"].tolist() == [3, 10, 36]
""",
    ),
    (
        "Will GPT-2 fit? The README's gigabytes, with and without torch's behaviours",
        """\
options = dict(n=4, m=8, model="gpt2", cluster="a100-nodes")
plain = cdpsim.compare(["gpipe", "1f1b"], **options).frame().set_index("schedule")["memory"]
torch = cdpsim.compare(["gpipe", "1f1b"], runtime="torch", **options).frame().set_index("schedule")["memory"]
assert abs(plain["gpipe"] - 14.83e9) < 1e7 and abs(plain["1f1b"] - 4.614e9) < 1e6
assert abs(torch["gpipe"] - 21.42e9) < 1e7 and (torch > plain).all() and (torch < 80e9).all()
""",
    ),
    (
        "One slow device holds up everybody",
        """\
assert cdpsim.simulate("multi-dp", n=4, steps=1).makespan == 8
run = cdpsim.simulate("multi-dp", n=4, steps=1, slow={3: 4})
assert run.makespan == 32
tasks = run.frame("tasks")
assert tasks[tasks["device"] == 0]["end"].sub(tasks[tasks["device"] == 0]["start"]).sum() == 8
""",
    ),
    (
        "An order of my own, as lists",
        """\
order = [["F0", "F1", "B0", "B1"], ["F0", "F1", "B0", "B1"]]
mine = cdpsim.simulate("mine", order=order, steps=1)
assert mine.makespan == cdpsim.simulate("gpipe", n=2, m=2, steps=1).makespan == 6
assert abs(float(mine.bubble) - 1 / 3) < 1e-9 and "mine" in repr(mine)
""",
    ),
    (
        "Which tasks are on the critical path?",
        """\
run = cdpsim.simulate("gpipe", n=4, m=8, steps=1)
path = [task for task in run.critical_path() if task.kind in ("F", "B")]
assert path[0].start == 0 and path[-1].end == run.makespan == 22
assert sum(task.end - task.start for task in path) == 22
assert all(a.end <= b.start for a, b in zip(path, path[1:]))
""",
    ),
    (
        "Interleaving halves the bubble on the same four devices",
        """\
plain = cdpsim.simulate("1f1b", n=4, m=8, steps=1)
interleaved = cdpsim.simulate("interleaved-1f1b", n=8, m=8, chunks=2, steps=1)
assert plain.devices == interleaved.devices == 4
assert abs(float(plain.bubble) - 3 / 11) < 1e-9
assert abs(float(interleaved.bubble) - 3 / 19) < 1e-9
""",
    ),
]

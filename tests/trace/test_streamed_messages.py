"""The columns of messages that go in streams: in the table of a run, in its file, and absent where there are none."""

from pathlib import Path

import pytest

from cdpsim import Cluster, Model, RequestError, Stage, load, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Link
from cdpsim.trace import TABLES, WIDER_TABLES

LAYER = Stage(forward=1.0, backward=2.0, parameters=1000, activation=10, boundary=10)
MODEL = Model(stages=(LAYER,) * 4, precision="fp32")
CLUSTER = Cluster(link=Link(latency=0.01, bandwidth=1e4))


def test_gathers_and_sums_have_their_streams(tmp_path: Path) -> None:
    """Two groups of two ranks: parameters are gathered and gradients summed inside a group, then across."""
    run = simulate("fsdp", shard=2, replicas=2, model=MODEL, cluster=CLUSTER, steps=2)
    assert tuple(run.messages.keys()) == WIDER_TABLES["messages"]
    streams = zip(*(run.messages[name].tolist() for name in ("op", "content", "stream")), strict=True)
    assert set(streams) == {
        ("all_gather", "parameters", "gather"),
        ("reduce_scatter", "gradient", "reduce"),
        ("all_reduce", "gradient", "across"),
    }
    run.save(tmp_path)
    assert load(tmp_path) == run.trace
    assert reopen(tmp_path).messages == run.messages
    assert run.trace.frame("messages")["stream"].tolist() == run.messages.stream.tolist()


def test_a_bucket_says_how_many_stages_it_has() -> None:
    """Of four stages of 1,000 bytes each, a bucket is full with the second: stages 3 and 2, then 1 and 0."""
    run = simulate("ddp", replicas=2, buckets="1001B", model=MODEL, cluster=CLUSTER, steps=1)
    rows = zip(*(run.messages[name].tolist() for name in ("stage", "stages", "size")), strict=True)
    assert [*rows] == [(2, 2, 2000), (0, 2, 2000)]


def test_boundaries_of_pipelines_go_in_no_stream(tmp_path: Path) -> None:
    """Nor among sums of data ranks; a run without streams keeps its file's form."""
    plain = simulate("1f1b", 2, model=MODEL, cluster=CLUSTER, steps=1)
    assert tuple(plain.messages.keys()) == TABLES["messages"]
    split = simulate("1f1b", 2, replicas=2, zero=1, model=MODEL, cluster=CLUSTER, steps=1)
    split.save(tmp_path)
    messages = load(tmp_path).messages
    assert set(messages.content[messages.stream == ""].tolist()) == {"activation", "activation_gradient"}
    assert messages.stream.dtype == split.messages.stream.dtype


def test_another_stream_is_refused(tmp_path: Path) -> None:
    simulate("ddp", replicas=2, model=MODEL, cluster=CLUSTER, steps=1).save(tmp_path)
    file = tmp_path / "messages.csv"
    file.write_text(file.read_text().replace(",reduce\n", ",river\n"))
    with pytest.raises(RequestError, match="line 2: stream is 'river'; write the trace again"):
        load(tmp_path)


def test_a_refined_run_says_which_layers_its_devices_have() -> None:
    run = simulate("1f1b", 2, shard=2, model=MODEL, cluster=CLUSTER, steps=1)
    assert run.summary()["places"] == [[0, 1], [2, 3]]
    assert {(t.device % 2, t.stage) for t in run.tasks} == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert "places" not in simulate("1f1b", 2, shard=2, by_layer=False, model=MODEL, cluster=CLUSTER).summary()

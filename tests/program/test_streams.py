"""The time that messages take of their devices: small runs by hand, an independent player, laws, published figures."""

import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, presets, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.cluster.topology import OVERLAPS, UNLIMITED_LANES
from cdpsim.draw.gantt import gantt
from cdpsim.invariants import violations
from cdpsim.program import EdgeKind
from cdpsim.program.check import check_program
from cdpsim.request.options import RENDEZVOUS, Rendezvous
from cdpsim.schedules import TABLE_1
from cdpsim.studies.breakeven import scale_links
from cdpsim.timing.engine import ENGINES
from cdpsim.trace import TABLES
from tests.helpers.message_turn_player import play
from tests.helpers.run_times import makespan, named
from tests.helpers.strategies import fitting, streamed_requests, taken, without_rounds
from tests.helpers.svg import drawn
from tests.helpers.times import are_close, are_no_later

HALF = Link(latency=0.5)
EVEN = Model(stages=(Stage(forward=1.0, backward=2.0, boundary=1, parameters=1),) * 2)


def on(overlap: str, link: Link = HALF, lanes: int = 1) -> Cluster:
    """Equal devices and links."""
    return Cluster(devices=(Devices(overlap=overlap, lanes=lanes),), link=link)


def overlapping(cluster: Cluster, overlap: str) -> Cluster:
    """A cluster whose devices all overlap messages and tasks in one way."""
    groups = tuple(msgspec.structs.replace(group, overlap=overlap) for group in cluster.devices)
    return msgspec.structs.replace(cluster, devices=groups)


def free(cluster: Cluster) -> Cluster:
    """A cluster whose messages take no time."""
    return scale_links(cluster, float("inf"), latency=0)


def test_a_pipeline_of_two_stages_by_hand() -> None:
    """Forwards take 1 s, backwards 2 s, messages 0.5 s; micro-batch 1 is released after 3 s.

    Device 1 has the first activation at 1.5, is done with its forward at 2.5 and with its backward at 4.5. Device 0
    does the second forward from 3 to 4 and sends at 4, whatever device 1 does. Under "full" and "stream" that is there
    at 4.5, and device 1's backward is done at 4.5 + 1 + 2 = 7.5. Under "none" device 1 sends the first gradient until
    5, and receives what has come for 0.5 s more: it goes forward at 5.5. Device 0 has the first gradient at 5 and its
    backward is done at 7; the second gradient is there 0.5 s after the backward, and the last backward takes 2 s.
    """
    for overlap, forward, done in (("full", 4.5, 10.0), ("stream", 4.5, 10.0), ("none", 5.5, 11.0)):
        trace = simulate("pp-cdp", 2, steps=1, model=EVEN, cluster=on(overlap))
        assert named(trace)["p2p activation(i=1,j=0) 0->1"] == (4.0, 4.5)
        assert named(trace)["F(i=1,j=1)"] == (forward, forward + 1)
        assert makespan(trace) == done


def test_a_task_waits_for_what_its_device_sends_first() -> None:
    """Two forwards in a row: under "none" device 0 sends from 1 to 1.5 s in between, else beside the second one."""
    for overlap, second in (("full", 1.0), ("stream", 1.0), ("none", 1.5)):
        trace = simulate("gpipe", 2, m=2, steps=1, model=EVEN, cluster=on(overlap))
        assert named(trace)["F(i=1,j=0)"] == (second, second + 1)


def test_a_stream_sends_one_after_another_and_receives_meanwhile() -> None:
    """Forwards of 1 s, messages of 3 s: device 0 makes one each second, and sends them at 1, 4, and 7 s.

    Device 1 has them at 4, 7 and 10, and sends on what it makes of them a second later, while it receives.
    """
    model = Model(stages=(Stage(forward=1.0, backward=1.0, boundary=1),) * 3)
    at = named(simulate("gpipe", 3, m=3, steps=1, model=model, cluster=on("stream", Link(latency=3.0))))
    assert [at[f"p2p activation(i={i},j=0) 0->1"][0] for i in range(3)] == [1.0, 4.0, 7.0]
    assert [at[f"p2p activation(i={i},j=1) 1->2"][0] for i in range(3)] == [5.0, 8.0, 11.0]


def test_collectives_run_one_after_another() -> None:
    """Two devices, an all-reduce of 2 s for each of two stages after a pass of 6 s: both at 8 s, or at 8 and 10 s."""
    for overlap, ends in (("full", [8.0, 8.0]), ("stream", [8.0, 10.0]), ("none", [8.0, 10.0])):
        trace = simulate("multi-dp", 2, steps=1, model=EVEN, cluster=on(overlap, Link(latency=2.0)))
        assert sorted(trace.messages["end"].tolist()) == ends


@pytest.mark.parametrize(("forward", "backward", "carry"), [(3.0, 6.0, 4.0), (1.0, 2.0, 9.0)])
def test_all_reduces_hide_behind_the_backward_as_in_buckets(forward: float, backward: float, carry: float) -> None:
    """DistributedDataParallel's closed form for K equal buckets: max(C + T / K, F + B / K + T) for a step."""
    k = 4
    stage = Stage(forward=forward / k, backward=backward / k, parameters=1)
    cluster = on("stream", Link(latency=carry / k))
    trace = simulate("multi-dp", k, m=2, steps=6, model=Model(stages=(stage,) * k), cluster=cluster, reduce="last")
    expected = max(forward + backward + carry / k, forward + backward / k + carry)
    assert trace.summary()["period"] == pytest.approx(expected)


@pytest.mark.parametrize("more", [{}, {"expand_collectives": True}, {"contention": "fair"}])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_rings_of_several_cards_take_a_device_together(overlap: str, more: dict[str, Any]) -> None:
    """Not one after another. With a single stage there is nothing beside the sum, so no overlap makes a difference."""
    cluster = presets.find_cluster("h100-nodes")
    asked: dict[str, Any] = {"m": 16, "model": "gpt2", "collective": "ring", "ignore_memory": True}
    step = simulate("multi-dp", 1, cluster=cluster, **asked).steady_state.period
    run = simulate("multi-dp", 1, cluster=overlapping(cluster, overlap), **asked, **more)
    assert run.steady_state.period == pytest.approx(step, rel=1e-9)
    assert violations(run) == {}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_sum_comes_before_the_gather_behind_the_same_task(overlap: str, engine: str) -> None:
    """FSDP of a stage on two ranks: messages and forwards of 1 s, backwards of 2 s, whatever overlaps.

    Gather 0-1, forward until 2, gather until 3, backward until 5; then the sum until 6, and only then the gather for
    the next forward until 7. That forward ends at 8, its gather at 9, the backward at 11, the last sum at 12.
    """
    model, link = Model(stages=EVEN.stages[:1]), Link(latency=1.0)
    asked: dict[str, Any] = {"model": model, "cluster": on(overlap, link), "engine": engine}
    run = simulate("fsdp", 1, m=2, shard=2, steps=1, **asked)
    gathers, sums = "all_gather", "reduce_scatter"
    expected = [(0, gathers), (2, gathers), (5, sums), (6, gathers), (8, gathers), (11, sums)]
    assert sorted((message.start, message.op) for message in run.messages) == expected


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_gather_waits_for_the_end_of_another_of_its_ranks(overlap: str, engine: str) -> None:
    """Messages of 1 s, of two ranks that update both stages at one moment: they gather the second a second later."""
    stages = (Stage(forward=1.0, backward=1.0, weight_backward=1.0, parameters=8, boundary=1),) * 2
    asked: dict[str, Any] = {"model": Model(stages=stages), "cluster": on(overlap, Link(latency=1.0)), "engine": engine}
    run = simulate("zbv", 2, m=1, shard=2, zero=3, steps=2, **asked)
    updated = {task.end for task in run.tasks if task.kind == "U" and task.step == 0}
    first, second = (m.start for m in run.messages if m.op == "all_gather" and m.step == 0)
    assert {first} == updated and second == first + 1


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_of_two_last_gathers_the_one_with_which_workers_would_go_on_is_first(overlap: str) -> None:
    """Weight prediction by two: a sum from 2 to 3 s, the estimate until 4, the version that it starts from until 5."""
    stage = Stage(forward=1.0, backward=1.0, parameters=1)
    asked: dict[str, Any] = {"model": Model(stages=(stage,)), "replicas": 2, "m": 1, "steps": 1}
    run = simulate("wp", **asked, cluster=on(overlap, Link(latency=1.0)))
    gathers = [(message.start, message.end) for message in run.messages if message.op == "all_gather"]
    assert sorted(gathers) == [(3, 4), (4, 5)]
    plain = simulate("wp", **asked, cluster=on("full", Link(latency=1.0)))
    if overlap != "none":  # where tasks wait for messages
        assert play(plain, run.request.cluster.overlaps(2))[1][plain.program.nodes - 1] == 4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("overlap", ["stream", "none"])
def test_a_sum_across_groups_comes_before_the_gather_behind_the_same_task(overlap: str, engine: str) -> None:
    """Of hybrid FSDP, by hand: messages of 1 s, forwards of 1 s, backwards of 2 s; two groups of two ranks.

    Gather 0-1, forward until 2, gather until 3, backward until 5, the sum in groups until 6. FSDP2 posts the sum across
    groups with that, and the next forward's gather only behind them: what a rank sends is the sum until 7, the gather
    until 8. That forward ends at 9, its gather at 10, the backward at 12, sums at 13 and 14.
    """
    model, link = Model(stages=EVEN.stages[:1]), Link(latency=1.0)
    asked: dict[str, Any] = {"model": model, "cluster": on(overlap, link), "engine": engine, "reduce": "each"}
    run = simulate("fsdp", 1, m=2, shard=2, replicas=2, steps=1, **asked)
    assert {(message.start, message.op) for message in run.messages} == {
        *((start, "all_gather") for start in (0, 2, 7, 9)),
        *((start, "reduce_scatter") for start in (5, 12)),
        *((start, "all_reduce") for start in (6, 13)),
    }


@given(streamed_requests())
@settings(max_examples=100, deadline=None)
def test_messages_take_what_the_rules_say(request: dict[str, Any]) -> None:
    """Event by event: the same times but for quanta, and to the last bit from both engines."""
    request.pop("rendezvous", None)
    run = simulate(**request)
    cluster = request.get("cluster", Cluster.unit())
    plain = simulate(**request | {"cluster": overlapping(cluster, "full")})
    assume(run.request.counts == plain.request.counts)  # of rounds, which find them by their times
    start, end = play(plain, cluster.overlaps(run.program.devices))
    nodes = range(plain.program.nodes)
    assert are_close(run.start[: len(nodes)], [start[node] for node in nodes])
    assert are_close(run.end[: len(nodes)], [end[node] for node in nodes])
    again = simulate(**request, engine="simpy")
    assert np.array_equal(run.start, again.start) and np.array_equal(run.end, again.end)


@given(streamed_requests(where=without_rounds))
@settings(max_examples=100, deadline=None)
def test_more_overlap_never_ends_later_and_free_messages_slow_nothing(request: dict[str, Any]) -> None:
    """Full overlap, then a stream beside the tasks, then all in the lanes: each only adds waits.

    What is waited for besides data is the time of messages: where that is nothing, nothing is any later. Rounds have
    other numbers of micro-batches then.
    """
    request.pop("rendezvous", None)
    cluster = request.get("cluster", Cluster.unit())
    for end in (lambda some: some, free):
        runs = [simulate(**request | {"cluster": end(overlapping(cluster, word))}) for word in OVERLAPS]
        nodes = runs[0].program.nodes
        for before, after in pairwise(runs):
            assert are_no_later(before.start[:nodes], after.start[:nodes])
            assert end is not free or are_close(before.start[:nodes], after.start[:nodes])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_free_messages_never_slow_a_run(name: str, engine: str) -> None:
    """Of any schedule, on stages and devices that are unlike, whether updates take time and collectives are pieces."""
    for update, expand in product((None, 0.1), (False, True)):
        asked = fitting(name, 4) | {"steps": 4, "slow": ["0:1.7"], "engine": engine, "expand_collectives": expand}
        stages = (
            Stage(forward=1 + 0.3 * j, backward=2.8 - 0.4 * (j % 3), weight_backward=0.7, parameters=5, update=update)
            for j in range(asked["n"])
        )
        asked["model"] = Model(stages=tuple(stages))
        runs = [simulate(**taken(asked | {"cluster": on(overlap, Link())})) for overlap in OVERLAPS]
        first = [(columns["start"].tolist(), columns["end"].tolist()) for columns in (runs[0].tasks, runs[0].messages)]
        for run in runs[1:]:
            assert [(some["start"].tolist(), some["end"].tolist()) for some in (run.tasks, run.messages)] == first


@given(streamed_requests())
@settings(max_examples=100, deadline=None)
def test_every_rule_and_law_holds(request: dict[str, Any]) -> None:
    """No deadlock, nothing out of turn, memory freed; expanded too. Edges are no more than a few for each node."""
    request.pop("rendezvous", None)
    for expand in (False, True):
        slots = {} if "model" in request else {"collective": "tree"}
        run = simulate(**taken(request | slots | {"expand_collectives": expand}))
        check_program(run.program)
        assert violations(run) == {}
        assert (run.program.edges.kind == EdgeKind.STREAM).sum() <= 5 * run.program.nodes


@pytest.mark.every_case
@pytest.mark.parametrize("name", TABLE_1)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_in_slots_with_free_messages_nothing_changes(name: str, n: int) -> None:
    """Messages take no time of anybody."""
    slots = simulate(name, n)
    others = [simulate(name, n, cluster=on(word, Link(), UNLIMITED_LANES)) for word in OVERLAPS]
    for other in others:
        for table in TABLES:
            columns, mine = getattr(slots, table), getattr(other, table)
            assert all(np.array_equal(columns[column], mine[column]) for column in dict(columns))


def gpt3(overlap: str, boundary: int, rendezvous: str | None = None) -> float:
    """Seconds of a step of GPT-3 175B as Korthikanti et al. (2022, table 5) time it: 8 devices with 3 chunks each.

    The backward recomputes all, b = 2.8 f; that everything overlapped takes 17.67 s gives f. Of a boundary of 2048 x
    12288 numbers in 16 bits each of 8 tensor-parallel ranks sends an eighth over its own 25 GB/s.
    """
    forward = 17.67 / (64 + 7 / 3) / 3.8 / 3
    stages = (Stage(forward=forward, backward=2.8 * forward, boundary=boundary),) * 24
    cluster = on(overlap, Link(bandwidth=25e9 if boundary > 1 else float("inf")))
    asked: dict[str, Any] = {"m": 64, "chunks": 3, "steps": 1, "rendezvous": rendezvous}
    return makespan(simulate("interleaved-1f1b", 24, model=Model(stages=stages), cluster=cluster, **asked))


def test_gpt_3_takes_what_its_messages_take() -> None:
    """175B was published with 18.13 s. Free messages take nothing; where both ends wait for each other, 6 s.

    Of a message's two ends each device has four for each micro-batch and chunk, of 6.3 MB at 25 GB/s: that is what
    "none" adds while the pipeline is full, and hardly anything while it fills.
    """
    message = 2 * 2048 * 12288 // 8 / 25e9
    assert [gpt3(overlap, 1) for overlap in OVERLAPS] == [pytest.approx(17.67)] * 3
    full, stream, none = (gpt3(overlap, 2 * 2048 * 12288 // 8) for overlap in OVERLAPS)
    assert 17.67 < full <= stream < none < 18.13
    assert none == pytest.approx(full + 64 * 3 * 4 * message, rel=0.005)


def test_the_page_on_communication_has_these_times() -> None:
    """Of GPT-3: what overlaps, then both rendezvous, with messages and with free ones."""
    size = 2 * 2048 * 12288 // 8
    times = [gpt3("full", size), gpt3("none", size)]
    times += [gpt3("none", boundary, order) for boundary in (size, 1) for order in ("megatron", "torch")]
    page = (Path(__file__).parents[2] / "docs" / "assumptions" / "communication.md").read_text(encoding="utf-8")
    words = page.partition("published 18.1 s)")[2].partition("made for slots")[0]
    assert re.findall(r"(\d+\.\d) s", words) == [f"{time:.1f}" for time in times]


def test_groups_of_devices_differ() -> None:
    """As by hand above: device 1 takes 0.5 s to send a gradient and 0.5 s to receive; device 0 waits anyway."""
    groups = (Devices(count=1), Devices(count=1, overlap="none"))
    assert makespan(simulate("pp-cdp", 2, steps=1, model=EVEN, cluster=Cluster(devices=groups, link=HALF))) == 11.0
    groups = (Devices(count=1, overlap="none"), Devices(count=1))
    assert makespan(simulate("pp-cdp", 2, steps=1, model=EVEN, cluster=Cluster(devices=groups, link=HALF))) == 10.0


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_buffer_is_there_while_its_message_is_on_its_way(overlap: str) -> None:
    """Received data takes memory from the start of its message, however late that is, until it is read."""
    stage = Stage(forward=1.0, backward=2.0, boundary=10, activation=10)
    trace = simulate("pp-cdp", 3, model=Model(stages=(stage,) * 3), cluster=on(overlap), steps=2)
    curve, messages = trace.memory, trace.messages
    for row in range(len(messages["start"])):
        rows = (curve["device"] == messages["dst"][row]) & (curve["category"] == "communication")
        assert curve["size"][rows][curve["time"][rows] <= messages["start"][row]][-1] >= messages["size"][row]


def test_an_unknown_overlap_is_refused() -> None:
    """With the words that there are."""
    with pytest.raises(RequestError, match=r"box.toml: \$.devices: overlap: unknown overlap 'streams'; did you mean"):
        Cluster.from_builtins({"devices": {"overlap": "streams"}}, "box.toml")


@pytest.mark.parametrize("how", RENDEZVOUS)
@pytest.mark.parametrize("overlap", ["full", "stream"])
def test_a_rendezvous_changes_nothing_where_messages_overlap_with_tasks(overlap: str, how: Rendezvous) -> None:
    """Both ends wait for each other only where a message has its devices to itself."""
    plain = simulate("pp-cdp", 2, model=EVEN, cluster=on(overlap))
    meeting = simulate("pp-cdp", 2, model=EVEN, cluster=on(overlap), rendezvous=how)
    assert (meeting.tasks, meeting.messages) == (plain.tasks, plain.messages)


def test_a_rendezvous_is_one_of_two() -> None:
    """Another one is refused, and one that has no message to wait for is not."""
    asked: dict[str, Any] = {"model": EVEN, "cluster": on("none")}
    with pytest.raises(RequestError, match="rendezvous: unknown rendezvous 'nccl'"):
        simulate("pp-cdp", 2, **asked, rendezvous="nccl")  # type: ignore[arg-type]
    assert not len(
        simulate("multi-dp", 1, model=Model(stages=EVEN.stages[:1]), cluster=on("none"), rendezvous="torch").messages
    )


def test_a_picture_tells_what_a_lane_waits_for() -> None:
    """As by hand above: device 1 sends from 4.5 to 5 s and receives until 5.5, what has been there since 4.5."""
    for overlap in ("none", "full"):
        picture = drawn(gantt(simulate("pp-cdp", 2, steps=1, model=EVEN, cluster=on(overlap))))
        assert any("waiting for a stream" in words for words in picture.said()) == (overlap == "none")


def test_a_sum_over_unlike_devices_blocks_no_stream() -> None:
    """GPT-2's last stage is tied to its first: on two devices, which have unlike numbers of layers.

    What device 0 gathers behind that sum still comes before what it gathers later.
    """
    run = simulate("1f1b", 2, m=4, shard=2, model="gpt2", cluster="h100-node", steps=2)
    first = run.request.shape.layers[1]
    assert first != run.request.shape.n - first
    gathers = [m for m in run.messages if m.op == "all_gather" and m.step == 0 and m.stage < first]
    assert [m.stage for m in sorted(gathers, key=lambda m: m.start)] == [*range(first)]

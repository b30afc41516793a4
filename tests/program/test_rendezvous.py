"""Both ends of messages wait for each other: small runs by hand, a player of queues, laws, and seeded faults."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import Cluster, Model, Stage, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Devices, Link
from cdpsim.draw.gantt import gantt
from cdpsim.invariants import violations
from cdpsim.program import Content, EdgeKind, Kind, Op, Program, streams
from cdpsim.program.check import check_program
from cdpsim.request.options import RENDEZVOUS, Rendezvous
from cdpsim.runs import Run, assembling
from tests.helpers.run_times import makespan, named
from tests.helpers.strategies import Need, alike, meeting, passing, streamed_requests, taken
from tests.helpers.stream_queue_player import play
from tests.helpers.svg import drawn
from tests.helpers.times import are_close, are_no_later

HALF = Link(latency=0.5)
EVEN = Model(stages=(Stage(forward=1.0, backward=2.0, boundary=1, parameters=1),) * 2)
LONG_FIRST = Model(stages=tuple(Stage(forward=f, backward=2 * f, boundary=1, parameters=1) for f in (6.0, 1.0, 1.0)))


def on(overlap: str = "none", link: Link = HALF) -> Cluster:
    """Equal devices and links."""
    return Cluster(devices=(Devices(overlap=overlap),), link=link)


def whole(request: dict[str, Any]) -> dict[str, Any]:
    """The same request where everything overlaps."""
    plain = tuple(Devices(count=g.count, speed=g.speed, lanes=g.lanes) for g in request["cluster"].devices)
    cluster = replace_devices(request["cluster"], plain)
    return {name: value for name, value in request.items() if name != "rendezvous"} | {"cluster": cluster}


def replace_devices(cluster: Cluster, devices: tuple[Devices, ...]) -> Cluster:
    """A cluster with other devices."""
    return Cluster(devices=devices, link=cluster.link, links=cluster.links, host=cluster.host)


def test_a_pipeline_of_two_stages_by_hand() -> None:
    """Forwards take 1 s, backwards 2 s, messages 0.5 s; micro-batch 1 is released after 3 s.

    Device 1 has the first activation at 1.5, is done with its forward at 2.5 and with its backward at 4.5. Device 0
    is done with the second forward at 4, but device 1 computes until 4.5: from then until 5 the activation goes there,
    and its backward is done at 5 + 1 + 2 = 8; 0.5 s more brings the gradient to device 0, whose last backward ends at
    10.5. torch and Megatron do the same here: nothing else is to be received.
    """
    for how in RENDEZVOUS:
        trace = simulate("pp-cdp", 2, steps=1, model=EVEN, cluster=on(), rendezvous=how)
        assert named(trace)["p2p activation(i=1,j=0) 0->1"] == (4.5, 5.0)
        assert makespan(trace) == 10.5


def test_deferring_shortens_a_run_whose_streams_are_blocked() -> None:
    """Stage 0 takes 6 + 12 s, stages 1 and 2 take 1 + 2 s each: three devices share stage 0, one each serves the rest.

    In slots, which decide over the order, stage 1's device gets the activation of micro-batch 1 (its forward, at
    slot 2 + 1, ends there) before the gradient of micro-batch 0 (at slot 4). Here that activation comes only after
    the forward of micro-batch 1, released after 24 / 3 = 8 s: at 14 s. The gradient, made at
    6 + 0.5 + 1 + 0.5 + 1 + 2 = 11 s, stands behind it until 14.5, and stage 1's backward begins at 15. If receives
    are deferred, the gradient comes first, as it is needed first: at 11, and the backward begins at 11.5.
    """
    gradient, backward = "p2p activation_gradient(i=0,j=2) 4->3", "B(i=0,j=1)"
    request: dict[str, Any] = {"steps": 1, "model": LONG_FIRST, "cluster": on()}
    posted = simulate("mp-cdp", 3, **request, rendezvous="torch")
    deferred = simulate("mp-cdp", 3, **request, rendezvous="megatron")
    assert named(posted)[gradient] == (14.5, 15.0)
    assert named(posted)[backward] == (15.0, 17.0)
    assert named(deferred)[gradient] == (11.0, 11.5)
    assert named(deferred)[backward] == (11.5, 13.5)
    assert makespan(deferred) < makespan(posted)


def test_a_device_sends_and_receives_at_once() -> None:
    """Messages posted at one moment are one batch: posted singly, a ring of devices would send one after another.

    In slots, device 1 has done micro-batch 1 at 2 + 6, whose gradient of stage 0 goes to device 2; and device 2 has
    done stage 2 of micro-batch 2 at 4 + 4, updates it, and sends it to device 0, which needs it first.
    """
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=1),) * 3)
    first = named(simulate("multi-cdp", 3, steps=2, model=model, cluster=on(), rendezvous="torch"))
    assert first["p2p gradient(j=0) 1->2"] == first["p2p parameters(j=2) 2->0"]


def test_collectives_run_one_after_another() -> None:
    """Two devices, an all-reduce of 2 s for each of two stages after a pass of 6 s."""
    for how in RENDEZVOUS:
        cluster = on("none", Link(latency=2.0))
        trace = simulate("multi-dp", 2, steps=1, model=EVEN, cluster=cluster, rendezvous=how)
        assert sorted(trace.messages["end"].tolist()) == [8.0, 10.0]


def test_one_pair_has_one_message_at_a_time() -> None:
    """Under cdp-v1 all new versions appear at once; fetched early they go from 1 to 0 one by one, 0.5 s each."""
    trace = simulate("multi-cdp", 2, model=EVEN, cluster=on(), rule="cdp-v1", prefetch=9, rendezvous="torch")
    mine = trace.messages["content"] == "parameters"
    assert np.diff(trace.messages["start"][mine]).tolist() == [0.5]


@st.composite
def met_requests(draw: st.DrawFn, where: Need = meeting) -> dict[str, Any]:
    """Keywords for `simulate` where both ends of messages meet, at the first device at least."""
    request = draw(streamed_requests(where=where, timed=True))
    cluster = request["cluster"]
    groups = (Devices(**{**vars_of(cluster.devices[0]), "overlap": "none"}), *cluster.devices[1:])
    request |= {"cluster": replace_devices(cluster, groups), "rendezvous": draw(st.sampled_from(RENDEZVOUS))}
    return taken(request)


@given(met_requests())
@settings(max_examples=100, deadline=None)
def test_streams_do_what_queues_do(request: dict[str, Any]) -> None:
    """By events, in the order of the unit-cost run: the same times but for quanta, and both engines to the last bit."""
    run = simulate(**request)
    plain = simulate(**whole(request))
    start, end = play(plain, request["cluster"].overlaps(run.program.devices), request["rendezvous"] == "megatron")
    assert are_close(run.start, start)
    assert are_close(run.end, end)
    again = simulate(**request, engine="simpy")
    assert np.array_equal(run.start, again.start) and np.array_equal(run.end, again.end)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_messages_are_posted_where_torch_posts_them(n: int) -> None:
    """For the pipeline, torch's own lowering of each device's tasks has its sends and receives in order of turns."""
    lowering = pytest.importorskip("torch.distributed.pipelining.schedules")
    action, types = lowering._Action, lowering._ComputationType
    program = simulate("pp-cdp", n).program
    tasks, messages, first = program.tasks, program.messages, len(program.tasks)
    computes: dict[int, list[Any]] = {device: [] for device in range(n)}
    for task in program.lane_tasks.tolist():
        kind = types.FORWARD if tasks.kind[task] == Kind.F else types.FULL_BACKWARD
        number = int(tasks.step[task]) * n + int(tasks.micro_batch[task])
        computes[int(tasks.device[task])].append(action(int(tasks.stage[task]), kind, number))
    turn, turns = streams.posting_turns(program), {}
    for row in range(len(messages)):
        forth = messages.content[row] == Content.ACTIVATION
        ends = ((messages.src[row], "SEND"), (messages.dst[row], "RECV"))
        number = int(messages.step[row]) * n + int(messages.micro_batch[row])
        for device, word in ends:
            kind = getattr(types, f"{word}_{'F' if forth else 'B'}")
            turns[action(int(device), kind, number)] = int(turn[first + row])
    lowered = lowering._add_send_recv({d: list(some) for d, some in computes.items()}, lambda stage: stage, n)
    for device, actions in lowered.items():
        order = [turns[one] for one in actions if one not in computes[device]]
        assert len(order) == sum(one.stage_index == device for one in turns)
        assert order == sorted(order)


@given(met_requests(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_rule_and_law_holds(request: dict[str, Any], expand: bool) -> None:
    """No deadlock, nothing out of turn, memory freed; expanded too. Edges are no more than a few for each node.

    Two exchanges of data ranks may follow each other in a queue and in the stream of a device.
    """
    if expand:
        request = taken(request | {"expand_collectives": True})
    run = simulate(**request)
    check_program(run.program)
    assert violations(run) == {}
    added = run.program.edges.kind == EdgeKind.STREAM
    assert added.sum() <= 5 * run.program.nodes
    starts = np.stack([run.program.edges.before[added], run.program.edges.after[added]])
    assert len(np.unique(starts, axis=1).T) * (1 + run.program.state.streams) >= added.sum()


@given(met_requests())
@settings(max_examples=100, deadline=None)
def test_what_devices_do_beside_each_other(request: dict[str, Any]) -> None:
    """Under "none" no task runs while a message of its device does; a collective has its device's stream for itself."""
    run = simulate(**request)
    overlaps, program, count = request["cluster"].overlaps(run.program.devices), run.program, len(run.program.tasks)
    for device, word in enumerate(overlaps):
        messages = [node for node in range(count, program.nodes) if device in ends_of(program, node)]
        tasks = np.flatnonzero((program.tasks.device == device) & (program.tasks.kind != Kind.U)).tolist()
        for one in messages if word != "full" else []:
            collective = program.messages.op[one - count] != Op.P2P
            beside = (tasks if word == "none" else []) + (messages if collective else [])
            for other in (node for node in beside if node != one):
                assert run.end[one] <= run.start[other] or run.end[other] <= run.start[one]


def ends_of(program: Program, node: int) -> list[int]:
    """The devices that send, receive or take part."""
    messages, row = program.messages, node - len(program.tasks)
    if messages.op[row] == Op.P2P:
        return [int(messages.src[row]), int(messages.dst[row])]
    members: list[int] = program.groups[messages.dst[row]].tolist()
    return members


@given(met_requests())
@settings(max_examples=100, deadline=None)
def test_a_meeting_is_only_waited_for(request: dict[str, Any]) -> None:
    """Nothing is earlier than where everything overlaps."""
    before, run = simulate(**whole(request)), simulate(**request)
    assert are_no_later(before.start, run.start)


def vars_of(group: Devices) -> dict[str, Any]:
    """The fields of a group of devices."""
    return {name: getattr(group, name) for name in group.__struct_fields__}


@given(met_requests(where=passing))
@settings(max_examples=100, deadline=None)
def test_a_deferred_receive_comes_after_the_task_before_its_reader(request: dict[str, Any]) -> None:
    """The input of a task starts to arrive when its device has done the task before it in the lane."""
    request |= {"rendezvous": "megatron"}
    run = simulate(**request)
    program, messages = run.program, run.program.messages
    previous = dict(zip(*(ends.tolist() for ends in program.lane_edges[::-1]), strict=True))
    for row in np.flatnonzero(messages.content <= Content.ACTIVATION_GRADIENT).tolist():
        forth = messages.content[row] == Content.ACTIVATION
        phase = messages.stage[row] + 1 if forth else 2 * program.n - messages.stage[row]
        reader = int(program.find_pass(messages.step[row], messages.micro_batch[row]) * program.phases + phase)
        assert program.tasks.device[reader] == messages.dst[row]
        if reader in previous:
            assert run.start[len(program.tasks) + row] >= run.end[previous[reader]]


@given(alike(where=meeting), st.sampled_from(RENDEZVOUS))
@settings(max_examples=60, deadline=None)
def test_expanded_collectives_are_never_later_than_in_one_piece(wanted: dict[str, Any], how: Rendezvous) -> None:
    """A collective's messages keep its turn; a member is done with it, and goes on, with its own last one."""
    groups = (Devices(**{**vars_of(wanted["cluster"].devices[0]), "overlap": "none"}),)
    wanted |= {"cluster": replace_devices(wanted["cluster"], groups), "rendezvous": how}
    one, many = (simulate(**taken(wanted | {"expand_collectives": expand})).whole for expand in (False, True))
    count = len(one.program.tasks)
    assert (many.end[:count] <= one.end[:count] * (1 + 1e-9)).all()


def test_groups_of_devices_differ() -> None:
    """Device 1 computes and communicates in turn, device 0 side by side: as by hand above, under "none"."""
    groups = (Devices(count=1), Devices(count=1, overlap="none"))
    trace = simulate("pp-cdp", 2, steps=1, model=EVEN, cluster=Cluster(devices=groups, link=HALF), rendezvous="torch")
    assert makespan(trace) == 10.5
    groups = (Devices(count=1, overlap="none"), Devices(count=1))
    trace = simulate("pp-cdp", 2, steps=1, model=EVEN, cluster=Cluster(devices=groups, link=HALF), rendezvous="torch")
    assert makespan(trace) == 10.0  # device 0 is idle when messages come and go


@pytest.mark.parametrize("how", RENDEZVOUS)
def test_a_buffer_is_there_while_its_message_is_on_its_way(how: Rendezvous) -> None:
    """Received data takes memory from the start of its message, however late that is, until it is read."""
    stage = Stage(forward=1.0, backward=2.0, boundary=10, activation=10)
    wanted: dict[str, Any] = {"model": Model(stages=(stage,) * 3), "cluster": on(), "steps": 2}
    trace = simulate("pp-cdp", 3, **wanted, rendezvous=how)
    curve, messages = trace.memory, trace.messages
    for row in range(len(messages["start"])):
        rows = (curve["device"] == messages["dst"][row]) & (curve["category"] == "communication")
        assert curve["size"][rows][curve["time"][rows] <= messages["start"][row]][-1] >= messages["size"][row]


def test_a_trace_of_both_ends_is_opened_again(tmp_path: Any) -> None:
    """Its request says how it was made."""
    trace = simulate("pp-cdp", 3, model=LONG_FIRST, cluster=on(), rendezvous="megatron")
    trace.save(tmp_path / "a")
    assert trace.request["rendezvous"] == "megatron"
    again = reopen(tmp_path / "a")
    assert isinstance(again, Run) and np.array_equal(again.start, trace.start)
    plain = simulate("pp-cdp", model=LONG_FIRST, cluster=on("full"))
    assert "rendezvous" not in plain.request
    assert "overlap" not in str(plain.request)


def _no_wait_for(kind: str) -> Any:
    """Batches without the edges of a kind."""

    class Forgetful(streams._Batches):
        def in_turn(self) -> Any:
            return tuple(ends[:0] if kind == "messages" else ends for ends in super().in_turn())

        def beside_tasks(self, program: Program, *how: Any) -> Any:
            before, after = super().beside_tasks(program, *how)
            task = (after if kind == "to-tasks" else before) < len(program.tasks)
            keep = ~task if kind in ("to-tasks", "from-tasks") else np.ones_like(task)
            return before[keep], after[keep]

    return Forgetful


def _turns(without: str) -> Any:
    """Turns that forget what is deeper, or which collective comes first, or are turned around."""

    def wrong(program: Program) -> Any:
        time, depth = streams._unit_run(program)
        alone = np.zeros_like(time)
        first, together = len(program.tasks), np.flatnonzero(program.messages.op != Op.P2P)
        alone[first + together] = 1 + together
        if without:
            alone[first + together] = 0 if without == "collectives" else len(together) - together
        key = np.stack([time, depth, alone])
        return np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)

    return wrong


MET: dict[str, Any] = {"steps": 1, "cluster": on(), "rendezvous": "torch"}
BY_HAND: dict[str, dict[str, Any]] = {
    "pipeline": MET | {"schedule": "pp-cdp", "n": 2, "model": EVEN},
    "deferred": MET | {"schedule": "mp-cdp", "n": 3, "model": LONG_FIRST, "rendezvous": "megatron"},
    "blocked": MET | {"schedule": "mp-cdp", "n": 3, "model": LONG_FIRST},
    "collectives": MET | {"schedule": "multi-dp", "n": 2, "model": EVEN},
    "pairs": MET | {"schedule": "multi-cdp", "n": 2, "model": EVEN, "steps": 3, "rule": "cdp-v1", "prefetch": 9},
}
FAULTS = {
    "messages": ("blocked", "_Batches", _no_wait_for("messages")),
    "to-tasks": ("blocked", "_Batches", _no_wait_for("to-tasks")),
    "from-tasks": ("pipeline", "_Batches", _no_wait_for("from-tasks")),
    "collectives": ("collectives", "posting_turns", _turns("collectives")),
    "order": ("collectives", "posting_turns", _turns("order")),
    "pairs": ("pairs", "posting_turns", _turns("")),
    "room": ("deferred", "defer_receives", lambda program: program),
}


@pytest.mark.every_case
@pytest.mark.parametrize("fault", [*FAULTS, "none"])
def test_the_player_notices_each_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is left out or turned around in `cdpsim.program.streams`, and nothing is if there is no fault."""
    for name in BY_HAND if fault == "none" else [FAULTS[fault][0]]:
        request = BY_HAND[name]
        plain = simulate(**whole(request))
        overlaps = request["cluster"].overlaps(plain.program.devices)
        if fault != "none":
            _, what, wrong = FAULTS[fault]
            monkeypatch.setattr(streams if what == "_Batches" else assembling, what, wrong)
        start, _ = play(plain, overlaps, request.get("rendezvous") == "megatron")
        assert (simulate(**request).start.tolist() == start) == (fault == "none")


def test_a_picture_tells_of_streams() -> None:
    """In the case by hand above: device 3's lane waits for its stream from 11, when the gradient is made, to 14.5.

    Then for the gradient itself, until 15.
    """
    trace = simulate("mp-cdp", 3, steps=1, model=LONG_FIRST, cluster=on(), rendezvous="torch")
    picture = drawn(gantt(trace))
    assert any("waiting for a stream" in words for words in picture.said())
    shape, frame = picture.shapes["idle-stream"], picture.shapes["frame"]
    scale = (frame.right - frame.left) / makespan(trace)
    left = [x for x, _ in shape.points]
    assert any(abs(x - frame.left - 11.0 * scale) < 0.1 for x in left)
    assert any(abs(x - frame.left - 14.5 * scale) < 0.1 for x in left)
    without = drawn(gantt(simulate("mp-cdp", 3, steps=1, model=LONG_FIRST))).said()
    assert not any("waiting for a stream" in words for words in without)


def test_what_a_task_sends_goes_before_an_update() -> None:
    """Stage 1 of three updates for 1 s beside the message of its gradient: a step has six passes and four messages."""
    stages = [Stage(forward=1.0, backward=1.0, update=1.0 if j == 1 else None) for j in range(3)]
    for how in RENDEZVOUS:
        run = simulate("1f1b", 3, m=1, steps=1, model=Model(stages=tuple(stages)), cluster=on(), rendezvous=how)
        assert makespan(run) == 6 * 1.0 + 4 * 0.5

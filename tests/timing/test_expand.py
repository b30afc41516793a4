"""Collectives run as their messages: the same times where links and devices are alike, never later ones elsewhere."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, Trace, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Devices, Link
from cdpsim.cluster.topology import Cable, Topology
from cdpsim.files.units import Work
from cdpsim.invariants import violations
from cdpsim.program import Category, Content, Op
from cdpsim.program.check import check_program
from cdpsim.program.collectives import COLLECTIVES, algorithm
from cdpsim.schedules import TABLE_1
from cdpsim.timing.expand import expand, unroll
from tests.helpers.strategies import DIVISIBLE, REPLICAS, alike, evenly, fitting, requests, taken, without_rounds

COLLECTIVE = [
    name for name in SCHEDULES if (SCHEDULES[name].order.together and name != "single-dp") or REPLICAS[name] > 1
]

ROOTED = ("tree", "hierarchical")  # collectives in which a member has the sum before it goes to the others


def bytes_sent(trace: Trace) -> list[int]:
    """Return the bytes that each device puts on the wire."""
    return [row["bytes"] for row in trace.summary()["bytes_sent"]]


@given(alike(where=without_rounds))
@settings(max_examples=120, deadline=None)
def test_a_collective_and_its_messages_take_the_same_time(wanted: dict[str, Any]) -> None:
    """To the last round, and every byte is sent by the device that sent it in one piece.

    How much workers compute until a message is through depends on the last bit of its time. A root has a sum
    before the others: where it has another stage's next task, as in pipelines of two directions, it goes on with that.
    """
    whole, parts = simulate(**wanted), simulate(**taken(wanted | {"expand_collectives": True}))
    if wanted["schedule"] in ("gems", "chimera", "dualpipe") and wanted["collective"] in ROOTED:
        assert parts.makespan <= whole.makespan * (1 + 1e-9)
    else:
        assert np.isclose(whole.summary()["makespan"], parts.summary()["makespan"], rtol=1e-9)
    assert bytes_sent(whole) == bytes_sent(parts)
    assert (parts.messages["op"] == "p2p").all()
    if set(whole.messages["op"]) - {"p2p"}:
        assert {**whole.request, "expand_collectives": True} == parts.request


@given(requests())
@settings(max_examples=120, deadline=None)
def test_an_expanded_program_keeps_every_rule(wanted: dict[str, Any]) -> None:
    """With uneven stages, devices and links; both engines agree, and payloads are cut with a rest, too."""
    slots = {} if "model" in wanted else {"collective": "tree"}  # one part: it goes into slots
    wanted = taken(wanted | {"expand_collectives": True} | slots)
    trace = simulate(**wanted)
    check_program(trace.program)
    assert violations(trace) == {}
    again = simulate(**wanted, engine="simpy")
    assert np.array_equal(trace.end, again.end)


@given(alike(where=without_rounds), st.lists(st.floats(0.1, 10.0), min_size=49, max_size=49))
@settings(max_examples=60, deadline=None)
def test_nothing_is_later_than_in_one_piece(wanted: dict[str, Any], speeds: list[float]) -> None:
    """Devices that differ: a member goes on with the last message that reaches it, which others may not have yet.

    In rounds it may so make fewer micro-batches.
    """
    model = wanted["model"]

    stages = (
        Stage(forward=Work(1.0), backward=Work(2.0), weight_backward=Work(1.0), parameters=one.parameters)
        for one in model.stages
    )
    devices = tuple(Devices(count=1, speed=speed) for speed in speeds)
    uneven = wanted | {
        "model": Model(stages=tuple(stages)),
        "cluster": Cluster(devices=devices, link=Link(latency=0.5)),
    }
    whole, parts = simulate(**uneven), simulate(**taken(uneven | {"expand_collectives": True}))
    count = len(whole.program.tasks) if whole else 0
    assert (parts.end[:count] <= whole.end[:count] * (1 + 1e-9)).all()


@pytest.mark.every_case
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_each_all_reduce_lasts_as_long_as_its_algorithm(n: int, collective: str) -> None:
    """From its first message to its last, in multi-dp's only step: all stages' all-reduces begin at once."""
    link = Link(latency=0.25, bandwidth=1e8)
    model = evenly(n, [1.0] * n)
    wanted: dict[str, Any] = {"model": model, "cluster": Cluster(link=link), "collective": collective, "steps": 1}
    whole, parts = simulate("multi-dp", n, **wanted), simulate("multi-dp", n, **wanted, expand_collectives=True)
    for stage in range(n):
        one, many = (trace.messages["stage"] == stage for trace in (whole, parts))
        assert whole.messages["start"][one].min() == parts.messages["start"][many].min()
        assert np.isclose(whole.messages["end"][one].max(), parts.messages["end"][many].max(), rtol=1e-12)


def test_stages_of_a_hierarchy_follow_one_another() -> None:
    """Wide links inside nodes of three and one, narrow ones between them: as in one piece."""
    wide, narrow = Cable(latency=5e-7, bandwidth=1e11), Cable(latency=5e-6, bandwidth=1e9)
    topology = Topology(kind="nodes", per_node=3, link=wide, network=narrow)
    cluster = Cluster(devices=(Devices(count=6),), topology=topology)
    wanted: dict[str, Any] = {"model": evenly(4, [1.0] * 4), "cluster": cluster, "collective": "hierarchical"}
    whole, parts = (simulate("multi-dp", 4, **wanted, expand_collectives=expanded) for expanded in (False, True))
    assert np.isclose(whole.summary()["makespan"], parts.summary()["makespan"], rtol=1e-12)
    between = (parts.messages["src"] == 3) | (parts.messages["dst"].astype(int) == 3)
    size = parts.messages["size"][between]
    ways = {(int(m), int(n)) for m, n in zip(*(parts.messages[c][between] for c in ("src", "dst")), strict=True)}
    assert ways == {(0, 3), (3, 0)}
    assert set(size.tolist()) == {DIVISIBLE * 4}  # two halves there, two back


@pytest.mark.parametrize("collective", ["tree", "recursive-doubling"])
@pytest.mark.parametrize("name", COLLECTIVE)
def test_devices_hold_as_much_at_their_peaks(name: str, collective: str) -> None:
    """In every category the same; in all no more, since not all of them wait for the last one.

    In pipelines those that go on hand over boundaries earlier, which so meet others: there stages have none.
    """
    wanted = taken(fitting(name, 4) | {"replicas": REPLICAS[name], "collective": collective})
    stages = evenly(4, [1.0, 2.0, 1.0, 3.0]).stages
    without = () if name in TABLE_1 else ("boundary",)
    wanted["model"] = Model(stages=tuple(replace(stage, **dict.fromkeys(without, 0)) for stage in stages))
    wanted["cluster"] = Cluster(link=Link(latency=0.25, bandwidth=1e8))
    whole, parts = (
        simulate(**taken(wanted | {"expand_collectives": expanded})).summary() for expanded in (False, True)
    )
    for one, other in zip(whole["peak_memory"], parts["peak_memory"], strict=True):
        assert one.pop("total") >= other.pop("total")
        assert one == other


def test_three_members_of_a_broadcast_by_hand() -> None:
    """Root to 1, then root to 2: 1 has it a round earlier, and goes on."""
    stage = Stage(forward=1.0, backward=1.0, parameters=100)
    cluster = Cluster(link=Link(latency=0.5, bandwidth=100.0))
    trace = simulate("zero-dp", 3, steps=1, model=Model(stages=(stage,) * 3), cluster=cluster, expand_collectives=True)
    first = trace.messages["stage"] == 0
    columns = (trace.messages[name][first].tolist() for name in ("content", "src", "dst", "start", "end"))
    rows = list(zip(*columns, strict=True))
    assert rows[:2] == [("parameters", 0, 1, 0.0, 1.5), ("parameters", 0, 2, 1.5, 3.0)]
    forward = (trace.tasks["kind"] == "F") & (trace.tasks["stage"] == 0)
    starts = dict(zip(trace.tasks["device"][forward].tolist(), trace.tasks["start"][forward].tolist(), strict=True))
    assert starts == {0: 3.0, 1: 1.5, 2: 3.0}  # the root is done with sending when its last message has gone


def test_a_member_holds_what_it_has_to_hand_on() -> None:
    """Root to 1 in the first second, then root to 2 and 1 to 3: 1 uses its copy until 1.25 s, and has it until 2 s.

    The other 100 bytes are its own stage's.
    """
    stage = Stage(forward=0.25, backward=0.25, parameters=100, gradients=0)
    cluster = Cluster(link=Link(bandwidth=100.0))
    trace = simulate("zero-dp", 4, steps=1, model=Model(stages=(stage,) * 4), cluster=cluster, expand_collectives=True)
    forward = (trace.tasks["device"] == 1) & (trace.tasks["stage"] == 0) & (trace.tasks["kind"] == "F")
    assert trace.tasks["end"][forward].tolist() == [1.25]
    held = (trace.memory["device"] == 1) & (trace.memory["category"] == "parameters") & (trace.memory["time"] < 3)
    assert trace.memory["time"][held].tolist() == [0.0, 1.0, 2.0]
    assert trace.memory["size"][held].tolist() == [100, 200, 100]


def test_two_members_of_a_ring_exchange_halves() -> None:
    """An odd number of bytes: one half is a byte larger."""
    stage = Stage(forward=1.0, backward=1.0, parameters=101)
    cluster = Cluster(link=Link(latency=0.5, bandwidth=100.0))
    model = Model(stages=(stage,) * 2)
    trace = simulate("multi-dp", 2, steps=1, model=model, cluster=cluster, collective="ring", expand_collectives=True)
    first = trace.messages["stage"] == 0
    sizes = trace.messages["size"][first].tolist()
    assert sorted(sizes) == [50, 50, 51, 51]
    assert bytes_sent(trace) == [202, 202]


def test_messages_wait_for_what_they_carry_on() -> None:
    """In a ring each part comes by way of all members before."""
    layout = unroll(algorithm(Op.ALL_REDUCE, "ring"), 4)
    before, after = layout.data
    assert (layout.rounds.dst[before] == layout.rounds.src[after]).all()
    assert (layout.rounds.first[before] == layout.rounds.first[after]).all()
    assert layout.begins.tolist() == layout.original.tolist() == [0, 1, 2, 3]
    assert [len(messages) for messages in layout.received] == [6] * 4


def test_a_program_without_collectives_stays_as_it_is() -> None:
    """Cyclic schedules have none, and one device has no other to exchange with."""
    for name, n in (("multi-cdp", 3), ("multi-dp", 1)):
        run = simulate(name, n)
        assert expand(run.program, run.costs, run.request.cluster)[0] is run.program


def test_slots_cannot_be_cut() -> None:
    """A stage's worth is one; trees and recursive doubling send it whole."""
    with pytest.raises(RequestError, match="expand-collectives: cuts a stage's worth into 3 parts"):
        simulate("multi-dp", 3, collective="ring", expand_collectives=True)
    assert bytes_sent(simulate("multi-dp", 3, expand_collectives=True)) == bytes_sent(simulate("multi-dp", 3))


def test_an_expanded_trace_is_opened_again(tmp_path: Any) -> None:
    """Its request says how it was made."""
    trace = simulate("zero-dp", 3, expand_collectives=True)
    trace.save(tmp_path / "a")
    assert reopen(tmp_path / "a") is not None


def test_messages_that_are_of_no_collective_take_what_they_took() -> None:
    """Boundaries, and updates, of two replicas of a pipeline whose all-reduces run as messages."""
    stage = Stage(forward=1.0, backward=1.0, update=0.5, boundary=3, parameters=8)
    asked: dict[str, Any] = {"model": Model(stages=(stage,) * 2), "cluster": Cluster(link=Link(bandwidth=1.0))}
    runs = [simulate("1f1b", replicas=2, steps=1, **asked, expand_collectives=way) for way in (False, True)]
    whole, pieces = (run.whole for run in runs)
    assert whole is not None and pieces is not None
    kept = pieces.costs.duration[: len(whole.program.tasks) + int((whole.program.messages.op == Op.P2P).sum())]
    assert sorted(set(kept.tolist())) == [0.5, 1.0, 3.0]


def test_what_a_rank_has_encoded_stays_until_it_has_been_sent() -> None:
    """In a binomial reduction an inner rank receives before it sends."""
    stage = Stage(forward=1.0, backward=2.0, activation=4, boundary=4, parameters=4096)
    cluster = Cluster(devices=(Devices(),), link=Link(latency=1e-3, bandwidth=1e4))
    asked: dict[str, Any] = {"model": Model(stages=(stage,) * 4), "cluster": cluster, "compress": "int8", "steps": 1}
    run = simulate("zero-dp", 4, **asked, expand_collectives=True)
    program, messages, buffers = run.program, run.program.messages, run.program.buffers
    encoded = 1024 + 2 * 4  # a byte for each of 1,024 numbers, and two scales
    rows = np.flatnonzero((buffers.category == Category.COMMUNICATION) & (buffers.size == encoded))
    assert len(rows) == 4 * 4
    for row in rows.tolist():
        moments = [buffers.end[row], *buffers.kept_until[buffers.kept == row]]
        sent = (messages.src == buffers.device[row]) & (messages.stage == buffers.stage[row])
        sent &= messages.content == Content.GRADIENT
        ends = run.end[len(program.tasks) + np.flatnonzero(sent)]
        assert run.end[np.array(moments) // 2].max() >= ends.max(initial=0)

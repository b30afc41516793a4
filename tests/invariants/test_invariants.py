"""Every invariant holds in every run, and each has a seeded fault that it alone catches."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from cdpsim import Cluster, Model, Stage, Tie, price, simulate
from cdpsim import run as run_program
from cdpsim.cluster import Cable, Devices, Link, PairLink, Topology
from cdpsim.invariants import INVARIANTS, violations
from cdpsim.program import NO_PARTS, Category, Content, EdgeKind, Edges, Kind, Messages, Op, Program
from cdpsim.program.assembly import derive
from cdpsim.runs import Run
from cdpsim.schedules.rule import find_rule
from cdpsim.timing.engine import ENGINES
from tests.helpers.every_row import every_row
from tests.helpers.strategies import requests

Fault = Callable[[], Run]
LARGE = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=4000, optimizer=7),) * 3)
WEIGHTLESS = Model(stages=(Stage(forward=1.0, backward=1.0, activation=1),) * 3)
OLD = [[1, 1, 0], [1, 0, 0], [0, 0, 0]]  # what CDP-v2 reads


def sound(schedule: str = "multi-cdp", n: int = 3, **options: Any) -> Run:
    """A run with nothing wrong, of all replicas."""
    return simulate(schedule, n, **options).whole


def node(program: Program, name: str) -> int:
    """The first node whose description begins so."""
    return next(k for k in range(program.nodes) if program.describe(k).startswith(name))


def again(run: Run, program: Program) -> Run:
    """Run a changed program at the same costs."""
    start, end = ENGINES["fast"](program, run.costs)
    return replace(run, program=program, start=start, end=end)


def shifted(run: Run, name: str, start: float = 0, end: float = 0) -> Run:
    """Move the start and the end of one node."""
    starts, ends = run.start.copy(), run.end.copy()
    starts[node(run.program, name)] += start
    ends[node(run.program, name)] += end
    return replace(run, start=starts, end=ends)


def column(run: Run, table: str, name: str, rows: Any, values: Any) -> Run:
    """Change a column of the program's tasks, messages or buffers."""
    part = getattr(run.program, table)
    changed = getattr(part, name).copy()
    changed[rows] = values
    return replace(run, program=replace(run.program, **{table: replace(part, **{name: changed})}))


def message(run: Run, name: str) -> int:
    """The row of a message."""
    return node(run.program, name) - len(run.program.tasks)


def without_edge(program: Program, before: str, after: str) -> Program:
    """Take one dependency away."""
    edges = program.edges
    keep = (edges.before != node(program, before)) | (edges.after != node(program, after))
    assert keep.sum() == len(keep) - 1
    return replace(program, edges=Edges(edges.before[keep], edges.after[keep], edges.kind[keep]))


def without_buffer(run: Run, category: Category, **where: int) -> Run:
    """Take one buffer away, by letting it weigh nothing."""
    buffers = run.program.buffers
    rows = np.flatnonzero(
        np.logical_and.reduce([buffers.category == category, *(getattr(buffers, k) == v for k, v in where.items())])
    )
    return column(run, "buffers", "size", rows[:1], 0) if category == Category.ACTIVATIONS else _cut(run, rows[:1])


def _cut(run: Run, rows: Any) -> Run:
    """Let buffers end where they begin."""
    run = column(run, "buffers", "end", rows, run.program.buffers.begin[rows])
    kept = ~np.isin(run.program.buffers.kept, rows)
    buffers = replace(
        run.program.buffers,
        kept=run.program.buffers.kept[kept],
        kept_until=run.program.buffers.kept_until[kept],
    )
    return replace(run, program=replace(run.program, buffers=buffers))


def infinite() -> Run:
    """One replica's last update never happens; its cost is as endless, so that nothing else is wrong with it."""
    name = "U(t=2,j=2) on device 2"
    run = shifted(sound("multi-dp", model=WEIGHTLESS), name, end=np.inf)
    return lasting(run, name, np.inf)


def lasting(run: Run, name: str, longer: float) -> Run:
    """Let a node cost more."""
    duration = run.costs.duration.copy()
    duration[node(run.program, name)] += longer
    return replace(run, costs=replace(run.costs, duration=duration))


def overlapping_tasks() -> Run:
    """On one lane, a task begins while another micro-batch's task before it still runs."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0),) * 2)
    run = sound("single-cdp", 2, cluster=Cluster(devices=(Devices(),)), model=model)
    edges, (before, after) = run.program.edges, run.program.lane_edges
    needed = np.zeros_like(run.start)
    np.maximum.at(needed, edges.after, run.end[edges.before])
    last = np.flatnonzero((run.start[after] == run.end[before]) & (needed[after] < run.start[after]))[-1]
    name = run.program.describe(int(after[last]))
    return lasting(shifted(run, name, start=-0.5), name, 0.5)


def streaming(overlap: str = "stream", **more: Any) -> Run:
    """Under cdp-v1 device 1 has both new versions at 9 s, and sends one after another, long before they are read."""
    model, devices = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=1),) * 2), (Devices(overlap=overlap),)
    cluster = Cluster(devices=devices, link=Link(latency=0.5))
    return sound("multi-cdp", 2, model=model, cluster=cluster, rule="cdp-v1", prefetch=9, **more)


def without_parts() -> Run:
    """Messages take nothing of devices that overlap nothing."""
    run = sound("multi-dp", model=WEIGHTLESS, cluster=Cluster(devices=(Devices(overlap="none"),)))
    first, edges = run.program.message_nodes.stop, run.program.edges
    rows = np.flatnonzero(edges.kind != EdgeKind.STREAM)
    fewer = Edges(edges.before[rows], edges.after[rows], edges.kind[rows])
    program = replace(run.program, edges=fewer, parts=NO_PARTS)
    costs = replace(run.costs, duration=run.costs.duration[:first])
    return replace(run, program=program, costs=costs, start=run.start[:first], end=run.end[:first])


def channels_one_after_another() -> Run:
    """Two rings, each over a card of its own, take their devices as if there were one."""
    topology = Topology(kind="nodes", per_node=2, nics=2, link=Cable(bandwidth=1e9), network=Cable(bandwidth=1e9))
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=8000),))
    cluster = Cluster(devices=(Devices(overlap="none"),), topology=topology)
    run = sound("multi-dp", 1, model=model, cluster=cluster, m=4, collective="ring", expand_collectives=True)
    parts = run.program.parts
    assert parts.channel.any()
    return replace(run, program=replace(run.program, parts=replace(parts, channel=np.zeros_like(parts.channel))))


def host_updates_without_time() -> Run:
    """Hosts whose updates take nothing keep no order, which streams would keep, too."""
    stages = (Stage(forward=1.0, backward=1.0, parameters=1, host_optimizer=1),) * 4
    cluster = Cluster(devices=(Devices(overlap="none"),), host=Link())
    rule = [[1, 2, 1, 1], [1, 2, 0, 1], [1, 1, 2, 1], [2, 0, 0, 1]]
    return sound("multi-cdp", 4, model=Model(stages=stages), cluster=cluster, rule=rule)


def test_hosts_make_updates_that_take_no_time_in_any_order() -> None:
    assert violations(host_updates_without_time()) == {}


def backward_ahead_of_its_version() -> Run:
    """A backward that reads another version than its forward reads one that stays where it is made: the last."""
    run = sound(rule={"lags": [[2] * 3] * 3, "backward": [[1] * 3] * 3})
    return column(run, "tasks", "version", node(run.program, "B(t=1,i=1,j=1)"), 3)


def stages_swapped() -> Run:
    """A lane does stage 1 before stage 0, and nothing says that it may not."""
    run = sound("single-dp", 3)
    program = without_edge(run.program, "F(t=0,i=0,j=0)", "F(t=0,i=0,j=1)")
    program = without_edge(program, "F(t=0,i=0,j=1)", "F(t=0,i=0,j=2)")
    order = program.lane_tasks.copy()
    order[[0, 1]] = order[[1, 0]]
    return again(run, replace(program, lane_tasks=order))


def update_too_early() -> Run:
    """An update of a state that travels waits for the task before the last backward, not for that."""
    run = sound("zero-cdp", 3, model=WEIGHTLESS)
    program = without_edge(run.program, "B(t=2,i=2,j=0)", "U(t=2,j=0)")
    return again(run, with_edge(program, node(program, "B(t=2,i=2,j=1)"), node(program, "U(t=2,j=0)")))


def with_edge(program: Program, before: int, after: int) -> Program:
    """Add a dependency."""
    edges = program.edges
    ends = (np.append(edges.before, before), np.append(edges.after, after), np.append(edges.kind, EdgeKind.DATA))
    return replace(program, edges=Edges(*ends))


def doubled_gradient() -> Run:
    """One gradient is added twice."""
    run = sound("multi-dp")
    before, after = (node(run.program, name) for name in ("B(t=1,i=1,j=1)", "all_reduce gradient(t=1,j=1)"))
    return again(run, with_edge(run.program, before, after))


def versions_swapped() -> Run:
    """The last two updates of a stage make each other's version; no forward reads either."""
    run = sound("multi-cdp", rule="cdp-v1")
    rows = [node(run.program, f"U(t={t},j=1)") for t in (1, 2)]
    swapped = column(run, "tasks", "version", rows, [3, 2])
    base = swapped.program.tasks.version[run.program.compute :] - 1
    return replace(swapped, program=replace(swapped.program, base=base))


def released_later() -> Run:
    """A micro-batch may start a slot later than it does."""
    run = sound()
    return replace(run, costs=replace(run.costs, release=run.costs.release + np.array([0, 1])))


def read_by_backward() -> Run:
    """A backward reads another version than its forward."""
    run = sound(model=WEIGHTLESS, steps=2)
    run = column(run, "tasks", "version", node(run.program, "B(t=1,i=2,j=0)"), 0)
    return asked(run, {"lags": OLD, "backward": [*OLD[:2], [1, 0, 0]]})


def asked(run: Run, rule: object) -> Run:
    """Let the request say another rule."""
    return replace(run, request=run.request._changed(rule=find_rule(rule)))


def read_by_both(t: int, version: int) -> Run:
    """A forward and its backward agree on a wrong version, in the last step."""
    run = sound(model=WEIGHTLESS, steps=t + 1)
    rows = [node(run.program, f"{kind}(t={t},i=0,j=0)") for kind in "FB"]
    return column(run, "tasks", "version", rows, version)


def freed_before_held() -> Run:
    """A gradient's buffer begins and ends the wrong way round."""
    run = sound("multi-dp")
    rows = np.flatnonzero(run.program.buffers.category == Category.GRADIENTS)[:1]
    begin, end = run.program.buffers.begin[rows], run.program.buffers.end[rows]
    return column(column(run, "buffers", "begin", rows, end), "buffers", "end", rows, begin)


def fewer_devices() -> Run:
    """The program says that it has a device less."""
    run = sound("multi-dp", model=WEIGHTLESS)
    return replace(run, program=replace(run.program, devices=2))


def unhindered() -> Run:
    """Messages pass through the links that they share as if each were alone there."""
    network = Cable(latency=1e-3, bandwidth=1e9)
    cluster = Cluster(devices=(Devices(count=4),), topology=Topology(kind="switch", link=network))
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=10**9),) * 4)
    sharing, free = (
        sound("multi-dp", 4, model=model, cluster=cluster, expand_collectives=True, contention=how)
        for how in ("fair", "none")
    )
    return replace(free, costs=sharing.costs)


def hurried_messages() -> Run:
    """Messages that share a link take three quarters of the time that they need there."""
    cluster = Cluster(devices=(Devices(count=4),), topology=Topology(kind="switch", link=Cable(bandwidth=1e9)))
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=10**9),) * 4)
    run = sound("multi-dp", 4, model=model, cluster=cluster, contention="fair", expand_collectives=True)
    sent = slice(len(run.program.tasks), run.program.message_nodes.stop)
    end = run.end.copy()
    end[sent] -= (run.end[sent] - run.start[sent]) / 4
    return replace(run, end=end)


def without(run: Run, before: str, after: str) -> Run:
    """Run again without a dependency."""
    return again(run, without_edge(run.program, before, after))


def unhurried(schedule: str, n: int = 3, **options: Any) -> Run:
    """A run of stages that weigh nothing, whose messages take half a task each."""
    return sound(schedule, n, **({"model": WEIGHTLESS, "cluster": Cluster(link=Link(latency=0.5))} | options))


def ignored_dependency() -> Run:
    """A dependency that nothing but the program asks for is not kept."""
    run = sound("multi-dp")
    ends = (node(run.program, name) for name in ("U(t=2,j=0)", "F(t=0,i=0,j=0)"))
    return replace(run, program=with_edge(run.program, *ends))


def updated_before_the_sum() -> Run:
    """An update waits for its own device's gradient and not for the sum of all."""
    run = unhurried("multi-dp")
    name = "U(t=2,j=2) on device 0"
    program = without_edge(run.program, "all_reduce gradient(t=2,j=2)", name)
    return again(run, with_edge(program, node(program, "B(t=2,i=0,j=0)"), node(program, name)))


def given_twice() -> Run:
    """A device gives its gradient away twice, and another one its not at all."""
    run = sound()
    return column(run, "messages", "src", message(run, "p2p gradient(t=1,j=0) 1->2"), 0)


def round_skipped() -> Run:
    """In the second round of a ring device 0 passes on what is still on its slow way from device 1."""
    cluster = Cluster(link=Link(latency=0.5), links=(PairLink(between=(0, 1), latency=2.0),))
    run = unhurried("multi-dp", cluster=cluster, expand_collectives=True, collective="ring", steps=1)
    edges, first = run.program.edges, len(run.program.tasks)  # three messages a round: 1->0, 2->1, 0->2
    keep = (edges.before != first) | (edges.after != first + 5)
    fewer = Edges(edges.before[keep], edges.after[keep], edges.kind[keep])
    return again(run, replace(run.program, edges=fewer))


def hurried_host() -> Run:
    """A host makes two updates at once."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, host_optimizer=1, host_update=2.0),) * 3)
    return without(sound("single-dp", model=model), "U(t=2,j=1)", "U(t=2,j=2)")


def brought_twice() -> Run:
    """The first message of a version comes once more, between the same nodes."""
    run = sound(model=WEIGHTLESS)
    old, edges, request = run.program, run.program.edges, run.request
    row, new = message(run, "p2p parameters(t=0,j=2) 0->1"), old.nodes
    node = len(old.tasks) + row
    into, out = edges.after == node, edges.before == node
    before = np.concatenate([edges.before, edges.before[into], np.full(out.sum(), new)])
    after = np.concatenate([edges.after, np.full(into.sum(), new), edges.after[out]])
    edges = Edges(before, after, np.concatenate([edges.kind, edges.kind[into], edges.kind[out]]))
    messages = (getattr(old.messages, each.name) for each in fields(old.messages))
    program = replace(old, messages=Messages(*(np.append(each, each[row]) for each in messages)), edges=edges)
    return again(replace(run, costs=price(program, request.model, request.cluster)), program)


def moved_too_early() -> Run:
    """A state leaves its user before that is done."""
    run = unhurried("zero-cdp", prefetch=9)
    return without(run, "F(t=1,i=0,j=1)", "p2p state(t=1,j=1) 0->2")


def left_behind() -> Run:
    """An optimizer state leaves for its next update before the one that it is at has been made."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, optimizer=1),) * 3)
    program = (run := unhurried("mp-cdp", model=model, prefetch=9)).program
    early, update, state = (node(program, name) for name in ("B(t=1,i=1,j=1)", "U(t=1,j=1)", "p2p state(t=1,j=1)"))
    program = without_edge(program, program.describe(update), program.describe(state))
    return again(run, with_edge(program, early, state))


def dropped_while_sent() -> Run:
    """A device lets a version go when its own tasks have read it, while it still sends it."""
    run = sound(model=Model(stages=(Stage(forward=1.0, backward=2.0, parameters=1),) * 3), cluster=SLOW_LINKS)
    buffers = run.program.buffers
    stay = buffers.kept_until >> 1 != node(run.program, "p2p parameters(t=0,j=2) 0->1")
    fewer = replace(buffers, kept=buffers.kept[stay], kept_until=buffers.kept_until[stay])
    return replace(run, program=replace(run.program, buffers=fewer))


def no_room_for_what_comes() -> Run:
    """A receiver does not count what is on its way."""
    run = sound(model=Model(stages=(Stage(forward=1.0, backward=2.0, parameters=1),) * 3), cluster=SLOW_LINKS)
    return without_buffer(run, Category.COMMUNICATION, device=1, stage=0, version=2)


def tying() -> Run:
    """The first and the last stage of a pipeline share a tensor."""
    stages = (Stage(forward=1.0, backward=1.0, parameters=5),) * 4
    return sound("chimera", 4, m=4, model=Model(stages=stages, tied=(Tie(stages=(0, 3), parameters=4),)))


def summed_elsewhere() -> Run:
    """The gradient of a shared tensor is summed over devices that do not have it."""
    run = tying()
    row = message(run, "all_reduce gradient(t=1,j=1)")
    return column(run, "messages", "dst", message(run, "all_reduce gradient(t=1)"), run.program.messages.dst[row])


def one_sum_less() -> Run:
    """A shared tensor's sum says that it is of a stage."""
    run = tying()
    return column(run, "messages", "stage", message(run, "all_reduce gradient(t=1)"), 0)


def sharing(**options: Any) -> Run:
    """Two ranks share the states of three layers, whose messages take half a task and more."""
    stages = tuple(Stage(forward=1.0, backward=2.0, parameters=size, optimizer=7) for size in (10, 15, 20))
    asked: dict[str, Any] = {"model": Model(stages=stages), "m": 2, "steps": 2, "shard": 2, "zero": 3}
    return sound("dp", 3, **asked | {"cluster": Cluster(link=Link(latency=0.1, bandwidth=20.0))} | options)


def summed_twice() -> Run:
    """The gradients of a stage between two others enter the sum of both of these, too."""
    run = sharing(zero=1, buckets="1 B")
    return column(run, "messages", "stages", message(run, "reduce_scatter gradient(t=1,j=0)"), 3)


def summed_in_part(less: int = 1, **options: Any) -> Run:
    """A sum of gradients has some bytes less."""
    run = sharing(zero=1, buckets="1 B", **options)
    row = message(run, "reduce_scatter gradient(t=1,j=1)")
    return column(run, "messages", "size", row, run.program.messages.size[row] - less)


def gathered_largest() -> Run:
    """A rank gathers the largest numbers of both, and one of these has left a number out."""
    run = sharing(zero=1, buckets="1 B", model=LARGE, compress="topk:0.1")
    row = message(run, "all_gather gradient(t=1,j=1)")
    return column(run, "messages", "size", row, run.program.messages.size[row] - 8 * len(LARGE.stages))


def summed_by_another_operation() -> Run:
    """The largest numbers of ranks go by an all-reduce."""
    run = sharing(zero=0, shard=None, replicas=2, buckets="1 B", model=LARGE, compress="topk:0.1")
    return column(run, "messages", "op", message(run, "all_gather gradient(t=1,j=1)"), Op.ALL_REDUCE)


def summed_by_others_too() -> Run:
    """Devices that do not have a shared tensor take part in its sum."""
    stages, ties = (Stage(forward=1.0, backward=1.0, parameters=5),) * 4, ((0, 1), (0, 1, 2, 3))
    model = Model(stages=stages, tied=tuple(Tie(stages=each, parameters=2) for each in ties))
    run = sound("gpipe", 4, replicas=2, model=model)
    rows = [message(run, "all_reduce gradient(t=1)") + 3 * k for k in range(2)]
    return column(run, "messages", "dst", rows[0], run.program.messages.dst[rows[1]])


def encoded_nowhere() -> Run:
    """A rank has no room for the numbers of one byte that it makes of its gradients."""
    run = sound("dp", 3, replicas=2, model=LARGE, cluster=SLOW_LINKS, compress="int8")
    rows = np.flatnonzero(run.program.buffers.category == Category.COMMUNICATION)
    return column(run, "buffers", "size", rows[:1], 0)


def without_residuals() -> Run:
    """A rank does not keep what the largest numbers leave of its gradients."""
    run = sound("dp", 3, replicas=2, model=LARGE, compress="topk:0.1")
    rows = np.flatnonzero((run.program.buffers.category == Category.COMMUNICATION) & (run.program.buffers.begin < 0))
    return column(run, "buffers", "size", rows[:1], 0)


def factoring(**options: Any) -> Run:
    """Two ranks sum matrices of 40 x 50 numbers by their factors, and vectors."""
    stage = Stage(forward=1.0, backward=2.0, parameters=8400, tensors=((40, 50), (100,)))
    asked: dict[str, Any] = {"model": Model(stages=(stage,) * 2, precision="fp32"), "compress": "powersgd:1"}
    return sound("dp", 2, replicas=2, cluster=SLOW_LINKS, **asked | options)


def factored_in_part(**options: Any) -> Run:
    """A right factor has some bytes less."""
    run = factoring(**options)
    row = message(run, "all_reduce gradient(t=1,j=0)")
    return column(run, "messages", "size", row, run.program.messages.size[row] - 8)


def right_before_left() -> Run:
    """Right factors go before left ones."""
    run = factoring(buckets="none")
    row = message(run, "all_reduce gradient(t=1,j=0)")
    return column(run, "messages", "size", [row, row + 1], run.program.messages.size[[row + 1, row]])


def without_factors() -> Run:
    """A rank keeps what factors leave of its gradients, but no factors."""
    run = factoring()
    rows = np.flatnonzero((run.program.buffers.category == Category.COMMUNICATION) & (run.program.buffers.begin < 0))
    return column(run, "buffers", "size", rows[:1], 8400)


def without_copies() -> Run:
    """A rank has no copy of the gradients that its factors stand for."""
    run = factoring(buckets="none")
    copies = (run.program.buffers.category == Category.COMMUNICATION) & (run.program.buffers.size == 8400)
    return column(run, "buffers", "size", np.flatnonzero(copies & (run.program.buffers.begin >= 0))[:1], 0)


def gathered_in_part() -> Run:
    """A gather brings less than the whole stage."""
    run = sharing()
    return column(run, "messages", "size", message(run, "all_gather parameters(t=0,j=1)"), 14)


def gathered_beside_updates() -> Run:
    """A rank gathers what it has updated while it updates the rest, and was not asked to."""
    stages = tuple(Stage(forward=1.0, backward=2.0, parameters=10, update=4.0) for _ in range(3))
    asked: dict[str, Any] = {"zero": 1, "buckets": "1 B", "model": Model(stages=stages)}
    return replace(sharing(gather="early", **asked), request=sharing(**asked).request)


def two_at_once() -> Run:
    """The last sum does not wait until the one before it has left the stream."""
    run = sharing(zero=1, buckets="1 B", cluster=Cluster(link=Link(latency=3.0)))
    return without(run, "reduce_scatter gradient(t=1,j=1)", "reduce_scatter gradient(t=1,j=0)")


def share_too_small() -> Run:
    """A rank has less than half of its optimizer states, all the time."""
    run = sharing()
    buffers = run.program.buffers
    rows = np.flatnonzero((buffers.category == Category.OPTIMIZER) & (buffers.device == 1) & (buffers.stage == 1))
    return column(run, "buffers", "size", rows, 2)


def ends_with_less() -> Run:
    """After its last update a rank has lost some of the parameters that it has copied."""
    run = sharing(zero=0, shard=None, replicas=2)
    buffers = run.program.buffers
    mine = (buffers.category == Category.PARAMETERS) & (buffers.stage == 1) & (buffers.version == 1)
    return column(run, "buffers", "size", np.flatnonzero(mine), 5)


def in_rounds(**options: Any) -> Run:
    """Two workers of ACCO, whose communications take as long as several micro-batches."""
    stage = Stage(forward=1.0, backward=1.0, parameters=8)
    cluster = Cluster(link=Link(bandwidth=1.0))
    return sound("acco", 1, replicas=2, steps=2, model=Model(stages=(stage,)), cluster=cluster, **options)


def locally(**options: Any) -> Run:
    """Two workers, one half as fast, that take the mean after two steps of their own."""
    stage = Stage(forward=1.0, backward=1.0, parameters=8)
    options |= {"model": Model(stages=(stage,)), "cluster": Cluster(link=Link(bandwidth=1.0)), "slow": {1: 2}}
    return sound("local-sgd", 1, replicas=2, steps=2, local_steps=2, **options)


def mean_of_an_older_version() -> Run:
    """A mean does not wait for the last step of the slower worker."""
    return without(locally(), "U(t=1,j=0) on device 1", "all_reduce parameters(t=1")


def mean_of_a_part() -> Run:
    """A mean is of half of the parameters."""
    return column(run := locally(), "messages", "size", message(run, "all_reduce parameters(t=3"), 4)


def waiting_worker() -> Run:
    """In the round that is thrown away a worker waits for the last communication before its last block."""
    run = in_rounds()
    tasks = run.program.tasks
    thrown = np.flatnonzero((tasks.step == run.program.steps - 1) & (tasks.device == 0) & (tasks.kind == Kind.F))
    program = with_edge(run.program, node(run.program, "all_gather parameters(t=3"), int(thrown[-1]))
    return again(run, program)


def longer_round() -> Run:
    """A worker computes a block more than it has to."""
    request = in_rounds().request
    counts = np.array(request.counts)
    counts[-1, 0] += 1
    request = request.with_rounds(counts)
    program = derive(request.schedule, request.model, request.steps, shape=request.shape, counts=counts)
    program = replace(program, request=request)
    return run_program(program, price(program, request.model, request.cluster))


def second_half_alone() -> Run:
    """An update of theta takes the second half of its mini-batch, and forgets the first one."""
    run = in_rounds()
    first = run.program.first_step.copy()
    first[-2:] += 1
    return replace(run, program=replace(run.program, first_step=first))


def from_an_estimate() -> Run:
    """An update of theta starts from the estimate of it."""
    run = in_rounds()
    base = run.program.base.copy()
    base[-2:] += 1
    return replace(run, program=replace(run.program, base=base))


SLOW_LINKS = Cluster(link=Link(latency=0.5))
FAULTS: dict[str, Fault] = {
    "links_carry_no_more_than_they_can": unhindered,
    "times_are_finite": infinite,
    "nodes_last_their_cost": lambda: shifted(sound(), "U(t=2,j=0)", end=1),
    "dependencies_are_kept": ignored_dependency,
    "lanes_do_one_task_at_a_time": overlapping_tasks,
    "releases_are_kept": released_later,
    "nothing_waits_without_cause": lambda: shifted(sound(), "U(t=2,j=0)", start=1, end=1),
    "passes_go_from_stage_to_stage": stages_swapped,
    "boundaries_cross_by_one_message": lambda: column(
        run := sound("pp-cdp"), "messages", "dst", message(run, "p2p activation(t=1,i=1,j=0)"), 2
    ),
    "backwards_read_what_their_forward_read": read_by_backward,
    "messages_leave_their_device": lambda: column(
        run := sound(), "messages", "dst", message(run, "p2p gradient(t=0,j=0) 0->1"), 0
    ),
    "devices_exist": fewer_devices,
    "collectives_go_round_by_round": round_skipped,
    "gradients_are_sent_after_they_are_made": lambda: without(
        unhurried("multi-cdp"), "B(t=2,i=0,j=0)", "p2p gradient(t=2,j=0) 0->1"
    ),
    "gradients_are_summed_once": given_twice,
    "tied_gradients_are_summed_once": summed_by_others_too,
    "gradients_take_their_bytes_along": summed_in_part,
    "ranks_have_room_for_what_they_encode": encoded_nowhere,
    "means_come_between_local_steps_and_outer_updates": mean_of_an_older_version,
    "means_are_over_all_workers": mean_of_a_part,
    "gradients_enter_one_sum": summed_twice,
    "parameters_are_gathered_for_uses": gathered_in_part,
    "new_parameters_are_gathered_after_updates": gathered_beside_updates,
    "streams_carry_one_message_at_a_time": two_at_once,
    "shares_make_up_the_whole": share_too_small,
    "runs_end_as_they_began": ends_with_less,
    "updates_come_after_all_their_gradients": updated_before_the_sum,
    "barriers_hold": lambda: without(sound(rule="cdp-v1"), "B(t=2,i=2,j=0)", "U(t=2,j=2)"),
    "versions_are_made_in_order": versions_swapped,
    "versions_exist_before_they_are_read": lambda: asked(read_by_both(1, 1), [[0, 1, 0], *OLD[1:]]),
    "versions_come_once": brought_twice,
    "versions_are_sent_after_they_are_made": lambda: without(
        unhurried("multi-cdp", prefetch=9), "U(t=0,j=2)", "p2p parameters(t=0,j=2) 2->0"
    ),
    "readings_are_as_old_as_the_rule_says": lambda: read_by_both(2, 0),
    "workers_of_rounds_never_wait": waiting_worker,
    "rounds_end_with_the_first_block_that_can": longer_round,
    "gradients_enter_one_update_of_theta": second_half_alone,
    "updates_start_from_theta": from_an_estimate,
    "states_go_from_user_to_user": moved_too_early,
    "optimizer_states_follow_updates": left_behind,
    "pulled_messages_find_room": lambda: without(sound(), "F(t=1,i=1,j=1)", "p2p parameters(t=0,j=2) 0->1"),
    "hosts_make_one_update_at_a_time": hurried_host,
    "streams_keep_their_order": lambda: without(
        streaming(), "device 1's part in p2p parameters(t=0,j=0) 1->0", "p2p parameters(t=0,j=1) 1->0"
    ),
    "readers_hold_what_they_read": lambda: without_buffer(sound(), Category.PARAMETERS, device=1, stage=0, version=0),
    "senders_hold_what_they_send": dropped_while_sent,
    "receivers_hold_what_arrives": no_room_for_what_comes,
    "activations_are_held_from_forward_to_backward": lambda: without_buffer(sound(), Category.ACTIVATIONS),
    "buffers_end_after_they_begin": freed_before_held,
}


def sums_in_another_order() -> Run:
    """A stream has its last two sums the other way round."""
    program = (run := sharing(zero=1, buckets="1 B", reduce="end")).program
    first, last, third = (f"reduce_scatter gradient(t=1,j={j})" for j in range(3))
    for before, after in ((first, last), (last, third)):
        program = without_edge(program, before, after)
    for before, after in ((last, first), (first, third)):
        program = with_edge(program, node(program, before), node(program, after))
    return again(run, program)


def gathered_for_nobody() -> Run:
    """A gather after an update brings a version that is made only later, and that nobody reads."""
    run = sharing(zero=1, buckets="1 B")
    return column(run, "messages", "step", message(run, "all_gather parameters(t=0,j=1)"), 1)


def other_ranks_sum() -> Run:
    """The sum of one group is over the devices of the other."""
    run = sharing(zero=1, replicas=2, buckets="1 B")
    return column(run, "messages", "dst", message(run, "reduce_scatter gradient(t=1,j=1)"), 2)


def one_pass_left_out() -> Run:
    """The gradients of a stage's second pass enter the sum of the stage before."""
    run = sharing(zero=2, reduce="each", buckets="1 B")
    rows = run.program.messages.content == Content.GRADIENT
    last = np.flatnonzero(rows & (run.program.messages.stage == 1))[-1:]
    return column(run, "messages", "stage", last, 0)


def scattered_elsewhere() -> Run:
    """A piece of a reduce-scatter goes to its sender's other neighbour."""
    run = sharing(zero=1, shard=3, expand_collectives=True, collective="ring")
    row = message(run, "p2p gradient(t=0,j=0) 1->0")
    return column(run, "messages", "dst", row, 2)


def missing_message() -> Run:
    """A boundary's message says that it is of another step."""
    run = sound("pp-cdp")
    return column(run, "messages", "step", message(run, "p2p activation(t=1,i=1,j=0)"), 0)


def stranger_as_root() -> Run:
    """A broadcast comes from a device that does not take part."""
    run = sound("zero-dp", model=WEIGHTLESS)
    return column(run, "messages", "src", message(run, "broadcast parameters(t=0,j=1)"), 7)


def never_updated() -> Run:
    """The last update of a stage makes the version before once more."""
    run = sound()
    return column(run, "tasks", "version", node(run.program, "U(t=2,j=1)"), 2)


def moved(schedule: str, name: str, end: str, device: int, **options: Any) -> Run:
    """A message goes from or to another device."""
    run = sound(schedule, **options)
    return column(run, "messages", end, message(run, name), device)


def updated_elsewhere() -> Run:
    """A device updates a stage that it never had."""
    run = sound()
    return column(run, "tasks", "device", node(run.program, "U(t=2,j=1)"), 0)


def optimizer_elsewhere() -> Run:
    """An optimizer state goes where it is not updated next."""
    run = sound("mp-cdp", model=Model(stages=(Stage(forward=1.0, backward=1.0, optimizer=1),) * 3))
    return column(run, "messages", "dst", message(run, "p2p state(t=1,j=1) 4->3"), 5)


def turned_lane() -> Run:
    """A lane is to do its last task first."""
    run = streaming("none", rendezvous="torch")
    order = run.program.lane_tasks.copy()
    order[[0, -1]] = order[[-1, 0]]
    return replace(run, program=replace(run.program, lane_tasks=order))


def another_algorithm() -> Run:
    """A message of a collective goes to the wrong member."""
    run = sound("multi-dp", expand_collectives=True, collective="ring", model=WEIGHTLESS)
    row = message(run, "p2p gradient(t=0,j=0) 1->0")
    return column(run, "messages", "dst", row, 2)


@every_row(
    ("fault", "name", "problem"),
    [
        (missing_message, "boundaries_cross_by_one_message", "has not exactly one message that brings its boundary"),
        (stranger_as_root, "messages_leave_their_device", r"has the members \[0, 1, 2\] and the root 7"),
        (never_updated, "versions_are_made_in_order", "version 3 of stage 1 is never made"),
        (updated_elsewhere, "versions_are_made_in_order", "replaces a version that its device never gets"),
        (
            backward_ahead_of_its_version,
            "versions_exist_before_they_are_read",
            r"B\(t=1,i=1,j=1\) reads a version that its device never gets",
        ),
        (
            lambda: moved("multi-cdp", "p2p parameters(t=0,j=2) 0->1", "dst", 2),
            "versions_exist_before_they_are_read",
            r"F\(t=1,i=1,j=2\) reads a version that its device never gets",
        ),
        (
            lambda: moved("mp-cdp", "p2p parameters(t=0,j=0)", "src", 5, model=WEIGHTLESS),
            "versions_are_sent_after_they_are_made",
            "carries a version that its sender never gets",
        ),
        (
            lambda: moved("zero-cdp", "p2p state(t=1,j=1) 0->2", "src", 1),
            "states_go_from_user_to_user",
            r"p2p state\(t=1,j=1\) 1->2 is not where the state of its stage is",
        ),
        (optimizer_elsewhere, "optimizer_states_follow_updates", "4->5 does not go from an update to the next"),
        (
            lambda: moved("mp-cdp", "p2p gradient(t=1,j=1) 3->4", "src", 5),
            "gradients_are_summed_once",
            "p2p gradient.* takes gradients from a device that has none",
        ),
        (
            lambda: shifted(sound("zb-h1", 2, m=2), "W(t=0,i=0,j=1)", start=-4),
            "passes_go_from_stage_to_stage",
            r"W\(t=0,i=0,j=1\) starts before the rest of its backward has ended",
        ),
        (channels_one_after_another, "streams_keep_their_order", "takes longer than its message"),
        (without_parts, "streams_keep_their_order", "messages do not take the lanes and streams of their devices"),
        (summed_elsewhere, "tied_gradients_are_summed_once", r"all_reduce gradient\(t=1\) leaves out a device"),
        (
            lambda: column(run := tying(), "messages", "size", message(run, "all_reduce gradient(t=1)"), 3),
            "gradients_take_their_bytes_along",
            r"all_reduce gradient\(t=1\) carries 3 B of gradients, not 4 B",
        ),
        (
            lambda: column(run := sound(), "messages", "size", message(run, "p2p gradient(t=0,j=0) 0->1"), 2),
            "gradients_take_their_bytes_along",
            r"p2p gradient\(t=0,j=0\) 0->1 carries 2 B of gradients, not 1 B",
        ),
        (
            lambda: summed_in_part(99, model=LARGE, compress="int4:8"),
            "gradients_take_their_bytes_along",
            "reduce_scatter .*, and those beside it, carry 2814 B for 12000 B of gradients",
        ),
        (gathered_largest, "gradients_take_their_bytes_along", "all_gather .* carry 2388 B for 12000 B of gradients"),
        (summed_by_another_operation, "gradients_take_their_bytes_along", "another operation than its numbers are"),
        (
            factored_in_part,
            "gradients_take_their_bytes_along",
            "those beside it, carry 1512 B for 16800 B of gradients",
        ),
        (right_before_left, "gradients_take_their_bytes_along", r"carry \[400, 200, 160\] B, not \[400, 160, 200\] B"),
        (
            lambda: shifted(factoring(), "all_reduce gradient(t=1,j=0)", start=-0.25),
            "gradients_are_sent_after_they_are_made",
            "has ended, whose gradient it takes along",
        ),
        (without_factors, "ranks_have_room_for_what_they_encode", "device 0 has no room for what it has encoded"),
        (without_copies, "ranks_have_room_for_what_they_encode", "device 0 has no room for what it has encoded"),
        (without_residuals, "ranks_have_room_for_what_they_encode", "device 0 has no room for what it has encoded"),
        (
            one_sum_less,
            "tied_gradients_are_summed_once",
            "^2 messages sum gradients of tied tensors, where 3 are needed",
        ),
        (turned_lane, "streams_keep_their_order", "wait for each other in a cycle"),
        (
            lambda: shifted(streaming("none", rendezvous="torch"), "B(t=0,i=0,j=0)", start=-0.25),
            "streams_keep_their_order",
            r"B\(t=0,i=0,j=0\) starts while its device does what comes before it",
        ),
        (
            lambda: shifted(streaming("none", rendezvous="torch"), "p2p gradient(t=0,j=1) 0->1", start=-0.25),
            "streams_keep_their_order",
            r"p2p gradient\(t=0,j=1\) 0->1 starts while its device does what comes before it",
        ),
        (
            lambda: shifted(streaming("none", rendezvous="torch"), "p2p parameters(t=0,j=1) 1->0", start=-0.25),
            "streams_keep_their_order",
            r"p2p parameters\(t=0,j=1\) 1->0 starts before its device's stream has come to it",
        ),
        (hurried_messages, "links_carry_no_more_than_they_can", "are more than their link can carry by then"),
        (sums_in_another_order, "streams_keep_their_order", "starts before .*, which the stream has first"),
        (gathered_for_nobody, "parameters_are_gathered_for_uses", "brings a device what it does not use"),
        (gathered_for_nobody, "versions_exist_before_they_are_read", "reads a version that its device never gets"),
        (gathered_beside_updates, "new_parameters_are_gathered_after_updates", r"j=0\) starts before U\(t=0,j=1\)"),
        (other_ranks_sum, "gradients_enter_one_sum", "is not over all devices whose gradients it takes"),
        (one_pass_left_out, "gradients_enter_one_sum", "0 sums take the gradients"),
        (scattered_elsewhere, "collectives_go_round_by_round", "reduce_scatter .* goes by no algorithm that it may"),
        (another_algorithm, "collectives_go_round_by_round", "goes by no algorithm that it may"),
    ],
)
def test_a_violation_says_what_is_wrong(fault: Fault, name: str, problem: str) -> None:
    """Each in its own words."""
    assert re.search(problem, violations(fault())[name])


def test_what_several_broadcasts_bring_at_once_is_held_until_the_last_has_left() -> None:
    """A version that comes again, for the backward, before the first of two copies is dropped."""
    stages = tuple(Stage(forward=1.0, backward=1.0, parameters=size) for size in (0, 4000, 10_000))
    cluster = Cluster(devices=(Devices(count=3, overlap="stream"),), link=Link(latency=2.0, bandwidth=1e3))
    asked: dict[str, Any] = {"prefetch": 1, "steps": 2, "collective": "halving-doubling", "contention": "fair"}
    assert violations(sound("zero-dp", model=Model(stages=stages), cluster=cluster, **asked)) == {}


def test_an_algorithm_is_known_by_all_of_its_messages() -> None:
    """The first two of a double tree that sums one byte in sixteen pieces would be those of a tree that sends it whole.

    The best algorithm is one of these: a byte more or less for each message is rounding.
    """
    topology = Topology(kind="nodes", per_node=4, link=Cable(bandwidth=1e9), network=Cable(bandwidth=1e9))
    cluster = Cluster(devices=(Devices(count=4),), topology=topology)
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=1),) * 4)
    run = sound("chimera", 4, m=4, model=model, cluster=cluster, expand_collectives=True)
    sums = np.flatnonzero(run.program.messages.content == Content.GRADIENT)
    assert len(sums) == 3 * 4 * 16 * 4  # steps, stages, pieces, messages of each
    assert violations(run) == {}


@given(requests())
def test_every_invariant_holds_in_every_run(request: dict[str, Any]) -> None:
    """All of them, for all requests drawn."""
    assert violations(run_of(request)) == {}


def run_of(request: dict[str, Any]) -> Run:
    """The run of a drawn request."""
    return simulate(**request)


@pytest.mark.every_case
@pytest.mark.parametrize("name", INVARIANTS)
def test_each_invariant_alone_catches_its_fault(name: str) -> None:
    """So none of them is there for nothing. What is changed may leave waits behind that nothing needs any more."""
    found = violations(FAULTS[name]())
    assert set(found) - ({"nothing_waits_without_cause"} - {name}) == {name}, found


def test_there_is_a_fault_for_each_and_at_least_fifteen() -> None:
    """The list is complete."""
    assert set(FAULTS) == set(INVARIANTS)
    assert len(INVARIANTS) >= 15


@pytest.mark.parametrize(
    "asked",
    [
        {"schedule": "1f1b", "n": 2, "m": 2, "stop": ["0:2s:1s"], "steps": 1},
        {"schedule": "acco", "n": 1, "m": 1, "steps": 2, "replicas": 2, "contention": "fair", "stop": ["0:242s:12s"]},
    ],
    ids=lambda asked: str(asked["schedule"]),
)
def test_a_device_that_stands_still_when_a_message_ends_goes_on_later(asked: dict[str, Any]) -> None:
    """It communicates between its tasks; the message ends while it stands still, and the next task comes after that."""
    stage = Stage(forward=1.0, backward=2.0, weight_backward=1.0, activation=1, boundary=1, parameters=1)
    link = Link(latency=121.0 if asked["schedule"] == "acco" else 1.0)
    cluster = Cluster(devices=(Devices(overlap="none"),), link=link)
    run = simulate(**asked, model=Model(stages=(stage,) * asked["n"]), cluster=cluster)
    assert (run.start == (254.0 if asked["schedule"] == "acco" else 3.0)).any()
    assert violations(run) == {}

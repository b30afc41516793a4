"""One suite that every schedule runs."""

from dataclasses import replace

import numpy as np
import pytest

from cdpsim import SCHEDULES, Cluster, RequestError, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.invariants import violations
from cdpsim.model import Model, Stage
from cdpsim.program import Category, Kind, Op
from cdpsim.program.check import check_program
from cdpsim.request.sharing import accepts
from cdpsim.schedules import TABLE_1, Schedule
from cdpsim.schedules.order import CYCLIC
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import CDP_V1, CDP_V2, matrix_rule
from tests.helpers.strategies import fitting, in_seconds, shapes

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
SIZES = 1, 2, 3, 7
sizes = [(s, n) for s in SCHEDULES.values() for n in (SIZES if s.name in TABLE_1 else (1, 3, 7))]
spaced = [s for s in SCHEDULES.values() if not s.order.lists and s.m is None]  # pipedream fills up as fast as it can
every_size = pytest.mark.parametrize(("schedule", "n"), sizes, ids=[f"{schedule.name}-{n}" for schedule, n in sizes])


@every_size
def test_its_program_keeps_the_rules(schedule: Schedule, n: int) -> None:
    """For any number of stages."""
    cluster = Cluster(devices=(Devices(lanes=n if schedule.placement.lanes else 1),))
    run = simulate(**fitting(schedule.name, n), cluster=cluster)
    check_program(run.program)


@every_size
def test_it_does_every_task_once(schedule: Schedule, n: int) -> None:
    """A forward and a backward, whole or in two parts, for each stage, micro-batch and step."""
    trace = simulate(**fitting(schedule.name, n), steps=2)
    shape = Shape(trace.request["n"], trace.request["m"], trace.request.get("chunks", 1))
    passes = dict.fromkeys(range(2), shape.m)
    if schedule.order.rounds:  # the last one is thrown away, after those that make the updates
        each = [sum(row) for row in trace.request["counts"]]
        per = schedule.order.rounds.per_update
        passes = {low // per: sum(each[low : low + per]) for low in range(0, len(each), per)}
    if local := schedule.order.local:  # a round of late means more, and warm-up steps alone
        passes = {t: shape.m * (1 if t < local.usual_warm_up else 2) for t in range(2 + local.late)}
    every = [(t, i, j) for t, many in passes.items() for i in range(many) for j in range(shape.n)]
    assert set(trace.tasks["kind"]) == set("FBWU" if schedule.splits(shape) else "FBU")
    for kind in set(trace.tasks["kind"]) - {"U"}:
        rows = trace.tasks["kind"] == kind
        keys = zip(*(trace.tasks[name][rows].tolist() for name in ("step", "micro_batch", "stage")), strict=True)
        assert sorted(keys) == every


@pytest.mark.every_case
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("schedule", spaced, ids=lambda s: s.name)
def test_positions_are_its_times_under_unit_costs(schedule: Schedule, n: int) -> None:
    """The order's positions equal the start times that dependencies and unit costs give."""
    run = simulate(schedule, n)
    t, i, phase = np.ogrid[:3, :n, : 2 * n]
    position = np.broadcast_to(schedule.order.position(t, i, phase, Shape(n, n)), (3, n, 2 * n)).ravel()
    assert np.array_equal(run.start[: len(position)], position)


@pytest.mark.every_case
@every_schedule
def test_messages_under_latency_keep_every_device_in_order(schedule: Schedule) -> None:
    """Real links change times, not the order in which a device works."""
    clusters = (Cluster(), Cluster(link=Link(latency=0.3)))
    model = in_seconds(4)
    free, slow = (simulate(**fitting(schedule.name, 4), model=model, cluster=cluster) for cluster in clusters)
    assert free is not None
    assert slow is not None
    if not schedule.placement.lanes:
        assert np.array_equal(free.program.lane_tasks, slow.program.lane_tasks)


def devices(schedule: Schedule, shape: Shape) -> int:
    """How many devices a stage of each micro-batch, or of all, makes necessary."""
    return shape.replicas * (shape.n // shape.chunks) * (shape.m if schedule.placement.replicas else 1)


alone = [(name, shape) for name, one in SCHEDULES.items() for shape in shapes(one, 2) if devices(one, shape) == 1]


@pytest.mark.parametrize(("name", "shape"), alone)
def test_one_device_sends_nothing(name: str, shape: Shape) -> None:
    """A run on one device has no messages, for every schedule and every number of stages."""
    assert not len(simulate(name, shape.n, m=shape.m, chunks=shape.chunks).messages["op"])


@every_size
def test_the_last_update_ends_the_hold_on_its_optimizer_state(schedule: Schedule, n: int) -> None:
    """Found by the replay: zero-cdp let a state go at the last use of its stage, before the update that followed."""
    wanted = fitting(schedule.name, n)
    stage = Stage(forward=1, backward=2, weight_backward=1, parameters=8, optimizer=8)
    wanted["model"] = Model(stages=(stage,) * wanted["n"])
    for rule in [CDP_V1, CDP_V2] if schedule.order is CYCLIC else [schedule.rule]:
        run = simulate(**wanted, steps=2, rule=rule)
        tasks, buffers = run.program.tasks, run.program.buffers
        ends = buffers.end[buffers.category == Category.OPTIMIZER]
        last = np.flatnonzero((tasks.kind == Kind.U) & (tasks.version == run.program.versions - 1))
        assert np.isin(2 * last + 1, ends).all()


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 5), (3, 2)])
@pytest.mark.parametrize("name", ["multi-dp", "mp-dp"])
def test_as_many_replicas_as_wanted_work_side_by_side(name: str, n: int, m: int) -> None:
    """A step takes 2N slots for every M; each stage's gradients are summed over its M copies."""
    trace = simulate(name, n, m=m)
    summary = trace.summary()
    assert summary["devices"] == (m if name == "multi-dp" else n * m)
    assert (summary["period"], summary["makespan"]) == (2 * n, 6 * n)
    sums = [dst for op, dst in zip(trace.messages["op"], trace.messages["dst"], strict=True) if op == "all_reduce"]
    assert len(sums) == 3 * n
    assert {len(members.split("|")) for members in sums} == {m}
    check_program(trace.program)
    assert violations(trace) == {}


@pytest.mark.every_case
@every_schedule
def test_collectives_are_for_flushes_and_only_for_those(schedule: Schedule) -> None:
    """Data that all replicas need at once goes by a collective; data that they need in turn goes point to point.

    Replicas of a pipeline need it at once even where the pipeline does not flush.
    """
    replicas = 2 if accepts(schedule, "replicas") else 1
    run = simulate(**fitting(schedule.name, 4), replicas=replicas)
    messages = run.program.messages
    model_messages = messages.op[messages.micro_batch < 0]
    assert len(model_messages) or schedule.placement.lanes
    together = schedule.order.together or replicas > 1
    assert (model_messages != Op.P2P).all() if together else (model_messages == Op.P2P).all()


@pytest.mark.every_case
@pytest.mark.parametrize("schedule", [s for s in spaced if not s.order.together], ids=lambda s: s.name)
@pytest.mark.parametrize("n", SIZES)
def test_v2_is_the_largest_causal_rule(schedule: Schedule, n: int) -> None:
    """One more fresh reading anywhere is refused, by its (i, j); v1 and v2 are not."""
    fresh = CDP_V2.matrix(n, n)
    for i, j in np.argwhere(~fresh).tolist():
        more = fresh.copy()
        more[i, j] = True
        with pytest.raises(RequestError, match=rf"not causal .*\(i={i}, j={j}\)"):
            simulate(schedule, n, rule=matrix_rule(more))
    for rule in (CDP_V1, CDP_V2):
        simulate(schedule, n, rule=rule)


@pytest.mark.every_case
@pytest.mark.parametrize("schedule", [s for s in spaced if not s.order.together], ids=lambda s: s.name)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_behind_a_barrier_a_stage_is_new_when_the_last_micro_batch_is_through(schedule: Schedule, n: int) -> None:
    """Two slots between micro-batches: the last one has finished its pass 2 (n - 1) slots after the next step began.

    Micro-batch i comes to stage j after 2 i + j.
    """
    for i, j in np.ndindex(n, n):
        rule = replace(matrix_rule(np.arange(n * n).reshape(n, n) == i * n + j), barrier=True)
        if 2 * i + j >= 2 * (n - 1):
            simulate(schedule, n, rule=rule)
        else:
            with pytest.raises(RequestError, match=rf"not causal .*\(i={i}, j={j}\)"):
                simulate(schedule, n, rule=rule)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_rule_in_between_is_as_stale_as_it_says(n: int) -> None:
    """Mean staleness is the share of stale readings."""
    fresh = CDP_V2.matrix(n, n).copy()
    fresh[n - 1, 0] = False
    summary = simulate("multi-cdp", n, rule=matrix_rule(fresh)).summary()
    assert summary["mean_staleness"] == pytest.approx((~fresh).mean())
    assert summary["request"]["rule"] == (~fresh).astype(int).tolist()

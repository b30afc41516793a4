"""One suite that every schedule runs."""

import numpy as np
import pytest

from cdpsim import SCHEDULES, Cluster, RequestError, simulate
from cdpsim.assemble import assemble
from cdpsim.check import check
from cdpsim.cluster import Link
from cdpsim.invariants import violations
from cdpsim.model import Model, Stage
from cdpsim.program import Category, Kind, Op
from cdpsim.schedules import Schedule
from cdpsim.schedules.rule import CDP_V1, CDP_V2, matrix_rule
from cdpsim.schedules.shape import Shape

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
every_size = pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 12])
cyclic = [schedule for schedule in SCHEDULES.values() if not schedule.order.flush]


@every_schedule
@every_size
def test_its_program_keeps_the_rules(schedule: Schedule, n: int) -> None:
    """For any number of stages."""
    check(assemble(schedule, Model.unit(n), 3, lanes=n))


@every_schedule
@every_size
def test_it_does_every_task_once(schedule: Schedule, n: int) -> None:
    """A forward and a backward for each stage, micro-batch and step."""
    tasks = simulate(schedule, n, steps=2).tasks
    for kind in "FB":
        rows = tasks["kind"] == kind
        keys = zip(*(tasks[name][rows].tolist() for name in ("step", "micro_batch", "stage")), strict=True)
        assert sorted(keys) == [(t, i, j) for t in range(2) for i in range(n) for j in range(n)]


@every_schedule
@every_size
def test_positions_are_its_times_under_unit_costs(schedule: Schedule, n: int) -> None:
    """What the order declares and what comes out of dependencies and costs coincide in the slot model."""
    run = simulate(schedule, n).run
    assert run is not None
    t, i, phase = np.ogrid[:3, :n, : 2 * n]
    assert schedule.order.position is not None
    position = np.broadcast_to(schedule.order.position(t, i, phase, Shape(n, n)), (3, n, 2 * n)).ravel()
    assert np.array_equal(run.start[: len(position)], position)


@every_schedule
def test_messages_under_latency_keep_every_device_in_order(schedule: Schedule) -> None:
    """Real links change times, not the order in which a device works."""
    free, slow = (simulate(schedule, 4, cluster=c).run for c in ("unit", Cluster(link=Link(latency=0.3))))
    assert free is not None
    assert slow is not None
    if not schedule.placement.lanes:
        assert np.array_equal(free.program.lane_tasks, slow.program.lane_tasks)


@every_schedule
def test_one_stage_sends_nothing(schedule: Schedule) -> None:
    """N = 1 has no messages, whatever the schedule."""
    assert not len(simulate(schedule, 1).messages["op"])


@every_schedule
@every_size
def test_the_last_update_ends_the_hold_on_its_optimizer_state(schedule: Schedule, n: int) -> None:
    """Found by the replay: zero-cdp let a state go at the last use of its stage, before the update that followed."""
    stages = (Stage(forward=1, backward=1, parameters=8, optimizer=8),) * n
    for rule in [schedule.rule] if schedule.order.flush else [CDP_V1, CDP_V2]:
        program = assemble(schedule, Model(stages=stages), 2, rule=rule)
        tasks, buffers = program.tasks, program.buffers
        ends = buffers.end[buffers.category == Category.OPTIMIZER]
        last = np.flatnonzero((tasks.kind == Kind.U) & (tasks.step == 1))
        assert np.isin(2 * last + 1, ends).all()


@every_schedule
def test_its_options_are_the_ones_that_do_something(schedule: Schedule) -> None:
    """Where an option is taken, it changes a run; where it would not, it is refused."""
    link = Cluster(link=Link(latency=0.3))
    for option, value, cluster in (("prefetch", 2, link), ("slot_order", "backward-first", Cluster())):
        if option.replace("_", "-") in schedule.options:
            plain, changed = (simulate(schedule, 4, cluster=cluster, **o) for o in ({}, {option: value}))  # type: ignore[arg-type]
            columns = [np.array_equal(plain.memory[c], changed.memory[c]) for c in ("time", "size")]
            assert not all(columns)
        else:
            with pytest.raises(RequestError, match="does not take this option"):
                simulate(schedule, 4, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 5), (3, 2)])
@pytest.mark.parametrize("name", ["multi-dp", "mp-dp"])
def test_as_many_replicas_as_wanted_work_side_by_side(name: str, n: int, m: int) -> None:
    """A step takes 2N slots whatever M; each stage's gradients are summed over its M holders."""
    trace = simulate(name, n, m=m)
    summary = trace.summary()
    assert summary["devices"] == (m if name == "multi-dp" else n * m)
    assert (summary["period"], summary["makespan"]) == (2 * n, 6 * n)
    sums = [dst for op, dst in zip(trace.messages["op"], trace.messages["dst"], strict=True) if op == "all_reduce"]
    assert len(sums) == 3 * n
    assert {len(members.split("|")) for members in sums} == {m}
    assert trace.run is not None
    check(trace.run.program)
    assert violations(trace.run) == {}


@every_schedule
def test_collectives_are_for_flushes_and_only_for_those(schedule: Schedule) -> None:
    """What all replicas need at once is a collective; what they need one after another goes point to point."""
    run = simulate(schedule, 4).run
    assert run is not None
    messages = run.program.messages
    model_messages = messages.op[messages.micro_batch < 0]
    assert (model_messages != Op.P2P).all() if schedule.order.flush else (model_messages == Op.P2P).all()


@pytest.mark.parametrize("schedule", cyclic, ids=lambda s: s.name)
@every_size
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


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_rule_in_between_is_as_stale_as_it_says(n: int) -> None:
    """Mean staleness is the share of stale readings."""
    fresh = CDP_V2.matrix(n, n).copy()
    fresh[n - 1, 0] = False
    summary = simulate("multi-cdp", n, rule=matrix_rule(fresh)).summary()
    assert summary["mean_staleness"] == pytest.approx((~fresh).mean())
    assert summary["request"]["rule"] == fresh.astype(int).tolist()

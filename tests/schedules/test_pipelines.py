"""Pipelines as simulated: published bubbles, what is in flight, versions, replicas; and a new one from outside."""

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, Request, RequestError, Stage, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Link
from cdpsim.invariants import violations
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.program.check import check_program
from cdpsim.request.sharing import accepts
from cdpsim.schedules import Schedule, pipeline
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.placement import Shape
from cdpsim.studies.compare import measure
from cdpsim.trace import TABLES
from tests.helpers.every_row import every_row
from tests.helpers.strategies import requests, shapes

FLUSHED = [name for name, schedule in SCHEDULES.items() if schedule.order.lists]
STREAMED = [
    name
    for name, schedule in SCHEDULES.items()
    if schedule.order.any_m and schedule.order.waits and not schedule.order.together
]


def step_of(name: str, n: int, **options: Any) -> int:
    """How long a training step takes once steps follow one another."""
    step = measure(simulate(name, n, steps=4, **options)).step
    assert isinstance(step, int)
    return step


@pytest.mark.parametrize("name", [*FLUSHED, *STREAMED])
def test_both_engines_agree_and_every_invariant_holds(name: str) -> None:
    """In every small shape that a schedule allows, of one replica and of two."""
    for shape in shapes(SCHEDULES[name], 4):
        asked: dict[str, Any] = {"n": shape.n, "m": shape.m, "chunks": shape.chunks, "replicas": shape.replicas}
        run = simulate(name, steps=2, **asked)
        check_program(run.program)
        assert violations(run) == {}, shape
        again = simulate(name, steps=2, engine="simpy", **asked)
        assert np.array_equal(run.start, again.start), shape


@pytest.mark.every_case
@pytest.mark.parametrize("d", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("times", [(1.0, 1.0), (1.0, 2.0), (3.0, 4.0)])
def test_bubbles_are_as_published_whatever_tasks_take(d: int, m: int, times: tuple[float, float]) -> None:
    """(d-1)/(m+d-1) for gpipe and 1f1b, where stages are alike (Huang et al. 2019, Narayanan et al. 2019)."""
    model = Model(stages=(Stage(forward=times[0], backward=times[1]),) * d)
    for name in ("gpipe", "1f1b"):
        trace = simulate(name, model=model, m=m, steps=1)
        assert trace.summary()["makespan"] == pytest.approx((m + d - 1) * sum(times))
        assert measure(trace).bubble == pytest.approx((d - 1) / (m + d - 1))


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_more_chunks_divide_the_bubble(chunks: int) -> None:
    """(d-1)/(v m + d-1) of the time of d devices is 1/v of 1f1b's (d-1) passes (Narayanan et al. 2021)."""
    d, m = 4, 8
    for name in ("interleaved-1f1b", "looped-bfs"):
        one = measure(simulate(name, d * chunks, m=m, chunks=chunks, steps=1))
        assert one.devices == d
        assert Fraction(one.bubble).limit_denominator(1000) == Fraction(d - 1, chunks * m + d - 1)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"])
def test_two_stages_lie_on_each_device_where_nothing_is_said(name: str) -> None:
    """Eight stages lie on four devices, and v = 2 makes the bubble (d-1)/(v m + d-1) = 3/19 (Narayanan et al. 2021).

    A zero bubble has d-1 of 2 v m + v m + d-1 slots: 3/51. A record has the number, also where it is 1.
    """
    run = simulate(name, 8, m=8, steps=1)
    assert run.devices == 4
    bubble = Fraction(3, 51 if name == "interleaved-zero-bubble" else 19)
    assert Fraction(measure(run).bubble).limit_denominator(1000) == bubble
    alone = Request(name, 8, m=8, chunks=1)
    assert Request(**alone).shape.chunks == 1
    assert simulate(alone).devices == 8


@pytest.mark.parametrize("d", [2, 4, 6])
def test_zero_bubbles_leave_what_is_published(d: int) -> None:
    """A step of unit tasks lasts 3m, and d-1 slots more with H1; H2 pays for nothing with memory (Qi et al. 2023)."""
    m = 2 * d
    assert step_of("1f1b", d, m=m, model="unit-split") == 3 * (m + d - 1)
    assert step_of("zb-h1", d, m=m) == 3 * m + d - 1
    assert step_of("zb-h2", d, m=m) == 3 * m
    assert step_of("zbv", 2 * d, m=m) == 2 * 3 * m
    assert measure(simulate("zb-h1", d, m=m)).activations == d
    assert measure(simulate("zb-h2", d, m=m)).activations == 2 * d - 1


@pytest.mark.parametrize(("d", "m"), [(1, 1), (3, 1), (4, 2), (4, 9)])
def test_as_many_are_in_flight_as_1f1b_needs(d: int, m: int) -> None:
    """min(d - r, m) on device r, and all m with gpipe."""
    for name, most in (("1f1b", [min(d - r, m) for r in range(d)]), ("gpipe", [m] * d)):
        held = simulate(name, d, m=m).summary()["peak_memory"]
        assert [row["activations"] for row in held] == most


@pytest.mark.parametrize("n", [2, 3, 6])
def test_2bw_at_m_equal_n_is_the_pipeline_of_cdp_v1(n: int) -> None:
    """Spec section 8: the same to the last row of every table."""
    ours, theirs = simulate("pipedream-2bw", n, steps=4), simulate("pp-cdp", n, rule="cdp-v1", steps=4)
    for table in TABLES:
        mine, other = getattr(ours, table), getattr(theirs, table)
        assert all(np.array_equal(mine[column], other[column]) for column in dict(mine))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pipedream_stashes_a_version_for_each_in_flight(n: int) -> None:
    """n - j of stage j; a micro-batch reads what its stage has when it comes (Narayanan et al. 2019, section 3.3)."""
    trace = simulate("pipedream", n, steps=4 * n)
    live = trace
    most = np.zeros(n, dtype=int)
    from cdpsim.trace.metrics.memory import live_versions

    versions = live_versions(live.program, live.start, live.end)
    np.maximum.at(most, versions["stage"], versions["versions"])
    assert most.tolist() == [n - j for j in range(n)]
    tasks = live.program.tasks
    for k in live.program.tasks_of_kind(Kind.F)[2 * n :].ravel().tolist():
        assert tasks.step[k] - tasks.version[k] == n - 1 - tasks.stage[k]


@pytest.mark.parametrize("n", [2, 4])
def test_with_vertical_sync_all_stages_read_one_version(n: int) -> None:
    trace = simulate("pipedream", n, steps=4 * n, rule="vertical-sync")
    tasks = trace.program.tasks
    version = tasks.version[trace.program.tasks_of_kind(Kind.F)]
    assert (version == version[:, :1]).all()
    assert (version[2 * n :, 0] == np.arange(n + 1, 3 * n + 1)).all()  # n - 1 steps old
    assert trace.request["rule"] == "vertical-sync"


@pytest.mark.parametrize("n", [2, 4])
def test_pipemare_reads_other_weights_in_backwards_and_says_where(n: int) -> None:
    """One version; forwards as old as with cdp-v2, backwards the newest; their rows have different versions."""
    trace = simulate("pipemare", n, steps=4)
    run, cdp = trace, simulate("pp-cdp", n, steps=4)
    assert measure(trace).versions == 1
    tasks = run.program.tasks
    forward, backward = (tasks.version[run.program.tasks_of_kind(kind)] for kind in (Kind.F, Kind.B))
    assert np.array_equal(forward, cdp.program.tasks.version[cdp.program.tasks_of_kind(Kind.F)])
    assert np.array_equal(backward, np.repeat(np.arange(4), n)[:, None] + np.zeros(n, dtype=int))
    apart = int((forward != backward).sum())
    assert trace.summary()["mismatched"] == apart == 3 * n * (n - 1) // 2
    assert "mismatched" not in simulate("pp-cdp", n).summary()


def test_asynchronous_pipelines_side_by_side() -> None:
    """Versions, staleness, activations and throughput in slots, as the papers have them."""
    n = 4
    steps = {name: 48 if name == "pipedream" else 12 for name in (*STREAMED, "pp-cdp")}
    found = {name: measure(simulate(name, n, steps=many)) for name, many in steps.items()}
    assert {one.micro_batch_rate for one in found.values()} == {Fraction(1, 2)}
    assert {one.bubble for one in found.values()} == {0}
    assert {one.activations for one in found.values()} == {n}
    assert {name: one.versions for name, one in found.items()} == {
        "pipedream": n,
        "pipedream-2bw": 2,
        "pipemare": 1,
        "pp-cdp": 2,
    }


@pytest.mark.parametrize("n", [2, 4])
def test_the_papers_comparison_of_devices(n: int) -> None:
    """Model parallelism with CDP has N(N+1)/2 devices for N micro-batches; N pipelines with replicas have N squared."""
    pyramid, replicas = measure(simulate("mp-cdp", n)), measure(simulate("1f1b", n, m=1, replicas=n))
    assert (pyramid.devices, replicas.devices) == (n * (n + 1) // 2, n * n)
    assert simulate("1f1b", n, m=1, replicas=n).whole.program.m == n


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "pp-cdp", "pipedream-2bw"])
def test_replicas_do_the_same_and_reduce_each_stage_together(name: str) -> None:
    """Times of one replica where links are free; one all-reduce for each stage and step, over all replicas of it."""
    one, three = (simulate(name, 4, steps=3, replicas=r).whole for r in (1, 3))
    first = three.program.tasks.device[: three.program.compute] < 4
    assert np.array_equal(three.start[: three.program.compute][first], one.start[: one.program.compute])
    messages = three.program.messages
    together = np.flatnonzero(messages.op == Op.ALL_REDUCE)
    assert len(together) == 4 * 3
    for k in together.tolist():
        stage = messages.stage[k]
        assert three.program.groups[messages.dst[k]].tolist() == [stage, 4 + stage, 8 + stage]


def test_all_reduces_overlap_if_they_may() -> None:
    """Stage j's gradient is there j backwards earlier than the last; at the flush all wait for it, and go in turn."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=10**9),) * 3)
    cluster = Cluster(link=Link(bandwidth=1e9))
    asked: dict[str, Any] = {"model": model, "cluster": cluster, "m": 4, "chunks": 3, "replicas": 2, "steps": 1}
    flushed, early = (simulate("interleaved-1f1b", reduce=when, **asked) for when in ("end", "last"))
    for run, begins in ((flushed, [36.0, 37.0, 38.0]), (early, [36.0, 34.0, 32.0])):
        messages, first = run.program.messages, len(run.program.tasks)
        rows = first + np.flatnonzero(messages.op == Op.ALL_REDUCE)
        found = dict(zip(messages.stage[rows - first].tolist(), run.start[rows].tolist(), strict=True))
        assert [found[j] for j in range(3)] == begins
    assert early.end.max() <= flushed.end.max()


@pytest.mark.parametrize(
    ("asked", "earlier"),
    [
        (
            {"schedule": "interleaved-1f1b", "n": 4, "m": 4, "chunks": 2, "replicas": 2, "counts": [[4, 3], [4, 4]]},
            [0, 0, 2, 2],
        ),
        ({"schedule": "1f1b", "n": 3, "m": 4, "replicas": 2, "stage_replicas": [2, 1, 1]}, [0, 0, 0]),
    ],
)
def test_sums_in_no_common_order_begin_when_they_may(asked: dict[str, Any], earlier: list[int]) -> None:
    """Where steps are unlike, the last backward of a device's other stage is two slots before that of its first one.

    Where devices have one stage each, the end is the only moment.
    """
    starts = []
    for when in ("end", "last"):
        sums = simulate(**asked, reduce=when).messages
        first = (sums.op == "all_reduce") & (sums.step == 0)
        starts.append(dict(zip(sums.stage[first].tolist(), sums.start[first].tolist(), strict=True)))
    late, early = starts
    assert [late[stage] - early[stage] for stage in range(len(earlier))] == earlier


@pytest.mark.every_case
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("name", "replicas"), [("zbv", 2), ("chimera", 1), ("gems", 1), ("dualpipe", 1)])
def test_each_word_for_when_gradients_are_summed_is_one_run(name: str, replicas: int, zero: int) -> None:
    """No option gives the times of --reduce end without ZeRO, and others at all stages of it."""
    stage = Stage(forward=1.0, backward=2.0, weight_backward=1.0, parameters=10**9)
    asked: dict[str, Any] = {"model": Model(stages=(stage,) * 4), "cluster": Cluster(link=Link(bandwidth=1e9))}
    asked |= {"m": 8, "replicas": replicas, "steps": 1}

    def ends(**options: Any) -> list[float]:
        return [float(end) for end in simulate(name, 4, **asked, **options).messages.end]

    last, end = (ends(zero=zero, reduce=when) for when in ("last", "end"))
    assert last != end
    if zero == 0:
        assert ends() == ends(reduce="end") == end
        assert ends(reduce="last") == last


def test_two_directions_share_a_stage() -> None:
    """Chimera's and GEMS's stages are on two devices, whose gradients are reduced together; a middle one is on one."""
    for name, n, pairs in (("chimera", 4, 4), ("gems", 5, 4)):
        run = simulate(name, n, m=4, steps=1)
        messages = run.program.messages
        groups = [run.program.groups[k].tolist() for k in messages.dst[messages.op == Op.ALL_REDUCE].tolist()]
        assert len(groups) == pairs
        assert all(sum(group) == n - 1 for group in groups)
        assert measure(simulate(name, n, m=4)).parameters == 2


@given(requests(), st.data())
def test_more_micro_batches_hold_no_more_in_1f1b(request: dict[str, Any], data: st.DataObject) -> None:
    """The micro-batches in flight on a device depend on the stages behind it, not on M beyond that number."""
    n = data.draw(st.integers(1, 5))
    few, many = (simulate("1f1b", n, m=m, steps=1).summary()["peak_memory"] for m in (n, n + request["m"]))
    assert [row["activations"] for row in few] == [row["activations"] for row in many]


@pytest.mark.parametrize(("name", "chunks"), [("dualpipe", 1), ("dualpipev", 2)])
def test_a_whole_backward_hands_on_its_gradient_when_all_of_it_is_done(name: str, chunks: int) -> None:
    """Where others are split: it is a B and a W with nothing between, and its message leaves after the W."""
    run = simulate(name, 4, m=8, steps=1)
    actions = SCHEDULES[name].actions(Shape(4, 8, chunks))
    program, messages = run.program, run.program.messages
    rows = np.flatnonzero(actions.kind == Action.B)
    whole = list(zip(actions.micro_batch[rows].tolist(), actions.stage[rows].tolist(), strict=True))
    assert {j for _, j in whole} == set(range(4))
    b, w = program.tasks_of_kind(Kind.B), program.tasks_of_kind(Kind.W)
    for i, j in whole:
        assert run.end[b[i, j]] == run.start[w[i, j]]
        if j:
            assert run.start[b[i, j - 1]] >= run.end[w[i, j]]
        sent = (messages.content == Content.ACTIVATION_GRADIENT) & (messages.micro_batch == i) & (messages.stage == j)
        assert (run.start[len(program.tasks) :][sent] >= run.end[w[i, j]]).all()


def test_weights_parts_hold_the_activations() -> None:
    """Each device of zb-h1 holds a pass from the start of its forward to the end of its W."""
    run = simulate("zb-h1", 3, m=5, steps=1)
    program, buffers = run.program, run.program.buffers
    rows = buffers.category == Category.ACTIVATIONS
    assert set((buffers.end[rows] >> 1).tolist()) == set(program.tasks_of_kind(Kind.W).ravel().tolist())


def ladder(devices: int, m: int, chunks: int) -> Actions:
    """One micro-batch after another through all stages and back: the pipeline that is none."""
    return Actions.of([[(kind, d, i) for i in range(m) for kind in "FB"] for d in range(devices)])


def test_a_schedule_from_outside_is_simulated_measured_and_checked() -> None:
    """The schedule of `docs/how-to/write-a-schedule.md`, declared outside of the package."""
    trace = simulate(pipeline("ladder", "one micro-batch at a time", ladder), 4, m=3, steps=2)
    assert violations(trace) == {}
    assert measure(trace).step == 3 * 2 * 4
    assert measure(trace).activations == 1
    assert measure(trace).bubble == pytest.approx(1 - 1 / 4)


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        ([[("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], "0F0 lacks 0B0"),
        ([[("F", 0, 0), ("B", 0, 0)]], "has 1 devices where 2 are asked for"),
        ([[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], "schedule deadlocks: 0B0"),
    ],
)
def test_an_order_from_outside_that_is_none_is_refused(devices: list[list[tuple[str, int, int]]], problem: str) -> None:
    schedule = pipeline("mine", "wrong", lambda d, m, chunks: Actions.of(devices))
    with pytest.raises(RequestError, match=problem):
        simulate(schedule, 2, m=1)


@every_row(
    ("request_", "problem"),
    [
        ({"schedule": "dualpipev", "n": 8, "m": 3}, "m: dualpipev needs m >= 2 \\* devices; m=3, devices=4"),
        ({"schedule": "chimera", "n": 3}, "n: chimera needs an even number of devices; devices=3"),
        (
            {"schedule": "interleaved-1f1b", "n": 5, "chunks": 2},
            "needs n to be a multiple of its chunks; n=5",
        ),
        ({"schedule": "interleaved-1f1b", "n": 4, "m": 5, "chunks": 2}, "interleaved-1f1b needs m to be a multiple of"),
        ({"schedule": "pipedream-2bw", "n": 8, "m": 2}, "m: pipedream-2bw needs m >= 7 where n=8; m=2"),
        ({"schedule": "pipedream", "n": 4, "m": 4}, "m: pipedream does not take this option"),
        ({"schedule": "gpipe", "n": 4, "chunks": 2}, "chunks: gpipe does not take this option"),
        ({"schedule": "gpipe", "n": 4, "rule": "cdp-v2"}, "'cdp-v2' does not go with the gpipe timing"),
        (
            {"schedule": "gpipe", "n": 4, "rule": "vertical-sync"},
            "gpipe does not take vertical-sync; pipedream does",
        ),
        (
            {"schedule": "acco", "n": 4, "rule": "vertical-sync"},
            "acco does not take vertical-sync; pipedream does",
        ),
        ({"schedule": "multi-cdp", "n": 4, "replicas": 2}, "replicas: multi-cdp does not take this option"),
        (
            {"schedule": "pipedream-2bw", "n": 4, "zero": 1, "replicas": 2, "gather": "step", "model": "gpt2"},
            "gather: pipedream-2bw does not take this option",
        ),
        ({"schedule": "zb-h1", "model": Model(stages=(Stage(forward=1.0, backward=2.0),))}, "zb-h1 splits backwards"),
        ({"schedule": "1f1b", "n": 4, "replicas": 0}, "replicas=0 must be at least 1"),
    ],
)
def test_what_a_schedule_does_not_allow_is_refused_with_its_rule(request_: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        simulate(**request_)


def test_no_schedule_is_named_where_it_is_not_declared() -> None:
    """Nothing in assembly, engines, metrics or drawings knows a pipeline by its name."""
    from pathlib import Path

    import cdpsim

    names = {f'"{name}"' for name in (*FLUSHED, *STREAMED)} - {'"dp"'}  # which is a rule, too
    for path in Path(cdpsim.__file__).parent.rglob("*.py"):
        if path.parent.name != "schedules" and path.name != "table1.py":  # whose rows are a paper's
            text = re.sub(r"(?m)^ *(>>>|\.\.\.) .*$", "", path.read_text())  # without examples
            assert not [name for name in names if name in text], path


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "chimera", "pipedream", "pipemare"])
def test_what_is_saved_is_opened_again_with_its_run(name: str, tmp_path: Any) -> None:
    """A record has its replicas, chunks and rule, so that the run behind files is found again."""
    schedule = SCHEDULES[name]
    asked: dict[str, Any] = {"replicas": 2, "steps": 3}
    asked |= {"chunks": 2, "reduce": "last"} if accepts(schedule, "chunks") else {}
    asked |= {"rule": "vertical-sync"} if schedule.takes_vertical_sync else {}
    trace = simulate(name, 4, **asked)
    trace.save(tmp_path)
    again = reopen(tmp_path)
    assert again.request == trace.request


def test_one_that_is_written_out_for_one_shape_is_of_no_other() -> None:
    """Of an order that is there once: another n is refused; replicas are free."""
    once = replace(pipeline("once", "written out", lambda d, m, c: ladder(2, 2, 1)), shape=Shape(2, 2), m=2)
    assert isinstance(once, Schedule)
    assert measure(simulate(once, replicas=2)).devices == 4
    with pytest.raises(RequestError, match="n=3, but once has 2 stages; leave it out"):
        simulate(once, 3)

"""Periods of the steady state, compared with long runs, closed forms, and runs that are not in steady state yet."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

from cdpsim import SCHEDULES, Cluster, Model, Stage, simulate
from cdpsim.cluster import Devices, Link, PairLink
from cdpsim.runs import Run
from cdpsim.schedules.rule import Rule
from cdpsim.studies.compare import measure
from cdpsim.trace.metrics import steady
from tests.helpers.strategies import fitting, listed, requests, streamed_requests

BOX = Cluster(link=Link(latency=0.25, bandwidth=8.0))


def uneven(n: int, scale: float = 1.0) -> Model:
    """Stages of times without a pattern."""
    times = [(1.0, 9.0), (7.0, 2.0), (3.0, 3.0), (9.0, 1.0), (2.0, 8.0), (4.0, 5.0)]
    return Model(
        stages=tuple(
            Stage(forward=f * scale, backward=b * scale, weight_backward=b * scale / 2, boundary=1, parameters=2)
            for f, b in times[:n]
        )
    )


def run_of(*args: Any, **asked: Any) -> Run:
    return simulate(*args, **asked)


def ends(run: Run) -> Any:
    """When each training step has ended, all of it: one task after another."""
    result = [0] * run.program.steps
    for node in range(len(run.program.tasks)):
        step = int(run.program.tasks.step[node])
        result[step] = max(result[step], run.end[node].item())
    return result


def check_period(name: str, **asked: Any) -> None:
    """The mean of as many later steps as have any short repetition, whole times exactly."""
    rest = run_of(name, **asked).steady_state
    assert rest.certified, (name, asked)
    every = len(rest.steps)
    later = ends(run_of(name, **asked, steps=rest.run.program.steps + 12 * every))
    last = rest.steps[-1]
    for k in (1, 3, 7):  # before the last steps, which nothing follows
        took = later[last + k * every] - later[last]
        if isinstance(took, int):
            assert Fraction(took, k * rest.updates) == rest.period
        else:
            assert took / (k * rest.updates) == pytest.approx(rest.period, rel=1e-11)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_certified_period_is_that_of_every_later_step(name: str) -> None:
    """In slots; with uneven stages and links; with messages in streams of their own, and alone."""
    for n in (2, 4):
        asked = fitting(name, n)
        check_period(**{"name": asked.pop("schedule"), **asked})
        model = uneven(asked.pop("n"))
        check_period(name, **asked, model=model, cluster=BOX)
        for overlap in ("stream", "none"):
            check_period(
                name, **asked, model=model, cluster=Cluster(devices=(Devices(overlap=overlap),), link=BOX.link)
            )


@settings(max_examples=40)
@given(requests(most=4) | streamed_requests(most=3))
def test_what_is_certified_goes_on(request: dict[str, Any]) -> None:
    """Of anything that can be asked for, too."""
    rest = run_of(**request).steady_state
    assume(rest.certified)
    every, last = len(rest.steps), rest.steps[-1]
    later = ends(run_of(**request | {"steps": rest.run.program.steps + 6 * every}))
    period = (later[last + 3 * every] - later[last]) / (3 * rest.updates)
    assert period == pytest.approx(float(rest.period), rel=1e-11)


@pytest.mark.parametrize("name", SCHEDULES)
def test_steady_metrics_do_not_depend_on_the_steps_asked_for(name: str) -> None:
    """Period, bubble, staleness, memory, versions, messages: the same from 1 step and from 20; makespan is not."""
    for more in ({}, {"model": uneven(4), "cluster": BOX}):
        asked = fitting(name, 4) | more
        few, many = (measure(simulate(**asked, steps=steps)).to_builtins() for steps in (1, 20))
        assert few.pop("makespan") < many.pop("makespan")
        assert few == many
        few, many = (simulate(**asked, steps=steps).summary() for steps in (1, 20))
        for metric in ("period", "period_is", "bubble", "mean_staleness"):
            assert few[metric] == many[metric]


@pytest.mark.parametrize("steps", [1, 3, 12, 48])
def test_staleness_is_the_mean_lag_in_steady_state(steps: int) -> None:
    """Of PipeDream (n-1)/2, with vertical sync n-1; of PipeMare the mean of ceil((n-1-j-i)/m), at least 0."""
    assert measure(simulate("pipedream", 4, steps=steps)).staleness == 1.5
    assert measure(simulate("pipedream", 4, steps=steps, rule="vertical-sync")).staleness == 3
    lags = [max(-((i - (8 - 1 - j)) // 2), 0) for i in range(2) for j in range(8)]
    assert measure(simulate("pipemare", 8, m=2, steps=steps)).staleness == sum(lags) / 16 == 1.75
    assert simulate("multi-cdp", 5, steps=steps).summary()["mean_staleness"] == 0.4  # (N-1)/2N


def test_messages_of_a_step_are_those_of_a_step_in_steady_state() -> None:
    """N(N-1) sums and as many parameters in a step of multi-cdp, of which the first step lacks the parameters."""
    for steps in (1, 2, 5):
        assert measure(simulate("multi-cdp", 4, steps=steps)).messages == 4 * 3 * 2


@pytest.mark.every_case
@pytest.mark.parametrize("name", SCHEDULES)
def test_so_many_steps_are_simulated_as_it_takes_to_be_full(name: str) -> None:
    """Two more than pass until all lags are there, at least three; of PipeDream n-1 pass."""
    asked = fitting(name, 6)
    lags = {"pipedream": asked["n"] - 1, "pipemare": 1, "pipedream-2bw": 1}
    fill = lags.get(name, 0 if SCHEDULES[name].order.together else 1)
    assert simulate(**asked).request["steps"] == max(3, fill + 2)


def test_a_lag_of_one_s_own_fills_longer() -> None:
    rule = Rule("four", lambda i, j, shape: 0 * i + 4)
    trace = simulate("multi-cdp", 3, rule=rule)
    assert (trace.request["steps"], trace.summary()["mean_staleness"]) == (6, 4)


@pytest.mark.parametrize("lag", [1, 4, 5, 8])
def test_all_versions_that_a_lag_needs_are_counted(lag: int) -> None:
    """A reader of theta_{t-L} needs L + 1 versions on its device, however early ends repeat."""
    rule = [[1, 1], [lag, 1]]
    one = measure(simulate("mp-cdp", 2, rule=rule))
    assert one.versions == lag + 1
    peaks = simulate("mp-cdp", 2, rule=rule, steps=40).summary()["peak_memory"]
    assert one.memory == max(row["total"] for row in peaks)


@pytest.mark.every_case
@pytest.mark.parametrize("lags", [[[1, 1], [1, 3]], [[5, 5], [1, 2]], [[5, 5], [3, 3]], [[2, 2], [1, 0]]])
@pytest.mark.parametrize("name", ["zero-cdp", "multi-cdp", "mp-cdp"])
def test_what_a_step_sends_is_what_a_longer_run_sends_more(name: str, lags: list[list[int]]) -> None:
    """By the bytes of two long runs, of which one has a step more."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, boundary=3, parameters=1, optimizer=1),) * 2)
    asked: dict[str, Any] = {"model": model, "cluster": Cluster(link=Link(latency=0.25)), "rule": lags}

    def sent(steps: int) -> float:
        return sum(float(row["bytes"]) for row in simulate(name, **asked, steps=steps).summary()["bytes_sent"])

    assert measure(simulate(name, **asked)).sent == sent(31) - sent(30)


@settings(max_examples=100, deadline=None)
@given(requests(where=listed))
def test_a_first_step_that_shows_the_period_shows_that_of_longer_runs(request: dict[str, Any]) -> None:
    """So do other metrics, but for roundings: recounted from the steps that take part elsewhere."""
    state = simulate(**request, ignore_memory=True).steady_state
    takes = state.run.costs.duration
    assume(takes[takes > 0].min(initial=1) > 1e-9 * float(state.period))  # less is lost in the times of later steps
    assert_as_longer_runs(request)


def assert_as_longer_runs(request: dict[str, Any]) -> None:
    """Compare all that is measured of a request's run with what longer runs show."""
    found = measure(simulate(**request, ignore_memory=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady, "period_of_separate_steps", lambda *_: None)
        longer = measure(simulate(**request, ignore_memory=True))
    for name in found.__dataclass_fields__:
        one, other = getattr(found, name), getattr(longer, name)
        assert one == (pytest.approx(other, rel=1e-9, abs=1e-12) if isinstance(one, float) else other), name


def test_a_step_waits_for_its_sums_before_the_next_begins() -> None:
    """A forward of 1 s, a backward of 1 s, and 8 bytes there and back by 8 bytes a second: half of 4 s is exposed."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, activation=1, parameters=8),))
    run = simulate("1f1b", 1, m=1, replicas=2, model=model, cluster=Cluster(link=Link(bandwidth=4.0)), steps=1)
    assert (run.steady_state.period, run.steady_state.certified, run.steady_state.steps) == (4.0, True, range(1))
    assert measure(run).exposed == 0.5


IN_TURN = {
    "model": Model(stages=(Stage(forward=1.0, backward=2.0, weight_backward=1.0, boundary=1, parameters=1),) * 4),
    "cluster": Cluster(devices=(Devices(overlap="none"),), link=Link(latency=1.0)),
}
TWO_WAYS = {
    "model": Model(
        stages=(
            Stage(forward=1.0, backward=1.0, weight_backward=0.25, activation=1),
            Stage(forward=1.0, backward=1.0, weight_backward=0.25, activation=1, boundary=1, update=1.0),
        )
    ),
    "cluster": Cluster(links=(PairLink(between=(1, 0), latency=1.0),)),
}


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("dualpipe", {"n": 2, "m": 4, "replicas": 2, **TWO_WAYS}),  # what came in the step before delays this one
        ("zbv", {"n": 4, "m": 3, "chunks": 2, "replicas": 2, "buckets": "300 MB", "rendezvous": "megatron", **IN_TURN}),
        ("1f1b", {"n": 4, "m": 3, "replicas": 2, **IN_TURN}),  # sums wait for messages of the next step
        ("1f1b", {"n": 4, "m": 6, "replicas": 3, "model": uneven(4), "cluster": BOX}),
        ("gpipe", {"n": 4, "m": 6, "replicas": 2, "model": uneven(4), "cluster": BOX, "reduce": "each"}),
    ],
)
def test_steps_with_sums_of_gradients_are_as_in_longer_runs(name: str, asked: dict[str, Any]) -> None:
    """Also where replicas are unlike, and where messages take their devices' turns."""
    assert_as_longer_runs({"schedule": name, "steps": 1, **asked})


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_one_step_is_enough_where_steps_do_not_touch(steps: int) -> None:
    """1F1B begins and ends on its first device: 2 (m + n - 1) slots later the next step begins, and nothing sooner."""
    run = run_of("1f1b", 4, m=6, steps=steps)
    assert (run.steady_state.period, run.steady_state.certified) == (2 * (6 + 4 - 1), True)
    assert run.steady_state.run.program.steps == (1 if steps == 5 else steps)
    assert run.steady_state.bubble == pytest.approx((4 - 1) / (6 + 4 - 1))
    apart = steady.period_of_separate_steps(run.program, run.end)
    assert apart == 2 * (6 + 4 - 1)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("zb-h2", {"m": 8}),  # devices begin the next step while others end this one
        (
            "1f1b",
            {"m": 4, "shard": 2, "zero": 1, "model": uneven(4), "cluster": BOX},
        ),  # parameters are gathered in between
        ("pipedream", {}),  # steps are not flushed
    ],
)
def test_other_steps_touch(name: str, asked: dict[str, Any]) -> None:
    """One step says nothing of the next then, and a run of several is looked at."""
    run = run_of(name, 4, steps=1, **asked)
    assert steady.period_of_separate_steps(run.program, run.end) is None
    assert run.steady_state.run.program.steps > 1


def test_what_is_held_behind_an_update_is_seen_in_the_next_step() -> None:
    """The second stage of a device is updated, and held, when its first one goes back; steps do not touch for that."""
    stages = [Stage(forward=1.0, backward=2.0, parameters=50, backward_transient=900 * (j < 2)) for j in range(4)]
    run = run_of("interleaved-1f1b", 4, m=2, chunks=2, steps=1, model=Model(stages=tuple(stages)))
    assert steady.period_of_separate_steps(run.program, run.end) == run.steady_state.period
    assert not steady.updates_last(run.program, run.start, run.end)
    assert run.steady_state.run.program.steps == 3
    assert (run.steady_state.run.peaks[:, -1] == run.peaks[:, -1] + 50).all()


def test_the_end_of_a_run_is_no_part_of_a_step_by_chance() -> None:
    """The last steps of a pipeline without flush end early; as jitter goes to nothing a step goes to that without."""
    asked: dict[str, Any] = {"model": uneven(4), "cluster": BOX}
    still = measure(simulate("pp-cdp", **asked)).step
    for steps in (3, 6, 12):
        jittered = simulate("pp-cdp", **asked, jitter="lognormal:0.000001", steps=steps)
        assert measure(jittered).step == pytest.approx(still, rel=0.002 if steps > 3 else 0.05)


def test_the_first_step_that_repeats_has_one_before_it() -> None:
    """Two stages take four slots for each step, from the start on: step 1 is the first that repeats another."""
    run = run_of("multi-dp", 2, steps=5)
    assert steady.certify(run.program, run.start, run.end) == steady.Certificate(1, 4, 1, 4)


def test_a_period_shows_in_as_many_steps_as_dependencies_reach_back() -> None:
    """Two of multi-cdp; in the last but one a forward ends a slot early here, which no other step does."""
    run = simulate("multi-cdp", 2, steps=12)
    program = run.program
    assert steady.dependency_reach(program)[0] == 2
    end = run.end.copy()
    end[np.flatnonzero(program.tasks.step == 10)[0]] -= 1
    assert steady.certify(program, run.start, run.end) is not None
    assert steady.certify(program, run.start, end) is None


@pytest.mark.parametrize("steps", [4, 5, 9])
def test_the_last_complete_step_is_the_last_that_ends_as_in_a_longer_run(steps: int) -> None:
    """A slow device does forward t + 1 before backward t, but the last of a run: that is early, and no other one."""
    model = Model(stages=tuple(Stage(forward=forward, backward=1.0, update=0.5) for forward in (5.0, 1.0)))
    run, longer = (run_of("pipedream", model=model, steps=count) for count in (steps, steps + 3))
    assert [one == other for one, other in zip(ends(run), ends(longer), strict=False)] == [True] * (steps - 1) + [False]
    assert steady.last_complete_step(run.program, run.start) == steps - 2


@pytest.mark.every_case
@pytest.mark.parametrize("name", SCHEDULES)
def test_nodes_have_one_name_if_they_are_the_same_of_two_steps(name: str) -> None:
    """Tasks by kind, stage and micro-batch, messages by content, operation and the age of what they carry as well."""
    program = run_of(**fitting(name, 4), steps=4).program
    tasks, messages, step = program.tasks, program.messages, steady.steps_of_nodes(program)
    what: list[tuple[Any, ...]] = list(zip(tasks.kind, tasks.stage, tasks.micro_batch, strict=True))
    age = step[len(tasks) :][: len(messages)] - messages.step
    columns = messages.op, messages.content, messages.stage, messages.micro_batch, age
    what += zip(*columns, strict=True)
    names = steady._identities(program)[: len(what)].tolist()
    assert len(set(zip(names, what, strict=True))) == len(set(names)) == len(set(what))


# Where nothing can be certified


def test_a_stop_is_measured_in_the_run_that_has_it() -> None:
    """Device 3 stands still for 50 slots from slot 18 on: the third step of eight slots takes 58, and is waited for."""
    summary = simulate("multi-dp", 4, steps=3, stop=["3:18:50"]).summary()
    assert (summary["makespan"], summary["period"], summary["period_is"]) == (74, 58, "measured")
    # Of the four devices, over 58 slots, each works for eight.
    assert summary["bubble"] == pytest.approx(1 - 8 / 58)


def test_chance_is_measured_in_the_run_that_has_it() -> None:
    summary = simulate("multi-dp", model=uneven(3), cluster=BOX, jitter="uniform:0.5", steps=9).summary()
    run = run_of("multi-dp", model=uneven(3), cluster=BOX, jitter="uniform:0.5", steps=9)
    found = ends(run)
    assert summary["period"] == pytest.approx((found[8] - found[4]) / 4)  # flushed, so to the very end
    assert summary["period_is"] == "measured"


@pytest.mark.parametrize(
    ("name", "idle"), [("single-cdp", 0), ("multi-cdp", 0), ("mp-cdp", 5 / 7), ("pp-cdp", 0), ("zero-cdp", 0)]
)
def test_devices_that_begin_and_end_in_turn_are_not_idle_for_that(name: str, idle: float) -> None:
    """Chance of a billionth leaves the bubble of 3 steps as in steady state: 21 devices do the work of 6 in mp-cdp."""
    model = Model(name="even", stages=(Stage(forward=1.0, backward=1.0),) * 6)
    run = simulate(name, 6, model=model, jitter="lognormal:1e-9")
    assert (run.summary()["period_is"], len(np.unique(run.tasks.step))) == ("measured", 3)
    assert run.bubble == pytest.approx(idle, abs=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_shared_links_are_measured_over_steps_of_our_own(steps: int) -> None:
    """However many are asked for; as nothing else is on the links, a ring takes what it takes alone."""
    asked: dict[str, Any] = {"model": uneven(3), "cluster": BOX, "collective": "ring", "steps": steps}
    shared, alone = (measure(simulate("multi-dp", contention=how, **asked)) for how in ("fair", "none"))
    assert (shared.period_is, alone.period_is) == ("measured", "certified")
    assert shared.step >= alone.step * (1 - 1e-12)
    assert shared.step == measure(simulate("multi-dp", contention="fair", **asked | {"steps": 5})).step


def test_the_last_half_of_a_measured_run_is_looked_at() -> None:
    """Up to the last step whose versions are read: of 8 steps, each t² slots late, steps 4 to 6 take 4 + 27 / 3."""
    run = simulate("multi-dp", 2, steps=8)
    late = np.concatenate([run.program.tasks.step, run.program.messages.step]) ** 2
    rest = replace(run, start=run.start + late, end=run.end + late, rerun=None).steady_state
    assert (rest.steps, rest.period, rest.period_is) == (range(4, 7), 4 + 9, "measured")


def test_unlike_links_that_devices_meet_in_turn_are_measured() -> None:
    """A pyramid of width 2 beside 3 micro-batches turns; where all are alike that does not matter."""
    links = (PairLink(between=(0, 3), latency=2.0),)
    model = uneven(3)
    assert simulate("mp-cdp", model=model, cluster=BOX).summary()["period_is"] == "certified"
    unlike = Cluster(link=BOX.link, links=links)
    assert simulate("mp-cdp", model=model, cluster=unlike).summary()["period_is"] == "measured"
    assert simulate("mp-cdp", model=model, cluster=BOX, slow=["1:2"]).summary()["period_is"] == "measured"
    assert simulate("pp-cdp", model=model, cluster=unlike).summary()["period_is"] == "certified"
    few, many = (simulate("mp-cdp", model=model, cluster=unlike, steps=steps).summary() for steps in (1, 20))
    assert few["period"] == many["period"]


def test_a_fraction_of_slots_is_a_text() -> None:
    """Two steps of 7 slots together: steps that take turns at 3 and 4 slots, as no schedule of ours does."""
    from cdpsim.files.units import json_number, simplified

    assert [json_number(simplified(Fraction(*parts))) for parts in ((7, 2), (8, 2))] == ["7/2", 4]


@pytest.mark.every_case
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_what_work_leaves_of_a_period(name: str) -> None:
    """The closed form: all work of a step over lanes times period; on uneven stages, links and streams."""
    asked = fitting(name, 4)
    model = uneven(asked.pop("n"))
    run = run_of(**asked, model=model, cluster=BOX)
    rest, lanes = run.steady_state, len(run.program.lane_start) - 1
    if run.rounds is not None:  # whose workers are never idle
        assert rest.bubble == 0
        return
    passes = int(run.program.counts[0]) * len(rest.steps) // rest.updates
    work = passes * sum(stage.forward + stage.backward for stage in model.stages)
    assert rest.bubble == pytest.approx(1 - work / (lanes * float(rest.period)), abs=1e-12)


def test_the_pyramid_in_steady_state_is_found_on_real_links() -> None:
    """A run's last step lacks the messages of the next one, so it is no sign of what repeats."""
    from cdpsim.studies.pyramid import pyramid

    result = pyramid(simulate("pp-cdp", 8, model="gpt2", cluster="a100-nodes"))
    assert result["period_is"] == "certified"
    assert np.array([stage["devices"] >= stage["bound"] for stage in result["stages"]]).all()

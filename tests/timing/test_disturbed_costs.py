"""Disturbed runs: laws, a clock that ticks, examples by hand, and ACCO's case of one slow GPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import Cluster, Model, RequestError, Stage, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Devices, Link
from cdpsim.cluster.disorder import Disorder, Slow, Stop
from cdpsim.invariants import violations
from cdpsim.program import Program
from cdpsim.runs import Run
from cdpsim.studies.compare import measure
from cdpsim.timing.engine import ENGINES
from cdpsim.trace.metrics.waiting import idle_spans
from tests.helpers.strategies import (
    Need,
    anything,
    disorders,
    jitters,
    requests,
    streamed_requests,
    taken,
    without_rounds,
)
from tests.helpers.times import are_no_later

SECONDS = Model(stages=(Stage(forward=1.0, backward=2.0, activation=10, boundary=4, parameters=10),) * 3)
LINKED = Cluster(link=Link(latency=0.25, bandwidth=40.0))


small_numbers = st.integers(0, 9)


@st.composite
def disturbed_requests(draw: st.DrawFn, where: Need = anything) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request, and what disturbs it."""
    request = draw(requests(most=4, where=where) | streamed_requests(most=3, where=where))
    disorder = draw(disorders(slots="model" not in request))
    disorder |= {"seed": draw(small_numbers), "run": draw(small_numbers)}
    whole = taken(request | disorder)
    return request, {name: value for name, value in whole.items() if name not in request}


def same(left: Run, right: Run) -> bool:
    """Whether the times of two runs are, to the last bit."""
    return np.array_equal(left.start, right.start) and np.array_equal(left.end, right.end)


@settings(max_examples=150)
@given(disturbed_requests())
def test_both_engines_give_the_same_times_to_the_last_bit(drawn: tuple[dict[str, Any], dict[str, Any]]) -> None:
    request, disorder = drawn
    fast, discrete = (simulate(**request, **disorder | {"engine": engine}) for engine in ENGINES)
    assert fast.start.dtype == discrete.start.dtype
    assert same(fast, discrete)


@settings(max_examples=60)
@given(disturbed_requests())
def test_every_disturbed_run_keeps_the_invariants(drawn: tuple[dict[str, Any], dict[str, Any]]) -> None:
    request, disorder = drawn
    trace = simulate(**request, **disorder)
    assert violations(trace) == {}
    assert 0 <= measure(trace).exposed <= measure(trace).bubble <= 1
    assert -1e-9 <= trace.summary()["bubble"] <= 1


@settings(max_examples=60)
@given(requests(most=4), st.integers(0, 20))
def test_what_changes_nothing_gives_the_same_trace(request: dict[str, Any], at: int) -> None:
    """A factor of 1, a variation of 0, a stop of no length: also the same summary, but for nothing."""
    nothing: dict[str, Any] = {"slow": ["0:1"], "jitter": "lognormal:0", "link_jitter": "uniform:0"}
    unit = "" if "model" not in request else "s"
    trace = simulate(**request, **nothing, stop=[f"0:{at}{unit}:0{unit}"])
    assert trace.summary() == simulate(**request).summary()
    assert same(trace, simulate(**request))


@settings(max_examples=60)
@given(disturbed_requests(where=without_rounds), st.sampled_from([1, 2, 3]), st.integers(0, 30))
def test_slower_never_ends_earlier(drawn: tuple[dict[str, Any], dict[str, Any]], factor: int, at: int) -> None:
    """A slower device or one more stop ends no run earlier, with all other disorder the same.

    Where workers compute until a message is through, some do: 5 s take three blocks of 2 s, or two of 2.5.
    """
    request, disorder = drawn
    before = simulate(**request, **disorder).whole
    unit = "" if "model" not in request else "s"
    more = [*disorder.get("stop", []), f"0:{at}{unit}:7{unit}"]
    own = float(disorder.get("slow", ["0:1"])[0][2:]) * factor
    after = simulate(**request, **disorder | {"stop": more, "slow": [f"0:{own:g}"]}).whole
    assert are_no_later(before.start, after.start)
    assert are_no_later(before.end, after.end)


@settings(max_examples=50)
@given(
    requests(most=4, timed=True),
    st.fixed_dictionaries({"jitter": jitters, "seed": small_numbers, "run": small_numbers}),
)
def test_factors_are_drawn_by_number_of_step_micro_batch_and_phase(
    request: dict[str, Any], disorder: dict[str, Any]
) -> None:
    """Another step, another schedule, other links: the same task takes the same number of times as long."""
    model, n = request["model"], request["n"]
    factors = []
    for name, steps, link in (("multi-dp", 2, Link()), ("pp-cdp", 3, Link(latency=1.0))):
        options: dict[str, Any] = {"model": model, "steps": steps, "cluster": _like(request["cluster"], link)}
        costs = simulate(name, n, **options, **disorder).costs
        assert costs.undisturbed is not None
        plain = costs.undisturbed.duration  # those of a run in steady state are rounded to quanta of that run
        factors.append((costs.duration / np.where(plain, plain, 1))[: 2 * 2 * n * n])
    assert np.allclose(factors[0], factors[1], rtol=1e-12)


def _like(cluster: Cluster, link: Link) -> Cluster:
    """A cluster with as fast devices, one task at a time on each."""
    return Cluster(devices=tuple(Devices(count=one.count, speed=one.speed) for one in cluster.devices), link=link)


def by_ticks(run: Run, stops: Mapping[int, list[tuple[int, int]]]) -> tuple[list[int], list[int]]:
    """Play a program of whole durations second by second."""
    program, count = run.program, len(run.program.tasks)
    waits: list[set[int]] = [set() for _ in range(program.nodes)]
    for before, after in zip(*(ends.tolist() for ends in program.waits()), strict=True):
        waits[after].add(before)
    release = {task: time for (task, _), time in zip(program.releases, run.costs.release.tolist(), strict=True)}
    left: list[int] = [int(one) for one in run.costs.duration]
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    now = 0
    while len(end) < program.nodes:
        assert now < 10_000
        still = {device for device, pairs in stops.items() if any(at <= now < until for at, until in pairs)}

        def works(node: int, still: set[int] = still) -> bool:
            return node >= count or int(program.tasks.device[node]) not in still

        changed = True
        while changed:
            changed = False
            for node in range(program.nodes):
                ready = node not in start and all(other in end for other in waits[node])
                if ready and release.get(node, 0) <= now and works(node):
                    start[node], changed = now, True
                    if not left[node]:
                        end[node] = now
        now += 1
        for node in start:
            if node not in end and works(node):
                left[node] -= 1
                if not left[node]:
                    end[node] = now
    return [start[node] for node in range(program.nodes)], [end[node] for node in range(program.nodes)]


@settings(max_examples=60)
@given(
    st.sampled_from(["multi-dp", "multi-cdp", "pp-cdp", "mp-cdp", "zero-dp", "zero-cdp", "single-cdp"]),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 9)), max_size=3),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_a_run_is_what_a_ticking_clock_makes_of_it(
    name: str, n: int, stops: list[tuple[int, int, int]], factor: int, latency: int
) -> None:
    """Whole seconds, or whole slots: each device works in each second in which it does not stand still."""
    devices = simulate(name, n).program.devices
    pairs: dict[int, list[tuple[int, int]]] = {}
    for device, at, length in stops:
        pairs.setdefault(device % devices, []).append((at, at + length))
    slow = [f"0:{factor}"]
    if latency:  # seconds
        model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=1),) * n)
        said = [f"{d}:{a}s:{u - a}s" for d, some in pairs.items() for a, u in some]
        cluster = Cluster(link=Link(latency=float(latency)))
        run = simulate(name, n, steps=2, model=model, cluster=cluster, stop=said, slow=slow)
        run.costs.release[:] = np.round(run.costs.release)  # cyclic releases may be thirds of seconds
        start, end = ENGINES["fast"](run.program, run.costs)
    else:
        said = [f"{d}:{a}:{u - a}" for d, some in pairs.items() for a, u in some]
        run = simulate(name, n, steps=2, stop=said, slow=slow)
        start, end = run.start, run.end
    expected = by_ticks(run, pairs)
    assert start.tolist() == expected[0]
    assert end.tolist() == expected[1]


def test_two_devices_by_hand() -> None:
    """DP of two stages, forward 1 s, backward 2 s: a step takes 6 s. Device 1 stops at 1.5 s for 1 s.

    Its second forward, from 1 to 2, goes on from 2.5 to 3; its backwards end at 5 and 7, when both devices update.
    """
    model = Model(stages=(Stage(forward=1.0, backward=2.0),) * 2)
    trace = simulate("multi-dp", model=model, steps=2, stop=["1:1.5 s:1 s"])
    tasks = trace.tasks
    own = (tasks["device"] == 1) & (tasks["step"] == 0) & (tasks["kind"] != "U")
    assert tasks["start"][own].tolist() == [0, 1, 3, 5]
    assert tasks["end"][own].tolist() == [1, 3, 5, 7]
    assert trace.summary()["makespan"] == 13
    summary = trace.summary()
    assert summary["idle_of_run"] == pytest.approx(2 / 26)  # device 1 stands still for 1 s, device 0 waits for it
    assert (summary["period"], summary["bubble"]) == (6, 0)  # of the second step, in which nothing happens
    first = (tasks["device"] == 0) & (tasks["step"] == 1) & (tasks["kind"] == "F") & (tasks["stage"] == 0)
    assert tasks["start"][first].tolist() == [7]


def test_between_tasks_a_device_that_stands_still_begins_nothing() -> None:
    """From slot 4 to 7 device 2 begins nothing; an update that falls into a stop waits, too."""
    tasks = simulate("multi-dp", 3, steps=1, stop=["2:4:3"]).tasks
    own = (tasks["device"] == 2) & (tasks["kind"] != "U")
    assert tasks["start"][own].tolist() == [0, 1, 2, 3, 7, 8]
    tasks = simulate("multi-dp", 2, steps=2, stop=["1:4:2"]).tasks
    updates = (tasks["kind"] == "U") & (tasks["step"] == 0)
    assert sorted(zip(tasks["device"][updates], tasks["start"][updates], strict=True)) == [
        (0, 4),
        (0, 4),
        (1, 6),
        (1, 6),
    ]


def test_messages_of_a_device_that_stands_still_go_on() -> None:
    """Device 0 has computed F(0,0) by 1 s and stops; its activation is at device 1 after 0.25 s and 4 of 40 B/s."""
    trace = simulate("pp-cdp", model=SECONDS, cluster=LINKED, steps=1, stop=["0:1 s:50 s"])
    sent = trace.messages
    assert (sent["start"][0], sent["end"][0]) == (1, pytest.approx(1.35))
    tasks = trace.tasks
    assert tasks["start"][(tasks["device"] == 1) & (tasks["kind"] == "F")][0] == pytest.approx(1.35)


def test_releases_stay_where_the_schedule_has_them() -> None:
    """Micro-batch 1 of three begins at a third of an undisturbed pass of 9 s, though its device is slow."""
    trace = simulate("multi-cdp", model=SECONDS, steps=1, slow=["1:4"])
    first = trace.tasks["micro_batch"] == 1
    assert trace.tasks["start"][first][0] == 3


def test_one_gpu_four_times_slower_leaves_the_others_idle_three_quarters_of_the_time() -> None:
    """ACCO's appendix C (Nabli et al. 2024): four workers, one of them made four times slower by sleeping.

    By hand: a worker's pass takes 2N = 8 slots, the slow one's 32, and an all-reduce waits for all; so the period is
    32, and the three others work 8 slots of 32: they are idle for 3/4 of the time, three times as long as they work.
    The paper says "3 of the 4 workers are idle a third of the time", which is what a worker 1.5 times slower would do.
    """
    trace = simulate("multi-dp", 4, steps=4, slow=["3:4"])
    assert trace.summary()["period"] == 32
    assert trace.summary()["makespan"] == 4 * 32
    gaps = idle_spans(trace.program, trace.start, trace.end)
    for device, share in ((0, 3 / 4), (1, 3 / 4), (2, 3 / 4), (3, 0)):
        mine = gaps["device"] == device
        assert (gaps["end"][mine] - gaps["begin"][mine]).sum() / (4 * 32) == share
    assert trace.summary()["bubble"] == 3 * (3 / 4) / 4
    model = Model(stages=(Stage(forward=2.0, backward=2.0),) * 4)
    third = simulate("multi-dp", model=model, steps=4, slow=["3:1.5"])
    assert third.summary()["bubble"] == pytest.approx(3 * (1 / 3) / 4)


def test_what_disturbs_is_recorded_and_served_again(tmp_path: Any) -> None:
    """The record has the seed and the number of the run, and no option that was not asked for."""
    asked: dict[str, Any] = {"jitter": "lognormal:0.2", "slow": ["1:2.5"], "stop": ["2:3 s:1 s"], "seed": 5, "run": 3}
    trace = simulate("multi-cdp", model=SECONDS, cluster=LINKED, **asked)
    said: dict[str, Any] = {"jitter": "lognormal:0.2", "slow": ["1:2.5"], "stop": ["2:3 s:1 s"], "seed": 5, "run": 3}
    assert {name: trace.request[name] for name in said} == said
    trace.save(tmp_path / "trace")
    again = reopen(tmp_path / "trace")
    assert again.summary() == trace.summary()
    simulate("multi-dp", 4, slow=["3:4"], stop=["1:3:2"]).save(tmp_path / "slots")
    assert reopen(tmp_path / "slots") is not None
    assert not {"jitter", "link_jitter", "slow", "stop", "run"} & set(simulate("multi-dp", 4).request)


def test_a_cluster_that_says_it_is_disturbed_as_if_it_were_asked() -> None:
    disorder = Disorder(jitter="uniform:0.4", slow=(Slow(device=1, factor=3),), stop=(Stop(device=0, at=2, lasts=1),))
    said = simulate("pp-cdp", model=SECONDS, cluster=Cluster(link=LINKED.link, disorder=disorder))
    asked: dict[str, Any] = {"jitter": "uniform:0.4", "slow": ["1:3"], "stop": ["0:2s:1s"]}
    assert said.summary() == simulate("pp-cdp", model=SECONDS, cluster=LINKED, **asked).summary()


def test_another_seed_or_run_is_another_run() -> None:
    found = {
        simulate("multi-dp", model=SECONDS, jitter="uniform:0.3", seed=seed, run=run).summary()["makespan"]
        for seed in range(3)
        for run in range(3)
    }
    assert len(found) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": "lognormal:0.1"}, "jitter: 'lognormal:0.1' makes parts of slots; give a --model"),
        ({"link_jitter": "uniform:0.1"}, "link-jitter: 'uniform:0.1' makes parts of slots"),
        ({"slow": ["1:1.5"]}, "slow: 1.5 times makes parts of slots; take a whole factor, or give a --model"),
        ({"slow": ["7:2"]}, "slow: there is no device 7 for multi-dp; take one from 0 to 2"),
        ({"stop": ["3:2"]}, "stop: there is no device 3 for multi-dp; take one from 0 to 2"),
        ({"run": -1}, "run=-1 must be at least 0"),
        (
            {"cluster": Cluster(disorder=Disorder(stop=(Stop(device=1, at=0.5),)))},
            "model: is of slots, which have no seconds",
        ),
    ],
)
def test_what_does_not_go_with_the_request_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        simulate("multi-dp", 3, **options)


def test_a_device_that_a_schedule_does_not_use_may_be_slow() -> None:
    """If the cluster has it: one file serves schedules that need more and fewer devices."""
    cluster = Cluster(devices=({"count": 8},), disorder=Disorder(slow=(Slow(device=7, factor=4),)))  # type: ignore[arg-type]
    assert simulate("multi-dp", model=SECONDS, cluster=cluster).summary()["makespan"] == 27


@pytest.mark.parametrize(
    ("start", "end", "problem"),
    [
        (3, 6, "starts while its device stands still"),  # the stop is from 2 to 5
        (5, 8, "does not last what it costs"),
        (6, 7, "waits for nothing"),
    ],
)
def test_invariants_know_when_devices_stand_still(start: int, end: int, problem: str) -> None:
    """Device 1 would begin B(i=1,j=1) in slot 2, stands still until 5, and does it until 6: all else is a fault."""
    run = simulate("multi-dp", 2, steps=1, stop=["1:2:3"])
    node = next(k for k in range(run.program.nodes) if run.program.describe(k) == "B(t=0,i=1,j=1)")
    assert (run.start[node], run.end[node], violations(run)) == (5, 6, {})
    starts, ends = run.start.copy(), run.end.copy()
    starts[node], ends[node] = start, end
    found = violations(replace(run, start=starts, end=ends))
    assert any(problem in text and "B(t=0,i=1,j=1)" in text for text in found.values())


def test_large_programs_stop_by_the_same_calendar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled sweeps know none, and leave such runs to numpy."""
    expected = simulate("multi-cdp", 4, stop=["2:9:4"])
    monkeypatch.setattr("cdpsim.numeric.paths.FEW_ROWS", 0)
    monkeypatch.setattr("cdpsim.numeric.paths.LOAD_NUMBA_FROM_ROWS", 0)
    assert same(simulate("multi-cdp", 4, stop=["2:9:4"]), expected)


def test_programs_keep_their_type() -> None:
    """In slots whole numbers stay whole."""
    run = simulate("multi-cdp", 4, slow=["1:3"], stop=["2:9:4"])
    assert isinstance(run.program, Program)
    assert run.end.dtype == np.int64

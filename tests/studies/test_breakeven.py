"""From which bandwidth on messages are hidden: by hand where that can be done, elsewhere by runs on either side."""

import csv
import io
import json
from collections.abc import Callable
from itertools import pairwise
from math import inf, log2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, presets, simulate
from cdpsim.cluster import Cable, Devices, Edge, Link, PairLink, Topology
from cdpsim.draw.canvas import rendered
from cdpsim.draw.study_pictures import break_even_curves
from cdpsim.request.sharing import accepts
from cdpsim.runs import Run
from cdpsim.schedules import TABLE_1
from cdpsim.studies.breakeven import (
    BANDWIDTH_PRECISION,
    BreakEven,
    Runner,
    _crossing,
    bandwidth_factors,
    find_break_even,
    scale_links,
    step_time,
    step_times_at,
)
from tests.conftest import Command
from tests.helpers.command_line import content, refuse
from tests.helpers.every_row import every_row
from tests.helpers.figures import HOSTILE
from tests.helpers.figures import one as one_of
from tests.helpers.strategies import models
from tests.helpers.svg import drawn, read

SHARE = 0.01
CLOSE = pytest.approx


def near(value: float) -> object:
    """As near as the search promises."""
    return pytest.approx(value, rel=2 * BANDWIDTH_PRECISION)


def runner(name: str, model: Model | str, n: int | None = None, **asked: object) -> Runner:
    """Return a function that runs a schedule on a cluster."""

    def run(cluster: Cluster) -> Run:
        return simulate(name, n, model=model, cluster=cluster, steps=12, ignore_memory=True, **asked)  # type: ignore[arg-type]

    return run


# By hand


@pytest.mark.every_case
@pytest.mark.parametrize("k", [2, 3, 8, 24])
@pytest.mark.parametrize("latency", [0.0, 1e-4])
def test_one_stage_on_k_devices_waits_for_a_ring(k: int, latency: float) -> None:
    """Each of 2(k-1) rounds takes a latency and a k-th of the gradients (Patarasuk & Yuan 2009); nothing overlaps."""
    size, bandwidth, compute = 6 * 10**9, 5e9, 0.7 + 1.3
    model = Model(stages=(Stage(forward=0.7, backward=1.3, parameters=size),))
    cluster = Cluster(link=Link(latency=latency, bandwidth=bandwidth))
    one = find_break_even(runner("multi-dp", model, m=k, collective="ring"), cluster, SHARE)
    all_reduce = 2 * (k - 1) * (latency + size / k / bandwidth)
    assert (one.devices, one.n, one.m, one.bandwidth) == (k, 1, k, bandwidth)
    assert one.free == CLOSE(compute)
    assert one.step == CLOSE(compute + all_reduce)
    assert one.exposed == CLOSE(all_reduce / (compute + all_reduce))
    assert one.latency == CLOSE(2 * (k - 1) * latency / compute)
    assert one.break_even == near(size / k / (SHARE * compute / (2 * (k - 1)) - latency))
    assert one.factor == CLOSE((one.break_even or 0) / bandwidth)


def test_what_goes_to_the_host_is_no_message() -> None:
    """A pass takes the 2 x 3 s in which 6 GB cross each way, however long messages take."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, activation=6 * 10**9, parameters=10**9),))
    cluster = Cluster(link=Link(bandwidth=1e9), host=Link(bandwidth=2e9))
    one = find_break_even(runner("multi-dp", model, m=2, collective="ring", offload="activations"), cluster, SHARE)
    assert [one.free, one.exposed] == CLOSE([6, 1 / 7])
    assert one.break_even == near(1e9 / (SHARE * 6))


def test_latency_alone_can_be_too_much() -> None:
    """Fourteen rounds of a ring of eight, of 1.5 ms each, are 21 ms of a second; up to 3 % they are hidden."""
    model = Model(stages=(Stage(forward=0.4, backward=0.6, parameters=10**9),))
    run, cluster = runner("multi-dp", model, m=8, collective="ring"), Cluster(link=Link(latency=1.5e-3, bandwidth=1e9))
    one = find_break_even(run, cluster, 0.02)
    assert (one.break_even, one.factor) == (None, None)
    assert one.latency == CLOSE(0.021)
    assert find_break_even(run, cluster, 0.03).break_even == near(10**9 / 8 / (0.03 / 14 - 1.5e-3))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=5),
    st.sampled_from([0.01, 0.1]),
)
@settings(max_examples=50, deadline=None)
def test_all_reduces_hide_behind_the_forwards_of_stages_before(rows: list[tuple[int, int, int]], share: float) -> None:
    """All begin at the end of a step; that of stage j is due when the stages before have gone forward again."""
    stages = tuple(Stage(forward=float(f), backward=float(b), parameters=10**6 * s) for f, b, s in rows)
    k, compute = len(rows), sum(f + b for f, b, _ in rows)
    one = find_break_even(
        runner("multi-dp", Model(stages=stages), collective="ring"), Cluster(link=Link(bandwidth=1e6)), share
    )
    due = np.cumsum([0, *(f for f, _, _ in rows[:-1])])
    carried = np.array([2 * (k - 1) * 10**6 * s / k for _, _, s in rows])
    assert one.step == CLOSE(compute + max(0, *(carried / 1e6 - due)))
    assert one.break_even == near(max(carried / (share * compute + due)))


@pytest.mark.parametrize("n", [2, 4, 7])
def test_all_reduces_on_one_stream_go_one_after_another(n: int) -> None:
    """In the order in which they are due: that of stage j ends after j + 1 of them, and is due after j forwards."""
    size, share = 10**6, 0.05
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=size),) * n)
    cluster = Cluster(devices=(Devices(overlap="stream"),), link=Link(bandwidth=1e5))
    one = find_break_even(runner("multi-dp", model, collective="ring"), cluster, share)
    carried = 2 * (n - 1) * size / n
    assert one.step == CLOSE(3 * n + max(j * (carried / 1e5 - 1) + carried / 1e5 for j in range(n)))
    longest = min((share * 3 * n + j) / (j + 1) for j in range(n))
    assert one.break_even == near(carried / longest)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (0.5, 1.25)])
@pytest.mark.parametrize("latency", [0.0, 0.125])
def test_messages_of_multi_cdp_have_a_slot_to_arrive_in(
    n: int, forward: float, backward: float, latency: float
) -> None:
    """From an update of stage j to the next one, through its first j + 1 readers, and back as sums of gradients.

    That takes N - j forwards and backwards, and j + 1 messages, of parameters or of gradients, which are as large; j of
    N stages are left to hide them. A step gets longer where (j + 1) P > j (f + b), first for j = 1.
    """
    slot, size = (forward + backward) / 2, 10**6
    model = Model(stages=(Stage(forward=forward, backward=backward, parameters=size),) * n)
    cluster = Cluster(link=Link(latency=latency, bandwidth=1e5))
    one = find_break_even(runner("multi-cdp", model, prefetch=2), cluster, SHARE)
    assert one.free == CLOSE(2 * n * slot)
    assert one.break_even == near(size / ((1 + n * SHARE) * slot - latency))
    assert (one.exposed, one.latency) == CLOSE((1 - one.free / one.step, 0))


def test_parameters_that_come_just_in_time_are_exposed() -> None:
    """Two workers, f = b = 1; every forward but that of a new version's own maker waits for its parameters."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=100),) * 2)
    cluster = Cluster(link=Link(bandwidth=1000.0))
    late, early = (find_break_even(runner("multi-cdp", model, prefetch=k), cluster, SHARE) for k in (0, 2))
    assert late.step > early.step == early.free == 4
    assert (late.break_even or 0) > 10 * (early.break_even or inf)


@pytest.mark.parametrize("name", ["single-dp", "single-cdp", "multi-dp", "pp-cdp"])
def test_who_sends_nothing_is_hidden_at_any_bandwidth(name: str) -> None:
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=100, boundary=9),))
    one = find_break_even(runner(name, model), Cluster(link=Link(latency=1.0, bandwidth=1.0)), SHARE)
    assert (one.devices, one.bandwidth, one.factor, one.break_even) == (1, None, 0, 0)
    assert (one.exposed, one.latency) == (0, 0)
    light = Model(stages=(Stage(forward=1.0, backward=1.0),) * 2)
    if name != "pp-cdp":  # which sends boundaries, if of nothing
        assert find_break_even(runner(name, light), Cluster(link=Link(bandwidth=1.0)), SHARE).factor == 0


# By simulation


@given(st.data(), st.sampled_from(["multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "pp-cdp", "zero-dp", "zero-cdp"]))
@settings(max_examples=25, deadline=None)  # of a tenth of a second and more
def test_on_either_side_is_what_it_says(data: st.DataObject, name: str) -> None:
    """A cluster with a little more bandwidth hides its messages, one with a little less does not."""
    n, share = data.draw(st.integers(2, 4)), data.draw(st.sampled_from([0.001, 0.01, 0.2]))
    model, latency = data.draw(models(n)), data.draw(st.sampled_from([0.0, 1e-6]))
    run, devices = runner(name, model), (Devices(speed=1.0),)
    one = find_break_even(run, Cluster(devices=devices, link=Link(latency=latency, bandwidth=1e6)), share)

    def step_at(bandwidth: float) -> float:
        return step_time(run(Cluster(devices=devices, link=Link(latency=latency, bandwidth=bandwidth))))

    if one.break_even is None:  # no bandwidth is enough
        assert step_at(inf) > (1 + share) * one.free
        return
    if one.break_even == 0:  # any bandwidth is
        assert step_at(1.0) <= (1 + share) * one.free
        return
    assert step_at(one.break_even * (1 + 3 * BANDWIDTH_PRECISION)) <= (1 + share) * one.free * (1 + 1e-9)
    assert step_at(one.break_even * (1 - 3 * BANDWIDTH_PRECISION)) > (1 + share) * one.free * (1 - 1e-9)
    steps = [step_at(one.break_even * factor) for factor in (0.01, 0.1, 0.5, 1, 2, 10, 100)]
    assert all(slow >= fast * (1 - 1e-9) for slow, fast in pairwise(steps))


@pytest.mark.parametrize("bent", [lambda x: x**9 - 1e-3, lambda x: 1e-3 - (1 - x) ** 9], ids=["late", "early"])
def test_a_bent_curve_needs_few_runs(bent: Callable[[float], float]) -> None:
    """Plain false position keeps one end and creeps to the other; halving the interval takes log2 of the precision."""
    asked = []

    def excess(x: float) -> float:
        asked.append(x)
        return bent(x)

    low = _crossing(excess, 0.0, 1.0)
    assert bent(low) <= 0 < bent(low * (1 + BANDWIDTH_PRECISION))
    assert len(asked) <= 1.25 * log2(1 / BANDWIDTH_PRECISION)


def test_a_curve_is_runs_at_those_bandwidths() -> None:
    run, cluster = runner("zero-dp", "gpt2", 4), presets.cluster("pcie-box")
    found = find_break_even(run, cluster, SHARE)
    steps = step_times_at(run, cluster, (0.5, 1, found.factor or 0))
    assert steps[0] > steps[1] == found.step
    assert steps[2] == CLOSE((1 + SHARE) * found.free, rel=1e-5)
    factors = bandwidth_factors([found])
    assert factors == sorted(factors)
    assert (factors[0], factors[-1]) == CLOSE((1 / 8, 8 * (found.factor or 0)), rel=1e-5)


def test_every_bandwidth_is_scaled_and_nothing_else() -> None:
    cable = Cable(latency=1.0, bandwidth=4.0, latency_back=2.0, bandwidth_back=8.0)
    joined = Cluster(
        devices=(Devices(count=4, speed=5.0, memory=7),),
        topology=Topology(kind="nodes", per_node=2, link=Cable(bandwidth=2.0), host=Cable(), network=cable),
        edges=(Edge(between=(0, 3), latency=3.0, bandwidth=16.0),),
    )
    twice = Cluster(
        devices=joined.devices,
        topology=Topology(
            kind="nodes",
            per_node=2,
            link=Cable(bandwidth=4.0),
            network=Cable(latency=1.0, bandwidth=8.0, latency_back=2.0, bandwidth_back=16.0),
        ),
        edges=(Edge(between=(0, 3), latency=3.0, bandwidth=32.0),),
    )
    assert scale_links(joined, 2) == twice
    linked = Cluster(link=Link(latency=1.0, bandwidth=3.0), links=(PairLink(between=(0, 1), bandwidth=4.0),))
    assert scale_links(linked, 2).link == Link(latency=1.0, bandwidth=6.0)
    assert scale_links(linked, 2).links == (PairLink(between=(0, 1), bandwidth=8.0),)
    assert scale_links(Cluster(host=Link(latency=1.0, bandwidth=3.0)), 2, latency=0).host == Link(
        latency=1.0, bandwidth=3.0
    )
    for cluster in (joined, linked):
        assert scale_links(cluster, 1) == cluster
        assert scale_links(cluster, inf, latency=0).is_free


def test_what_is_refused() -> None:
    run = runner("multi-dp", "gpt2", 2)
    with pytest.raises(RequestError, match="cluster: its links have no bandwidth that could be changed; take one with"):
        find_break_even(run, Cluster(devices=(Devices(speed=1e12),), link=Link(latency=1.0)))
    with pytest.raises(RequestError, match="share: 0 is not between 0 and 100"):
        find_break_even(run, presets.cluster("h100-node"), 0)


# Drawn


def picture_of(names: list[str], numbers: list[int], model: Model) -> tuple[list[BreakEven], list[float], list[object]]:
    """Return the figure of toy runs, with its break-evens, factors, and the curves of the last N."""
    cluster = Cluster(link=Link(latency=1e-3, bandwidth=1e6))
    made: list[tuple[BreakEven, Runner]] = []
    for n in numbers:
        for name in names:
            run = runner(name, model, n, **({"prefetch": 1} if name == "multi-cdp" else {}))
            made.append((find_break_even(run, cluster, SHARE), run))
    found = [one for one, _ in made]
    factors = bandwidth_factors(found, 7)
    return found, factors, [(one, step_times_at(run, cluster, factors)) for one, run in made if one.n == numbers[-1]]


EIGHT = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=10**6, boundary=1000),) * 8)


def test_a_picture_has_each_curve_where_its_steps_are() -> None:
    found, factors, curves = picture_of(["multi-dp", "multi-cdp"], [2, 4], EIGHT)
    figure = break_even_curves(found, factors, curves, share=SHARE)  # type: ignore[arg-type]
    picture = drawn(figure)
    left, right = picture.shapes["exposed-0"].left, picture.shapes["exposed-0"].right
    logs = np.log(factors)
    for place, (one, steps) in enumerate(curves):  # type: ignore[misc]
        points = picture.shapes[f"exposed-{place}"].points
        assert [x for x, _ in points] == CLOSE(left + (logs - logs[0]) / (logs[-1] - logs[0]) * (right - left), abs=0.1)
        exposed = [1 - one.free / step for step in steps]  # type: ignore[has-type]
        top, ground = picture.shapes["exposed-0"].upper, picture.shapes["exposed-1"].lower
        highest = 1 - found[2].free / max(curves[0][1])  # type: ignore[index]
        scale = (top - ground) / highest
        assert [y for _, y in points] == CLOSE([ground + share * scale for share in exposed], abs=0.1)
    own = left - logs[0] / (logs[-1] - logs[0]) * (right - left)
    assert picture.shapes["own"].middle[0] == CLOSE(own, abs=0.1)
    over = picture.shapes["over-n-0"].points
    assert len(over) == 2
    assert over[0][0] < over[1][0]
    assert {f"over-n-{k}" for k in (0, 1)} <= set(picture.shapes)
    for place, (last, _) in enumerate(curves):  # type: ignore[misc]
        mark = one_of(figure, f"break-even-{place}")
        assert (mark.get_xdata(), mark.get_ydata()) == ([last.break_even], [CLOSE(SHARE / (1 + SHARE))])  # type: ignore[has-type]
    assert "hidden at N = 4, but for 1 % of the step, from" in picture.said()
    again = break_even_curves(found, factors, curves, share=SHARE)  # type: ignore[arg-type]
    assert rendered(again, "a.svg") == rendered(break_even_curves(found, factors, curves, share=SHARE), "b.svg")  # type: ignore[arg-type]


def test_heights_over_n_are_break_evens() -> None:
    found, factors, curves = picture_of(["multi-dp", "multi-cdp"], [2, 4, 8], EIGHT)
    picture = drawn(break_even_curves(found, factors, curves, share=SHARE))  # type: ignore[arg-type]
    ground = picture.shapes["own-over-n"].middle[1]
    heights, wanted = [], []
    for place in (0, 1):
        heights += [y - ground for _, y in picture.shapes[f"over-n-{place}"].points]
        wanted += [np.log(one.factor or 1) for one in found[place::2]]
    scale = heights[0] / wanted[0]
    assert heights == CLOSE([scale * want for want in wanted], abs=0.2)


def test_never_and_any_are_said_and_hostile_names_are_text() -> None:
    never = BreakEven(HOSTILE, "dp", 2, 2, 2, 1.0, 2.0, 0.5, 0.25, 1e9, None, None)
    free = BreakEven("single-dp", "dp", 2, 2, 1, 1.0, 1.0, 0.0, 0.0, None, 0.0, 0.0)
    curves = [(never, [3.0, 2.0]), (free, [1.0, 1.0])]
    said = drawn(break_even_curves([never, free], [0.5, 1.0], curves, share=SHARE)).said()
    assert any(words.endswith("never; latency alone costs 25 %") for words in said)
    assert "single-dp: any bandwidth" in said
    many = [BreakEven(str(k), "dp", 2, 2, 2, 1.0, 1.0, 0.0, 0.0, 1e9, 1.0, 1e-9) for k in range(9)]
    with pytest.raises(RequestError, match="9 curves cannot be told apart; name at most 8"):
        break_even_curves(many, [1.0, 2.0], [(one, [1.0, 1.0]) for one in many], share=SHARE)


# On the command line

ASKED = ["breakeven", "--model", "toy.toml", "--cluster", "box.toml"]


def test_the_table_is_that_of_the_function_in_every_form(command: Command, here: Path) -> None:
    found = json.loads(command(*ASKED, "--format", "json").out)
    assert [one["schedule"] for one in found] == [name for name in TABLE_1 if not name.startswith("single")]
    model, cluster = Model.load("toy.toml"), Cluster.load("box.toml")
    for one in found:
        early = {"prefetch": 1} if accepts(SCHEDULES[one["schedule"]], "prefetch") else {}
        assert one.pop("errors")
        assert one == find_break_even(runner(one["schedule"], model, **early), cluster).to_builtins()
    assert found[0]["bandwidth"] == 1e9  # of devices 0 and 1; the others have 3
    rows = list(csv.DictReader(io.StringIO(command(*ASKED, "--format", "csv").out)))
    assert [row["schedule"] for row in rows] == [one["schedule"] for one in found]
    assert [float(row["exposed"]) for row in rows] == [one["exposed"] for one in found]
    text = command(*ASKED).out
    assert "break-even" in text
    assert all(f" {100 * one['exposed']:.1f} % " in text for one in found)


def test_several_numbers_and_points_of_curves(command: Command, here: Path) -> None:
    out = command(*ASKED, "multi-dp", "-n", 3, 2, "--format", "json", "-o", "x.svg").out
    assert [one["n"] for one in json.loads(out)] == [2, 3]
    assert {"exposed-0", "over-n-0", "own"} <= set(read((here / "x.svg").read_bytes()).shapes)
    points = json.loads(command(*ASKED, "multi-dp", "-n", 2, 3, "--over", "bandwidth", "--format", "json").out)
    assert [row["n"] for row in points] == sorted(row["n"] for row in points)
    assert len({row["factor"] for row in points}) * 2 == len(points)
    assert all(row["bandwidth"] == CLOSE(row["factor"] * 1e9) for row in points)
    assert json.loads(out)[0]["free"] == CLOSE(points[0]["step"] * (1 - points[0]["exposed"]))
    assert "x.svg" in content(here)


def test_rows_have_the_names_that_were_asked_for(command: Command, here: Path) -> None:
    out = command(*ASKED, "ddp", "fsdp", "dp", "--replicas", 2, "--format", "json").out
    assert [row["schedule"] for row in json.loads(out)] == ["ddp", "fsdp", "dp"]


def test_prefetch_is_for_those_who_take_it(command: Command, here: Path) -> None:
    """By default one task early, if a schedule can; asked for where none can, it is refused."""

    def found(*asked: object) -> Callable[[str], float]:
        rows = json.loads(command(*ASKED, "multi-dp", "multi-cdp", *asked, "--format", "json").out)
        return lambda name: next(row["break_even"] for row in rows if row["schedule"] == name)

    done = command(*ASKED, "multi-dp", "pp-cdp", "--replicas", "2")
    assert (done.code, done.err) == (0, "cdpsim: --replicas: not taken by multi-dp\n")
    plain, late = found(), found("--prefetch", 0)
    assert plain("multi-dp") == late("multi-dp")
    assert plain("multi-cdp") < late("multi-cdp")
    refuse(
        command, here, "breakeven multi-dp --prefetch 2 --model toy.toml --cluster box.toml", "prefetch: multi-dp does"
    )


REFUSALS = {
    "breakeven -n 3": ["--cluster: is missing; its bandwidths are what is varied"],
    "breakeven --cluster box.toml": ["n: is missing"],
    "breakeven lost -n 3 --cluster box.toml": ["unknown schedule 'lost'"],
    "breakeven -n 3 3 --cluster box.toml": ["n: has one number twice"],
    "breakeven -n 3 --cluster box.toml --share 0": ["--share: '0' is not a number between 0.000001 and 100"],
    "breakeven -n 3 --cluster box.toml --share x": ["--share: 'x' is not a number"],
    "breakeven -n 3 --cluster box.toml --over time": ["unknown over 'time'"],
    "breakeven -n 3 --cluster box.toml": ["model: is of slots, which have no seconds and no bytes"],
    "breakeven -n 3 --cluster box.toml --format yaml": ["unknown format 'yaml'"],
    "breakeven -n 3 --cluster box.toml -o x.html": ["its form is unknown"],
    "breakeven -n 4 --cluster box.toml --model toy.toml": ["the model has 3 stages"],
}


@every_row("line", REFUSALS)
def test_what_cannot_be_answered_is_one_line(line: str, command: Command, here: Path) -> None:
    refuse(command, here, line, *REFUSALS[line])

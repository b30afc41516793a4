"""Traffic over time as it is drawn, held against single messages, the volumes of table 1 and rates by hand."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.figure import Figure

from cdpsim import Cluster, RequestError, Trace, simulate
from cdpsim.cluster import Devices, Link, PairLink
from cdpsim.draw.canvas import rendered
from cdpsim.draw.curves import scale_of, traffic_by_content, traffic_by_sender, traffic_over_time
from cdpsim.program import Content
from tests.helpers.figures import BOX, HOSTILE, PAPER, at, marked, model, one, saved, spot, words
from tests.helpers.made_traces import changed, empty
from tests.helpers.strategies import requests

CONTENTS = ("activation", "activation_gradient", "gradient", "parameters", "state")


def copies(op: str, dst: object) -> int:
    """Return the spec's count of copies: k-1 for a reduction or a broadcast among k, both for an all-reduce.

    The size of a reduce-scatter is that of a share, of which each member sends k-1.
    """
    others = str(dst).count("|")
    return {"p2p": 1, "all_reduce": 2 * others, "reduce_scatter": (others + 1) * others}.get(op, others)


def sent_at(trace: Trace) -> dict[tuple[str, float], int]:
    """Return the bytes sent, by content and start, message by message."""
    found: dict[tuple[str, float], int] = {}
    columns = (trace.messages[name].tolist() for name in ("op", "content", "dst", "size", "start"))
    for op, content, dst, size, start in zip(*columns, strict=True):
        found[content, start] = found.get((content, start), 0) + size * copies(op, dst)
    return found


def bars(figure: Figure, content: str) -> dict[float, float]:
    """Drawn bars by the slot in their middle, as high as they are."""
    found: dict[float, float] = {}
    for part in marked(figure, f"sent-{content.replace('_', '-')}"):
        _, edges, _ = part.get_data()
        middles = [round((left + right) / 2, 6) for left, right in zip(edges[1::2], edges[2::2], strict=False)]
        found |= {middle: at(part, middle) for middle in middles if at(part, middle)}
    return found


@pytest.mark.parametrize("name", PAPER)
def test_in_slots_a_bar_is_what_is_sent_at_that_moment(name: str) -> None:
    trace = simulate(name, 3)
    figure, sent = traffic_over_time([trace]), sent_at(trace)
    for content in CONTENTS:
        expected = {start: size for (kind, start), size in sent.items() if kind == content and size}
        assert bars(figure, content) == pytest.approx(expected)
    for peak in marked(figure, "peak"):
        assert spot(peak)[1] == max(sum(size for (_, at), size in sent.items() if at == start) for _, start in sent)


def test_the_norm_of_gradients_is_told_from_states() -> None:
    """Words of contents are not in the order of the alphabet."""
    layer = {"forward": "1 s", "backward": "2 s", "parameters": "4 kB", "repeat": 2}
    run = simulate("dp", shard=2, model={"stages": [layer]}, cluster=BOX, clip=True, steps=1)
    total = traffic_by_content(run, scale_of([run], "B/s"))
    sent = {Content(k).name.lower() for k, row in enumerate(total.value) if row.any()}
    assert sent == set(run.messages.content.tolist()) == {"gradient", "norm", "parameters"}


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize(
    ("name", "gradient", "parameters", "boundary"),
    [  # table 1 in stage-activations of all micro-batches: a unit of ΨP is N stages, and there are N micro-batches
        ("multi-cdp", 1, 1, 0),
        ("mp-dp", 2, 0, 1),  # an all-reduce brings gradients there, and what is made of them back
        ("multi-dp", 2, 0, 0),
        ("mp-cdp", 1 / 2, 1 / 2, 1),
        ("pp-cdp", 0, 0, 1),
        ("zero-dp", 1, 2, 0),
    ],
)
def test_a_steady_step_sends_the_volumes_of_table_1(
    name: str, gradient: float, parameters: float, boundary: float, n: int
) -> None:
    figure = traffic_over_time([simulate(name, n, steps=6)])
    step = range(6 * n + 1, 8 * n + 1)
    sent = {content: sum(bars(figure, content).get(slot, 0) for slot in step) for content in CONTENTS}
    expected = {"gradient": gradient, "parameters": parameters, "activation": boundary, "activation_gradient": boundary}
    assert {name: sent[name] for name in expected} == {name: each * n * (n - 1) for name, each in expected.items()}


def test_dp_sends_at_once_what_cdp_spreads() -> None:
    n = 4
    figure = traffic_over_time([simulate("multi-dp", n), simulate("multi-cdp", n)])
    assert spot(one(figure, "sent-0-peak"))[1] == 2 * n * (n - 1)
    assert spot(one(figure, "sent-1-peak"))[1] <= n
    shown = words(figure)
    assert f"multi-dp, dp: peak 24 at slot 8, {3 * 24} in all, mean 3 per slot" in shown
    assert any("an all-reduce 2(k − 1)" in text for text in shown)


@settings(max_examples=40)
@given(requests(most=4))
def test_nothing_is_lost_on_the_way(request: dict[str, Any]) -> None:
    """The integral of rates, or the sum of moments, equals the bytes of the messages, in all and for each device."""
    trace = simulate(**request)
    messages = trace.messages
    end = max(trace.tasks["end"].max(), messages["end"].max(initial=0))
    timed = messages["end"] - messages["start"] > 1e-9 * end
    shared = scale_of([trace], at_once=not timed.any())
    carried = timed if timed.any() else ~timed
    columns = (messages[name][carried].tolist() for name in ("op", "dst", "size"))
    sizes = np.array([size * copies(op, dst) for op, dst, size in zip(*columns, strict=True)])
    series = traffic_by_content(trace, shared)
    spans = np.ones(len(series.time)) if shared.at_once else np.diff(np.append(series.time, shared.end))
    # Times that differ by a billionth of the run are one, perhaps several in a row; rates so small are rounding.
    rates = 0 if shared.at_once else (sizes / (messages["end"] - messages["start"])[carried]).sum()
    assert (series.value * spans).sum() == pytest.approx(sizes.sum(), rel=1e-6, abs=1e-8 * float(rates * end))
    if shared.at_once:
        sent = [found.value.sum() for _, found in sorted(traffic_by_sender(trace, shared).items())]
        assert sent == pytest.approx([float(Fraction(row["bytes"])) for row in trace.summary()["bytes_sent"]])


def test_the_first_of_equal_peaks_is_marked_whatever_rounding_says() -> None:
    n, trace = 4, simulate("multi-dp", model=model(4), cluster=BOX)
    (time, rate) = spot(one(traffic_over_time([trace]), "peak"))
    assert time == trace.messages["start"].min()
    rounds = 2 * (1e-5 + 1e8 / 3e9)  # recursive doubling among four
    assert rate == pytest.approx(n * 2 * (n - 1) * 1e8 / rounds)


def test_rates_are_size_over_duration() -> None:
    trace = simulate("mp-cdp", model=model(3), cluster=BOX)
    figure, columns = traffic_over_time([trace]), trace.messages
    rate = columns["size"] / (columns["end"] - columns["start"])
    parts = {content: marked(figure, f"sent-{content.replace('_', '-')}") for content in CONTENTS}
    middles = (columns["start"] + columns["end"]) / 2
    for time in [*middles[::5].tolist(), *np.random.default_rng(1).uniform(0, middles.max(), 50).tolist()]:
        now = (columns["start"] <= time) & (time < columns["end"])
        for content in CONTENTS:
            expected = rate[now & (columns["content"] == content)].sum()
            drawn = sum(at(part, time) for part in parts[content])
            assert drawn == pytest.approx(expected, abs=1)


def test_what_takes_no_time_among_what_does_is_named() -> None:
    some = Cluster(devices=(Devices(),), links=(PairLink(between=(0, 1), latency=0.01, bandwidth=1e9),))
    trace = simulate("pp-cdp", model=model(3), cluster=some)
    left = int(trace.messages["size"][trace.messages["end"] == trace.messages["start"]].sum())
    assert f"without {left / 1e6:g} MB that take no time" in words(traffic_over_time([trace]))
    free = traffic_over_time([simulate("pp-cdp", model=model(3), cluster=Cluster(devices=(Devices(),), link=Link()))])
    assert not any("take no time" in text for text in words(free))


def test_algorithms_are_named() -> None:
    assert "Sent by each device, all-reduces by ring" in words(
        traffic_over_time([simulate("multi-dp", 3, collective="ring")])
    )
    assert "Sent by each device, collectives by binomial trees" in words(traffic_over_time([simulate("zero-dp", 3)]))
    assert "Sent by each device" in words(traffic_over_time([simulate("zero-cdp", 3)]))


def test_nothing_sent_is_said() -> None:
    assert "nothing is sent" in words(traffic_over_time([simulate("single-cdp", 3)]))
    shown = words(traffic_over_time([simulate("single-cdp", 3), simulate("multi-cdp", 3)]))
    assert "single-cdp: nothing is sent" in shown


@pytest.mark.parametrize("real", [False, True])
def test_the_same_request_gives_the_same_bytes_also_from_files(real: bool, tmp_path: Path) -> None:
    def trace() -> Trace:
        return simulate("mp-dp", model=model(2), cluster=BOX) if real else simulate("mp-dp", 2)

    first = saved(trace(), tmp_path / "trace")
    first.summary()["request"]["schedule"] = HOSTILE
    assert rendered(traffic_over_time([first]), "a.svg") == rendered(
        traffic_over_time([changed(trace(), first.summary())]), "a.svg"
    )


def test_what_is_empty_is_refused() -> None:
    with pytest.raises(RequestError, match="no tasks"):
        traffic_over_time([empty()])


@pytest.mark.parametrize("name", ["multi-dp", "multi-cdp", "zero-dp"])
def test_what_has_been_sent_so_far_is_the_sum_of_messages_that_have_begun(name: str) -> None:
    trace = simulate(name, 3)
    line = one(traffic_over_time([trace, trace]), "sum-1")
    messages = trace.messages
    sent = [
        copies(op, dst) * size for op, dst, size in zip(messages["op"], messages["dst"], messages["size"], strict=True)
    ]
    time, value = line.get_data()
    for slot in range(int(trace.tasks["end"].max())):
        expected = sum(size for size, start in zip(sent, messages["start"], strict=True) if start <= slot)
        assert value[np.searchsorted(time, slot, side="right") - 1] == expected


def test_where_messages_take_time_the_sum_ends_with_all_bytes() -> None:
    trace = simulate("multi-cdp", model=model(3), cluster=BOX)
    time, value = one(traffic_over_time([trace]), "sum-0").get_data()
    assert value[-1] == pytest.approx(trace.messages["size"].sum(), rel=1e-9)
    assert (np.diff(value) >= 0).all() and (np.diff(time) >= 0).all()

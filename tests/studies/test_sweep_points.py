"""Axes and points of sweeps: ranges, order, number, names, and what is refused before anything runs."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import RequestError
from cdpsim.studies.sweep.points import lowest_form, read_part
from tests.helpers.every_row import every_row
from tests.helpers.profiles import profiled
from tests.helpers.sweeps import sweep

TWO: dict[str, list[Any]] = {"schedule": ["1f1b", "gpipe"], "n": [2, 4, 8]}


def values_of(axis: Any) -> list[Any]:
    return list(sweep({"fixed": {"schedule": "1f1b"}, "axes": {"n": axis}}).axes[0].values)


@every_row(
    ("axis", "values"),
    [
        ({"from": 2, "to": 32, "times": 2}, [2, 4, 8, 16, 32]),
        ({"from": 2, "to": 33, "times": 2}, [2, 4, 8, 16, 32]),
        ({"from": 1, "to": 9, "step": 4}, [1, 5, 9]),
        ({"from": 0.1, "to": 0.5, "step": 0.1}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"from": 1, "to": 1000, "count": 4, "spacing": "log"}, [1, 10, 100, 1000]),
        ({"from": 0, "to": 1, "count": 5}, [0, 0.25, 0.5, 0.75, 1]),
        ({"from": 7, "to": 7, "count": 1}, [7]),
        ({"from": "1 GB/s", "to": "100 GB/s", "count": 3, "spacing": "log"}, ["1 GB/s", "10 GB/s", "100 GB/s"]),
        ({"values": [3, 4.0]}, [3, 4]),
        ([2.0, "x"], [2, "x"]),
    ],
)
def test_an_axis_has_the_values_of_its_list_or_range(axis: Any, values: list[Any]) -> None:
    assert values_of(axis) == values


@every_row(
    ("axis", "words"),
    [
        ([], "axes.n: has no values; give at least one"),
        ([2, 2.0], "axes.n: has 2 twice"),
        (4, "axes.n: 4 is no list; write [4], or a range"),
        ("ab", "axes.n: 'ab' is no list"),
        ({"from": 8, "to": 2, "times": 2}, "axes.n: is a range without values"),
        ({"from": 0, "to": 2, "times": 2}, "axes.n: is a range without values"),
        ({"from": 2, "to": 8, "times": 1}, "axes.n: is a range without values"),
        ({"from": 2, "to": 8, "step": 0}, "axes.n: is a range without values"),
        ({"from": 2, "to": 8, "count": 0}, "axes.n: is a range without values"),
        ({"from": 2, "to": 8, "count": 1}, "axes.n: has one value and two ends"),
        ({"from": 2, "to": 8}, "axes.n: is no range; give values, or from and to with one of step, times and count"),
        ({"from": 2, "to": 8, "step": 1, "times": 2}, "axes.n: is no range"),
        ({"from": 2, "to": 8, "step": 1, "values": [2]}, "axes.n: has values, and a range, too"),
        ({"from": "2 s", "to": "8 ms", "count": 2}, "axes.n: goes from 2 s to 8 ms, two units"),
        ({"from": "two", "to": 8, "count": 2}, "axes.n: 'two' is no number"),
        ({"from": 1, "to": 10**9, "step": 1}, "axes.n: has 1,000,000,000 values"),
        ({"from": "1e999", "to": "2e999", "step": 1}, "axes.n: has an end above 1e+100"),
        ({"from": 1, "to": 10**400, "times": 2}, "sweep: has a whole number of more than 63 bits"),
        ({"from": 1, "to": 1e300, "times": 1e200}, "axes.n: has an end above 1e+100"),
        ({"from": 1e-300, "to": 1, "times": 1e300}, "axes.n: is a range without values"),
        ({"from": "1.2.3", "to": "2", "step": 1}, "axes.n: '1.2.3' is no number"),
        ({"from": 0, "to": 1, "step": 1e-320}, "axes.n: has inf values"),
        ([10**30], "sweep: has a whole number of more than 63 bits"),
        ({"form": 1}, "axes.n: $: unknown field 'form'; did you mean 'from'?"),
        ({"from": 1, "to": 2, "count": 2, "spacing": "lin"}, "spacing: unknown spacing 'lin'"),
    ],
)
def test_an_axis_that_is_none_is_refused(axis: Any, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        values_of(axis)
    assert str(refused.value).startswith(words)


def test_the_last_axis_is_the_fastest() -> None:
    own = sweep({"axes": {**TWO, "m": [4, 8]}})
    assert [tuple(own.values(i)) for i in own.in_file_order()] == list(product(*TWO.values(), [4, 8]))


def test_axes_that_go_together_are_one_dimension_behind_the_others() -> None:
    own = sweep({"axes": {"n": [2, 4], "schedule": ["1f1b"]}, "together": [{"m": [16, 8], "replicas": [1, 2]}]})
    rows = [own.values(i) for i in own.in_file_order()]
    assert rows == [[n, "1f1b", m, r] for n in (2, 4) for m, r in ((16, 1), (8, 2))]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.dictionaries(st.integers(0, 3), st.sets(st.integers(0, 3), min_size=1), min_size=1), max_size=3),
)
def test_the_number_of_points_is_that_of_a_list_without_what_is_left_out(
    sizes: list[int], boxes: list[dict[int, set[int]]]
) -> None:
    names = ["n", "m", "chunks", "replicas"][: len(sizes)]
    axes = {name: list(range(1, size + 1)) for name, size in zip(names, sizes, strict=True)}
    boxes = [{d: {v for v in box[d] if v < sizes[d]} for d in box if d < len(sizes)} for box in boxes]
    boxes = [box for box in boxes if box and all(box.values())]
    left_out = [{names[d]: [v + 1 for v in sorted(box[d])] for d in box} for box in boxes]
    content = {"fixed": {"schedule": "1f1b"}, "axes": axes, "leave_out": left_out}
    every = product(*map(range, sizes))
    expected = [index for index in every if not any(all(index[d] in box[d] for d in box) for box in boxes)]
    if not expected:
        with pytest.raises(RequestError, match="points: are all left out"):
            sweep(content)
        return
    own = sweep(content)
    assert list(own.in_file_order()) == expected
    assert own.count == len(expected)


def test_parts_share_the_points() -> None:
    own = sweep({"axes": {"n": list(range(2, 300)), "schedule": ["1f1b"]}})
    parts = [list(own.of_part((k, 13))) for k in range(1, 14)]
    assert sorted(index for part in parts for index in part) == list(own.in_file_order())
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert list(own.of_part((1, 1))) == list(own.in_working_order())


@every_row("text", ["0/3", "4/3", "3", "a/b", "1/0", "-1/3", "1/2/3", "²/3"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is no part; give for example 3/8"):
        read_part(text)


def test_points_of_one_program_come_side_by_side() -> None:
    """Values of a cluster change no program, and so they change fastest in working order."""
    values = ["1 GB/s", "2 GB/s"]
    bandwidth = {"of": "cluster.topology.network.bandwidth", "values": values}
    own = sweep({"fixed": {"cluster": "a100-nodes", "model": "gpt2"}, "axes": {"bandwidth": bandwidth, **TWO}})
    rows = [own.values(i) for i in own.in_working_order()]
    assert [(s, n, b) for b, s, n in rows] == list(product(*TWO.values(), values))


def test_a_point_has_one_name_however_it_is_asked() -> None:
    """Fixed or an axis, by an axis of another name, in another order, as 4 or 4.0, with dashes or without."""
    asked: list[dict[str, Any]] = [
        {"fixed": {"schedule": "1f1b", "slot_order": "forward-first"}, "axes": {"n": [4.0]}},
        {"fixed": {"slot-order": "forward-first"}, "axes": {"n": [4], "schedule": ["1f1b"]}},
        {"axes": {"slot-order": ["forward-first"], "schedule": ["1f1b"], "stages": {"of": "n", "values": [4]}}},
    ]
    every = [sweep(content) for content in asked]
    assert len({own.name(next(own.in_file_order())) for own in every}) == 1


def test_a_name_has_the_content_of_models_and_files_and_the_version_of_results(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = toy / "order.csv"
    order.write_text("0F0,1F0\n")
    content = {"fixed": {"model": "toy.toml", "schedule": "order.csv"}, "axes": {"m": [3]}}

    def name() -> bytes:
        return sweep(content, toy).name((0,))

    first = name()
    assert name() == first
    order.write_text("0F0,0F1\n")
    second = name()
    (toy / "toy.toml").write_text((toy / "toy.toml").read_text() + "samples = 3\n")
    assert len({first, second, name()}) == 3


def test_all_names_differ() -> None:
    bandwidth = {"of": "cluster.link.bandwidth", "values": ["1 GB/s", "2 GB/s", 1e9]}
    cluster = {"link": {"bandwidth": "1 GB/s"}}
    axes = {**TWO, "m": [4, 8], "bandwidth": bandwidth}
    own = sweep({"fixed": {"cluster": cluster, "model": "gpt2"}, "axes": axes})
    assert len({own.name(index) for index in own.in_file_order()}) == own.count == 36


@every_row(
    ("content", "words"),
    [
        ({}, "axes: are missing; write [axes]"),
        ({"what": "comparison", "axes": TWO}, "what: unknown what 'comparison'; did you mean 'compare'?"),
        ({"axes": {"n": [2]}}, "schedule: is missing, and compare needs it"),
        ({"axes": {**TWO, "mm": [2]}}, "option: unknown option 'mm'"),
        ({"axes": TWO, "fixed": {"n": 4}}, "axes.n: is fixed, too; leave either out"),
        ({"axes": TWO, "fixed": {"modle": "gpt2"}}, "option: unknown option 'modle'; did you mean 'model'?"),
        ({"axes": TWO, "fixed": {"model": "gpt-2"}}, "model: unknown model 'gpt-2'; did you mean 'gpt2'?"),
        ({"axes": TWO, "fixed": {"model": 3}}, "model: 3 is no model"),
        ({"axes": {**TWO, "schedule": ["no.csv"]}}, "no.csv: no such file or directory; check its spelling"),
        ({"axes": {**TWO, "schedule": ["/dev/zero"]}}, "/dev/zero: is not a regular file; copy its content into one"),
        ({"axes": TWO, "fixed": {"rule": "/dev/zero"}}, "/dev/zero: is not a regular file"),
        ({"axes": TWO, "fixed": {"counts": "/"}}, "/: is a folder; give a file"),
        ({"axes": TWO, "fixed": {"model": "/dev/zero"}}, "/dev/zero: "),
        ({"axes": TWO, "leave_out": [{"n": 3}]}, "leave_out.n: 3 is no value of that axis; known are 2, 4, 8"),
        ({"axes": TWO, "leave_out": [{"s": 3}]}, "axis: unknown axis 's'"),
        ({"axes": TWO, "leave_out": [{}]}, "leave_out: has an empty table"),
        ({"axes": TWO, "together": [{}]}, "together: has a table without axes"),
        (
            {"axes": TWO, "together": [{"m": [1, 2], "steps": [3]}]},
            "together: axes that go together have equally many values, and m has 2, steps has 1",
        ),
        ({"axes": TWO, "together": [{"n": [2]}]}, "axes.n: n is an axis twice"),
        ({"axes": {**TWO, "k": {"of": "n", "values": [2]}}}, "axes.k: n is an axis twice"),
        ({"axes": {**TWO, "bubble": {"of": "m", "values": [2]}}}, "axes.bubble: is a column of results"),
        ({"axes": {**TWO, "b": {"of": "cluster.link", "values": [2]}}}, "axes: cluster.link is of a cluster file, and"),
        ({"axes": {**TWO, "b": {"of": "machine.x", "values": [2]}}}, "axes: unknown path 'machine.x'"),
        ({"axes": {**TWO, "b": [object()]}}, "axes: <object"),
        ({"axis": TWO}, "sweep: $: unknown field 'axis'; did you mean 'axes'?"),
    ],
)
def test_a_sweep_that_is_none_is_refused(content: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        sweep(content)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("cluster.topolgy.network.bandwidth", "cluster.topolgy: is not in the file; did you mean 'topology'?"),
        ("cluster.topology.network.bandwith", "unknown field 'bandwith'; did you mean 'bandwidth'?"),
        ("cluster.name.first.x", "cluster.name.first: cluster.name is a value and has no 'first'"),
        ("model.stages.99.forward", "model.stages.99: is no row; model.stages has the rows 0 to"),
        ("cluster.devices.memory", "5 pounds"),
    ],
)
def test_a_path_that_no_file_has_is_refused_with_the_nearest(path: str, words: str) -> None:
    axes = {**TWO, "value": {"of": path, "values": ["5 pounds"]}}
    with pytest.raises(RequestError) as refused:
        sweep({"fixed": {"model": profiled("gpt2"), "cluster": "a100-nodes"}, "axes": axes})
    assert "axes.value: no value can be read: " in str(refused.value)
    assert words in str(refused.value)


def test_too_many_points_are_refused_with_their_number() -> None:
    numbers = list(range(1000))
    axes: dict[str, Any] = dict.fromkeys(("n", "m", "chunks"), numbers)
    content = {"fixed": {"schedule": "1f1b"}, "axes": axes, "leave_out": [{"n": 0, "m": [0, 1]}]}
    with pytest.raises(RequestError, match="points: are 999,998,000, and a sweep has at most 10,000,000"):
        sweep(content)
    names = ("n", "m", "chunks", "replicas", "shard", "seed", "steps", "prefetch")
    with pytest.raises(RequestError, match="points: are 1,000,000,000,000,000,000,000,000, and"):
        sweep({"fixed": {"schedule": "1f1b"}, "axes": dict.fromkeys(names, numbers)})


def test_nan_is_no_value() -> None:
    with pytest.raises(RequestError, match="has nan, which is no number"):
        lowest_form([2, float("nan")])


def test_what_is_infinite_stays_infinite_in_json() -> None:
    assert lowest_form({"bandwidth": float("inf")}) == {"bandwidth": "inf"}

"""Plans beside all of their candidates, simulated one by one; fronts by their definition; counts; what is refused."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import floor, log10
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import cdpsim
from cdpsim import SCHEDULES, Cluster, Measured, Model, Plan, Stage, evaluate, plan
from cdpsim.cluster import Devices, Link
from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.model.layers import Layers
from cdpsim.studies.plan.bounds import Bound, Bounds
from cdpsim.studies.plan.plan_table import plan_table
from cdpsim.studies.plan.space import FATES, OPEN, REFUSED, SIMULATED, TOO_LARGE, WORSE, Candidate, find_candidates
from cdpsim.studies.plan.wanted import read_wanted
from tests.helpers.every_row import every_row

WAITING = [name for name, schedule in SCHEDULES.items() if schedule.order.waits]
FIGURES = ("step", "memory", "ranks", "staleness")
OBJECTIVES = dict(zip(("samples", "memory", "devices", "staleness"), FIGURES, strict=True))


def stages(count: int, samples: int | None = None, **facts: Any) -> Model:
    """A model of unequal stages."""
    each = [
        Stage(
            forward=Work(1e12 * (1 + j % 3)),
            backward=Work(2e12 * (1 + j % 3)),
            weight_backward=Work(1e12 * (1 + j % 3)),
            activation=1000 + 100 * j,
            parameters=700 + 10 * j,
            optimizer=1400,
            boundary=100 + j,
        )
        for j in range(count)
    ]
    return Model(name="toy", stages=tuple(each), samples=samples, **facts)


def box(bandwidth: float = 1e4, memory: int | None = None) -> Cluster:
    """A cluster of equal devices."""
    return Cluster(
        name="box", devices=(Devices(speed=10e12, memory=memory),), link=Link(latency=1e-3, bandwidth=bandwidth)
    )


DENSE = Layers(layers=3, width=64, heads=12, head_width=16, ffn=96, length=32, vocabulary=64)
OF_EXPERTS = replace(DENSE, experts=8, top_k=2, expert_ffn=32)


def shaped(layers: Layers) -> Model:
    """A small model of layers."""
    return Model.of_layers(layers, name="toy", samples=1, precision="bf16")


def mesh_of(options: Mapping[str, Any]) -> tuple[int, int, int]:
    """The ranks of tensors, of context and of experts."""
    tensor, context, expert = (options.get(name) or 1 for name in ("tensor", "context", "expert"))
    return tensor, context, expert


def metrics(one: Measured) -> tuple[float, ...]:
    """The metrics that plans compare, the less the better; steps to eleven digits."""
    step, *others = (float(getattr(one, name)) for name in FIGURES)
    return round(step, 10 - floor(log10(step))), *others


def listed(model: Any = "unit", cluster: Any = "unit", **options: Any) -> list[Candidate]:
    """All candidates, also those that cannot be asked."""
    names = ("devices", "batch", "memory", "schedules", "staleness", "max_memory", "seconds")
    limits = {"fewer": False, "objective": "samples", "top": 1} | {name: options.pop(name, None) for name in names}
    return find_candidates(read_wanted(model, cluster, limits, options)).candidates


def simulated_all(found: Plan) -> dict[int, Measured]:
    """All candidates of a plan that can be asked, simulated; refuse one that cannot be."""
    candidates = enumerate(found.search.space.candidates)
    return {k: evaluate(**one.options, steps=12) for k, one in candidates if one.refusal is None}


def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


def first_of_equals(order: Iterable[int], every: Mapping[int, Measured]) -> list[int]:
    """The candidates that differ from all earlier ones by more than a thousandth in some metric."""
    kept: list[int] = []
    for k in order:
        if not any(
            all(
                abs(getattr(every[k], name) - getattr(every[first], name)) <= getattr(every[first], name) / 1000
                for name in (*FIGURES, "sent")
            )
            for first in kept
        ):
            kept.append(k)
    return kept


def check_against_all(found: Plan, limit: float, top: int, objective: str) -> None:
    """Hold rows, front and counts against the simulations of all candidates."""
    every = simulated_all(found)
    fitting = {k: metrics(one) for k, one in every.items() if one.memory <= limit}
    first = [OBJECTIVES[objective], *(name for name in FIGURES if name != OBJECTIVES[objective])]
    key = {k: (*(each[FIGURES.index(name)] for name in first), k) for k, each in fitting.items()}
    order = sorted(fitting, key=key.__getitem__)
    fresh = first_of_equals((k for k in order if not fitting[k][3]), every)[:top]
    stale = first_of_equals((k for k in order if fitting[k][3]), every)[:top]
    rows = fresh + [k for k in stale if not fresh or key[k][0] < key[fresh[0]][0]]
    candidates = found.search.space.candidates
    assert [row.options for row in found.rows] == [candidates[k].options for k in rows]
    assert [row.measured for row in found.rows] == [every[k] for k in rows]
    front = [k for k in fitting if not any(dominates(other, fitting[k]) for other in fitting.values())]
    front = first_of_equals(sorted(front, key=lambda k: (*fitting[k], k)), every)
    assert [row.options for row in found.front] == [candidates[k].options for k in front]
    fates = [one.fate for one in candidates]
    for k, fate in enumerate(fates):
        assert (fate == REFUSED) == (k not in every), fate
        assert fate != TOO_LARGE or every[k].memory > limit
        assert fate != OPEN
        assert fate != WORSE or k not in {*rows, *front}


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    """A small plan: a few schedules, a model of a few stages or slots, some devices, and a batch."""
    names = draw(st.lists(st.sampled_from(WAITING), min_size=1, max_size=4, unique=True))
    devices = draw(st.sampled_from([1, 2, 3, 4, 6]))
    options: dict[str, Any] = {"schedules": names, "devices": devices}
    if draw(st.booleans()):
        samples = draw(st.sampled_from([None, 2]))
        options |= {
            "model": stages(draw(st.integers(2, 6)), samples),
            "cluster": box(draw(st.sampled_from([1e3, 1e5]))),
        }
        options |= {"recompute": draw(st.sampled_from(["none", ["none", "layer"]]))}
        batch = devices * (samples or 1)
    else:
        batch = devices
    options["batch"] = batch * draw(st.integers(1, 3))
    options["objective"] = draw(st.sampled_from([*OBJECTIVES]))
    options["top"] = draw(st.integers(1, 5))
    return options | {"fewer": draw(st.booleans())}


@given(asked(), st.floats(0, 1))
@settings(max_examples=25)
def test_a_plan_is_what_the_simulations_of_all_candidates_say(options: dict[str, Any], share: float) -> None:
    try:
        found = plan(**options)
    except RequestError:
        assume(False)
    sizes = sorted(one.memory for one in simulated_all(found).values())
    limit = sizes[int(share * (len(sizes) - 1))] - (share < 0.1)
    limited = plan(**options, memory=limit)
    check_against_all(limited, limit, options["top"], options["objective"])
    check_against_all(found, float("inf"), options["top"], options["objective"])
    if not limited.rows:
        assert limited.smallest is not None
        assert limited.smallest.measured.memory == sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (DENSE, {"schedules": "dp,1f1b", "context": [1, 2], "attention_exchange": ["gather", "ring"], "n": [1, 4]}),
        (OF_EXPERTS, {"schedules": "dp,zb-h1", "sequence": True, "n": [1, 2]}),
        (OF_EXPERTS, {"schedules": "1f1b,pp-cdp", "sequence": True, "context": [1, 2], "fewer": True, "n": 2}),
    ],
    ids=["dense", "experts", "all axes"],
)
def test_a_plan_over_meshes_is_what_the_simulations_of_all_candidates_say(
    layers: Layers, options: dict[str, Any]
) -> None:
    """Over ranks of tensors, context and experts; bounds are at most what these simulations give."""
    asked: dict[str, Any] = {"devices": 8, "batch": 8, "zero": [0, 2], "recompute": "none", "top": 5}
    asked |= options
    found = plan(shaped(layers), "h100-nodes", **asked)
    every = simulated_all(found)
    for k, one in every.items():
        least = found.search.space.candidates[k].least
        assert least.step <= float(one.step) * (1 + 1e-12) and least.memory <= one.memory
        assert one.batch == 8 and (one.ranks == 8 or "fewer" in options)
    check_against_all(found, float("inf"), 5, "samples")
    assert sum(found.searched[fate] for fate in FATES if fate != REFUSED) == len(every)
    assert {mesh_of(one.options) for one in found.search.space.candidates} >= {(2, 1, 1), (4, 1, 1)}


@pytest.mark.parametrize("layers", [DENSE, OF_EXPERTS], ids=["dense", "experts"])
def test_meshes_are_all_that_fit(layers: Layers) -> None:
    """By loops over all degrees: t divides 12 heads and a node, E divides 8 experts and the ranks of a stage."""
    found = listed(shaped(layers), "h100-nodes", devices=8, batch=8, schedules=["1f1b"], zero=0, recompute="none")
    asked = {(*mesh_of(one.options), one.options["n"]) for one in found if one.options["schedule"] == "1f1b"}
    expected = {
        (t, 1, e, n)
        for t, e, n in product(range(1, 9), range(1, 9), range(2, 9))
        if 12 % t == 0 and 8 % (t * n) == 0
        if e == 1 or (layers.experts and 8 % e == 0 and (8 // n) % e == 0)
    }
    assert asked == expected
    assert {one.devices for one in found} == {8}


def test_meshes_are_searched_where_a_model_is_of_layers_and_nodes_have_groups() -> None:
    def degrees(model: Any, cluster: Any, **options: Any) -> set[tuple[int, int, int]]:
        found = listed(model, cluster, devices=4, batch=8, schedules=["dp"], recompute="none", **options)
        return {mesh_of(one.options) for one in found}

    assert degrees(shaped(DENSE), "h100-nodes") == {(1, 1, 1), (2, 1, 1), (4, 1, 1)}
    assert degrees(shaped(DENSE), "h100-nodes", tensor=2, context=[1, 2]) == {(2, 1, 1), (2, 2, 1)}
    assert degrees(shaped(OF_EXPERTS), "h100-nodes", tensor=1) == {(1, 1, e) for e in (1, 2, 4)}
    assert degrees(shaped(DENSE), box()) == degrees(stages(4, 1), "h100-nodes") == {(1, 1, 1)}
    assert degrees("unit", "unit") == {(1, 1, 1)}


def test_ranks_that_a_request_refuses_are_counted_and_said() -> None:
    restricted: dict[str, Any] = {"schedules": "1f1b", "zero": 0, "recompute": "none"}
    found = plan(shaped(DENSE), "h100-nodes", devices=8, batch=8, tensor=[1, 8], **restricted)
    refused = [one for one in found.search.space.candidates if mesh_of(one.options)[0] == 8]
    assert found.searched[REFUSED]["tensor"] == len(refused) > 0
    assert "\ntensor 8 is left out: tensor: 8 does not divide the 12 heads of toy; 4" in str(found)


def test_options_of_groups_are_tried_once_where_no_group_is() -> None:
    alone = listed(shaped(DENSE), "h100-nodes", devices=4, batch=8, schedules=["1f1b"], tensor=1)
    ways = {"sequence": [False, True], "attention_exchange": ["gather", "ring", "all-to-all"]}
    found = listed(shaped(DENSE), "h100-nodes", devices=4, batch=8, schedules=["1f1b"], context=[1, 2], **ways)
    of_mesh = Counter(mesh_of(one.options) for one in found)
    assert of_mesh[1, 1, 1] == len(alone)
    for mesh, many in ((2, 1, 1), 2), ((1, 2, 1), 3), ((2, 2, 1), 6):
        tried = [one.options for one in found if mesh_of(one.options) == mesh]
        assert len({tuple(options.get(name) for name in ways) for options in tried}) == many


def every_request(model: Model, cluster: Cluster, devices: int, batch: int) -> Iterator[dict[str, Any]]:
    """All requests of some pipelines, by nested loops, that run on these devices and have this batch."""
    numbers = [k for k in range(1, devices + 1) if devices % k == 0]
    sizes = product((None, *range(1, model.n + 1)), range(1, batch + 1), (None, 1, 2, 4), numbers, numbers, range(4))
    for n, m, chunks, replicas, shard, zero in sizes:
        if m * replicas * shard * (model.samples or 1) != batch or (zero > 0) != (shard > 1):
            continue
        options = {"n": n, "m": m, "chunks": chunks, "replicas": replicas, "shard": shard, "zero": zero}
        given = {name: value for name, value in options.items() if value not in (None, 0)}
        given |= {"model": model, "cluster": cluster, "recompute": "none"}
        yield given


@pytest.mark.parametrize("name", ["dp", "1f1b", "interleaved-1f1b", "zbv"])
def test_candidates_are_all_requests_with_these_devices_and_this_batch(name: str) -> None:
    """Each of them, and no others: found by trying all sizes."""
    model, cluster, schedule = stages(6, samples=2), box(), SCHEDULES[name]
    found = listed(model, cluster, devices=4, batch=16, schedules=[name], recompute="none")
    asked = {sizes_of(one.options) for one in found if one.refusal is None and one.options["schedule"] == name}
    expected = set()
    for options in every_request(model, cluster, 4, 16):
        if ("chunks" in options) != schedule.order.any_chunks:
            continue
        if (options.get("n") not in (None, 1, 2, 4)) if schedule.order.one_place else (options.get("n") in (None, 1)):
            continue  # data parallelism has all layers or a few groups, and is what one stage is
        if options.get("chunks") == 1:
            continue  # a stage on each device is another schedule's
        if options.get("n", 1) % options.get("chunks", schedule.order.chunks):
            continue
        places = 1 if schedule.order.one_place else options["n"] // options.get("chunks", schedule.order.chunks)
        if places * options["replicas"] * options["shard"] != 4:
            continue
        try:
            one = evaluate(name, **options)
        except RequestError:
            continue
        assert (one.devices, one.batch) == (4, 16)
        expected.add(sizes_of(options))
    assert asked == expected


def sizes_of(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The sizes of a request, with their defaults."""
    usual = {"n": None, "m": None, "chunks": None, "replicas": 1, "shard": 1, "zero": 0}
    return tuple(options.get(name, value) for name, value in usual.items())


def test_a_candidate_that_cannot_be_asked_is_refused_by_a_request_for_the_same_reason() -> None:
    refused = [one for one in listed(stages(5, samples=1), box(), devices=4, batch=8) if one.refusal]
    asked = [one for one in refused if one.refusal and one.refusal.subject not in ("batch", "devices")]
    assert len(asked) > 50
    for one in asked:
        if one.options.get("zero", 0) > 1 and "rule" in one.options:
            continue  # for two reasons
        with pytest.raises(RequestError) as error:
            evaluate(**one.options)
        assert error.value.subject == one.refusal.subject  # type: ignore[union-attr]


def test_a_pipeline_of_one_stage_is_data_parallelism() -> None:
    found = plan(stages(4), box(), devices=2, batch=4, schedules="gpipe,1f1b", n=1, recompute="none")
    assert {(one.options["schedule"], one.options["n"]) for one in found.search.space.candidates} == {("dp", 1)}
    stale = plan(stages(4), box(), devices=2, batch=4, schedules="pp-cdp", n=1, rule="cdp-v1", recompute="none")
    assert [row.options for row in stale.front] == [row.options for row in found.front]  # without staleness


def test_pipelines_of_one_stage_have_all_candidates_of_data_parallelism() -> None:
    """Of layers, too, which `-n 1` groups."""
    names = ["1f1b", "zb-h1", "dp"]
    found = {name: listed(stages(6), box(), devices=4, batch=16, schedules=[name], recompute="none") for name in names}
    of_dp = {name: {sizes_of(one.options) for one in found[name] if one.options["schedule"] == "dp"} for name in names}
    assert of_dp["1f1b"] == of_dp["zb-h1"] == of_dp["dp"]
    assert {sizes[0] for sizes in of_dp["dp"]} == {None, 1, 2, 4}


def test_a_row_counts_the_candidates_that_equal_it() -> None:
    """A zero bubble with one stage on each device is the interleaved one with one chunk."""
    found = plan(devices=4, batch=8, schedules="zb-h1,interleaved-zero-bubble", n=4, chunks=1)
    (row,) = found.rows
    assert [command.split()[2] for command in row.equal] == ["interleaved-zero-bubble"]
    assert "zb-h1 (+1 equal)" in str(found)
    assert [each.equal for each in found.front] == [row.equal]


def test_rows_begin_with_the_best_without_staleness() -> None:
    """Those with staleness come apart below them, as far as they are better."""
    found = plan(devices=4, batch=8, memory=6, top=2)
    fresh, stale = found.rows[:2], found.rows[2:]
    assert found.best is fresh[0]
    assert [row.measured.staleness for row in fresh] == [0, 0]
    assert min(row.measured.staleness for row in stale) > 0
    assert max(row.measured.step for row in stale) < fresh[0].measured.step
    above, below = str(found).split("\n\nwith stale parameters, and better than row 1:\n")
    assert above.count(str(fresh[0]["schedule"])) == 1
    assert str(stale[0]["schedule"]) in below


def test_an_option_that_is_varied_is_not_among_those_that_are_not() -> None:
    options: dict[str, Any] = {"devices": 2, "batch": 4, "schedules": "dp,1f1b", "recompute": "none"}
    assert ", offload, " in plan(stages(4), box(), **options).status
    assert "prefetch" in plan(stages(4), box(), **options).status
    assert "prefetch" not in plan(stages(4), box(), prefetch=[0, 1], **options).status


def test_a_size_that_no_candidate_has_is_said_with_the_reason() -> None:
    options: dict[str, Any] = {"devices": 4, "batch": 8, "schedules": "dp,1f1b", "recompute": "none"}
    found = plan(stages(4), box(), n=[1, 2, 3, 5000], **options)
    lines = [line for line in str(found).splitlines() if "left out" in line]
    assert lines == ["n 5000 is left out: no candidate on 4 devices with this batch has it"]
    assert found.to_builtins()["left_out"] == lines


def test_the_least_staleness_is_that_of_synchronous_training() -> None:
    found = plan(devices=4, batch=8, staleness=0)
    assert {row.measured.staleness for row in [*found.rows, *found.front]} == {0}
    assert found.searched[REFUSED]["staleness"]
    assert max(one.staleness for one in found.search.space.candidates if one.refusal is None) == 0


def test_a_search_without_time_has_a_row_and_says_what_is_possible() -> None:
    options: dict[str, Any] = {"devices": 4, "batch": 8, "schedules": ["1f1b", "gpipe", "zb-h2"]}
    found = plan(**options, seconds=0)
    assert (len(found.rows), found.proved) == (1, False)
    assert found.status == "stopped after 0 s: nothing is known of what can exist"


def test_a_search_that_ends_early_says_how_good_others_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ends it behind the bounds and one simulation."""
    simulated: list[object] = []

    def once(**options: Any) -> Measured:
        simulated.append(options)
        return evaluate(**options)

    monkeypatch.setattr("cdpsim.studies.plan.search.evaluate", once)
    monkeypatch.setattr("cdpsim.studies.plan.wanted.monotonic", lambda: 1e9 if simulated else 0.0)
    found = plan(devices=4, batch=8, schedules=["1f1b", "gpipe", "zb-h2"], seconds=10**6)
    assert (found.searched[SIMULATED], len(found.rows), found.proved) == (1, 1, False)
    best = plan(devices=4, batch=8, schedules=["1f1b", "gpipe", "zb-h2"]).best
    assert best is not None
    assert float(found.status.split("no better than ")[1].split()[0]) >= best.measured.micro_batch_rate * 0.999


@pytest.mark.slow
@pytest.mark.parametrize(
    "exchange",
    [
        {},
        {"update_in": "stream"},
        {"update_in": "stream", "reduce": "last"},
        {"reduce": "end"},
        {"reduce": "last"},
        {"reduce": "each"},
        {"reshard": "yes"},
        {"reshard": "no"},
        {"buckets": "1 MB"},
        {"clip": True},
    ],
    ids=str,
)
def test_no_candidate_is_better_than_its_bounds_however_data_ranks_exchange(exchange: dict[str, Any]) -> None:
    """Devices have several stages, whose updates take unlike times, and links are slow."""
    pace = zip((3, 50, 8, 21, 1, 34, 13, 5), (40, 2, 30, 6, 25, 1, 9, 17), strict=True)
    sizes: dict[str, Any] = {"activation": 2**20, "boundary": 2**16, "optimizer": 2**20}
    model = Model(
        stages=tuple(
            Stage(forward=f / 16, backward=3.5 * f / 16, update=u / 8, parameters=u << 20, gradients=f << 20, **sizes)
            for f, u in pace
        )
    )
    names = ["dp", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1"]
    cluster = Cluster(devices=(Devices(),), link=Link(latency=0.25, bandwidth=2.0**21))
    found = plan(model, cluster, devices=8, batch=16, memory="1 TB", schedules=names, top=10**6, **exchange)
    simulated = [one for one in found.search.space.candidates if one.measured]
    assert simulated
    for one in simulated:
        assert one.least.step <= one.point.step * (1 + 1e-10), one.options
        assert one.least.memory <= one.point.memory, one.options


def test_seconds_change_nothing_of_what_is_proved() -> None:
    options: dict[str, Any] = {"devices": 4, "batch": 8}
    assert plan_table(plan(**options, seconds=1000), "json") == plan_table(plan(**options), "json")


def test_a_search_interrupted_before_it_has_bounds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bounds, "of", interrupted)
    found = plan(devices=4, batch=8, schedules=["gpipe", "1f1b"])
    assert found.status == "interrupted: nothing is known of what can exist"
    assert (found.searched[OPEN], found.rows, found.interrupted) == (found.searched["candidates"], [], True)


def test_an_interrupted_search_says_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def interrupted(**options: Any) -> Measured:
        calls.append(options)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(**options)

    monkeypatch.setattr("cdpsim.studies.plan.search.evaluate", interrupted)
    found = plan(devices=4, batch=8)
    assert (found.searched[SIMULATED], found.proved, found.interrupted) == (2, False, True)
    assert found.status.startswith("interrupted: ")
    assert len(found.rows) == 2


def test_a_request_that_is_refused_only_when_it_runs_is_counted_by_its_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**options: Any) -> Measured:
        if options["schedule"] == "gpipe":
            raise RequestError("weather", "is bad; wait")
        return evaluate(**options)

    monkeypatch.setattr("cdpsim.studies.plan.search.evaluate", refused)
    found = plan(devices=4, batch=8, schedules="1f1b,gpipe")
    assert found.searched[REFUSED] == {"weather": 1}
    assert [row["schedule"] for row in found.rows] == ["1f1b"]


@pytest.mark.slow
def test_every_row_has_a_command_that_shows_its_metrics(command: Any) -> None:
    """Of a model and a cluster that have names, with all kinds of options."""
    found = plan("gpt2", "a100-nodes", devices=4, batch=64, schedules="dp,1f1b,pipemare,multi-cdp", top=4)
    rows = [*found.rows, *found.front[::4]]
    assert len(rows) > 5
    for row in rows:
        words = row.command.split()
        assert words[:2] == ["cdpsim", "compare"]
        shown = json.loads(command(*words[1:], "--format", "json").out)
        expected = json.loads(json.dumps(row.measured.to_builtins()))
        differ = {name for name, value in shown[0].items() if name != "makespan" and value != expected[name]}
        assert len(shown) == 1
        assert not differ


def test_a_command_gives_the_metrics_in_a_process_of_its_own() -> None:
    found = plan(devices=4, batch=8, memory=6)
    assert found.best is not None
    words = [sys.executable, "-m", *found.best.command.split(), "--columns", "all", "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)[0]
    assert (shown["step"], shown["memory"]) == (found.best.measured.step, found.best.measured.memory)


@pytest.mark.slow
def test_the_same_bytes_whatever_the_hash_seed() -> None:
    program = "import cdpsim; from cdpsim.studies.plan.plan_table import plan_table\n"
    program += "found = cdpsim.plan(devices=4, batch=8, memory=7)\nprint(found, plan_table(found, 'json'))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_lists_of_other_options_are_searched_and_left_out_where_they_do_nothing() -> None:
    """A pipeline that flushes sums gradients at two moments, as two candidates; one that does not has one."""
    options: dict[str, Any] = {"devices": 4, "batch": 8, "recompute": "none"}
    model, cluster = stages(4), box()
    one = listed(model, cluster, schedules=["gpipe", "pipemare"], rule="dp", replicas=2, shard=1, **options)
    two = listed(
        model,
        cluster,
        schedules=["gpipe", "pipemare"],
        rule="dp",
        replicas=2,
        shard=1,
        reduce=["end", "last"],
        **options,
    )

    def count(found: Iterable[Candidate]) -> Counter[str]:
        return Counter(str(each.options["schedule"]) for each in found)

    assert count(two)["gpipe"] == 2 * count(one)["gpipe"]
    assert count(two)["pipemare"] == count(one)["pipemare"]


def test_candidates_have_the_rules_that_a_schedule_may_take() -> None:
    """Cyclic training reads by CDP-v2, by CDP-v1 or the newest; what updates at a barrier reads the newest alone."""
    names = ["multi-cdp", "multi-dp"]
    found = listed(stages(4), box(), devices=4, batch=4, n=4, schedules=names, recompute="none")
    asked = [(one.options["schedule"], one.options.get("rule")) for one in found]
    assert sorted(asked, key=str) == [
        ("multi-cdp", "cdp-v1"),
        ("multi-cdp", "dp"),
        ("multi-cdp", None),
        ("multi-dp", None),
    ]


def test_models_of_other_batches_are_one_axis() -> None:
    """The same network with one sample a micro-batch, and with two: m is another number."""
    models = [stages(4, samples=1), stages(4, samples=2)]
    found = plan(models, box(), devices=4, batch=8, schedules="1f1b", n=4, recompute="none")
    assert sorted(one.options["m"] for one in found.search.space.candidates) == [4, 8]


def test_all_that_is_restricted_is_left_out() -> None:
    found = listed(stages(8), box(), devices=8, batch=16, schedules="1f1b", n=[4, 8], zero=[0, 3], recompute="none")
    axes = [(one.options["n"], one.options.get("zero", 0)) for one in found]
    assert set(axes) == {(8, 0), (4, 0), (4, 3)}


def test_counts_add_up_where_none_fits_and_the_smallest_is_refused_only_when_it_runs() -> None:
    options: dict[str, Any] = {"schedules": ["dpu", "zb-h2"], "reduce": ["end", "last"]}
    found = plan("gpt2", "a100-nodes", devices=1, batch=48, memory="3 GB", update_time="memory", **options)
    counts = dict(found.searched)
    refused = sum(counts.pop(REFUSED).values())
    assert not found.rows
    assert counts.pop("candidates") == refused + sum(counts.values())


def test_the_nearest_batches_can_be_planned() -> None:
    options: dict[str, Any] = {"devices": 1000, "schedules": ["dp", "gpipe", "mp-cdp", "zero-cdp", "gems"]}
    with pytest.raises(RequestError, match="the nearest batch") as refused:
        plan("gpt2", "a100-nodes", batch=16, **options)
    for batch in re.findall(r"\d+", str(refused.value).partition("the nearest")[2]):
        assert not all(one.refusal for one in listed("gpt2", "a100-nodes", batch=int(batch), **options))


def test_one_sample_is_no_samples() -> None:
    assert "1 device, 1 micro-batch in a training step" in str(plan(devices=1, batch=1, schedules="1f1b"))


def test_forms_have_all_rows() -> None:
    found = plan(devices=4, batch=8, memory=7)
    content = json.loads(plan_table(found, "json"))
    assert content["status"] == found.status
    assert [row["command"] for row in content["rows"]] == [row.command for row in found.rows]
    assert [row["step"] for row in content["front"]] == [row.measured.step for row in found.front]
    assert (
        sum(content["searched"][REFUSED].values()) + sum(content["searched"][fate] for fate in FATES if fate != REFUSED)
        == (content["searched"]["candidates"])
    )
    rows = list(csv.DictReader(io.StringIO(plan_table(found, "csv"))))
    assert {row["command"] for row in rows} == {row.command for row in [*found.rows, *found.front]}
    every = found.to_builtins(candidates=True)["candidates"]
    assert len(every) == content["searched"]["candidates"]
    assert [row["fate"] for row in every] == [one.fate for one in found.search.space.candidates]
    assert found.status in str(found).splitlines()
    assert "proved" in repr(found)
    assert found.rows[0].command in str(found)
    assert found._repr_html_().startswith("<table>")


def test_a_frame_has_every_candidate() -> None:
    pytest.importorskip("pandas")
    found = plan(devices=4, batch=8, schedules="1f1b,gpipe")
    assert found.frame()["fate"].tolist() == [one.fate for one in found.search.space.candidates]


@pytest.mark.slow
def test_the_memory_of_the_devices_is_the_limit_by_default() -> None:
    model = stages(4)
    sizes = sorted({one.memory for one in simulated_all(plan(model, box(), devices=2, batch=4)).values()})
    middle = sizes[len(sizes) // 2]
    small = plan(model, box(memory=middle), devices=2, batch=4)
    given_limit = plan(model, box(), devices=2, batch=4, memory=middle)
    assert [row.options["schedule"] for row in small.rows] == [row.options["schedule"] for row in given_limit.rows]
    assert {row.measured.fits for row in small.front} == {True}


@every_row(
    ("options", "refusal"),
    [
        ({"devices": 4}, "batch: is missing; give the samples of a training step"),
        ({"batch": 4}, "devices: is missing, and the cluster has as many as it takes; give their number"),
        ({"devices": 0, "batch": 4}, "devices: devices=0 must be at least 1"),
        ({"devices": 4, "batch": "many"}, "batch: batch=many must be a whole number of at least 1"),
        ({"devices": 4, "batch": 8, "memory": "80 GB"}, "memory: memory=80 GB must be a whole number of at least 0"),
        ({"devices": 4, "batch": 8, "schedules": []}, "schedules: is an empty list; name some, or leave it out"),
        ({"devices": 4, "batch": 8, "schedules": "1f1c"}, "schedule: unknown schedule '1f1c'; did you mean '1f1b'?"),
        ({"devices": 4, "batch": 8, "staleness": -1}, "staleness: -1 is no number from 0 on; give for example 1.5"),
        ({"devices": 4, "batch": 8, "seconds": "x"}, "seconds: 'x' is no number from 0 on; give for example 1.5"),
        (
            {"devices": 4, "batch": 8, "n": [2, 4]},
            "n: each of n stages takes a slot, so that another n is another model; give one",
        ),
        (
            {"devices": 4, "batch": 8, "objective": "fame"},
            "objective: unknown objective 'fame'; known are samples, memory, devices, staleness",
        ),
        (
            {"devices": 4, "batch": 8, "n": 3, "schedules": "1f1b"},
            "n: leave no candidate on 4 devices; allow more values",
        ),
        (
            {"devices": 4, "batch": 6, "schedules": "multi-dp"},
            "batch: no candidate trains on 6 samples on 4 devices; the nearest batch is 4",
        ),
        (
            {"devices": 4, "batch": 8, "cluster": Cluster(devices=(Devices(count=2),))},
            "cluster: has 2 devices, but the plan needs 4; raise `count` in [devices], ask for fewer stages or ranks, "
            "or take another schedule",
        ),
        (
            {"devices": 4, "batch": 8, "model": [stages(4), "unit"]},
            "model: some are in slots, and some in seconds; give models of one kind",
        ),
        (
            {"devices": 4, "batch": 8, "model": [stages(4), stages(5)]},
            "model: have 4 and 5 stages, and are not one network; plan for each",
        ),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_in_one_line(options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(RequestError) as error:
        plan(**options)
    assert str(error.value) == refusal


def test_a_batch_that_nothing_reaches_is_refused_with_the_nearest_ones() -> None:
    model = stages(4, samples=3)
    with pytest.raises(RequestError, match=r"no candidate trains on 8 samples .*; the nearest batches are 6 and 9$"):
        plan(model, box(), devices=1, batch=8)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="plan\\(\\) got an unexpected keyword argument 'jitter'"):
        plan(devices=4, batch=8, jitter="normal:0.1")


def test_bounds_that_are_too_high_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of all candidates fails where a bound says that the best one cannot be good."""
    real = Bounds.of

    def too_high(bounds: Bounds, case: int, options: Mapping[str, Any]) -> Bound:
        return Bound(10**9, 10**9) if options["schedule"] == "zb-h2" else real(bounds, case, options)

    monkeypatch.setattr(Bounds, "of", too_high)
    found = plan(devices=4, batch=8, schedules=["zb-h2", "1f1b", "gpipe"], top=1)
    with pytest.raises(AssertionError):
        check_against_all(found, float("inf"), 1, "samples")


def test_the_package_has_plans() -> None:
    assert cdpsim.plan is plan


def test_a_list_of_an_option_has_a_column_also_where_one_value_is_none() -> None:
    """And a value that changes nothing is no further candidate: one rank sums with no other."""
    found = plan(
        "gpt2", box(), devices=4, batch=32, schedules="1f1b,gpipe", compress=[None, "topk:0.05"], recompute="none"
    )
    assert "compress" in found.candidates.records()[0]
    alone = [one for one in found.search.space.candidates if one.options.get("n") == 4 and not one.refusal]
    alone = [one for one in alone if one.options["schedule"] != "dp"]
    assert {one.options.get("compress") for one in alone} == {None}

"""Requests, runs, answers and refusals survive the way to another process."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cdpsim import SCHEDULES, Cluster, Model, Request, RequestError, Stalled, Trace, assemble, load, presets, simulate
from cdpsim.program.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_GATHER,
    SCATTER_ALL_GATHER,
    Algorithm,
    hierarchical_all_reduce,
)
from cdpsim.schedules import pipeline, pipelines, schedule_from_csv
from cdpsim.schedules.actions import write_actions
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import ALL_RULES, matrix_rule
from cdpsim.studies.compare import measure
from cdpsim.studies.montecarlo import sample_runs
from cdpsim.trace import TABLES

WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"protocol {n}": partial(pickle.dumps, protocol=n) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
in_every_way = pytest.mark.parametrize("way", WAYS)


def passed(way: str, value: Any) -> Any:
    """The value as it comes out of a pickle, or of a copy."""
    made = WAYS[way](value)
    return pickle.loads(made) if way.startswith("protocol") else made


def parts(value: object) -> Iterator[object]:
    """All that a value consists of, as plain values, arrays and functions."""
    if isinstance(value, Trace):
        value = vars(value)
    if isinstance(value, np.ndarray):
        yield value.dtype, value.tolist()
    elif is_dataclass(value):
        yield type(value)
        yield from (part for field in fields(value) for part in parts(getattr(value, field.name)))
    elif isinstance(value, partial):
        yield value.func
        yield from parts((value.args, value.keywords))
    elif isinstance(value, dict):
        yield tuple(value)
        yield from (part for each in value.values() for part in parts(each))
    elif isinstance(value, tuple | list):
        yield type(value), len(value)
        yield from (part for each in value for part in parts(each))
    else:
        yield value


def same(left: object, right: object) -> bool:
    """Whether two values consist of the same."""
    return list(parts(left)) == list(parts(right))


def test_what_differs_is_not_the_same() -> None:
    """Or the tests below would show nothing."""
    assert same(SCHEDULES["1f1b"], SCHEDULES["1f1b"])
    assert not same(SCHEDULES["1f1b"], SCHEDULES["gpipe"])
    assert not same(simulate("1f1b", 2), simulate("1f1b", 2, steps=4))
    assert not same(matrix_rule(np.eye(2, dtype=bool)), matrix_rule(np.ones((2, 2), dtype=bool)))


@pytest.mark.every_case
@in_every_way
def test_every_schedule_and_rule(way: str) -> None:
    """The named ones equal themselves; those from a matrix or of an own list say the same."""
    for schedule in SCHEDULES.values():
        assert passed(way, schedule) == schedule
    for rule in ALL_RULES.values():
        assert passed(way, rule) == rule
    fresh = np.array([[True, False], [False, True], [True, True]])
    again = passed(way, matrix_rule(fresh, "mine"))
    assert again.matrix(2, 3).tolist() == fresh.tolist()
    with pytest.raises(RequestError, match=r"^mine: the rule has 3 rows of 2"):
        again.matrix(3, 3)
    mine = pipeline("mine", "an own list", pipelines.gpipe)
    assert passed(way, mine) == mine


@pytest.mark.every_case
@in_every_way
def test_an_order_from_a_file(way: str, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    write_actions(pipelines.gpipe(3, 5), path)
    schedule = passed(way, schedule_from_csv(path))
    assert same(schedule, schedule_from_csv(path))
    assert same(schedule.actions(Shape(3, 5)), pipelines.gpipe(3, 5))


@pytest.mark.every_case
@in_every_way
def test_every_model_and_cluster(way: str) -> None:
    things: list[msgspec.Struct] = [Model.unit(3), Model.unit(3, split=True), Cluster.unit()]
    things += [presets.model("gpt2"), presets.cluster("a100-nodes")]
    for thing in things:
        assert passed(way, thing) == thing


REQUESTS: list[dict[str, Any]] = [
    *({"schedule": name, "n": 4, "m": 8} for name in ("1f1b", "zbv", "dualpipe")),
    {"schedule": "multi-dp", "n": 3, "collective": "ring"},
    {"schedule": "multi-dp", "n": 8, "model": "gpt2", "cluster": "a100-nodes", "collective": "hierarchical"},
    {"schedule": "zero-dp", "n": 4, "model": "gpt2", "cluster": "a100-nodes", "contention": "fair", "steps": 2},
    {"schedule": "multi-cdp", "n": 2, "stop": ["0:3:2"], "rule": matrix_rule(np.zeros((2, 2), dtype=bool))},
]


@in_every_way
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request["schedule"])
def test_a_trace_and_all_of_its_run(way: str, request_: dict[str, Any]) -> None:
    """Program, costs and request with it, fresh and after its columns were asked for; and what is measured of it."""
    trace = simulate(**request_)
    assert same(passed(way, trace), trace)
    columns = {name: getattr(trace, name) for name in TABLES}
    again = passed(way, trace)
    assert same(again, trace)
    assert same({name: getattr(again, name) for name in TABLES}, columns)
    assert again.summary() == trace.summary()
    assert again.algorithms is None or len(again.algorithms) == len(columns["messages"]["op"])
    assert passed(way, measure(again)) == measure(trace)


@pytest.mark.every_case
@in_every_way
def test_a_request(way: str) -> None:
    request = Request("pipedream", 3, cluster="a100-nodes", model="gpt2")
    assert same(passed(way, request), request)
    program = assemble(request)
    assert same(passed(way, program), program)


@pytest.mark.every_case
@in_every_way
def test_a_loaded_trace(way: str, tmp_path: Path) -> None:
    simulate("mp-dp", 3).save(tmp_path / "run")
    loaded = load(tmp_path / "run")
    assert same(passed(way, loaded), loaded)


@pytest.mark.every_case
@in_every_way
def test_many_runs(way: str) -> None:
    runs = sample_runs(simulate("1f1b", 2, model="gpt2", cluster="a100-nodes", jitter="uniform:0.1"), 3)
    assert passed(way, runs).summary() == runs.summary()


@pytest.mark.every_case
@in_every_way
def test_every_collective(way: str) -> None:
    """It sends the same afterwards, in as many rounds; six members, of which four are a power of two."""
    known: list[Algorithm] = [BROADCAST, REDUCE, SCATTER_ALL_GATHER, REDUCE_SCATTER_GATHER]
    known += [*ALL_REDUCE.values(), *ALL_GATHER.values(), *REDUCE_SCATTER.values()]
    for how in (*known, hierarchical_all_reduce(((0, 1, 2), (3, 4, 5)))):
        again = passed(way, how)
        assert again == how
        for name in ("rounds", "parts", "carried", "sends", "schedule"):
            assert same(getattr(again, name)(6), getattr(how, name)(6)), (how, name)


@pytest.mark.every_case
@in_every_way
def test_refusals_keep_their_subject_and_their_line(way: str) -> None:
    for error in (
        RequestError("n", "is missing; give one"),
        RequestError("x" * 2000, "\x1b[2J\nis \ud800; take another" + "y" * 2000),
    ):
        error.add_note("in a worker")
        again = passed(way, error)
        assert (type(again), str(again)) == (RequestError, str(error))
        assert (again.subject, again.problem) == (error.subject, error.problem)
        assert again.__notes__ == ["in a worker"]
    stalled = passed(way, Stalled("the run does not end"))
    assert (type(stalled), str(stalled)) == (Stalled, "the run does not end")


def test_a_pool_serves_simulations_and_hands_back_refusals() -> None:
    """Workers that begin from nothing, as on every system: traces come back, and each refusal is raised here."""
    asked = partial(simulate, n=2, model=presets.model("gpt2"), cluster=presets.cluster("a100-nodes"))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        traces = pool.map_async(asked, [SCHEDULES["multi-dp"], SCHEDULES["1f1b"]])
        refused = pool.apply_async(asked, (SCHEDULES["1f1b"],), {"m": 0})
        stalled = pool.apply_async(simulate, ("1f1b", 2), {"stop": ["0:1"]})
        for trace, name in zip(traces.get(timeout=120), ("multi-dp", "1f1b"), strict=True):
            assert same(trace, asked(name))
        with pytest.raises(RequestError, match=r"^m: m=0 must be at least 1") as told:
            refused.get(timeout=120)
        assert told.value.subject == "m"
        with pytest.raises(Stalled, match="device 0 stopped in slot 1"):
            stalled.get(timeout=120)

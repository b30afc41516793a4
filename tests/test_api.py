"""Request, program, costs and run, one by one: the same as all at once, and refused where they do not fit."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from cdpsim import (
    Cluster,
    Model,
    Request,
    RequestError,
    Slow,
    Stage,
    Stop,
    assemble,
    presets,
    price,
    run,
    simulate,
    sweep,
)
from cdpsim.cluster import Devices, Link
from cdpsim.cluster.disorder import Disorder
from cdpsim.cluster.topology import Cable, Topology
from cdpsim.request.options import CollectiveName
from cdpsim.studies.breakeven import runner_on_clusters
from tests.helpers.strategies import requests, streamed_requests

MODEL = Model(stages=(Stage(forward=1.0, backward=2.0, boundary=10, parameters=40, activation=5),) * 4)
LINKS = [Cluster(link=Link(latency=latency, bandwidth=20.0)) for latency in (0.0, 0.25, 1.0)]


def real(name: str, cluster: Cluster = LINKS[1], **words: Any) -> Request:
    """A request of four stages in seconds."""
    return Request(name, model=MODEL, cluster=cluster, **words)


@settings(max_examples=60)
@given(requests() | streamed_requests(most=3))
def test_a_run_in_parts_is_the_run_at_once(words: dict[str, Any]) -> None:
    """To the last bit, in all tables and the summary; and what is recorded asks for it again."""
    request = Request(**words)
    program = assemble(request)
    costs = price(program, request.model, request.cluster)
    parts, whole = run(program, costs), simulate(**words, ignore_memory=True).whole
    assert np.array_equal(parts.start, whole.start) and np.array_equal(parts.end, whole.end)
    assert parts.summary() | {"request": 0} == whole.summary() | {"request": 0}
    assert np.array_equal(sweep(program, [costs])[0], whole.end[: len(program.tasks)])
    again = Request.from_builtins(parts.request.to_builtins())
    assert again == parts.request


@pytest.mark.parametrize("name", ["multi-dp", "multi-cdp", "pp-cdp", "zero-cdp", "1f1b", "pipedream"])
def test_a_program_serves_all_clusters_of_its_structure(name: str) -> None:
    """Each run is that of its own request, also in steady state, and records its own cluster."""
    words: dict[str, Any] = {"m": 6} if name == "1f1b" else {}
    program = assemble(real(name, **words))
    costs = [price(program, MODEL, cluster) for cluster in LINKS]
    ends = sweep(program, costs)
    for cluster, one, end in zip(LINKS, costs, ends, strict=True):
        expected, found = simulate(real(name, cluster, **words)), run(program, one)
        assert np.array_equal(found.end, expected.end) and np.array_equal(end, expected.end[: len(program.tasks)])
        assert (found.steady_state.period, found.request) == (expected.steady_state.period, expected.request)


def test_the_other_model_is_priced_in_as_many_stages() -> None:
    """A name is read as a request reads it; times may be others, sizes not."""
    request = Request("multi-dp", 4, model="gpt2", cluster="a100-nodes")
    program = assemble(request)
    by_name = price(program, "gpt2", "h100-nodes")
    assert np.array_equal(run(program, by_name).end, simulate("multi-dp", 4, model="gpt2", cluster="h100-nodes").end)
    slower = Model(stages=(Stage(forward=3.0, backward=2.0, boundary=10, parameters=40, activation=5),) * 4)
    program = assemble(real("pp-cdp"))
    assert np.array_equal(
        run(program, price(program, slower, LINKS[1])).end, simulate("pp-cdp", model=slower, cluster=LINKS[1]).end
    )


def test_collectives_that_swap_algorithms_are_another_program() -> None:
    """Both clusters run a large and a small sum by the same two algorithms, and one of middle size by either."""
    each = [Stage(forward=1.0, backward=2.0, parameters=size) for size in (10**6, 1, 3000, 1)]
    model = Model(stages=tuple(each))
    slow, fast = (Cluster(link=Link(latency=1.0, bandwidth=bandwidth)) for bandwidth in (1e2, 1e5))
    words: dict[str, Any] = {"model": model, "collective": "best", "expand_collectives": True}
    program = assemble(Request("multi-dp", cluster=slow, **words))
    assert len(program.messages) != len(assemble(Request("multi-dp", cluster=fast, **words)).messages)
    with pytest.raises(RequestError, match=r"^cluster: has other algorithms of collectives"):
        price(program, model, fast)
    assert np.array_equal(
        runner_on_clusters(Request("multi-dp", cluster=slow, **words))(fast).end,
        simulate("multi-dp", cluster=fast, **words).end,
    )


LANES = Cluster(devices=(Devices(lanes=2),), link=LINKS[1].link)
NONE = Cluster(devices=(Devices(overlap="none"),), link=LINKS[1].link)


def stages(**changed: Any) -> Model:
    """Four stages, all of which differ from those of the model above."""
    return Model(stages=(Stage(**{"forward": 1.0, "backward": 2.0, "boundary": 10, "parameters": 40} | changed),) * 4)


@pytest.mark.parametrize(
    ("name", "model", "cluster", "problem"),
    [
        ("multi-dp", MODEL, NONE, "^cluster: has devices that overlap otherwise than the program was assembled for"),
        ("single-cdp", MODEL, LANES, "^cluster: has another number of lanes than"),
        ("multi-dp", stages(activation=6), LINKS[1], "^model: has other sizes than"),
        ("multi-cdp", stages(activation=5, update=1.0), LINKS[1], "^model: has updates elsewhere, or of other times"),
        ("multi-dp", "unit", LINKS[1], "^model: is of slots, and this request's is not"),
        ("multi-dp", MODEL, Cluster(devices=(Devices(count=3),)), "has 3 devices, but multi-dp needs 4"),
        ("multi-dp", "gpt3", LINKS[1], "^model: unknown"),
    ],
)
def test_what_another_program_would_be_assembled_for_is_refused(
    name: str, model: Any, cluster: Any, problem: str
) -> None:
    """In one line that says what differs; the program says what it was made for."""
    request = real(name, Cluster(devices=(Devices(),), link=LINKS[1].link) if name == "single-cdp" else LINKS[1])
    program = assemble(request)
    with pytest.raises(RequestError, match=problem):
        price(program, model, cluster)
    assert program.key["schedule"] == name and program.key["overlaps"] == ("full",) * program.devices


def test_a_pyramid_of_other_times_is_another_program() -> None:
    """Four stages of which the last takes much longer need other numbers of devices."""
    program = assemble(real("mp-cdp"))
    long = [Stage(forward=9.0, backward=2.0, boundary=10, parameters=40, activation=5)]
    with pytest.raises(RequestError, match=r"^cluster: has devices that need another number of them for a stage"):
        price(program, Model(stages=(*MODEL.stages[:3], *long)), LINKS[1])


def test_expanded_collectives_keep_their_algorithms() -> None:
    """The best algorithm at small latency is not the best at high bandwidth; then another program is assembled."""

    def switch(latency: float, bandwidth: float) -> Cluster:
        cable = Cable(latency=latency, bandwidth=bandwidth)
        return Cluster(devices=(Devices(count=4),), topology=Topology(kind="switch", link=cable))

    slow, wide = switch(1.0, 1e9), switch(0.0, 10.0)
    request = real("multi-dp", slow, expand_collectives=True)
    program = assemble(request)
    assert np.array_equal(run(program, price(program, MODEL, slow)).end, simulate(request).end)
    with pytest.raises(RequestError, match=r"^cluster: has other algorithms of collectives than"):
        price(program, MODEL, wide)
    other = simulate(real("multi-dp", wide, expand_collectives=True))
    assert np.array_equal(runner_on_clusters(request)(wide).end, other.end)


def test_disturbances_are_objects_or_texts() -> None:
    """Both ask for the same, and the record is of texts."""
    objects = simulate("multi-dp", 4, steps=3, stop=[Stop(3, 18, 50)], slow=[Slow(1, 2)])
    texts = simulate("multi-dp", 4, steps=3, stop=["3:18:50"], slow=["1:2"])
    assert np.array_equal(objects.end, texts.end)
    assert objects.request["stop"] == ["3:18:50"] and objects.request["slow"] == ["1:2"]
    with pytest.raises(RequestError, match=r"^stop: slots are whole"):
        simulate("multi-dp", 4, stop=[Stop(3, 18.5)])


def test_costs_of_disturbed_runs_are_swept_as_they_run() -> None:
    """Jitter of several runs, and a device that stands still."""
    program = assemble(real("multi-cdp"))
    calm = price(program, MODEL, LINKS[1])
    costs = [calm]
    several: list[dict[str, Any]]
    several = [{"jitter": "uniform:0.2", "run": 3}, {"stop": ["1:2 s:3 s"]}, {"slow": ["2:3"]}]
    for words in several:
        request = real("multi-cdp", **words)
        costs.append(price(assemble(request), request.model, request.cluster))
    expected = [run(program, one).end[: len(program.tasks)] for one in costs]
    assert np.array_equal(sweep(program, costs), expected)
    assert len({end.max() for end in expected}) == 4
    assert sweep(program, []).shape == (0, len(program.tasks))
    shared = real("multi-cdp", contention="fair")
    program = assemble(shared)
    with pytest.raises(RequestError, match=r"^contention: many runs at once do not know who shares links"):
        sweep(program, [price(program, shared.model, shared.cluster)])


def test_a_request_says_all_of_itself() -> None:
    """Beside a request, no options are taken; an unknown option is refused, with the nearest one."""
    request = Request("multi-cdp", 4)
    assert repr(request) == "Request('multi-cdp', n=4, m=4, steps=3, model='unit', cluster='unit')"
    assert simulate(request).request == request.resolved(sends=True, sums=False, devices=4)
    with pytest.raises(RequestError, match=r"^request: says all of itself"):
        simulate(request, steps=4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepz'"):
        Request("multi-cdp", 4, stepz=3)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"^request: unknown request 'stepz'; did you mean 'steps'"):
        Request.from_builtins({"schedule": "multi-cdp", "n": 4, "stepz": 3})
    with pytest.raises(RequestError, match=r"^request: has no schedule"):
        Request.from_builtins({"n": 4})
    with pytest.raises(RequestError, match=r"^program: does not say what it was assembled for"):
        price(replace(assemble(request), request=None), "unit", "unit")


FLAT = Cluster(devices=(Devices(speed=1e14),), link=Link(latency=1e-5, bandwidth=1e9))


def test_what_a_cluster_decides_is_decided_by_the_other_one() -> None:
    """Without a word for it, a collective runs by the best algorithm on a topology, and by doubling elsewhere."""
    for first, second in (("a100-nodes", FLAT), (FLAT, "a100-nodes")):
        request = Request("multi-dp", 8, model="gpt2", cluster=first)
        program = assemble(request)
        fresh = simulate("multi-dp", 8, model="gpt2", cluster=second)
        found = run(program, price(program, request.model, second))
        assert np.array_equal(found.end, fresh.end) and np.array_equal(
            runner_on_clusters(request)(second_of(second)).end, fresh.end
        )
        assert found.request["collective"] == fresh.request["collective"]
        assert np.array_equal(simulate(found.request.of(request.model, first)).end, simulate(request).end)


def second_of(cluster: str | Cluster) -> Cluster:
    """A cluster by its name, or itself."""
    return presets.find_cluster(cluster)


SLOWED = Cluster(link=LINKS[1].link, disorder=Disorder(slow=(Slow(1, 3.0),)))


@pytest.mark.parametrize("words", [{}, {"jitter": "uniform:0.2"}, {"slow": ["0:2"]}, {"jitter": "uniform:0"}])
@pytest.mark.parametrize("clusters", [(SLOWED, LINKS[1]), (LINKS[1], SLOWED)])
def test_what_disturbs_a_cluster_stays_with_it(words: dict[str, Any], clusters: tuple[Cluster, Cluster]) -> None:
    """The request's own disorder goes to the other cluster, option by option; the first cluster's does not."""
    first, second = clusters
    program = assemble(real("multi-dp", first, **words))
    found, fresh = run(program, price(program, MODEL, second)), simulate(real("multi-dp", second, **words))
    assert np.array_equal(found.end, fresh.end) and found.request == fresh.request
    assert found.steady_state.period_is == fresh.steady_state.period_is


def test_another_cluster_s_devices_must_be_there() -> None:
    """As in a request of its own."""
    program = assemble(real("multi-dp"))
    with pytest.raises(RequestError, match=r"^slow: there is no device 9 for multi-dp"):
        price(program, MODEL, Cluster(devices=(Devices(count=4),), disorder=Disorder(slow=(Slow(9, 2.0),))))


def test_a_model_by_its_name_is_trained_as_asked() -> None:
    """Then it has the sizes that the program was assembled for."""
    asked: dict[str, Any] = {"optimizer": "sgd", "mixed_precision": False, "recompute": "full"}
    program = assemble(Request("pp-cdp", 4, model="gpt2", cluster="a100-nodes", **asked))
    fresh = simulate("pp-cdp", 4, model="gpt2", cluster="h100-nodes", **asked)
    found = run(program, price(program, "gpt2", "h100-nodes"))
    assert np.array_equal(found.end, fresh.end) and found.request == fresh.request


@pytest.mark.parametrize("collective", ["ring", "double-tree", "hierarchical", "hierarchical-rails", "best"])
def test_a_program_from_another_process_is_priced(collective: CollectiveName) -> None:
    """Its collectives run by the same algorithms, though these are other objects."""
    request = Request(
        "multi-dp", 12, model="gpt2", cluster="a100-nodes", collective=collective, expand_collectives=True
    )
    made = assemble(request)
    assert run(made, price(made, request.model, request.cluster)).summary()  # what is known of it then goes along
    program = pickle.loads(pickle.dumps(made))
    found = run(program, price(program, request.model, request.cluster))
    assert np.array_equal(found.end, simulate(request).end)
    assert "of Request('multi-dp', n=12" in repr(found)


def test_costs_of_another_program_are_refused() -> None:
    """By their number of nodes, in one line."""
    programs = [assemble(real("multi-dp", steps=steps)) for steps in (2, 3)]
    costs = price(programs[0], MODEL, LINKS[1])
    for refused in (lambda: run(programs[1], costs), lambda: sweep(programs[1], [costs])):
        with pytest.raises(
            RequestError, match=r"^costs: are of \d+ nodes, and the program has \d+; price that program"
        ):
            refused()


def test_what_a_request_says_cannot_be_changed_behind_it() -> None:
    """Everything that a request hands out is a copy, which the caller may change."""
    request = Request("1f1b", 2, m=3, counts=[[1], [2], [3]])
    request.to_builtins()["counts"][0][0] = 7
    assert request["counts"] == [[1], [2], [3]] and request.steps == 3


def test_a_program_is_not_priced_by_a_model_with_other_tied_tensors() -> None:
    """Their sums over both directions are messages of the program."""
    stage = {"forward": 1.0, "backward": 2.0, "weight_backward": 1.0, "parameters": 1000}
    plain, tied = (
        Model.from_builtins({"stages": [stage] * 2} | more, "two")
        for more in ({}, {"tied": [{"stages": [0, 1], "parameters": "1 kB"}]})
    )
    program = assemble(Request(schedule="dualpipe", n=2, m=4, model=plain, cluster="a100-nodes"))
    with pytest.raises(RequestError, match="other tied tensors"):
        price(program, tied, "a100-nodes")


def test_a_program_with_one_replica_for_all_is_refused_where_they_are_unlike() -> None:
    """Of three stages a replica on nodes of eight devices, the third replica's messages leave its node."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=8, boundary=10),) * 3)
    folded = simulate("1f1b", 3, m=2, replicas=3, model=model, cluster=LINKS[1])
    program, whole = folded.program, folded.whole.program
    assert program.fold == 3
    assert np.array_equal(run(program, price(program, model, LINKS[1])).end, folded.end)
    with pytest.raises(RequestError, match="cluster: has replicas that are not alike"):
        price(program, model, "a100-nodes")
    assert len(price(whole, model, "a100-nodes").duration) == whole.nodes

"""An evaluation runs a part of what is asked for, and its metrics are those of a run of all."""

from dataclasses import fields
from inspect import unwrap
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, Request, RequestError, Stage, evaluate, evaluate_all, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.numeric import paths
from cdpsim.request.sharing import accepts
from cdpsim.runs import evaluation, micro_batches
from cdpsim.runs.assembling import KNOWN_PROGRAMS, KnownPrograms
from cdpsim.studies.compare import Measured, measure
from cdpsim.trace.metrics import memory
from tests.helpers import strategies
from tests.helpers.half_of_cases import every_second

SHARES = ("bubble", "exposed")  # differences of times, which need not be as exact as the times themselves


def differences(found: Measured, whole: Measured) -> list[tuple[str, Any, Any]]:
    """The metrics that differ: integers at all, times by more than 1e-12 of them, shares by more than 1e-11."""
    pairs = [(field.name, getattr(found, field.name), getattr(whole, field.name)) for field in fields(Measured)]
    return [(name, one, other) for name, one, other in pairs if not equal(name, one, other)]


def equal(name: str, one: Any, other: Any) -> bool:
    if not (isinstance(one, float) and isinstance(other, float)):
        return bool(one == other)
    return abs(one - other) <= (1e-11 if name in SHARES else 1e-12 * max(abs(one), abs(other)))


def whole_run(options: dict[str, Any]) -> Measured:
    return measure(simulate(Request(**{"ignore_memory": True} | options)))


@pytest.fixture
def folds_always(monkeypatch: pytest.MonkeyPatch) -> list[micro_batches.Folded | None]:
    """Fold micro-batches where that takes longer, too; the list has what came of each request."""
    outcomes: list[micro_batches.Folded | None] = []

    def fold(request: Request) -> micro_batches.Folded | None:
        outcomes.append(micro_batches.fold_micro_batches(request))
        return outcomes[-1]

    monkeypatch.setattr(micro_batches, "_cost", lambda tasks: 0)
    monkeypatch.setattr(evaluation, "fold_micro_batches", fold)
    return outcomes


TAKE_ANY_M = [name for name, schedule in SCHEDULES.items() if accepts(schedule, "m") and schedule.order.waits]
# What is held grows in the first two, whose forwards come before all backwards; after the last forward, a device of
# gems waits for an update alone.
NOT_FOLDED = ("gpipe", "looped-bfs", "gems")
FOLDED = [
    name
    for name in TAKE_ANY_M
    if name not in NOT_FOLDED and SCHEDULES[name].order.lists and SCHEDULES[name].order.together
]
LINKS = {
    "free": Cluster(devices=(Devices(),)),
    "slow": Cluster(devices=(Devices(),), link=Link(latency=0.5, bandwidth=2.0**20)),
    "in turn": Cluster(devices=(Devices(overlap="none"),), link=Link(latency=1 / 64, bandwidth=2.0**24)),
    "in streams": Cluster(devices=(Devices(overlap="stream"),), link=Link(latency=1 / 8, bandwidth=2.0**22)),
}
FORWARDS = {"rising": (1, 2, 3, 4, 5, 6, 7, 8), "falling": (8, 7, 6, 5, 4, 3, 2, 1), "mixed": (3, 8, 1, 5, 2, 7, 4, 6)}


def uneven(n: int, forwards: tuple[int, ...]) -> Model:
    """A model whose times are multiples of a 16th of a second, so that sums of them are exact."""
    return Model(
        stages=tuple(
            Stage(
                forward=forwards[j] / 16,
                backward=(2 * forwards[j] + j) / 16,
                weight_backward=forwards[j] / 16,
                activation=(j + 1) * 2**20,
                boundary=(1 + j % 3) * 2**18,
                parameters=(9 - j) * 2**19,
                backward_transient=(j % 2) * 2**21,
            )
            for j in range(n)
        )
    )


def case(name: str, forwards: str, link: str, m: int) -> dict[str, Any]:
    schedule = SCHEDULES[name]
    chunks = 2 if schedule.order.any_chunks else schedule.order.chunks
    n = 4 * chunks if schedule.order.lists else 4
    options: dict[str, Any] = {
        "schedule": name,
        "n": n,
        "m": m,
        "model": uneven(n, FORWARDS[forwards]),
        "cluster": LINKS[link],
    }
    return options | ({"chunks": chunks} if schedule.order.any_chunks else {})


def test_of_schedules_stages_and_links_any_two_are_tried_together() -> None:
    """By half of all cases: a fault that needs three certain ones would be seen with other stages, too."""
    cases = every_second(TAKE_ANY_M, FORWARDS, LINKS)
    assert len(cases) <= len(TAKE_ANY_M) * len(FORWARDS) * len(LINKS) / 2
    for a, b in combinations(range(3), 2):
        choices = (TAKE_ANY_M, FORWARDS, LINKS)
        assert {(case[a], case[b]) for case in cases} == set(product(choices[a], choices[b]))


@pytest.mark.parametrize(("name", "forwards", "link"), every_second(TAKE_ANY_M, FORWARDS, LINKS))
def test_folded_micro_batches_give_the_metrics_of_all(
    name: str, forwards: str, link: str, folds_always: list[micro_batches.Folded | None]
) -> None:
    """Times to 1e-12, memory and messages exactly."""
    options = case(name, forwards, link, 96)
    assert differences(evaluate(**options), whole_run(options)) == []


@pytest.mark.parametrize("forwards", ["falling", "mixed"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera", "interleaved-1f1b", "dp"])
def test_other_numbers_of_micro_batches_follow_from_the_same_runs(
    name: str, forwards: str, folds_always: list[micro_batches.Folded | None]
) -> None:
    """Metrics do not depend on what was asked for before."""
    micro_batches.KNOWN_GROWTHS.forget()
    for m in (96, 88, 144, 96):
        options = case(name, forwards, "free", m)
        assert differences(evaluate(**options), whole_run(options)) == []
    assert all(folds_always)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "dualpipev"])
def test_even_stages_in_seconds_fold(name: str, folds_always: list[micro_batches.Folded | None]) -> None:
    """No float is exactly 0.013 or 0.027: yet what ends together ends together in each run, by whole quanta."""
    stage = {"forward": 0.013, "backward": 0.027, "weight_backward": 0.011, "activation": 2**20, "parameters": 2**20}
    any_chunks = SCHEDULES[name].order.any_chunks
    n = 4 * (2 if any_chunks else SCHEDULES[name].order.chunks)
    options: dict[str, Any] = {"schedule": name, "n": n, "m": 208, "steps": 2} | ({"chunks": 2} if any_chunks else {})
    options["model"] = Model.from_builtins({"stages": [stage | {"boundary": 2**18, "repeat": n}]}, "even")
    options["cluster"] = Cluster(devices=(Devices(),), link=Link(latency=7e-6, bandwidth=1.3e9))
    assert differences(evaluate(**options), whole_run(options)) == []
    assert all(folds_always)


def test_memory_that_grows_in_the_middle_of_a_step_is_not_folded(
    folds_always: list[micro_batches.Folded | None],
) -> None:
    """Torch keeps something of each micro-batch: from seven on, most is held in the middle of the step."""
    first = {"forward": 53 / 61, "backward": 76 / 61, "weight_backward": 52 / 61, "activation": 46 * 2**20}
    first |= {"parameters": 29 * 2**20, "forward_transient": 2**20, "backward_transient": 9 * 2**20}
    last = {"forward": 19 / 61, "backward": 60 / 61, "weight_backward": 18 / 61, "activation": 19 * 2**20}
    last |= {"parameters": 9 * 2**20, "boundary": 2**16, "forward_transient": 7 * 2**20, "backward_transient": 2**21}
    options: dict[str, Any] = {"schedule": "zbv", "n": 2, "m": 71, "steps": 3, "runtime": "torch"}
    options["model"] = Model.from_builtins({"stages": [first | {"update": 40 / 61}, last]}, "odd")
    options["cluster"] = Cluster(devices=(Devices(overlap="stream"),), link=Link(latency=0.013, bandwidth=1.7e7))
    for m in (15, 71, 139):
        assert differences(evaluate(**options | {"m": m}), whole_run(options | {"m": m})) == []
    assert not any(folds_always)


@pytest.mark.parametrize("link", ["free", "slow", "in streams"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dp"])
def test_ranks_that_share_states_fold_micro_batches(
    name: str, zero: int, link: str, folds_always: list[micro_batches.Folded | None]
) -> None:
    """What comes from the step before, as parameters do, is there before it decides."""
    options = case(name, "mixed", link, 96) | {"zero": zero, "shard": 2}
    assert differences(evaluate(**options), whole_run(options)) == []
    assert all(folds_always) or link != "free" or (name, zero) not in {("1f1b", 1), ("1f1b", 2), ("dp", 1)}


@pytest.mark.every_case
@pytest.mark.parametrize("name", FOLDED)
def test_schedules_fold_micro_batches(name: str, folds_always: list[micro_batches.Folded | None]) -> None:
    """Else the test above would compare runs with themselves."""
    options = case(name, "falling", "free", 96)
    evaluate(**options)
    evaluate(**options | {"model": "unit-split", "cluster": "unit"})
    assert any(folds_always)


@pytest.mark.parametrize(
    ("name", "chunks", "period"),
    [
        ("1f1b", 1, lambda n, m: 2 * (m + n - 1)),  # Narayanan et al. 2021, section 2.2.1
        ("interleaved-1f1b", 2, lambda n, m: 2 * 2 * m + 2 * (n - 1)),  # section 2.2.2
    ],
)
def test_a_million_micro_batches_take_what_the_papers_say(name: str, chunks: int, period: Any) -> None:
    more = {"chunks": chunks} if chunks > 1 else {}
    assert evaluate(name, 4 * chunks, m=10**6, **more).step == period(4, 10**6)


@settings(max_examples=60)
@given(strategies.requests(), st.integers(1, 9))
def test_an_evaluation_is_what_a_run_of_all_measures(request: dict[str, Any], steps: int) -> None:
    """Any request: also with data ranks, buckets, rules and lanes."""
    options = request | {"steps": steps, "ignore_memory": True}
    assert differences(evaluate(**options), measure(simulate(**options))) == []


def test_many_steps_are_known_from_few() -> None:
    """A run that does not flush repeats itself from some step on; its length follows."""
    model = uneven(4, FORWARDS["mixed"])
    for name in ("pp-cdp", "multi-cdp", "pipedream", "1f1b"):
        options: dict[str, Any] = {"schedule": name, "n": 4, "model": model, "cluster": LINKS["slow"]}
        for steps in (1, 2, 40, 41):
            makespan = simulate(**options, steps=steps).makespan
            assert evaluate(**options, steps=steps).makespan == pytest.approx(makespan, rel=1e-12)


def test_what_depends_on_chance_is_run_as_it_is() -> None:
    options: dict[str, Any] = {
        "schedule": "1f1b",
        "n": 3,
        "m": 64,
        "model": "gpt2",
        "cluster": "a100-nodes",
        "jitter": "lognormal:0.2",
    }
    assert evaluate(**options) == whole_run(options)


def test_a_run_is_evaluated_that_would_be_too_large_for_this_machine() -> None:
    with pytest.raises(RequestError, match="tasks are the most"):
        simulate("1f1b", 8, m=10**8)
    assert (
        evaluate("1f1b", 4, m=10**6, max_memory="16 MB").memory == 4 + 2
    )  # activations in flight; one stage's P and G


def test_what_cannot_be_folded_is_refused_where_it_does_not_fit() -> None:
    with pytest.raises(RequestError, match="--max-memory allows"):
        evaluate("multi-dp", 8, m=4096, max_memory="16 MB")


def test_what_a_runtime_keeps_from_step_to_step_is_there_whatever_steps_are_asked_for() -> None:
    """torch's 1F1B holds what it has sent until it sends again, which is in the next step."""
    stages = tuple(
        Stage(forward=1.0, backward=2.0, activation=10**6, boundary=10**5, parameters=10**6) for _ in range(3)
    )
    options: dict[str, Any] = {"schedule": "1f1b", "n": 3, "m": 5, "model": Model(stages=stages), "runtime": "torch"}
    cases = [options | {"steps": steps} for steps in (1, 2, 3, 4, 7)]
    rows = [evaluate(**each) for each in cases] + [whole_run(each) for each in cases]
    assert len({(row.memory, row.communication) for row in rows}) == 1


def test_memory_of_devices_is_no_reason_to_refuse() -> None:
    row = evaluate("gpipe", 4, m=8, model="llama3-8b", cluster="a100-nodes")
    assert not row.fits and row.memory > 80e9


def test_many_requests_at_once_have_the_metrics_of_each() -> None:
    """Also where programs differ, where chance decides, and where one request is there twice."""
    stages = {"model": uneven(4, FORWARDS["mixed"]), "n": 4}
    requests: list[dict[str, Any]] = [
        stages | {"schedule": name, "cluster": Cluster(devices=(Devices(),), link=Link(bandwidth=2.0**power))}
        for power in (20, 22, 24, 26)
        for name in ("1f1b", "pp-cdp", "multi-cdp")
    ]
    requests += [requests[0], requests[1] | {"slow": {1: 2}}, requests[2] | {"jitter": "uniform:0.1"}]
    assert evaluate_all(requests) == [evaluate(**each) for each in requests]
    assert evaluate_all(Request(**each) for each in requests[:5]) == evaluate_all(requests[:5])
    assert evaluate_all([]) == []
    large = {"schedule": "1f1b", "n": 4, "m": 10**6}
    assert [row.step for row in evaluate_all([large, large])] == [2000006, 2000006]


class TestKnownPrograms:
    """Programs are assembled once for all requests that differ in costs alone."""

    def request(self, **changed: Any) -> Request:
        usual: dict[str, Any] = {"schedule": "1f1b", "n": 4, "m": 4, "model": "gpt2", "cluster": "a100-nodes"}
        return Request(**usual | changed)

    @pytest.mark.parametrize("changed", [{"cluster": "h100-nodes"}, {"slow": {0: 2}}, {"steps": 3}])
    def test_costs_alone_need_no_other_program(self, changed: dict[str, Any]) -> None:
        known = KnownPrograms()
        assert known.find(self.request()) is known.find(self.request(**changed))

    @pytest.mark.every_case
    @pytest.mark.parametrize(
        "changed",
        [
            {"schedule": "gpipe"},
            {"m": 5},
            {"steps": 4},
            {"recompute": "layer"},
            {"optimizer": "sgd"},
            {"replicas": 2},
            {"replicas": 2, "zero": 1},
            {"runtime": "torch"},
            {"cluster": {"devices": {"speed": "1 TFLOPS", "overlap": "none"}}},
        ],
    )
    def test_other_structure_needs_another_program(self, changed: dict[str, Any]) -> None:
        known = KnownPrograms()
        assert known.find(self.request()) is not known.find(self.request(**changed))

    def test_those_not_asked_for_longest_go(self) -> None:
        known = KnownPrograms(most=1)
        first = known.find(self.request())
        known.find(self.request(m=5))
        assert known.find(self.request()) is not first

    def test_replicas_are_told_apart_on_a_cluster_where_they_are_not_alike(self) -> None:
        """Between nodes of 8, the second replica of 5 devices has another link in its middle."""
        known = KnownPrograms()
        alike = {"link": {"latency": "1 us", "bandwidth": "1 GB/s"}, "devices": {"speed": "1 TFLOPS"}}
        options: dict[str, Any] = {"n": 5, "replicas": 2}
        assert known.find(self.request(**options, cluster=alike)).fold == 2
        assert known.find(self.request(**options)).fold == 1
        assert known.find(self.request(**options, cluster=alike)).fold == 2


@settings(max_examples=25)
@given(strategies.requests(timed=True), strategies.a_one_lane_cluster)
def test_a_program_kept_from_another_request_gives_the_same_metrics(options: dict[str, Any], other: Cluster) -> None:
    options["ignore_memory"] = True
    try:
        evaluate(**options)
        kept = evaluate(**options | {"cluster": other})
    except RequestError:
        assume(False)
    KNOWN_PROGRAMS.forget()
    assert kept == evaluate(**options | {"cluster": other})


@pytest.mark.every_case
@pytest.mark.parametrize("as_python", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "multi-cdp", "zero-cdp", "single-cdp", "dp"])
def test_compiled_peaks_are_those_of_numpy(
    name: str, as_python: bool, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once as compiled code, once as the Python that it is compiled from."""
    options: dict[str, Any] = {"schedule": name, "n": 4, "model": "gpt2", "cluster": "a100-nodes"}
    monkeypatch.setattr(paths, "compiled_loops_for", lambda rows: None)
    monkeypatch.setattr(memory, "compiled_loops_for", lambda rows: None)
    expected = simulate(**options, ignore_memory=True).peaks.tolist()
    monkeypatch.setattr(memory, "compiled_loops_for", lambda rows: compiled)
    if as_python:
        monkeypatch.setattr(compiled, "fill_in_levels", unwrap(compiled.fill_in_levels))
    assert simulate(**options, ignore_memory=True).peaks.tolist() == expected


@pytest.mark.parametrize("name", ["dualpipe", "chimera", "1f1b", "dp"])
def test_models_of_equal_sizes_and_other_ties_have_programs_of_their_own(name: str) -> None:
    stage = {"forward": 1.0, "backward": 2.0, "weight_backward": 1.0, "activation": 10}
    stages = [stage | {"parameters": size} for size in (1000, 5000)]
    tied = {"tied": [{"stages": [0, 1], "parameters": "1 kB", "gradients": "1 kB"}]}
    options: dict[str, Any] = {"schedule": name, "n": 2, "cluster": "a100-nodes"} | ({} if name == "dp" else {"m": 6})
    for more in ({}, tied, {}):
        asked = options | {"model": Model.from_builtins({"stages": stages} | more, "two")}
        assert differences(evaluate(**asked), whole_run(asked)) == []


def test_who_expects_many_runs_has_all_of_them_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "compiled_loops", lambda: "compiled")
    assert paths.compiled_loops_for(1) is None
    with paths.expect_many_runs():
        assert paths.compiled_loops_for(1) == "compiled"
        with paths.expect_many_runs(False):
            assert paths.compiled_loops_for(1) == "compiled"
    assert paths.compiled_loops_for(1) is None

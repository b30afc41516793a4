"""Local steps: runs are those of an oracle that plays workers one by one, and of closed forms; bad input is refused."""

from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, simulate
from cdpsim.cluster import Link
from cdpsim.invariants import violations
from cdpsim.request.sharing import accepts
from cdpsim.runs import Run
from cdpsim.schedules.order import LocalSteps
from cdpsim.schedules.placement import Shape
from tests.conftest import Command
from tests.helpers.command_line import assert_refused
from tests.helpers.every_row import every_row
from tests.helpers.rounds import Means, co2, local_round, played_means

LATE = "co2"
NAMES = ("local-sgd", "post-local-sgd", "slowmo", "diloco", LATE)
BANDWIDTH = 8


class Case(NamedTuple):
    """Times of workers as multiples of a usual one's: of a micro-batch, an update, an outer update, in seconds."""

    schedule: str
    factors: list[int]
    passes: int
    update: int
    outer: int
    exchange: int  # of half a mean: a ring's reduce-scatter, or its all-gather, in parts of a worker
    m: int
    local_steps: int
    updates: int
    warm_up: int

    @property
    def time(self) -> Fraction:
        """The time of a mean."""
        return Fraction(2 * self.exchange * (len(self.factors) - 1))

    def step(self, factor: int = 1) -> Fraction:
        """The time of a local step."""
        return Fraction(factor * (self.m * self.passes + self.update))

    def play(self) -> Means:
        """Play it."""
        return played_means(
            [self.step(factor) for factor in self.factors],
            (self.updates - self.warm_up, self.local_steps),
            self.time,
            [Fraction(factor * self.outer) for factor in self.factors],
            self.schedule == LATE,
            (self.warm_up, [Fraction(factor * self.update) for factor in self.factors]),
        )

    def run(self, **options: Any) -> Run:
        """Simulate it: a ring sends (N - 1) / N of all bytes in each half."""
        n = len(self.factors)
        times = {"update": self.update or None, "outer_update": self.outer or None}
        stage = Stage(forward=1, backward=self.passes - 1, parameters=n * self.exchange * BANDWIDTH, **times)  # type: ignore[arg-type]
        slow = {worker: factor for worker, factor in enumerate(self.factors) if factor > 1}
        options |= {"warm_up": self.warm_up} if self.warm_up else {}
        options |= {"slow": slow} if slow else {}
        options |= {"collective": "ring"} if n > 1 else {}
        return simulate(
            self.schedule,
            replicas=n,
            m=self.m,
            local_steps=self.local_steps,
            steps=self.updates,
            model=Model(stages=(stage,)),
            cluster=Cluster(link=Link(bandwidth=float(BANDWIDTH))),
            **options,
        )


@st.composite
def cases(draw: st.DrawFn, *, alike: bool = False) -> Case:
    """Workers, alike or not, that take whole times."""
    schedule, workers, updates = draw(st.sampled_from(NAMES)), draw(st.integers(1, 4)), draw(st.integers(2, 4))
    factors = [1] * workers if alike else draw(st.lists(st.integers(1, 4), min_size=workers, max_size=workers))
    return Case(
        schedule,
        factors,
        draw(st.integers(2, 5)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 12)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 4)),
        updates,
        draw(st.integers(1, updates - 1)) if schedule == "post-local-sgd" else 0,
    )


@given(cases())
@settings(max_examples=200, deadline=None)
def test_workers_do_what_the_oracle_plays(case: Case) -> None:
    """When means begin and end, what each worker sends, and both engines; nothing else is wrong."""
    run, played = case.run(engine="simpy"), case.play()
    assert run.makespan == played.end
    if len(case.factors) > 1 and case.exchange:
        sent = np.argsort(run.messages.start)
        assert run.messages.start[sent].tolist() == played.begun
        assert run.messages.end[sent].tolist() == played.ended
        assert np.bincount(run.messages.step, minlength=case.updates).tolist() == [1] * case.updates
    share = Fraction(2 * (len(case.factors) - 1), len(case.factors))
    size = len(case.factors) * case.exchange * BANDWIDTH
    assert {each["bytes"] for each in run.summary()["bytes_sent"]} == {float(case.updates * share * size)}
    assert not violations(run)
    assert not violations(case.run(engine="fast"))
    assert case.run(engine="fast").makespan == run.makespan


@pytest.mark.slow
@given(cases(alike=True))
@settings(max_examples=3000, deadline=None)
def test_workers_that_are_alike_take_what_the_forms_say(case: Case) -> None:
    """H (C + U) + T + O a round; late means start when the round's steps are made and the mean before is through."""
    run, own = case.run(), case.step()
    if case.schedule == LATE:
        ready = co2(case.updates + 1, case.local_steps * own, case.time, Fraction(case.outer))
        assert run.makespan == ready[-1] + case.outer
        assert run.steady_state.period == max(case.local_steps * own + case.outer, case.time)
        return
    bare = own - case.update
    each = local_round([bare], case.local_steps, Fraction(case.update), case.time, Fraction(case.outer))
    assert run.makespan == case.warm_up * (own + case.time) + (case.updates - case.warm_up) * each.length
    assert run.steady_state.period == each.length
    if len(case.factors) == 1:
        assert run.steady_state.bubble == 0


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_of_the_versions_that_updates_start_from(name: str) -> None:
    run = simulate(name, 2, replicas=3, m=2, local_steps=3, slow={1: 2})
    assert run.summary()["mean_staleness"] == 0
    assert not run.tasks.stale.any()


def test_versions_counted_by_hand() -> None:
    """Two workers, three updates, two local steps: rows are (step, version) of a worker's updates in their order.

    A warm-up's version is common. A round makes a version after each local step, and one of the mean. The first round
    of CO2 has no mean, and the last mean is of the last round but one: gradients of the last enter no update.
    """

    def made(name: str, **options: Any) -> list[tuple[int, int]]:
        tasks = simulate(name, 1, replicas=2, local_steps=2, steps=3, **options).tasks
        rows = np.flatnonzero((tasks.kind == "U") & (tasks.device == 1))
        return sorted(zip(tasks.step[rows].tolist(), tasks.version[rows].tolist(), strict=True))

    assert made("local-sgd") == [(r, 3 * r + v) for r in range(3) for v in (1, 2, 3)]
    assert made("post-local-sgd", warm_up=1) == [(0, 1), *((r, 3 * r - 2 + v) for r in (1, 2) for v in (1, 2, 3))]
    assert made(LATE) == [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (2, 6), (2, 7), (2, 8), (3, 9), (3, 10), (3, 11)]


@given(st.integers(1, 7), st.integers(0, 3), st.booleans())
def test_means_are_of_the_last_local_steps(local_steps: int, warm_up: int, late: bool) -> None:
    """Each mean is of the last version before it that workers make alone, or of that of the round before."""
    shape = Shape(1, 1, warm_up=warm_up, local_steps=local_steps)
    local = LocalSteps(late=late)
    made = local.versions(shape).made(local.steps(warm_up + 4, shape))
    own, outer = np.flatnonzero(made.own) + 1, np.flatnonzero(made.averaged >= 0)
    ends = own[local_steps - 1 :: local_steps]
    assert made.averaged[outer].tolist() == ends[:4].tolist()
    assert made.step[outer].tolist() == made.step[ends[late : 4 + late] - 1].tolist()
    assert np.bincount(made.step[own - 1])[warm_up:].tolist() == [1] * ((4 + late) * local_steps)
    assert not made.estimate.any()


def test_what_workers_hold_is_the_papers_table() -> None:
    """K = 12, N = 64, 7.5e9 parameters: what ACCO's Table 1 prints of SlowMo and CO2, and its formula for others."""
    stage = Stage(forward=1, backward=2, parameters=15_000_000_000)
    model = Model(precision="bf16", stages=(stage,))

    def most(name: str) -> float:
        options: dict[str, Any] = {"optimizer": "adam", "mixed_precision": True, "ignore_memory": True}
        options |= {"local_steps": 2} if name in NAMES else {}
        run = simulate(name, model=model, replicas=64, cluster="a100-nodes", **options)
        return float(max(peak["total"] for peak in run.summary()["peak_memory"]) / 1e9)

    assert {name: most(name) for name in ("ddp", *NAMES)} == {
        "ddp": 120,
        "local-sgd": 120,
        "post-local-sgd": 120,
        "slowmo": 150,
        "diloco": 150,
        LATE: 180,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_the_same_request(name: str) -> None:
    run = simulate(name, 1, replicas=2, local_steps=5)
    again = simulate(**run.request)
    assert again.summary() == run.summary()
    assert again.request.shape.local_steps == 5


GPT = "--replicas 2 --model gpt2 --cluster a100-nodes"
REFUSED = {
    "local-sgd -n 1 --replicas 2 --local-steps 0": "local-steps: local-steps=0 must be at least 1",
    "diloco -n 1 --replicas 2 --local-steps many": "local-steps: ",
    "dp -n 1 --replicas 2 --local-steps 4": "local-steps: dp does not take this option",
    "local-sgd -n 1 --replicas 2 --warm-up 1": "warm-up: local-sgd does not take this option",
    "post-local-sgd -n 1 --replicas 2 --warm-up 0": "warm-up: warm-up=0 must be at least 1",
    "slowmo -n 1 --replicas 2 --rule cdp-v1": "rule: slowmo does not take this option",
    "co2 -n 1 --replicas 2 --clip": "clip: ",
    "co2 -n 1 --replicas 2 --zero 1": "zero: co2 does not take this option",
    **{
        f"diloco -n 1 --replicas 2 --outer {given}": f"outer: '{given}' is no optimizer"
        for given in ("sgd", "sgd:0", "adam:1", "sgd:1:1", "nesterov:1:0", "sgd:x", "sgd:1:0.5:2", "sgd:nan")
    },
    "local-sgd -n 1 --replicas 2 --outer sgd:1": "outer: local-sgd does not take this option",
    f"co2 {GPT} --steps 100000000": "n: n=14, m=1, replicas=2 with steps=100000000 is",
    "co2 --replicas 8 --model llama2-7b --cluster a100-nodes": "device 0 ",
}


@every_row(("line", "fragment"), REFUSED.items())
def test_what_cannot_be_is_refused(command: Command, line: str, fragment: str) -> None:
    """In one line; among them outer copies that do not fit."""
    assert_refused(command("simulate", *line.split()), fragment)


def test_counts_are_refused() -> None:
    with pytest.raises(RequestError, match="counts: local-sgd does not take this option"):
        simulate("local-sgd", 1, m=2, replicas=2, counts=[[2, 1]])


def test_all_take_the_options_of_local_steps() -> None:
    assert {name for name, each in SCHEDULES.items() if each.order.local} == {*NAMES}
    assert {name for name, each in SCHEDULES.items() if accepts(each, "local_steps")} == {*NAMES}

"""One run of few micro-batches shows what any number of them takes, or says that it does not."""

from dataclasses import fields, replace
from math import isclose
from typing import Any

import msgspec
import numpy as np
import pytest

from cdpsim import Cluster, Model, Request, Stage, evaluate
from cdpsim.cluster import Devices, Link
from cdpsim.program import Category, Program
from cdpsim.runs import micro_batches
from cdpsim.runs.micro_batches import Cut, Growth, Repetition, find_cuts, find_repetition, growth_of_unit
from cdpsim.runs.steady_metrics import Metrics, metrics_of_steps, steady_steps
from cdpsim.studies.compare import measure

LINKS = {
    "free": Cluster(devices=(Devices(),)),
    "slow": Cluster(devices=(Devices(),), link=Link(latency=0.5, bandwidth=2.0**20)),
}


def uneven(n: int) -> Model:
    """Stages of which the third is the slowest, and the last one the largest; times are multiples of a 64th."""
    forwards = (13, 11, 16, 9, 14, 10, 15, 12)
    return Model(
        stages=tuple(
            Stage(
                forward=forwards[j % 8] / 64,
                backward=(2 * forwards[j % 8] + j) / 64,
                weight_backward=forwards[j % 8] / 64,
                activation=(j + 1) * 2**20,
                boundary=(1 + j % 3) * 2**18,
                parameters=(9 + j) * 2**19,
                backward_transient=(j % 2) * 2**21,
            )
            for j in range(n)
        )
    )


def request(name: str, n: int, m: int, link: str = "free", **more: Any) -> Request:
    return Request(name, n, m=m, model=uneven(n), cluster=LINKS[link], ignore_memory=True, **more)


def growth(asked: Request, few: int, more: int) -> Growth | None:
    one, two = (steady_steps(asked.with_micro_batches(m)) for m in (few, more))
    return growth_of_unit(one, two, asked.steps)


LLAMA: dict[str, Any] = {"model": "llama3-8b", "cluster": "a100-nodes", "steps": 2, "ignore_memory": True}
CASES: dict[str, tuple[Request, int]] = {
    "1f1b": (request("1f1b", 4, 24, steps=2), 4),
    "slow links": (request("1f1b", 4, 24, "slow", steps=2), 4),
    "replicas": (Request("1f1b", 8, m=18, replicas=4, **LLAMA), 1),
    "no bubble": (Request("zb-h1", 8, m=66, **LLAMA), 2),
    "both ways": (request("chimera", 4, 24, steps=2), 4),
    "updates between tasks": (request("interleaved-1f1b", 8, 24, steps=2, chunks=2), 4),
    "steps that touch": (request("zb-h2", 4, 48, steps=2), 2),
    "fewer steps than it takes to see": (request("zb-h1", 4, 16, steps=2), 1),
    "slots": (Request("zb-h1", 4, m=16, model="unit-split", steps=2), 1),
}


@pytest.mark.every_case
@pytest.mark.parametrize("units", [1, 23])
@pytest.mark.parametrize("case", CASES)
def test_a_run_shows_longer_ones(case: str, units: int) -> None:
    """Each metric of runs of more units: memory and messages exactly, times to 1e-12."""
    asked, unit = CASES[case]
    few = asked.shape.m
    found = growth(asked, few, few + unit)
    assert found is not None and found.m == few
    known, whole = found.after(units), steady_steps(asked.with_micro_batches(few + units * unit)).run()
    for field in fields(Metrics):
        one, other = (getattr(each, field.name) for each in (known, metrics_of_steps(whole, 2)))
        if field.name == "waiting":  # a sum of differences of times
            assert isclose(one, other, abs_tol=1e-12 * known.lanes * known.span)
        elif isinstance(one, float):
            assert isclose(one, other, rel_tol=1e-12), field.name
        else:
            assert np.array_equal(one, other), field.name


def test_slots_of_one_forward_one_backward() -> None:
    """A micro-batch more takes two slots of each of four stages (Narayanan et al. 2021), and no more memory."""
    asked = Request("1f1b", 4, m=9)
    found = growth(asked, 9, 10)
    assert found is not None
    assert (found.metrics.period, found.slopes["period"]) == (2 * (9 + 3), 2)
    assert (found.metrics.busy, found.slopes["busy"]) == (2 * 4 * 9, 2 * 4)
    assert found.metrics.peaks[:, 0].tolist() == [4, 3, 2, 1]
    known = found.after(991)
    assert known.period == 2 * (1000 + 3) and known.peaks is found.metrics.peaks


@pytest.mark.parametrize(
    ("name", "few", "more"),
    [
        ("gpipe", 12, 13),  # each micro-batch more is held
        ("1f1b", 3, 4),  # of fewer than stages no forward follows a backward
        ("zb-h2", 12, 14),  # the middle is not yet as the middle of more
        ("pipedream-2bw", 12, 13),  # steps overlap
    ],
)
def test_programs_that_do_not_repeat_a_unit_have_no_cut(name: str, few: int, more: int) -> None:
    asked = request(name, 4, few)
    one, two = (steady_steps(asked.with_micro_batches(m)).program for m in (few, more))
    assert not find_cuts(one, two)
    assert growth(asked, few, more) is None


@pytest.mark.parametrize("changed", ["boundary", "activation", "parameters"])
def test_a_longer_program_of_other_sizes_is_no_longer_one(changed: str) -> None:
    """What is sent, or held, or updated is another amount in one of its stages."""
    asked, model = request("1f1b", 4, 12), uneven(4)
    stages = [*model.stages]
    stages[1] = msgspec.structs.replace(stages[1], **{changed: 2 * getattr(stages[1], changed)})
    other = Request("1f1b", 4, m=13, model=Model(stages=tuple(stages)), cluster=LINKS["free"], ignore_memory=True)
    one, two, three = (steady_steps(each).program for each in (asked, asked.with_micro_batches(13), other))
    assert find_cuts(one, two)
    assert not find_cuts(one, three)


def held_until_the_update(program: Program) -> Program:
    """A program whose first device keeps the activations of all micro-batches."""
    ends, held = program.buffers.end.copy(), program.buffers
    ends[(held.category == Category.ACTIVATIONS) & (held.device == 0)] = 2 * program.compute + 1
    return replace(program, buffers=replace(held, end=ends))


def test_devices_that_hold_more_with_each_micro_batch_have_no_cut() -> None:
    asked = request("1f1b", 4, 12)
    one, two = (steady_steps(asked.with_micro_batches(m)).program for m in (12, 13))
    assert find_cuts(one, two)
    assert not find_cuts(held_until_the_update(one), held_until_the_update(two))


def test_a_run_that_has_not_settled_shows_nothing() -> None:
    """Of eight stages the last one, with the head, is the slowest: others work ahead of it at first."""
    asked = Request("zb-h1", 8, m=18, **LLAMA)
    assert growth(asked, 18, 20) is None
    assert growth(asked, 66, 68) is not None


def test_a_lane_that_is_idle_once_more_is_not_taken_for_a_repetition() -> None:
    """Found by chance: a backward of the last micro-batches starts within a unit, and its like before it does not."""
    columns = (
        (0.0051897107966539825, 0.032569178389865894, 0.008136524355320827, 44, 2**22),
        (0.0052987318413524036, 0.02240603405818254, 0.0017654431298618424, 90, 2**11),
        (0.013434850183663409, 0.052738316212158187, 0.019683923123885505, 66, 2**23),
        (0.0042453479348096681, 0.040431397106999167, 0.019498967992675951, 49, 2**21),
    )
    stages = tuple(
        Stage(forward=f, backward=b, weight_backward=w, activation=held * 2**20, boundary=sent, parameters=2**20)
        for f, b, w, held, sent in columns
    )
    cluster = Cluster(devices=(Devices(),), link=Link(latency=0.01, bandwidth=2.0**28))
    asked = Request("interleaved-zero-bubble", 4, m=64, chunks=2, model=Model(stages=stages), cluster=cluster)
    few, more = (steady_steps(asked.with_micro_batches(m)) for m in (6, 8))
    run, (cut, *_) = few.run(None), find_cuts(few.program, more.program)
    repetition = find_repetition(cut, run.start, run.end)
    later = (run.end[cut.ends[1]] - run.end[cut.ends[0]])[0]
    unrepeated = np.flatnonzero(run.start[cut.behind[1]] - run.start[cut.behind[0]] != later)
    early = run.start[cut.behind[1][unrepeated]].min()
    assert repetition is None or repetition.until + later <= early < run.start[cut.behind[0][unrepeated]].min() + later
    whole = measure(steady_steps(asked).run())
    assert isclose(evaluate(asked).exposed, whole.exposed, abs_tol=1e-11)


class TestRepetitions:
    """Of six tasks in a lane, each half a second long, a second apart, with a cut before the fourth."""

    start = np.arange(6.0)
    none = np.empty(0, dtype=np.int64)
    cut = Cut(
        (np.array([2]), np.array([3])),
        (np.array([0, 1, 2]), np.array([1, 2, 3])),
        (np.array([3, 4]), np.array([4, 5])),
        np.array([0]),
        np.array([5]),
        (none, none),
        np.array([3]),
        (none, none),
    )

    def found(self, start: Any, cut: Cut = cut) -> Repetition | None:
        return find_repetition(cut, start, start + 0.5)

    def test_all_that_has_another_behind_it_is_repeated(self) -> None:
        assert self.found(self.start) == (1.0, -0.5, 5.0)

    @pytest.mark.parametrize(("at", "until"), [(4.25, 3.0), (3.75, 2.75)])
    def test_one_that_comes_later_or_earlier_ends_it(self, at: float, until: float) -> None:
        """Of the earlier time, only the later node of the pair is too soon: less than a unit behind the repetition."""
        start = self.start.copy()
        start[4] = at
        assert self.found(start) == (1.0, -0.5, until)

    def test_one_before_the_cut_that_differs_begins_it(self) -> None:
        start = self.start.copy()
        start[1] = 1.25
        assert self.found(start) == (1.0, 1.75, 5.0)

    def test_a_node_of_the_unit_that_comes_late_begins_it(self) -> None:
        """The same one before the cut has ended long before, and nothing waits for either."""
        start = np.append(self.start, [2.0, 3.75])
        one, again = self.cut.before
        cut = self.cut._replace(before=(np.append(one, 6), np.append(again, 7)))
        assert self.found(start, cut) == (1.0, 3.25, 5.0)

    def test_nodes_that_do_not_grow_in_number_are_on_their_side(self) -> None:
        start = np.append(self.start, [0.25, 5.5])
        fixed = self.cut._replace(fixed=(np.array([6]), np.array([7])))
        assert self.found(start, fixed) == (1.0, 0.75, 4.5)
        late = self.cut._replace(fixed=(np.array([7]), np.array([6])))
        assert self.found(start, late) is None

    def test_ends_that_move_unlike_each_other_show_nothing(self) -> None:
        two = self.cut._replace(ends=(np.array([1, 2]), np.array([2, 3])))
        start = self.start.copy()
        assert self.found(start, two) is not None
        start[1] = 1.25
        assert self.found(start, two) is None


def test_what_is_folded_is_known_for_other_numbers_at_no_cost() -> None:
    micro_batches.KNOWN_GROWTHS.forget()
    asked = request("1f1b", 4, 1000)
    found = micro_batches.fold_micro_batches(asked)
    assert found is not None and found.run.request.shape.m == 8
    again = micro_batches.fold_micro_batches(asked.with_micro_batches(600))
    assert again is not None and again.run is found.run

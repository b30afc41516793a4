"""Fig. 4's extrapolation, held against brute force in fractions, simulated workers, other counts, and the paper."""

import json
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import Cluster, Model, RequestError, Stage, presets, simulate
from cdpsim.cluster import Devices
from cdpsim.files.units import Work
from cdpsim.program import Category, Kind
from cdpsim.program.assembly import derive
from cdpsim.schedules import SCHEDULES
from cdpsim.schedules.rule import CDP_V1
from cdpsim.schedules.shape import Shape
from cdpsim.studies.superpose import (
    CURVE_CONTENTS,
    ROOFLINE_DEVICES,
    WorkerCurve,
    bytes_moved,
    fold,
    memory_by_task,
    roofline,
    superpose,
    task_costs,
    whole_ratios,
    worker_curve,
)
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import find_engine
from cdpsim.trace.metrics import memory
from tests.conftest import Command, examples
from tests.helpers import strategies
from tests.helpers.command_line import refuse

PAPER_MODELS = ["resnet50", "vit-b16"]
IMAGES = 32 * 3 * 224 * 224 * 4  # of a micro-batch, in float32
steps = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 30)), min_size=1, max_size=8)


def curve_of(rows: list[tuple[int, int]], scale: int = 1) -> WorkerCurve:
    size, duration = zip(*rows, strict=True)
    return WorkerCurve(np.array(size), np.array([scale * d for d in duration], dtype=object))


def mean_at(curve: WorkerCurve, n: int, share: Fraction) -> Fraction:
    """Return the mean of n workers' memory when the first is at that share of its pass, each looked up by itself."""
    begins = [0, *accumulate(map(int, curve.duration))]
    total = 0
    for i in range(n):
        at = (share + Fraction(i, n)) % 1 * begins[-1]
        total += next(int(m) for m, (a, b) in zip(curve.size, pairwise(begins), strict=True) if a <= at < b)
    return Fraction(total, n)


def moments(curve: WorkerCurve, n: int) -> set[Fraction]:
    """All shares of a pass at which any of n workers comes to a task."""
    begins = [0, *accumulate(map(int, curve.duration))]
    return {(Fraction(b, begins[-1]) - Fraction(i, n)) % 1 for b in begins for i in range(n)}


def cdp(curve: WorkerCurve, n: int) -> Fraction:
    return Fraction(int(fold(curve, n)[1].max()), n)


def mean(curve: WorkerCurve) -> Fraction:
    return Fraction(int((curve.size * curve.duration).sum()), int(curve.duration.sum()))


@given(steps, st.integers(1, 12), st.sampled_from([1, 7, 2**70]))
@settings(max_examples=examples(150), deadline=None)
def test_folding_is_what_brute_force_finds(rows: list[tuple[int, int]], n: int, scale: int) -> None:
    """At every moment at which anything changes, also where 64 bits do not do."""
    curve = curve_of(rows, scale)
    position, total = fold(curve, n)
    unit = n * int(curve.duration.sum())
    found = {Fraction(int(p), unit): Fraction(int(held), n) for p, held in zip(position, total, strict=True)}
    assert position[0] == 0
    assert list(found) == sorted(found)
    assert max(found) < Fraction(1, n)
    assert max(found.values()) == max(mean_at(curve, n, share) for share in moments(curve, n))
    for share in {share % Fraction(1, n) for share in moments(curve, n)} | set(found):
        assert found[max(s for s in found if s <= share)] == mean_at(curve, n, share)


@given(steps, st.integers(1, 40), st.integers(1, 9))
@settings(max_examples=examples(150), deadline=None)
def test_laws(rows: list[tuple[int, int]], n: int, times: int) -> None:
    curve = curve_of(rows)
    most, average = int(curve.size.max()), mean(curve)
    variation = int(np.abs(np.diff(np.append(curve.size, curve.size[0]))).sum())
    assert cdp(curve, 1) == most
    assert average <= cdp(curve, n * times) <= cdp(curve, n) <= most
    for many in (n, 10**6, 10**12):  # Koksma's inequality
        assert cdp(curve, many) - average <= Fraction(variation, many)


def test_large_numbers_are_exact() -> None:
    """A worker in a million, on times that 64-bit integers cannot hold: as many as there are in a hand's count."""
    one, two = 0.1, 0.3  # whose sum is no multiple of either
    curve = WorkerCurve(np.array([5, 9]), whole_ratios([one, two]))
    assert curve.duration[0] * Fraction(two) == curve.duration[1] * Fraction(one)
    n = 10**6
    share = Fraction(two) / (Fraction(one) + Fraction(two))
    assert cdp(curve, n) == 5 + Fraction(4 * -(-share.numerator * n // share.denominator), n)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 33])
def test_equal_stages_give_the_paper_s_half(n: int) -> None:
    """N(N+1)/2 activations of stages in every slot instead of N*N (section 3.2 of the paper)."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, activation=1),) * n)
    found = superpose(model, n, axis="measured")
    assert (found.dp, found.cdp) == (n, Fraction(n + 1, 2))
    assert found.reduction == Fraction(n - 1, 2 * n)


TWO = Model(
    name="two",
    stages=(
        Stage(
            forward=Work(10),
            backward=Work(30),
            activation=100,
            kept_output=8,
            forward_transient=1,
            backward_transient=2,
            boundary=20,
            parameters=1000,
        ),
        Stage(forward=Work(5), backward=Work(5), activation=50, backward_transient=4, parameters=300, gradients=600),
    ),
)


def test_what_one_worker_holds_can_be_counted_by_hand() -> None:
    """As docs/memory.md says; the second stage's input, 20 bytes, counts 8 of them in the first stage."""
    both = 100 + 50 - 8
    # A gradient is held from the end of the task that makes it: the boundary's while the first stage goes backward.
    forward, turn, last, first = 100 + 1, both, both + 4, 100 + 2 + 20
    assert memory_by_task(TWO, "activations").tolist() == [forward, turn, last, first]
    assert memory_by_task(TWO, "gradients").tolist() == [forward, turn, last + 600, first + 600 + 1000]
    assert memory_by_task(TWO, "constants").tolist() == [
        1300 + size for size in memory_by_task(TWO, "gradients").tolist()
    ]
    given = Model(stages=(replace(TWO.stages[0], data=40), TWO.stages[1]))
    assert memory_by_task(given, "activations").tolist() == [forward - 40, turn - 40, last - 40, first - 40]
    assert memory_by_task(given, "gradients").tolist() == memory_by_task(TWO, "gradients").tolist()


def test_rooflines_are_those_of_data_sheets() -> None:
    """Of the SXM cards: dense float32 or TF32, and bytes of memory, a second."""
    cards = {"v100": (15.7e12, 900e9), "a100": (19.5e12, 2.039e12), "h100": (67e12, 3.35e12), "h200": (67e12, 4.8e12)}
    tf32 = {"a100-tf32": (156e12, 2.039e12), "h100-tf32": (989e12 / 2, 3.35e12), "h200-tf32": (989e12 / 2, 4.8e12)}
    assert {name: roofline(name) for name in ROOFLINE_DEVICES} == cards | tf32


def test_axes_can_be_computed_by_hand() -> None:
    assert task_costs(TWO, "flops") == [10, 5, 5, 30]
    assert bytes_moved(TWO) == [200 + 1000, 100 - 8 + 300, 150 + 300 + 600, 300 + 1000 + 1000]
    bound_by_bytes = [moved / 900e9 for moved in bytes_moved(TWO)]
    assert task_costs(TWO, "roofline:v100") == bound_by_bytes
    busy = Model(stages=(Stage(forward=Work(15.7e12), backward=Work(1), activation=9 * 10**11),))
    assert task_costs(busy, "roofline:v100") == pytest.approx([2.0, 3.0])
    busy = Model(stages=(Stage(forward=Work(15.7e13), backward=Work(15.7e12)),))
    assert task_costs(busy, "roofline:v100") == [10, 1]
    timed = Model(stages=(Stage(forward=0.5, backward=1.5), Stage(forward=0.25, backward=0.25)))
    assert task_costs(timed, "measured") == [0.5, 0.25, 0.25, 1.5]
    assert whole_ratios(task_costs(timed, "measured")).tolist() == [2, 1, 1, 6]


def workers(model: Model, n: int, axis: str) -> tuple[int, np.ndarray, np.ndarray]:
    """Run n workers on devices of their own: the length of a pass, and what they hold together from each time on.

    As many micro-batches as workers, each released by the cyclic order; whole times, of which 1/n is whole, too.
    """
    program = derive(SCHEDULES["multi-cdp"], model, 3, shape=Shape(model.n, n), rule=CDP_V1)
    assert program.devices == n
    tasks, count = program.tasks, len(program.lane_tasks)
    own = n * whole_ratios(task_costs(model, axis)).astype(np.int64)
    duration = np.zeros(program.nodes, dtype=np.int64)
    stage = tasks.stage[:count]
    duration[:count] = np.where(tasks.kind[:count] == Kind.F, own[stage], own[2 * model.n - 1 - stage])
    span = int(own.sum())
    release = np.array([int(span * share) for _, share in program.releases], dtype=np.int64)
    start, end = find_engine("simpy")(program, Costs(duration, np.ones(len(program.messages), np.int32), release))
    rows = np.flatnonzero(program.buffers.category == Category.ACTIVATIONS)
    begin, finish = (times[rows] for times in memory.buffer_spans(program.buffers, start, end))
    everyone = np.zeros(len(rows), dtype=np.int64)
    _, time, size = memory.step_function(everyone, begin, finish, program.buffers.size[rows].astype(np.int64))
    return span, time, size


def assert_superposed(model: Model, n: int, axis: str) -> None:
    """Check that n simulated workers together hold the folded curve of one, at every moment of the steady state."""
    span, time, size = workers(model, n, axis)
    position, total = fold(WorkerCurve(memory_by_task(model, "activations"), whole_ratios(task_costs(model, axis))), n)
    low, high, period = span * (n - 1) // n, 3 * span, span // n
    at = np.unique(np.concatenate([time, *(position.astype(np.int64) + k * period for k in range(3 * n))]))
    at = at[(low <= at) & (at < high)]
    assert len(at)
    simulated = np.append(0, size)[np.searchsorted(time, at, side="right")]
    superposed = total[np.searchsorted(position.astype(np.int64), at % period, side="right") - 1]
    assert (simulated == superposed + n * model.stages[0].data).all()  # the workers hold their inputs all the time


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PAPER_MODELS)
def test_simulating_the_workers_gives_the_same_curve(name: str, n: int) -> None:
    assert_superposed(presets.model(name), n, "flops")


@given(st.integers(1, 4).flatmap(strategies.models), st.integers(1, 5), st.data())
@settings(max_examples=30, deadline=None)
def test_simulating_workers_of_any_model_gives_the_same_curve(model: Model, n: int, data: st.DataObject) -> None:
    whole_work = [
        Stage(
            forward=Work(data.draw(st.integers(1, 99))),
            backward=Work(data.draw(st.integers(1, 99))),
            activation=stage.activation,
            kept_output=stage.kept_output,
            forward_transient=stage.forward_transient,
            backward_transient=stage.backward_transient,
            boundary=stage.boundary,
        )
        for stage in model.stages
    ]
    assert_superposed(Model(stages=tuple(whole_work)), n, "flops")


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_every_worker_of_dp_peaks_at_the_curve_s_height(name: str) -> None:
    """The peak that `simulate` gives each device of multi-dp; the input is a part of it."""
    cluster = Cluster(devices=(Devices(speed=1e12),))
    trace = simulate("multi-dp", model=name, cluster=cluster, steps=1)
    rows = trace.memory["category"] == "activations"
    assert int(trace.memory["size"][rows].max()) == superpose(name, 4).dp + IMAGES


# Peak bytes of what operators of the whole model make and keep, followed one operator at a time on fake tensors, the
# input left out: what `python -m validation profile NAME --batch 32` prints of the model in one piece. Stages know
# nothing of each other's tensors, so that few bytes, such as the loss's, can differ.
IN_ONE_PIECE = {"resnet50": 2_755_477_000, "vit-b16": 3_829_361_672}


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_dp_is_what_a_model_in_one_piece_peaks_at(name: str) -> None:
    assert superpose(name, 32).dp == pytest.approx(IN_ONE_PIECE[name], rel=1e-5)


def test_the_paper_s_vit_comes_out() -> None:
    """3.9 GB to 2.3 GB, 42 % (Fig. 4): with gradients of parameters, which a training loop holds to the end."""
    found = superpose("vit-b16", 32, contents="gradients")
    assert round(found.dp / 1e9, 1) == 3.9
    assert round(float(found.cdp) / 1e9, 1) == 2.3
    assert round(float(100 * found.reduction)) == 42


def test_the_paper_s_resnet_lies_between_the_axes() -> None:
    """30 %: less by FLOP, more by the time of a device whose early layers, with the most bytes, wait for memory."""
    for contents in CURVE_CONTENTS:
        flops = superpose("resnet50", 32, contents=contents)
        timed = superpose("resnet50", 32, axis="roofline:a100-tf32", contents=contents)
        assert flops.reduction < Fraction(30, 100) < timed.reduction
        assert flops.dp == timed.dp


@pytest.mark.parametrize("name", presets.preset_names("models"))
def test_contents_only_add(name: str) -> None:
    some, more, most = (worker_curve(name, contents=contents) for contents in CURVE_CONTENTS)
    assert (some.size <= more.size).all()
    tied = {"gpt2": 50_257 * 768 * 2}  # its output layer's weights are its embedding's, on every worker
    once = presets.model(name).size("parameters").sum() - tied.get(name, 0)
    assert set((most.size - more.size).tolist()) == {once}
    assert (some.size >= 0).all()


def test_nothing_held_saves_nothing() -> None:
    found = superpose(Model(stages=(Stage(forward=1.0, backward=2.0),)), 3, axis="measured")
    assert found.dp == found.cdp == found.reduction == 0
    assert found.model == "model"


# On the command line


def test_json_has_the_contract_s_keys(command: Command) -> None:
    code, out, err = command("superpose", "vit-b16", "-n", 32, "--format", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == ["model", "n", "axis", "contents", "dp_bytes", "cdp_bytes", "reduction"]
    assert list(found.values())[:4] == ["vit-b16", 32, "flops", "activations"]
    assert found["reduction"] == pytest.approx(1 - found["cdp_bytes"] / found["dp_bytes"], abs=1e-12)
    assert command("superpose", "vit-b16", "-n", 32, "--format", "json").out == out


def test_a_table_says_what_was_asked_and_what_the_paper_says(command: Command) -> None:
    out = command("superpose", "vit-b16", "-n", 32, "--contents", "gradients").out
    assert out.splitlines()[2].split() == [
        *("vit-b16", "32", "flops", "gradients"),
        *("3.88", "GB", "2.25", "GB", "42.0", "%"),
    ]
    assert "the paper: from 3.9 GB to 2.3 GB, 42 % less at N = 32 (Fig. 4)\n" in out
    assert "the paper: 30 % less" in command("superpose", "resnet50", "-n", 4).out
    for form in ("csv", "json"):
        assert "paper" not in command("superpose", "resnet50", "-n", 4, "--format", form).out
    header, row = command("superpose", "resnet50", "-n", 3, "--format", "csv").out.splitlines()
    shown = dict(zip(header.split(","), row.split(","), strict=True))
    assert shown["dp_bytes"] == str(superpose("resnet50", 3).dp)


def test_a_file_of_one_stage_and_a_hostile_name(command: Command, here: Path) -> None:
    (here / "one|$&.toml").write_text("[[stages]]\nforward = 1\nbackward = 2\nactivation = 30\n")
    for form in ("text", "csv"):
        code, out, _ = command("superpose", "one|$&.toml", "-n", 10**6, "--axis", "measured", "--format", form)
        assert code == 0
        assert "the paper" not in out
    found = json.loads(command("superpose", "one|$&.toml", "-n", 5, "--axis", "measured", "--format", "json").out)
    assert (found["model"], found["dp_bytes"], found["cdp_bytes"], found["reduction"]) == ("one|$&.toml", 30, 30, 0)


REFUSALS = {
    "superpose": ["MODEL, -n: are missing"],
    "superpose vit-b16": ["-n: is missing"],
    "superpose vit-b16 -n 0": ["n=0 must be at least 1"],
    "superpose vit-b16 -n 1.5": ["n=1.5 must be a whole number"],
    "superpose vit-b16 -n 1000000000000000000": ["astronomically large"],
    "superpose vit-b15 -n 2": ["unknown model 'vit-b15'; did you mean 'vit-b16'?"],
    "superpose unit -n 2": ["unknown model 'unit'; known are gpt2"],
    "superpose lost.toml -n 2": ["lost.toml: no such file"],
    "superpose box.toml -n 2": ["box.toml"],
    "superpose vit-b16 -n 2 --axis flop": ["unknown axis 'flop'; did you mean 'flops'?"],
    "superpose vit-b16 -n 2 --axis flops:a100": ["axis: flops is not of a device; leave ':a100' out"],
    "superpose vit-b16 -n 2 --axis roofline": ["axis: roofline needs a device, such as roofline:a100; known are v100"],
    "superpose vit-b16 -n 2 --axis roofline:v10": ["unknown device 'v10'; did you mean 'v100'?"],
    "superpose vit-b16 -n 2 --axis measured": ["stage 0: is work", "take axis flops, or give a model of times"],
    "superpose toy.toml -n 2": ["stage 0: is a time", "take axis measured"],
    "superpose toy.toml -n 2 --axis roofline:v100": ["stage 0: is a time", "take axis measured"],
    "superpose vit-b16 -n 2 --contents all": ["unknown contents 'all'; known are activations, gradients, constants"],
    "superpose vit-b16 -n 2 --format yaml": ["unknown format 'yaml'"],
    "superpose vit-b16 -n 2 4": ["'4': is one argument too many"],
}


@pytest.mark.parametrize("line", REFUSALS)
def test_what_cannot_be_superposed_is_refused(line: str, command: Command, here: Path) -> None:
    refuse(command, here, line, *REFUSALS[line])


def test_a_model_of_slots_is_refused() -> None:
    with pytest.raises(RequestError, match="is of slots"):
        superpose(Model.unit(3), 2)


def test_a_backward_that_is_a_time_is_named() -> None:
    mixed = Model(stages=(Stage(forward=Work(1), backward=Work(1)), Stage(forward=Work(1), backward=2.0)))
    with pytest.raises(RequestError, match="stage 1: is a time"):
        superpose(mixed, 2)

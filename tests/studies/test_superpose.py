"""Fig. 4's extrapolation, held against brute force in fractions, simulated workers, other counts, and the paper."""

import json
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import Cluster, Model, RequestError, Stage, presets, simulate
from cdpsim.cluster import Devices
from cdpsim.files.units import Work
from cdpsim.model.curve import MemoryCurve, OperatorSteps
from cdpsim.program import Category, Kind
from cdpsim.program.assembly import derive
from cdpsim.schedules import SCHEDULES
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import CDP_V1
from cdpsim.studies.superpose import (
    CURVE_CONTENTS,
    ROOFLINE_DEVICES,
    WorkerCurve,
    bytes_moved,
    memory_by_task,
    roofline,
    step_costs,
    sum_workers,
    superpose,
    task_costs,
    task_steps,
    whole_ratios,
    worker_curve,
)
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import find_engine
from cdpsim.trace.metrics import memory
from tests.conftest import Command
from tests.helpers import strategies
from tests.helpers.command_line import refuse
from tests.helpers.every_row import every_row

PAPER_MODELS = ["resnet50", "vit-b16"]
IMAGES = 32 * 3 * 224 * 224 * 4  # of a micro-batch, in float32
steps = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 30)), min_size=1, max_size=8).filter(
    lambda rows: any(duration for _, duration in rows)
)


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


def mean_at_moment(curve: WorkerCurve, n: int, share: Fraction) -> Fraction:
    """Return the same at that very moment, at which a worker holds the most of the steps that begin then."""
    begins = [0, *accumulate(map(int, curve.duration))]
    span, total = begins[-1], 0
    for i in range(n):
        at = (share + Fraction(i, n)) % 1 * span
        spans = list(zip(curve.size, pairwise(begins), strict=True))
        beginning = [int(m) for m, (a, b) in spans if a % span == at]
        total += max(beginning, default=0) or next(int(m) for m, (a, b) in spans if a <= at < b)
    return Fraction(total, n)


def moments(curve: WorkerCurve, n: int) -> set[Fraction]:
    """All shares of a pass at which any of n workers comes to a task."""
    begins = [0, *accumulate(map(int, curve.duration))]
    return {(Fraction(b, begins[-1]) - Fraction(i, n)) % 1 for b in begins for i in range(n)}


def cdp(curve: WorkerCurve, n: int) -> Fraction:
    return Fraction(int(sum_workers(curve, n).moment.max()), n)


def mean(curve: WorkerCurve) -> Fraction:
    return Fraction(int((curve.size * curve.duration).sum()), int(curve.duration.sum()))


@given(steps, st.integers(1, 12), st.sampled_from([1, 7, 2**70]))
@settings(max_examples=150, deadline=None)
def test_folding_is_what_brute_force_finds(rows: list[tuple[int, int]], n: int, scale: int) -> None:
    """At every moment at which anything changes, also where 64 bits do not do."""
    curve = curve_of(rows, scale)
    position, total, moment = sum_workers(curve, n)
    unit = n * int(curve.duration.sum())
    found = {Fraction(int(p), unit): Fraction(int(held), n) for p, held in zip(position, total, strict=True)}
    for place, held in zip(found, moment, strict=True):
        assert Fraction(int(held), n) == mean_at_moment(curve, n, place)
    assert cdp(curve, n) == max(mean_at_moment(curve, n, share) for share in moments(curve, n))
    assert position[0] == 0
    assert list(found) == sorted(found)
    assert max(found) < Fraction(1, n)
    assert max(found.values()) == max(mean_at(curve, n, share) for share in moments(curve, n))
    for share in {share % Fraction(1, n) for share in moments(curve, n)} | set(found):
        assert found[max(s for s in found if s <= share)] == mean_at(curve, n, share)


@given(steps, st.integers(1, 40), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_laws(rows: list[tuple[int, int]], n: int, times: int) -> None:
    curve = curve_of(rows)
    most, average = int(curve.size.max()), mean(curve)
    assert Fraction(int(sum_workers(curve, n).total.max()), n) <= cdp(curve, n)
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


def steps_of(cost: list[int], moved: list[int], held: list[int], **reads: Any) -> OperatorSteps:
    return OperatorSteps(cost=tuple(cost), moved=tuple(moved), held=tuple(held), **reads)


# TWO, with operators: the first stage keeps 8 of the 20 bytes between the stages; the backward of the second reads its
# input in its first step, and the first stage's reads its output's gradient in its first two.
CURVES = (
    MemoryCurve(
        forward=steps_of([10, 0], [12, 3], [60, 101]),
        backward=steps_of([0, 20, 10], [7, 8, 9], [121, 122, 60], gradient_steps=2),
    ),
    MemoryCurve(
        forward=steps_of([2, 3], [5, 5], [30, 50], input_steps=1),
        backward=steps_of([0, 0, 5, 0], [1, 1, 1, 1], [54, 40, 35, 30], input_steps=1),
    ),
)
BY_OPERATOR = replace(TWO, stages=tuple(map(lambda s, c: replace(s, curve=c), TWO.stages, CURVES)))


def test_what_operators_hold_can_be_counted_by_hand() -> None:
    """Each step has what its own stage still needs, and what the other one keeps."""
    forward, turn = [60, 101], [30 + 100 - 8, 50 + 100 - 8]
    last = [54 + 100 - 8, *(size + 100 - 8 - 12 for size in (40, 35, 30))]  # 12 of the input are kept nowhere else
    first = [121, 122, 60 - 20]
    assert [task.tolist() for task in task_steps(BY_OPERATOR, "activations")] == [forward, turn, last, first]
    gradients = task_steps(BY_OPERATOR, "gradients")
    assert gradients[2].tolist() == [600 + size for size in last]
    assert gradients[3].tolist() == [1600 + size for size in first]
    assert worker_curve(BY_OPERATOR).size.tolist() == [*forward, *turn, *last, *first]
    assert worker_curve(BY_OPERATOR).duration.tolist() == [10, 0, 2, 3, 0, 0, 5, 0, 0, 20, 10]
    assert superpose(BY_OPERATOR, 1).dp == superpose(BY_OPERATOR, 1, by_layer=True).dp == 54 + 100 - 8
    # 25 of 50 FLOP apart: most together from 12 to 15, while the other one is at the first stage's backward.
    assert superpose(BY_OPERATOR, 2).cdp == Fraction(142 + 122, 2)
    mixed = replace(TWO, stages=(TWO.stages[0], BY_OPERATOR.stages[1]))
    assert superpose(mixed, 1).resolution == "operator and layer"
    assert [task.tolist() for task in task_steps(mixed, "activations")][::3] == [[101], [122]]


def test_an_input_that_no_backward_reads_is_gone_after_the_forward() -> None:
    """The last stage's input counts until its forward has read it, and not once in any backward."""
    ahead, back = CURVES[1].forward, replace(CURVES[1].backward, input_steps=0)
    unread = replace(TWO.stages[1], curve=MemoryCurve(forward=ahead, backward=back))
    model = replace(TWO, stages=(BY_OPERATOR.stages[0], unread))
    assert task_steps(model, "activations")[1].tolist() == [30 + 92, 50 - 12 + 92]
    assert task_steps(model, "activations")[2].tolist() == [size - 12 + 92 for size in (54, 40, 35, 30)]
    assert task_steps(model, "activations")[3].tolist() == [121, 122, 40]


def test_gradients_of_parameters_come_one_by_one() -> None:
    """Those of the layers behind are there; the layer's own count when complete, all after its backward."""
    back = replace(CURVES[1].backward, gradients=(0, 4, 4, 400))
    last = replace(TWO.stages[1], first_gradients=376, curve=MemoryCurve(forward=CURVES[1].forward, backward=back))
    with pytest.raises(RequestError, match=r"gradients: and held are 430 bytes at most, but .* needs 434"):
        replace(TWO, stages=(BY_OPERATOR.stages[0], replace(last, first_gradients=380)))
    model = replace(TWO, stages=(BY_OPERATOR.stages[0], last))
    assert task_steps(model, "activations")[2].tolist() == task_steps(BY_OPERATOR, "activations")[2].tolist()
    assert task_steps(model, "gradients")[2].tolist() == [146, 120 + 4, 115 + 4, 110 + 400]
    assert task_steps(model, "gradients")[3].tolist() == [1600 + size for size in (121, 122, 40)]


def test_a_roofline_is_of_each_operator() -> None:
    """A V100: 15.7 TFLOP/s, 900 GB/s; times of steps are as exact as nanoseconds are."""
    busy = replace(BY_OPERATOR.stages[1], forward=Work(5 * 10**9), backward=Work(5 * 10**9))
    wide = [
        replace(steps, cost=tuple(10**9 * c for c in steps.cost)) for steps in (CURVES[1].forward, CURVES[1].backward)
    ]
    model = Model(stages=(replace(busy, curve=MemoryCurve(forward=wide[0], backward=wide[1])),))
    times = step_costs(model, "roofline:v100", task_costs(model, "roofline:v100"))
    assert times == [2e9 / 15.7e12, 3e9 / 15.7e12, 1 / 900e9, 1 / 900e9, 5e9 / 15.7e12, 1 / 900e9]
    timed = Model(stages=(replace(busy, forward=5.0, backward=5.0, curve=model.stages[0].curve),))
    assert step_costs(timed, "measured", task_costs(timed, "measured")) == [2, 3, 0, 0, 5, 0]


def test_by_layer_needs_curves() -> None:
    with pytest.raises(RequestError, match=r"by_layer: no stage of the model has a curve.*leave by_layer out"):
        superpose(TWO, 2, by_layer=True)


def test_what_one_worker_holds_can_be_counted_by_hand() -> None:
    """As docs/assumptions/memory.md says; the second stage's input, 20 bytes, counts 8 of them in the first stage."""
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
    """Check that n simulated workers together hold the summed curve of one, at every moment of the steady state."""
    span, time, size = workers(model, n, axis)
    position, total, _ = sum_workers(
        WorkerCurve(memory_by_task(model, "activations"), whole_ratios(task_costs(model, axis))), n
    )
    low, high, period = span * (n - 1) // n, 3 * span, span // n
    at = np.unique(np.concatenate([time, *(position.astype(np.int64) + k * period for k in range(3 * n))]))
    at = at[(low <= at) & (at < high)]
    assert len(at)
    simulated = np.append(0, size)[np.searchsorted(time, at, side="right")]
    superposed = total[np.searchsorted(position.astype(np.int64), at % period, side="right") - 1]
    assert (simulated == superposed + n * model.stages[0].data).all()  # the workers hold their inputs all the time


@pytest.mark.every_case
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


# `simulate` counts the gradient of a layer's output to the end of the layer's backward. Where autograd frees it before
# the highest moment, a model in one piece holds less.
FREED_EARLIER = {"resnet50": 16_384, "vit-b16": 0}


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_every_worker_of_dp_peaks_at_the_curve_s_height(name: str) -> None:
    """The peak that `simulate` gives each device of multi-dp; the input is a part of it."""
    cluster = Cluster(devices=(Devices(speed=1e12),))
    trace = simulate("multi-dp", model=name, cluster=cluster, steps=1)
    rows = trace.memory["category"] == "activations"
    assert int(trace.memory["size"][rows].max()) == superpose(name, 4).dp + IMAGES + FREED_EARLIER[name]
    assert superpose(name, 4).dp == superpose(name, 4, by_layer=True).dp


# Peak bytes of what operators of the whole model make and keep, followed one operator at a time on fake tensors, the
# input left out: what `python -m validation profile NAME --batch 32` prints of the model in one piece. There the loss
# and its gradient, of 4 bytes each, are alive to the end.
IN_ONE_PIECE = {"resnet50": 2_755_477_000, "vit-b16": 3_829_361_672}


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_dp_is_what_a_model_in_one_piece_peaks_at(name: str) -> None:
    assert superpose(name, 32).dp == IN_ONE_PIECE[name] - 8


def test_the_paper_s_vit_lies_between_layers_and_operators() -> None:
    """From 3.9 GB to 2.3 GB, 42 % less (Fig. 4): gradients of parameters count, which stay to the end of the pass."""
    fine, coarse = (superpose("vit-b16", 32, contents="gradients", by_layer=by_layer) for by_layer in (False, True))
    assert (fine.dp, fine.resolution) == (coarse.dp, "operator")
    assert round(fine.dp / 1e9, 1) == 3.9
    assert [round(float(100 * found.reduction), 1) for found in (fine, coarse)] == [45.5, 42.1]
    assert [round(float(found.cdp) / 1e9, 1) for found in (fine, coarse)] == [2.1, 2.2]


@pytest.mark.parametrize("contents", CURVE_CONTENTS)
@pytest.mark.parametrize("name", PAPER_MODELS)
def test_by_layer_is_a_bound(name: str, contents: str) -> None:
    """The peak of one worker is the same; N workers need at most as much as by layer."""
    for n in (2, 4, 8, 32, 1000):
        fine, coarse = (superpose(name, n, contents=contents, by_layer=by_layer) for by_layer in (False, True))
        assert fine.dp == coarse.dp
        assert fine.cdp <= coarse.cdp


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
    model = presets.model(name)
    tied = {"gpt2": 50_257 * 768 * 2}  # its output layer's weights are its embedding's, on every worker
    if model.layers is not None and model.layers.tied:
        tied[name] = model.layers.vocabulary * model.layers.width * 2
    once = model.size("parameters").sum() - tied.get(name, 0)
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
        *("vit-b16", "32", "flops", "gradients", "operator"),
        *("3.85", "GB", "2.10", "GB", "45.5", "%"),
    ]
    by_layer = command("superpose", "vit-b16", "-n", 32, "--contents", "gradients", "--by-layer").out
    assert by_layer.splitlines()[2].split()[4:] == ["layer", "3.85", "GB", "2.23", "GB", "42.1", "%"]
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
    "superpose": ["NAME|FILE, -n: are missing"],
    "superpose vit-b16": ["-n: is missing"],
    "superpose vit-b16 -n 0": ["n=0 must be at least 1"],
    "superpose vit-b16 -n 1.5": ["n=1.5 must be a whole number"],
    "superpose vit-b16 -n 1000000000000000000": ["astronomically large"],
    "superpose vit-b15 -n 2": ["unknown model 'vit-b15'; did you mean 'vit-b16'?"],
    "superpose unit -n 2": ["unknown model 'unit'; known are deepseek-v2"],
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
    "superpose gpt2 -n 2 --by-layer": ["by_layer: no stage of the model has a curve"],
    "superpose vit-b16 -n 2 4": ["'4': is one argument too many"],
}


@every_row("line", REFUSALS)
def test_what_cannot_be_superposed_is_refused(line: str, command: Command, here: Path) -> None:
    refuse(command, here, line, *REFUSALS[line])


def test_a_model_of_slots_is_refused() -> None:
    with pytest.raises(RequestError, match="is of slots"):
        superpose(Model.unit(3), 2)


def test_a_backward_that_is_a_time_is_named() -> None:
    mixed = Model(stages=(Stage(forward=Work(1), backward=Work(1)), Stage(forward=Work(1), backward=2.0)))
    with pytest.raises(RequestError, match="stage 1: is a time"):
        superpose(mixed, 2)

"""The memory between the parts of split backwards: all, or as much as a model file says."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import simulate
from cdpsim.errors import RequestError
from cdpsim.invariants import violations
from cdpsim.model import Model, Recipe, Stage
from cdpsim.model.recipe import apply_recipe
from cdpsim.program import Category, Kind
from cdpsim.runs import Run
from cdpsim.trace.metrics import memory
from tests.helpers.every_row import every_row
from tests.helpers.profiles import profiled

SPLIT: dict[str, dict[str, int]] = {
    "zb-h1": {"n": 4, "m": 6},
    "zb-h2": {"n": 4, "m": 7},
    "interleaved-zero-bubble": {"n": 4, "m": 4, "chunks": 2},
    "zbv": {"n": 4, "m": 5, "chunks": 2},
    "dualpipe": {"n": 4, "m": 8},
    "dualpipev": {"n": 4, "m": 6, "chunks": 2},
}
TIMES: dict[str, Any] = {"forward": 1.0, "backward": 2.0, "weight_backward": 1.0}
every_split = pytest.mark.parametrize("schedule", SPLIT)


def model(n: int, **sizes: Any) -> Model:
    """Stages of which the first has no part for its input, and the last sends nothing on."""
    common: dict[str, Any] = {"activation": 100, "boundary": 10, "parameters": 1}
    between = Stage(**TIMES, **common | sizes)
    first = Stage(forward=1.0, backward=2.0, weight_backward=2.0, **common | {"kept_output": between.kept_output})
    left = between.weight_activation
    less = {"weight_activation": None if left is None else left - between.weight_output, "weight_output": 0}
    return Model(stages=(first, *(between,) * (n - 2), replace(between, boundary=0, kept_output=0, **less)))


def run_of(schedule: str, stages: Model) -> Run:
    return simulate(schedule, model=stages, steps=2, cluster="h200-node", **SPLIT[schedule])  # type: ignore[arg-type]


def activations(run: Run) -> list[int]:
    peaks: list[int] = memory.peak_memory(run.program, run.start, run.end)[:, Category.ACTIVATIONS].tolist()
    return peaks


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_a_stash_shrinks_when_its_first_part_ends(schedule: str) -> None:
    """Counted from the tasks' times: 100 from F on, 10 beside it while B runs, 60 from there until W has ended.

    In the first stage, which has no first part, 100 and 10 until W has ended.
    """
    run = run_of(schedule, model(4, weight_activation=60, weight_output=10))
    tasks, (start, end) = run.program.tasks, (run.start, run.end)
    change: dict[tuple[int, float], int] = defaultdict(int)
    rows = [run.program.tasks_of_kind(kind) for kind in (Kind.F, Kind.B, Kind.W)]
    for ahead, back, weights in np.stack(rows, axis=-1).reshape(-1, 3).tolist():
        stage = int(tasks.stage[ahead])
        freed = weights if stage == 0 else back
        above = 10 * (stage < 3)
        left = 0 if stage == 0 else 60 - (10 - above)
        spans = [(start[ahead], end[freed], 100), (start[back], end[freed], above), (end[back], end[weights], left)]
        for begin, until, size in spans:
            change[int(tasks.device[ahead]), begin] += size
            change[int(tasks.device[ahead]), until] -= size
    for device in range(4):
        moments = sorted(moment for where, moment in change if where == device)
        levels = np.cumsum([change[device, moment] for moment in moments])
        assert activations(run)[device] == levels.max()
        assert levels[-1] == 0


@every_split
def test_what_frees_nothing_is_what_is_not_given(schedule: str) -> None:
    """Memory is the same at any time where all is left, the gradient of the output too."""
    sizes: dict[str, Any] = {"weight_activation": 110, "weight_output": 10}
    runs = [run_of(schedule, model(SPLIT[schedule]["n"], **stated)) for stated in (sizes, {})]
    one, other = (memory.memory_by_category(run.program, run.start, run.end) for run in runs)
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_a_first_part_may_retain_everything(schedule: str) -> None:
    """Counted from the tasks' times: 100, and 10 and 30 from B's start, until W has ended; B needs 45 - 30 beside.

    The first stage goes back as a whole, in W.
    """
    sizes = {"retained_gradients": 30, "retained_input_transient": 45, "retained_weight_transient": 3}
    given_ = {"weight_activation": 60, "weight_output": 10, "input_transient": 7, "weight_transient": 8}
    stages = model(4, **given_, **sizes)
    first = replace(stages.stages[0], retained_gradients=None, retained_input_transient=None, weight_transient=0)
    stages = replace(stages, stages=(replace(first, retained_weight_transient=None), *stages.stages[1:]))
    run = simulate(schedule, model=stages, steps=2, cluster="h200-node", runtime=RETAINED, **SPLIT[schedule])  # type: ignore[arg-type]
    tasks, (start, end) = run.program.tasks, (run.start, run.end)
    rows = [run.program.tasks_of_kind(kind) for kind in (Kind.F, Kind.B, Kind.W)]
    change: dict[tuple[int, float], int] = defaultdict(int)
    for ahead, back, weights in np.stack(rows, axis=-1).reshape(-1, 3).tolist():
        stage = int(tasks.stage[ahead])
        inner = 30 * (stage > 0)
        spans = [(start[ahead], end[weights], 100), (start[back], end[weights], 10 * (stage < 3) + inner)]
        spans += [(start[back], end[back], 15), (start[weights], end[weights], 3)] * (stage > 0)
        for begin, until, size in spans:
            change[int(tasks.device[ahead]), begin] += size
            change[int(tasks.device[ahead]), until] -= size
    for device in range(4):
        moments = sorted(moment for where, moment in change if where == device)
        assert activations(run)[device] == np.cumsum([change[device, moment] for moment in moments]).max()
    assert not violations(run)


RETAINED = "paper:split_backward=retained"


@every_split
@given(
    left=st.integers(0, 90),
    given_=st.integers(0, 10),
    above=st.integers(0, 10),
    kept=st.sampled_from([0, 10]),
    transient=st.integers(0, 50),
)
def test_less_is_left_and_less_is_held(
    schedule: str, left: int, given_: int, above: int, kept: int, transient: int
) -> None:
    """No device holds more than where a first part frees nothing; and all laws hold."""
    parts = {"weight_activation": left + given_ + above, "weight_input": given_, "weight_output": above}
    common: dict[str, Any] = {"kept_output": kept, "input_transient": transient, "weight_transient": transient}
    n = SPLIT[schedule]["n"]
    frees, keeps = (run_of(schedule, model(n, **common, **sizes)) for sizes in (parts, {}))
    assert not violations(frees)
    assert all(a <= b for a, b in zip(activations(frees), activations(keeps), strict=True))


@pytest.mark.parametrize(("name", "n"), [("llama2-7b", 4), ("llama2-7b", 8), ("llama3-8b", 4)])
def test_zb_h1_holds_as_much_as_1f1b(name: str, n: int) -> None:
    """On the device that holds the most, as its paper says (Qi et al. 2024, section 2.3): the first, of even stages.

    Seven stages are uneven, of four blocks or five, and zb-h1 has as many passes on the fives as 1f1b on the first.
    """
    asked: dict[str, Any] = {"n": n, "m": 2 * n, "steps": 1, "model": profiled(name), "cluster": "h100-node"}
    ours, plain = (activations(simulate(each, ignore_memory=True, **asked)) for each in ("zb-h1", "1f1b"))
    assert max(ours) == max(plain) == ours[0]
    ours, plain = (
        activations(simulate(each, ignore_memory=True, **asked | {"n": 7, "m": 14})) for each in ("zb-h1", "1f1b")
    )
    assert max(ours) > max(plain)


# Made of layers, and by recipes

LAYER = Stage(
    **TIMES,
    activation=100,
    kept_output=10,
    boundary=10,
    backward_transient=20,
    weight_activation=70,
    weight_input=10,
    weight_output=5,
    input_transient=30,
    weight_transient=8,
    retained_gradients=40,
    retained_input_transient=50,
)


def test_layers_of_a_stage_let_go_one_by_one() -> None:
    """The last one's part has 190 beside it; the first one's 100, the other's 70, less what both have or is above."""
    (stage,) = Model(stages=(LAYER,) * 2).grouped(1).stages
    assert stage.activation == 190
    assert (stage.weight_activation, stage.weight_input, stage.weight_output) == (140, 10, 5)
    in_last, in_first = 190 + 30, 100 + (70 - 10 - 5) + 10 + 30
    assert stage.input_transient == max(in_last, in_first) - 190
    assert stage.weight_transient == 8  # in the last layer; in the first 70 + 8
    assert stage.retained_gradients == 2 * 40 + 5
    assert stage.retained_input_transient == 40 + 10 + 50
    assert (
        Model(stages=(replace(LAYER, weight_activation=None, weight_input=0, weight_output=0), LAYER))
        .grouped(1)
        .stages[0]
        .weight_activation
        is None
    )


def test_a_stage_that_begins_a_model_leaves_all_until_its_weights_part() -> None:
    first = Stage(forward=1.0, backward=1.0, weight_backward=1.0, activation=100, boundary=10)
    assert Model(stages=(first, LAYER)).grouped(1).stages[0].weight_activation is None


def test_what_is_computed_again_is_left_as_if_it_were_not() -> None:
    """Between the parts 140 of two layers; the first part has 100, and 10 of each input, gradient and 30 beside."""
    (stage,) = apply_recipe(Model(stages=(replace(LAYER, inference=60),) * 2), Recipe(recompute="sqrt"), 1).stages
    assert (stage.activation, stage.weight_activation) == (10, 140)  # the first layer's input is not stated
    assert stage.weight_transient == 8
    last, first = 10 + 100 + 30, 100 + 10 + 30 + 70 - 5
    assert stage.input_transient == max(last, first) - 10


def test_what_is_left_stays_where_activations_are_offloaded() -> None:
    (stage,) = apply_recipe(Model(stages=(LAYER,)), Recipe(offload="activations"), 1).stages
    assert (stage.activation, stage.offloaded, stage.weight_activation) == (0, 100, 70)
    assert (stage.input_transient, stage.weight_transient) == (100 + 30, 8)


@every_row(
    ("sizes", "problem"),
    [
        ({"weight_activation": 1, "weight_backward": 2.0}, "weight_activation: is what a backward's input part leaves"),
        ({"weight_activation": 9}, "weight_input: must be at most weight_activation"),
        ({"weight_activation": 4, "weight_input": 0}, "weight_output: must be at most weight_activation"),
        ({"weight_activation": 14}, "weight_activation: must be at least weight_input and weight_output"),
        ({"weight_output": 11}, "weight_output: must be at most boundary"),
        ({"weight_activation": 141}, "activation, boundary and input_transient together"),
        ({"weight_activation": 131, "input_transient": None}, "activation, boundary and backward_transient together"),
        ({"retained_gradients": 51}, "retained_gradients: must be at most retained_input_transient"),
        ({"retained_input_transient": None}, "retained_gradients: must be at most backward_transient"),
        ({"retained_gradients": None}, "retained_input_transient: is of a backward that retains gradients"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        replace(LAYER, **sizes)


@pytest.mark.parametrize("sizes", [{"weight_activation": 140}, {"weight_output": 10}, {"retained_gradients": 50}])
def test_sizes_may_be_all_that_is_there(sizes: dict[str, Any]) -> None:
    replace(LAYER, **sizes)


def test_what_layers_leave_is_there_before_it_is_left() -> None:
    """The first layer leaves all 140 that it has; merged, the part ends with 210, and 5 of them count as a gradient."""
    (stage,) = (
        Model(stages=(replace(LAYER, weight_activation=140), replace(LAYER, input_transient=0))).grouped(1).stages
    )
    assert (stage.weight_activation, stage.activation + (stage.input_transient or 0)) == (210, 210 - 5)


def test_no_more_of_its_input_is_left_than_a_stage_gets() -> None:
    with pytest.raises(RequestError, match="stage 1 has the boundary of stage 0 as its input"):
        Model(stages=(LAYER, replace(LAYER, weight_input=11)))


def test_merged_parts_that_retain_need_as_much_as_whole_backwards_where_layers_do_not_say() -> None:
    """In the first layer 60 beside the gradients inside the last one, and the gradient of its own output."""
    layer = replace(LAYER, backward_transient=60, retained_input_transient=None, retained_weight_transient=None)
    (stage,) = Model(stages=(layer, layer)).grouped(1).stages
    assert stage.retained_input_transient == 40 + 10 + 60
    assert stage.retained_weight_transient == 60

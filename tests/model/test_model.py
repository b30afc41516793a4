"""A model survives its file, and a wrong file is refused with the field's path."""

from collections.abc import Callable
from itertools import chain, combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import presets, simulate
from cdpsim.cluster import Cluster, Devices
from cdpsim.errors import RequestError
from cdpsim.files.units import Work
from cdpsim.model import STAGE_SIZES, Model, Stage
from tests.helpers.every_row import every_row
from tests.helpers.profiles import profiled

pytestmark = pytest.mark.filterwarnings("error")

TOY = """
name = "toy"
[[stages]]
repeat = 2
forward = "1 s"
backward = "2 s"
weight_backward = "1 s"
activation = "1.5 GB"
kept_output = "16 MB"
backward_transient = "3 MB"
boundary = "16 MB"
parameters = "400 MB"
[[stages]]
forward = "2.5 TFLOP"
backward = "5 TFLOP"
activation = "20 MB"
gradients = 7
optimizer = "8 B"
"""
PLAIN = Stage(forward=1.0, backward=2.0)


@pytest.fixture
def toy(tmp_path: Path) -> Model:
    (tmp_path / "toy.toml").write_text(TOY)
    return Model.load(tmp_path / "toy.toml")


def test_a_file_says_what_each_stage_takes_and_holds(toy: Model) -> None:
    assert (toy.name, toy.n, toy.is_unit) == ("toy", 3, False)
    costs = [(stage.forward, stage.backward, stage.weight_backward) for stage in toy.stages]
    assert costs == [(1.0, 2.0, 1.0)] * 2 + [(Work(2.5e12), Work(5e12), None)]
    assert {kind: toy.size(kind).tolist() for kind in STAGE_SIZES} == {
        "activation": [1_500_000_000, 1_500_000_000, 20_000_000],
        "kept_output": [16_000_000, 16_000_000, 0],
        "forward_transient": [0, 0, 0],
        "backward_transient": [3_000_000, 3_000_000, 0],
        "weight_activation": [1_500_000_000, 1_500_000_000, 20_000_000],
        "weight_input": [0, 0, 0],
        "weight_output": [0, 0, 0],
        "input_transient": [3_000_000, 3_000_000, 0],
        "weight_transient": [3_000_000, 3_000_000, 0],
        "boundary": [16_000_000, 16_000_000, 0],
        "sent": [16_000_000, 16_000_000, 0],
        "parameters": [400_000_000, 400_000_000, 0],
        "gradients": [400_000_000, 400_000_000, 7],
        "first_gradients": [400_000_000, 400_000_000, 7],
        "freed_output": [16_000_000, 16_000_000, 0],
        "loss_forward": [0, 0, 0],
        "loss_gradient": [0, 0, 0],
        "optimizer": [0, 0, 8],
        "update_loop": [0, 0, 0],
        "update_foreach": [0, 0, 0],
        "data": [0, 0, 0],
        "unused_input": [0, 0, 0],
    }
    assert toy.optimizer_as_message.tolist() == [0, 0, 8]
    assert toy.size("gradients").dtype == np.int64


def test_the_unit_model_counts_slots_and_stages_worth() -> None:
    model = Model.unit(3)
    assert (model.n, model.is_unit, model.to_builtins()) == (3, True, "unit")
    ones = {kind for kind in STAGE_SIZES if model.size(kind).tolist() == [1] * 3}
    sizes = {"activation", "weight_activation", "boundary", "sent", "parameters", "gradients", "first_gradients"}
    assert ones == sizes
    assert all(model.size(kind).tolist() == [0] * 3 for kind in set(STAGE_SIZES) - ones)
    assert (model.optimizer_as_message.tolist(), model.boundary_in_memory.tolist()) == ([1, 1, 1], [0, 0, 0])
    assert model.optimizer_as_message.dtype == np.int64


def test_a_large_unit_model_shares_one_stage() -> None:
    model = Model.unit(10_000)
    assert len({id(stage) for stage in model.stages}) == 1


@pytest.mark.parametrize("n", [0, -1, 1_000_001])
def test_a_unit_model_has_a_sensible_number_of_stages(n: int) -> None:
    with pytest.raises(RequestError, match=f"^n={n}: must be at least 1 and at most 1000000$"):
        Model.unit(n)


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_saved_unit_model_is_one_of_seconds_and_bytes(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"unit.{ending}"
    Model.unit(4).save(path)
    loaded = Model.load(path)
    assert (loaded.is_unit, loaded.n, loaded.stages[0]) == (False, 4, Model.unit(1).stages[0])
    assert loaded.to_builtins() == {
        "name": "unit",
        "stages": [
            {"repeat": 4, "forward": "1 s", "backward": "1 s"}
            | {"activation": "1 B", "boundary": "1 B", "parameters": "1 B"}
        ],
    }


def test_equal_neighbours_are_saved_as_one_entry(toy: Model, tmp_path: Path) -> None:
    toy.save(tmp_path / "copy.json")
    assert (
        (tmp_path / "copy.json").read_text()
        == """{
  "name": "toy",
  "stages": [
    {
      "repeat": 2,
      "forward": "1 s",
      "backward": "2 s",
      "weight_backward": "1 s",
      "activation": "1.5 GB",
      "kept_output": "16 MB",
      "backward_transient": "3 MB",
      "boundary": "16 MB",
      "parameters": "400 MB"
    },
    {
      "forward": "2.5 TFLOP",
      "backward": "5 TFLOP",
      "activation": "20 MB",
      "gradients": "7 B",
      "optimizer": "8 B"
    }
  ]
}
"""
    )


def test_saving_overwrites_only_when_asked(toy: Model, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="already exists; --force overwrites"):
        toy.save(tmp_path / "toy.toml")
    toy.save(str(tmp_path / "toy.toml"), force=True)
    assert Model.load(tmp_path / "toy.toml") == toy


KEPT = 10**6  # at most: every stage's activation and boundary have room for it
SIZE = st.integers(KEPT, 10**12)


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    kind: Callable[[float], float] = draw(st.sampled_from([float, Work]))
    most = 1e9 if kind is float else 1e24
    backward = draw(st.floats(1e-29, most))
    part = draw(st.none() | st.floats(1e-30, backward))
    activation, boundary, transient = draw(SIZE), draw(SIZE), draw(SIZE)
    for_input = draw(st.none() | SIZE)
    left = activation + boundary + (for_input or transient)
    return Stage(
        forward=draw(st.floats(1e-30, 1e9) | st.floats(1e-30, 1e24).map(Work)),
        backward=kind(backward),
        weight_backward=None if part is None else kind(part),
        activation=activation,
        boundary=boundary,
        backward_transient=transient,
        input_transient=for_input,
        kept_output=draw(st.integers(0, KEPT)),
        forward_transient=draw(SIZE),
        weight_activation=draw(st.none() | st.integers(0, left)) if part is not None and part < backward else None,
        weight_transient=draw(st.none() | SIZE),
        parameters=draw(SIZE),
        gradients=draw(st.none() | SIZE),
        optimizer=draw(SIZE),
    )


RUNS = st.lists(st.builds(lambda stage, times: (stage,) * times, stages(), st.integers(1, 3)), min_size=1, max_size=5)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(RUNS, NAMES, st.sampled_from(["toml", "json", "TOML"]))
def test_load_undoes_save(runs: list[tuple[Stage, ...]], name: str, ending: str) -> None:
    model = Model(name=name, stages=tuple(chain(*runs)))
    with TemporaryDirectory() as folder:
        model.save(Path(folder, f"x.{ending}"))
        loaded = Model.load(Path(folder, f"x.{ending}"))
    assert loaded == model
    assert [type(stage.backward) for stage in loaded.stages] == [type(stage.backward) for stage in model.stages]
    assert Model.from_builtins(model.to_builtins(), "x") == model


def _stage(**fields: object) -> dict[str, object]:
    return {"stages": [{"forward": 1, "backward": 2}, {"forward": 1, "backward": 2} | fields]}


LAST = "$.stages[1]"


@every_row(
    ("content", "problem"),
    [
        ({}, "$.stages: are missing; give [[stages]], or the shape of [layers]"),
        ([], "$: expected `object`, got `array`"),
        ("unit", "$: expected `object`, got `str`"),
        ({"stages": []}, "$.stages: are missing; give [[stages]], or the shape of [layers]"),
        ({"stages": {}}, "$.stages: expected `array`, got `object`"),
        ({"stages": [{"forward": 1}]}, "$.stages[0]: object missing required field `backward`"),
        ({"stagse": []}, "$: unknown field 'stagse'; did you mean 'stages'?"),
        (_stage(forwrad=1), f"{LAST}: unknown field 'forwrad'; did you mean 'forward'?"),
        (
            _stage(qq=1),
            f"{LAST}: unknown field 'qq'; known are name, forward, backward, weight_backward, activation",
        ),
        ({"is_unit": True} | _stage(), "$: unknown field 'is_unit'; "),
        ({"name": 3} | _stage(), "$.name: expected `str`, got `int`"),
        ({"name": "\ud800"} | _stage(), "$.name: expected `str` matching regex"),
        ({"name": "x" * 65537} | _stage(), "$.name: expected `str` of length <= 65536"),
        (_stage(forward=0), f"{LAST}.forward: 0: not between 1e-30 and 1e+09 s; write for example '5 us'"),
        (_stage(forward=True), f"{LAST}.forward: true: not a time; write for example '5 us'"),
        (_stage(forward=float("nan")), f"{LAST}.forward: nan: not between"),
        (_stage(backward=float("inf")), f"{LAST}.backward: inf: not between"),
        (_stage(backward=-1), f"{LAST}.backward: -1: not between"),
        (_stage(backward="5 GB"), f"{LAST}.backward: '5 GB': not a time or work; write for example '5 us'"),
        (_stage(backward=None), f"{LAST}.backward: none: not a time"),
        (_stage(forward=10**400), f"{LAST}.forward: this number: not between"),
        (_stage(activation="5 s"), f"{LAST}.activation: '5 s': not a size; write for example '80 GB'"),
        (_stage(boundary=0.5), f"{LAST}.boundary: 0.5: a fraction of a byte"),
        (_stage(parameters=1e16), f"{LAST}.parameters: 1e+16: not between 0 and 1e+15 B"),
        (_stage(gradients=-1), f"{LAST}.gradients: -1: not between"),
        (_stage(optimizer=[[[]]]), f"{LAST}.optimizer: [[[]]]: not a size"),
        (_stage(repeat=0), f"{LAST}.repeat: expected `int` >= 1"),
        (_stage(repeat=True), f"{LAST}.repeat: expected `int`, got `bool`"),
        (_stage(repeat=1.5), f"{LAST}.repeat: expected `int`, got `float`"),
        (_stage(repeat="2"), f"{LAST}.repeat: expected `int`, got `str`"),
        (_stage(repeat=1_000_001), f"{LAST}.repeat: expected `int` <= 1000000"),
        (_stage(repeat=1_000_000), "$.stages: more than 1000000 in all; lower `repeat`"),
        (
            _stage(parameters="1 PB", repeat=10),
            "$.stages: parameters sums to more than 9 PB; check the units",
        ),
        (_stage(activation=3, boundary=2, kept_output=3), f"{LAST}: kept_output: must be at most activation and bound"),
        (_stage(activation=2, boundary=3, kept_output=3), f"{LAST}: kept_output: must be at most activation and bound"),
        (
            {
                "stages": [
                    {"forward": 1, "backward": 2, "activation": a, "boundary": 3, "kept_output": a} for a in (2, 1)
                ]
            },
            "$.stages: stage 1 has the kept_output of stage 0 as its input; its activation must not be less",
        ),
        (_stage(activation=2, data=3), f"{LAST}: data: must be at most activation, of which it is a part"),
        (_stage(activation=2, unused_input=3), f"{LAST}: unused_input: must be at most activation"),
        (_stage(parameters=1, first_gradients=2), f"{LAST}: first_gradients: must be at most gradient"),
        (_stage(activation=2, kept_output=0, freed_output=1), f"{LAST}: freed_output: must be at most kept_output"),
        (_stage(parameters=1, host_parameters=2), f"{LAST}: host_parameters: must be at most parameters"),
        (_stage(parameters=7, tensors=[[2]]), f"{LAST}: tensors: have 2 numbers in all, which do not weigh 7 bytes"),
        (_stage(weight_backward=0), f"{LAST}.weight_backward: 0: not between"),
        (
            _stage(weight_backward=2.1),
            f"{LAST}: weight_backward: must be at most backward, of which it is a part",
        ),
        (_stage(weight_backward="1 FLOP"), f"{LAST}: weight_backward: must be a time where backward is one"),
        (_stage(backward="9 FLOP", weight_backward=1), f"{LAST}: weight_backward: must be a time where"),
        (_stage(recomputed=2.1), f"{LAST}: recomputed: must be at most backward, of which it is a part"),
        (_stage(recomputed="1 FLOP"), f"{LAST}: recomputed: must be a time where backward is one"),
        (_stage() | {"tokens": 9}, "$.tokens: are those of a sample, and there is no number of samples; add `samples`"),
    ],
)
def test_wrong_content_is_refused_with_the_path_of_the_field(content: object, problem: str) -> None:
    with pytest.raises(RequestError) as refusal:
        Model.from_builtins(content, "toy.toml")
    assert str(refusal.value).startswith(f"toy.toml: {problem}")
    assert str(refusal.value).isprintable()


SYNTAX = [
    ("json", "[" * 100_000, "nested too deeply; write plain tables"),
    ("json", '{"stages":' * 100_000, "nested too deeply; write plain tables"),
    ("toml", "a = " + "[" * 100_000, "nested too deeply; write plain tables"),
    ("toml", "a = " + "{a = " * 100_000, "nested too deeply; write plain tables"),
    ("toml", "a." * 1_000_000 + "a = 1", "nested too deeply; write plain tables"),
    ("toml", "[" + "a." * 1_000_000 + "a]", "nested too deeply; write plain tables"),
    ("toml", "a." * 900 + "a = 1", "$: unknown field 'a'; "),
    ("toml", "name = 'a'\nname = 'b'\n", "not TOML: Cannot overwrite a value (at line 2, column 11)"),
    ("toml", "name = \n", "not TOML: Invalid value (at line 1, column 8); mend it there"),
    ("toml", "a = 1" + "0" * 5000, "not TOML: Exceeds the limit (4300 digits)"),
    ("toml", "[[stages]]\nforward = 0x" + "f" * 5000, "$.stages[0].forward: this number: not between"),
    (
        "toml",
        "[[stages]]\nforward = 1979-05-27",
        "$.stages[0].forward: datetime.date(1979, 5, 27): not a time",
    ),
    ("json", '{"name": "a",\n "name": "b"}', "not JSON: 'name' is there twice"),
    (
        "json",
        '{"name": 1,\n}',
        "not JSON: Expecting property name enclosed in double quotes: line 2 column 1",
    ),
    ("json", "{}{}", "not JSON: Extra data: line 1 column 3"),
    ("json", "name = 'a'", "not JSON: Expecting value: line 1 column 1"),
    ("json", '{"stages": [{"forward": NaN}]}', "$.stages[0].forward: nan: not between"),
    ("json", '{"name": "\\ud800", "stages": []}', "$.name: expected `str` matching regex"),
]


@every_row(("ending", "text", "problem"), SYNTAX)
def test_a_broken_file_is_refused_with_the_place(ending: str, text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / f"broken.{ending}"
    path.write_text(text)
    with pytest.raises(RequestError) as refusal:
        Model.load(path)
    assert str(refusal.value).startswith(f"{path}: {problem}")
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("name", ["toy", "toy.yaml", "toy.toml.gz", ".toml"])
def test_other_endings_are_refused(name: str, tmp_path: Path) -> None:
    problem = "its form is unknown; end its name in .toml or .json"
    with pytest.raises(RequestError, match=problem):
        Model.load(tmp_path / name)
    with pytest.raises(RequestError, match=problem):
        Model.unit(1).save(tmp_path / name)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none.toml: no such file or directory; check its spelling"):
        Model.load(tmp_path / "none.toml")


def test_what_is_made_in_python_obeys_the_rules_of_a_file() -> None:
    assert Stage(forward="25 us", backward="1 FLOP") == Stage(forward=25e-6, backward=Work(1))  # type: ignore[arg-type]
    assert Model(stages=[PLAIN]).stages == (PLAIN,)  # type: ignore[arg-type]
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: Stage(forward=-1, backward=1), "forward: -1: not between"),
        (lambda: Stage(forward=1, backward=1, activation=True), "activation: true: not a size"),
        (
            lambda: Stage(forward=1, backward=1, weight_backward=2),
            "weight_backward: must be at most backward",
        ),
        (lambda: Model(stages=()), "stages: expected `array` of length >= 1"),
        (lambda: Model(stages=(PLAIN,) * 1_000_001), "stages: expected `array` of length <= 1000000"),
    ]
    for make, problem in refused:
        with pytest.raises(RequestError, match=problem):
            make()


def test_a_stage_that_costs_the_same_in_work_is_another_stage() -> None:
    assert Stage(forward=1.0, backward=2.0) != Stage(forward=Work(1), backward=2.0)
    table = Model(stages=(PLAIN, Stage(forward=Work(1), backward=2.0))).to_builtins()
    assert table == {"stages": [{"forward": "1 s", "backward": "2 s"}, {"forward": "1 FLOP", "backward": "2 s"}]}


# Fewer stages than the model's own


@st.composite
def layers(draw: st.DrawFn) -> Model:
    """Stages that cost work, with or without outputs that they keep."""
    made = []
    for _ in range(draw(st.integers(1, 7))):
        kept = draw(st.just(0) | st.integers(1, 50))
        boundary = kept if kept else draw(st.integers(0, 50))
        kinds = ("forward_transient", "backward_transient", "parameters")
        sizes: dict[str, Any] = {kind: draw(st.integers(0, 99)) for kind in kinds}
        forward, backward = (Work(draw(st.integers(1, 20))) for _ in range(2))
        activation = 50 + draw(st.integers(0, 99))
        held: dict[str, Any] = {"activation": activation, "kept_output": kept, "boundary": boundary}
        made.append(Stage(forward=forward, backward=backward, **held, **sizes))
    return Model(stages=tuple(made))


def peak(model: Model) -> int:
    """Return the peak activations of one device that runs one micro-batch through all stages."""
    trace = simulate("multi-dp", model=model, cluster=Cluster(devices=(Devices(speed=1e12),)), steps=1)
    return max(int(device["activations"]) for device in trace.summary()["peak_memory"])


@given(layers(), st.data())
def test_a_device_holds_as_much_of_grouped_stages(model: Model, data: st.DataObject) -> None:
    """And the gradient of a group's output as long as the group's backward runs."""
    n = data.draw(st.integers(1, model.n))
    grouped, ends = model.grouped(n), [*model.cuts(n), model.n]
    held, moments = 0, [peak(model)]
    for j, stage in enumerate(model.stages):
        held += stage.activation - (model.stages[j - 1].kept_output if j else 0)
        end = next(end for end in ends if end > j)
        if j + 1 < end < model.n:
            gradients = stage.boundary + model.stages[end - 1].boundary
            moments.append(held + gradients + stage.backward_transient)
    assert peak(grouped) == max(moments)


@pytest.mark.parametrize("name", ["resnet50", "vit-b16", "gpt2", "llama3-8b"])
def test_all_stages_of_a_real_model_in_one_hold_as_much(name: str) -> None:
    """But for what stands between stages and not inside one: inputs that are not read again, and targets."""
    model = presets.model(name) if name in ("resnet50", "vit-b16") else Model.load(profiled(name))
    first, last = model.stages[0], model.stages[-1]
    inner = model.size("boundary")[:-1].sum()
    unused = sum(stage.unused_input for before, stage in pairwise(model.stages) if not before.kept_output)
    assert unused <= inner
    least = peak(model) - unused
    assert least <= peak(model.grouped(1)) <= peak(model) + first.data + last.data


def test_an_input_that_is_not_read_again_goes_with_its_forward() -> None:
    """The second layer keeps 7 bytes, 4 of them its input, and 3 without that; the first keeps 10."""
    second = Stage(forward=1.0, backward=1.0, activation=7, unused_input=4)
    first = Stage(forward=1.0, backward=1.0, activation=10, boundary=4)
    apart = Model(stages=(first, second)).grouped(1).stages[0]
    assert (apart.activation, apart.forward_transient) == (13, 4)  # 17 while the second forward runs
    first = Stage(forward=1.0, backward=1.0, activation=10, boundary=4, kept_output=4)
    kept = Model(stages=(first, second)).grouped(1).stages[0]
    assert (kept.activation, kept.forward_transient) == (
        13,
        0,
    )  # the input is the first one's output, and is there once


@given(layers(), st.data())
def test_what_adds_up_adds_up(model: Model, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, model.n))
    grouped, ends = model.grouped(n), (0, *model.cuts(n), model.n)
    assert grouped.n == n
    for begin, end, stage in zip(ends, ends[1:], grouped.stages, strict=False):
        own = model.stages[begin:end]
        assert stage.parameters == sum(layer.parameters for layer in own)
        assert (stage.boundary, stage.kept_output) == (own[-1].boundary, own[-1].kept_output)
        assert float(stage.backward) == sum(layer.backward for layer in own)
        assert isinstance(stage.forward, Work)
    every = [sum(s.forward + s.backward for s in model.stages[a:b]) for a, b in pairwise(ends)]
    others = combinations(range(1, model.n), n - 1)
    costs = [stage.forward + stage.backward for stage in model.stages]
    assert max(every) == min(max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, model.n))) for cuts in others)


def test_fields_that_are_not_given_stay_so_where_none_is(toy: Model) -> None:
    plain = Model(stages=(PLAIN, PLAIN, PLAIN)).grouped(1).stages[0]
    assert (plain.forward, plain.backward, plain.weight_backward, plain.gradients) == (3.0, 6.0, None, None)
    some = Stage(forward=0.1, backward=0.2, weight_backward=0.1, parameters=5, gradients=7, optimizer=3)
    mixed = Model(stages=(some, Stage(forward=0.2, backward=0.3, parameters=2, optimizer=1))).grouped(1).stages[0]
    assert (mixed.weight_backward, mixed.gradients, mixed.optimizer) == (0.1, 9, 4)


def split(weight: float, for_input: int | None = 30, for_weights: int | None = 8) -> Stage:
    """A layer that holds 100, and sends on 10."""
    parts = {"input_transient": for_input, "weight_transient": for_weights}
    own = {"weight_backward": Work(weight), "backward_transient": 20, "activation": 100, "boundary": 10}
    return Stage(forward=Work(2), backward=Work(4), **own, **parts)  # type: ignore[arg-type]


def test_a_first_stage_hands_nothing_back_however_many_layers_it_has() -> None:
    """All of its backward is for weights: there is no gradient of its input to compute, nor of those in between."""
    model = Model(stages=(split(4, 0, 20), *(split(1),) * 3))
    first, second = model.grouped(2).stages
    assert (first.weight_backward, second.weight_backward) == (Work(8), Work(2))
    assert (first.has_input_part, second.has_input_part) == (False, True)
    assert (first.input_transient, first.weight_transient) == (0, first.backward_transient)


def test_parts_of_a_grouped_backward_hold_what_parts_of_all_layers_do() -> None:
    """For the input nothing is let go; for the weights a layer's gradients are handed back, but for the first one's."""
    (stage,) = Model(stages=(split(1),) * 3).grouped(1).stages
    assert (stage.activation, stage.backward_transient) == (300, 20)
    assert stage.input_transient == 10 + 30  # in any layer but the last, whose output's gradient is no transient
    assert stage.weight_transient == 20  # in the last layer; in the first 100 + 10 + 8 in all
    (stage,) = Model(stages=(split(1, None, 300), split(1, None, None))).grouped(1).stages
    assert (stage.input_transient, stage.weight_transient) == (10 + 20, 100 + 10 + 300 - 200)
    assert Model(stages=(split(1, None, None),) * 2).grouped(1).stages[0].input_transient is None


def test_more_stages_than_there_are_and_other_groups_are_refused(toy: Model) -> None:
    assert toy.grouped(3) is toy
    refused: list[tuple[Callable[[], Model], str]] = [
        (lambda: toy.grouped(4), "n: n=4, but the model has 3 stages, which can be grouped and not split; lower n"),
        (lambda: toy.grouped(2), "n=2: the 3 stages cost work and time, and cannot be grouped; give all in one"),
        (lambda: toy.grouped(0), "n=0: must be at least 1 and at most 3"),
        (
            lambda: Model.unit(3).grouped(2),
            "n=2: the model has 3 stages, and the slot model's are not grouped; give n=3",
        ),
        (
            lambda: Model(stages=(PLAIN,) * 2001).grouped(2),
            "n=2: the model has 2001 stages, and more than 2000 are not",
        ),
    ]
    for group, problem in refused:
        with pytest.raises(RequestError) as refusal:
            group()
        assert str(refusal.value).startswith(problem)


def test_a_file_says_how_many_samples_a_micro_batch_has(tmp_path: Path) -> None:
    (tmp_path / "toy.toml").write_text("samples = 24\n" + TOY)
    model = Model.load(tmp_path / "toy.toml")
    assert model.samples == 24
    assert Model.from_builtins(model.to_builtins(), "again") == model
    assert presets.model("gpt2").grouped(2).samples == 8
    assert Model.load(tmp_path / "toy.toml").table()["samples"] == 24
    (tmp_path / "toy.toml").write_text(TOY)
    assert "samples" not in Model.load(tmp_path / "toy.toml").table()
    for samples, bound in ((0, ">= 1"), (2**31 + 1, "<= 2147483648")):
        (tmp_path / "toy.toml").write_text(f"samples = {samples}\n" + TOY)
        with pytest.raises(RequestError, match=rf"toy.toml: \$.samples: expected `int` {bound}"):
            Model.load(tmp_path / "toy.toml")


def test_a_file_says_its_precision(tmp_path: Path) -> None:
    (tmp_path / "toy.toml").write_text('precision = "bf16"\n' + TOY)
    model = Model.load(tmp_path / "toy.toml")
    assert model.precision == "bf16"
    assert model.table()["precision"] == "bf16"
    (tmp_path / "toy.toml").write_text('precision = "fp31"\n' + TOY)
    with pytest.raises(RequestError, match=r"toy.toml: \$.precision: unknown precision 'fp31'; did you mean 'fp32'\?"):
        Model.load(tmp_path / "toy.toml")


def test_positional_arguments_are_refused_with_the_keywords_that_are_meant() -> None:
    """msgspec itself says "Extra positional arguments provided", before 0.20 in any case."""
    made: Any = Model
    with pytest.raises(TypeError, match=r"^Model\(\) takes keywords; write Model\(stages=\.\.\.\)$"):
        made("m", [Stage(forward=1.0, backward=1.0)])
    made = Stage
    with pytest.raises(TypeError, match=r"^Stage\(\) takes keywords; write Stage\(forward=\.\.\., backward=\.\.\.\)$"):
        made(1.0, 2.0)

"""Curves in model files: what is read, written and refused, and where a model has none."""

import tomllib
from pathlib import Path

import pytest

from cdpsim import Model, Request, RequestError, presets
from cdpsim.files.config import toml_text
from cdpsim.model.recipe import apply_recipe
from tests.helpers.every_row import every_row

CURVED = """
[[stages]]
forward = "30 FLOP"
backward = "60 FLOP"
activation = 100
kept_output = 8
forward_transient = 5
backward_transient = 2
boundary = 20
[stages.curve.forward]
cost = [10, 0, 20]
moved = [1, 2, 3]
held = [60, 105, 104]
[stages.curve.backward]
cost = [60, 0]
moved = [1, 2]
held = [122, 30]
gradient_steps = 1
[[stages]]
forward = 3e-9
backward = 7e-9
activation = 50
[stages.curve.forward]
cost = [1, 2]
moved = [1, 2]
held = [50, 50]
input_steps = 1
[stages.curve.backward]
cost = [3, 4]
moved = [1, 2]
held = [50, 20]
input_steps = 1
"""


def read(text: str, folder: Path) -> Model:
    path = folder / "curved.toml"
    path.write_text(text)
    return Model.load(path)


def test_a_curve_is_written_as_it_was_read(tmp_path: Path) -> None:
    """In TOML in lines of many numbers, and in JSON."""
    model = read(CURVED, tmp_path)
    curve = model.stages[0].curve
    assert (curve.forward.cost, curve.forward.moved, curve.forward.held) == ((10, 0, 20), (1, 2, 3), (60, 105, 104))
    assert (curve.forward.gradient_steps, curve.backward.gradient_steps, curve.backward.input_steps) == (0, 1, 0)
    for ending in ("toml", "json"):
        path = tmp_path / f"again.{ending}"
        model.save(path)
        assert Model.load(path) == model
    assert "\nheld = [\n    60, 105, 104,\n]\n" in (tmp_path / "again.toml").read_text()


def test_long_lists_are_in_lines() -> None:
    """The same numbers, and lines of a width that an editor shows; short lists, and texts, are as before."""
    content = {"long": [7**k for k in range(60)], "short": [1, 2], "text": "[\n    1,\n    2,\n    3,\n]"}
    text = toml_text(content)
    assert tomllib.loads(text) == content
    assert max(map(len, text.splitlines())) <= 116
    assert text.count("\n") < 30
    assert "short = [\n    1,\n    2,\n]" in text


REFUSALS = {
    "another cost than its stage": ("cost = [10, 0, 20]", "cost = [10, 0, 21]", "forward.cost: sums to 31, but"),
    "a peak below its stage's": ("60, 105, 104", "60, 104, 104", "forward.held: is 104 bytes at most, but"),
    "a peak above its stage's": ("122, 30", "123, 30", "backward.held: is 123 bytes at most, but"),
    "an end below the stash": ("60, 105, 104", "60, 105, 99", "forward.held: ends with 99 bytes, but 100 are kept"),
    "too little for the gradient": (
        "122, 30",
        "122, 19",
        "backward.held: has less in step 1 than the input and the gr",
    ),
    "too little for the input": ("[50, 20]", "[50, 11]", "stages[1].curve.backward.held: has less in step 1 than"),
    "another time than its stage": (
        "cost = [1, 2]",
        "cost = [1, 3]",
        "sums to 4, but the forward of the stage costs 3;",
    ),
    "another number of steps": ("moved = [1, 2, 3]", "moved = [1, 2]", "cost, moved and held: have 3, 2 and 3 steps"),
    "more reads than steps": (
        "gradient_steps = 1",
        "gradient_steps = 3",
        "gradient_steps: is 3, but there are 2 steps",
    ),
    "less than nothing": ("held = [60, ", "held = [-60, ", "expected `int` >= 0"),
    "a fraction": ("held = [60, ", "held = [60.5, ", "expected `int`, got `float`"),
    "a quantity": ("held = [60, ", "held = ['60 B', ", "expected `int`, got `str`"),
    "gradients of other steps": (
        "held = [122, 30]",
        "held = [122, 30]\ngradients = [1]",
        "gradients: have 1 steps, but",
    ),
    "gradients that end": ("held = [122, 30]", "held = [122, 30]\ngradients = [9, 8]", "gradients: must not fall"),
    "gradients with another peak": (
        "held = [122, 30]",
        "held = [122, 30]\ngradients = [0, 93]",
        "backward.gradients: and held are 123 bytes at most, but the first backward of a step needs 122",
    ),
    "no steps": ("cost = [10, 0, 20]", "cost = []", "length >= 1"),
    "no backward": (
        "[stages.curve.backward]\ncost = [60, 0]",
        "[stages.curve.back]\ncost = [60, 0]",
        "did you mean 'backw",
    ),
    "too large a number": ("held = [60, ", f"held = [{2**61}, ", "expected `int` <= "),
}


@every_row("case", REFUSALS)
def test_a_curve_that_is_not_its_stage_s_is_refused(case: str, tmp_path: Path) -> None:
    given, changed, problem = REFUSALS[case]
    assert CURVED.count(given) == 1
    with pytest.raises(RequestError) as refusal:
        read(CURVED.replace(given, changed), tmp_path)
    assert problem in str(refusal.value)
    assert "curved.toml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_run_has_no_curves() -> None:
    """They change neither what is recorded nor what is computed; recipes change the stash without them."""
    shipped = presets.model("vit-b16")
    assert all(stage.curve for stage in shipped.stages)
    plain = shipped.without_curves()
    assert not any(stage.curve for stage in plain.stages)
    assert plain.without_curves() is plain
    both = [Request("multi-cdp", model=model, cluster="a100-nodes") for model in (shipped, plain)]
    assert both[0].to_builtins() == both[1].to_builtins()
    assert both[0].model == plain
    for recompute in ("none", "full"):
        recipe = shipped.training.__class__(recompute=recompute)
        assert apply_recipe(shipped, recipe, 4) == apply_recipe(plain, recipe, 4)

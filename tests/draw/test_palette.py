"""The claims of palette.py on its colours, measured: CIELAB distances for normal sight and for colour blindness."""

from itertools import combinations

import numpy as np
import pytest

from cdpsim.draw import palette
from cdpsim.program import Category, Content, Kind
from tests.helpers.colours import SIGHTS, linear, seen


def test_the_measure_is_cielab() -> None:
    """Against published values of sRGB's white, red and blue."""
    assert seen("#ffffff", "normal") == pytest.approx([100, 0, 0], abs=0.02)
    assert seen("#ff0000", "normal") == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    assert seen("#0000ff", "normal") == pytest.approx([32.30, 79.19, -107.86], abs=0.02)


@pytest.mark.parametrize("sight", SIGHTS)
def test_greys_stay_grey_for_everybody(sight: str) -> None:
    assert seen("#808080", sight) == pytest.approx(seen("#808080", "normal"), abs=0.1)


@pytest.mark.parametrize("sight", SIGHTS)
def test_any_two_colours_differ_by_33(sight: str) -> None:
    pairs = combinations(palette.COLOURS, 2)
    assert min(np.linalg.norm(seen(a, sight) - seen(b, sight)) for a, b in pairs) >= 33


def test_the_measure_finds_colours_that_are_alike_to_some() -> None:
    """Red and green that differ by far more than 33 for most people, and by less for the colour-blind."""
    red, green = "#c43b00", "#6a7a00"
    assert np.linalg.norm(seen(red, "normal") - seen(green, "normal")) > 60
    assert np.linalg.norm(seen(red, "deuteranopia") - seen(green, "deuteranopia")) < 33


def test_any_two_differ_by_7_in_lightness() -> None:
    lightness = sorted(seen(colour, "normal")[0] for colour in palette.COLOURS)
    assert min(np.diff(lightness)) >= 7


def test_colours_repeat_after_eight() -> None:
    assert len(set(palette.COLOURS)) == 8
    assert [palette.colour(k) for k in (0, 7, 8, 17)] == [palette.COLOURS[k] for k in (0, 7, 0, 1)]


@pytest.mark.parametrize(
    ("colours", "kinds"),
    [(palette.CATEGORY_COLOURS, Category), (palette.CONTENT_COLOURS, Content), (palette.KIND_COLOURS, Kind)],
)
def test_every_kind_has_its_own_colour(colours: dict[int, str], kinds: type[Category]) -> None:
    assert set(colours) == set(kinds)
    assert len(set(colours.values())) == len(kinds)
    assert set(colours.values()) <= set(palette.COLOURS)


@pytest.mark.parametrize("colour", palette.COLOURS)
def test_words_can_be_read_on_every_colour(colour: str) -> None:
    """WCAG asks for a contrast of 4.5."""
    light = palette.luminance(colour)
    assert light == pytest.approx(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour))
    contrast = {"#000000": (light + 0.05) / 0.05, "#ffffff": 1.05 / (light + 0.05)}
    assert contrast[palette.ink_on(colour)] >= 4.5

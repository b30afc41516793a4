"""The claims of palette.py on its colours, measured: CIELAB distances for normal sight and for colour blindness."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from cdpsim.draw import palette
from cdpsim.program import Category, Content, Kind

# Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB.
SIGHTS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# sRGB's primaries and white point D65.
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
WHITE = (0.95047, 1.0, 1.08883)


def linear(colour: str) -> NDArray[np.float64]:
    shares = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    ratio = np.array(TO_XYZ) @ rgb / np.array(WHITE)
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def seen(colour: str, sight: str) -> NDArray[np.float64]:
    return lab(np.clip(np.array(SIGHTS[sight]) @ linear(colour), 0, 1))


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

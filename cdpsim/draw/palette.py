"""Colours that remain distinct for colour-blind readers and in print: any two differ in lightness."""

from functools import cache

from cdpsim.draw.canvas import GREY, INK, PALE
from cdpsim.program import Category, Content, Kind

# Found by search: any two differ by at least 33 in CIELAB, for normal sight and for each of the three kinds of colour
# blindness, and by at least 7 in lightness alone. tests/draw/test_palette.py measures it.
COLOURS = ("#0d48f2", "#f7990d", "#0dad8f", "#712b63", "#b7bff7", "#d0342c", "#490d8c", "#f7d18b")
COLOURINGS = ("kind", "micro-batch", "stage")  # what the colours of tasks may mean
# In the order in which parts lie on each other, the lowest first: adjacent ones differ most.
CATEGORY_COLOURS = {
    Category.ACTIVATIONS: COLOURS[1],
    Category.PARAMETERS: COLOURS[0],
    Category.GRADIENTS: COLOURS[2],
    Category.OPTIMIZER: COLOURS[3],
    Category.COMMUNICATION: COLOURS[4],
}
CONTENT_COLOURS = {
    Content.PARAMETERS: COLOURS[0],
    Content.GRADIENT: COLOURS[2],
    Content.STATE: COLOURS[3],
    Content.NORM: COLOURS[5],
    Content.FETCHED: COLOURS[6],
    Content.ACTIVATION: COLOURS[1],
    Content.ACTIVATION_GRADIENT: COLOURS[7],
}
KIND_COLOURS = {Kind.F: COLOURS[0], Kind.B: COLOURS[1], Kind.W: COLOURS[2], Kind.U: COLOURS[3]}
NIGHT = "#14161a"
# Colours of a figure on black; all others stay, but for greys, which are turned over. The three were found by search:
# each has a contrast of 3 to the night and of 4.5 to white letters, and differs in CIELAB by 27 from all others, for
# normal sight and for each kind of colour blindness.
ON_NIGHT = {
    "#ffffff": NIGHT,
    INK: "#e8e8e8",
    GREY: "#a5a5a5",
    PALE: "#3a3c40",
    COLOURS[0]: "#3060c0",
    COLOURS[3]: "#706090",
    COLOURS[6]: "#a000ff",
}


def colour(number: int) -> str:
    """Return the colour of a micro-batch, a stage or a curve; colours repeat after eight."""
    return COLOURS[number % len(COLOURS)]


def tint(shade: str, share: float) -> str:
    """Return a colour with a share of white in it.

    >>> tint("#0d48f2", 0.5), tint("#0d48f2", 0)
    ('#86a4f8', '#0d48f2')
    """
    parts = (int(shade[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def on_night(colour: str) -> str:
    """Return a colour of a figure on white as one on black.

    >>> on_night("#6b6b6b"), on_night("#f7990d"), on_night("#808080")
    ('#a5a5a5', '#f7990d', '#828385')
    """
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    if colour in ON_NIGHT or max(parts) - min(parts) > 3:
        return ON_NIGHT.get(colour, colour)
    share = parts[1] / 255
    dark = (int(NIGHT[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part * share + 0xF0 * (1 - share)):02x}" for part in dark)


@cache
def ink_on(background: str) -> str:
    """Return black or white, whichever can be read on that colour.

    >>> ink_on("#f7990d"), ink_on("#490d8c")
    ('#000000', '#ffffff')
    """
    return "#000000" if luminance(background) > 0.18 else "#ffffff"


def luminance(background: str) -> float:
    """Return WCAG's relative luminance of a colour, from 0 for black to 1 for white.

    >>> round(luminance("#ffffff"), 6)
    1.0
    """
    shares = (int(background[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

"""Colours that remain distinct for colour-blind readers and in print: any two differ in lightness."""

from functools import cache

from cdpsim.program import Category, Content, Kind

# Found by search: any two differ by at least 33 in CIELAB, for normal sight and for each of the three kinds of colour
# blindness, and by at least 7 in lightness alone. tests/draw/test_palette.py measures it.
COLOURS = ("#0d48f2", "#f7990d", "#0dad8f", "#712b63", "#b7bff7", "#d0342c", "#490d8c", "#f7d18b")
COLOURINGS = ("kind", "micro-batch", "stage")  # what the colours of tasks may mean
# Where parts lie on each other, as in a sum of memory, adjacent ones differ most.
CATEGORY_COLOURS = {
    Category.PARAMETERS: COLOURS[0],
    Category.ACTIVATIONS: COLOURS[1],
    Category.GRADIENTS: COLOURS[2],
    Category.OPTIMIZER: COLOURS[3],
    Category.COMMUNICATION: COLOURS[4],
}
CONTENT_COLOURS = {
    Content.ACTIVATION: COLOURS[1],
    Content.ACTIVATION_GRADIENT: COLOURS[7],
    Content.GRADIENT: COLOURS[2],
    Content.PARAMETERS: COLOURS[0],
    Content.STATE: COLOURS[3],
    Content.NORM: COLOURS[5],
    Content.FETCHED: COLOURS[6],
}
KIND_COLOURS = {Kind.F: COLOURS[0], Kind.B: COLOURS[1], Kind.W: COLOURS[2], Kind.U: COLOURS[3]}


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

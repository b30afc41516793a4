"""The settings of a picture that its reader may choose: title, size, letters, legend, dark or light."""

import re
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeAlias

from cdpsim.errors import RequestError, choose, short_repr

LEAST_FONT = 6.0  # points: printed letters that can be read
_INCHES = {"": 1.0, "in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
_LENGTH = re.compile(r"(\d+\.?\d*|\.\d+) ?([a-z]*)", re.ASCII)
_RANGES = {"width": (1, 60), "height": (0.5, 60), "font-size": (4, 72), "dpi": (20, 1200)}
Length: TypeAlias = float | int | str


class PlaceSize(NamedTuple):
    """A place where a picture is shown: width and greatest height in inches, letters in points, dots per inch."""

    width: float
    most_height: float
    font_size: float
    dpi: int


PLACES = {
    "column": PlaceSize(3.35, 9.0, 7.0, 300),  # of a paper with two
    "page": PlaceSize(7.0, 9.0, 8.0, 300),  # the text of a page
    "slide": PlaceSize(12.0, 6.5, 16.0, 150),  # of 13.33 by 7.5 inches
}


@dataclass(frozen=True, kw_only=True)
class Look:
    """The look of a picture; the picture itself decides on a setting that is None.

    Lengths are in inches, or texts such as "8.5 cm"; `font_size` is that of its ordinary letters, in points. `place` is
    where it will be shown: "column", "page" or "slide". An empty `title` leaves it out.

    >>> Look(width="8.5 cm").inches_wide
    3.3464566929133857
    """

    title: str | None = None
    width: Length | None = None
    height: Length | None = None
    font_size: Length | None = None
    dpi: Length | None = None
    legend: bool = True
    dark: bool = False
    place: str | None = None

    def __post_init__(self) -> None:
        if self.title is not None and not isinstance(self.title, str):
            raise RequestError("title", f"{short_repr(self.title)} is no text; give one")
        for name in ("legend", "dark"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"{short_repr(getattr(self, name))} must be True or False")
        if self.place is not None:
            choose("for", self.place, PLACES)
            if self.width is not None:
                raise RequestError("width", f"is what --for {self.place} says; leave either out")
        for name in ("width", "height", "font_size", "dpi"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _checked(name.replace("_", "-"), value))

    @property
    def given(self) -> list[str]:
        """The names of the settings that differ from a picture's own, as options have them."""
        names = {"legend": "no-legend", "font_size": "font-size", "place": "for"}
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return [names.get(name, name) for name in changed]

    @property
    def inches_wide(self) -> float | None:
        """The width that was asked for."""
        return PLACES[self.place].width if self.place else _as_number(self.width)

    @property
    def letters(self) -> float | None:
        """The size of ordinary letters that was asked for."""
        return _as_number(self.font_size) or (PLACES[self.place].font_size if self.place else None)

    @property
    def least_letters(self) -> float:
        """The least size of letters; 0 if the picture is for no particular place."""
        return LEAST_FONT if self.place else 0.0

    @property
    def dots_per_inch(self) -> int:
        """The resolution of a .png."""
        return int(self.dpi or (PLACES[self.place].dpi if self.place else 150))

    def high(self, natural: float) -> float:
        """Return the height of a picture that by itself would be so high."""
        return _as_number(self.height) or (min(natural, PLACES[self.place].most_height) if self.place else natural)


AS_DRAWN = Look()


def _as_number(size: Length | None) -> float | None:
    """Return a size that was checked."""
    return None if size is None else float(size)


def _checked(name: str, value: Length) -> float:
    """Return a size as a number; refuse one that is none, or that no picture has."""
    units = _INCHES if name in ("width", "height") else {"": 1.0, **({"pt": 1.0} if name == "font-size" else {})}
    least, most = _RANGES[name]
    match = _LENGTH.fullmatch(str(value).strip())
    if not match or match[2] not in units or isinstance(value, bool):
        examples = "7, or '17.5 cm'" if units is _INCHES else f"{10 if name == 'font-size' else 300}"
        raise RequestError(name, f"{short_repr(value)} is no size; give for example {examples}")
    size = float(match[1]) * units[match[2]]
    if not least <= size <= most:
        unit = {"dpi": "", "font-size": " points"}.get(name, " inches")
        raise RequestError(name, f"{short_repr(value)} is not between {least:g} and {most:g}{unit}; give another")
    return int(size) if name == "dpi" else size

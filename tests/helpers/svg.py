"""Pictures read back from their SVG: shapes and texts, with their positions in points."""

import re
from typing import NamedTuple
from xml.etree import ElementTree

from matplotlib.figure import Figure

from cdpsim.draw import canvas

SVG = "{http://www.w3.org/2000/svg}"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


class Shape(NamedTuple):
    """A shape with an id: the points of its paths, y upwards, and the style of the first."""

    points: list[tuple[float, float]]
    style: str

    @property
    def left(self) -> float:
        return min(x for x, _ in self.points)

    @property
    def right(self) -> float:
        return max(x for x, _ in self.points)

    @property
    def lower(self) -> float:
        return min(y for _, y in self.points)

    @property
    def upper(self) -> float:
        return max(y for _, y in self.points)

    @property
    def middle(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.lower + self.upper) / 2

    @property
    def fill(self) -> str:
        return self.style.partition("fill: ")[2][:7]


class Words(NamedTuple):
    """A text, the position of the middle of its digits, and its size."""

    words: str
    x: float
    y: float
    size: float


class Picture(NamedTuple):
    """The size, the shapes and the texts of an SVG."""

    width: float
    height: float
    shapes: dict[str, Shape]
    texts: list[Words]

    def said(self) -> list[str]:
        """Return all texts."""
        return [text.words for text in self.texts]

    def named(self, pattern: str) -> dict[str, Shape]:
        """Return the shapes whose whole id matches a pattern."""
        return {name: shape for name, shape in self.shapes.items() if re.fullmatch(pattern, name)}


def drawn(figure: Figure) -> Picture:
    """Render a figure as SVG and read it back."""
    return read(canvas.rendered(figure, "picture.svg"))


def read(svg: bytes) -> Picture:
    """Read the shapes and the texts of an SVG."""
    root = ElementTree.fromstring(svg)
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    names = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(names) == len(set(names)), "ids are unique"
    shapes = {}
    for group in root.iter(f"{SVG}g"):
        paths = group.findall(f"{SVG}path")
        if paths and "id" in group.attrib:
            numbers = [float(number) for path in paths for number in _NUMBER.findall(path.attrib["d"])]
            points = [(x, height - y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
            shapes[group.attrib["id"]] = Shape(points, paths[0].attrib["style"])
    texts = []
    for text in root.iter(f"{SVG}text"):
        size = re.search(r"([\d.]+)px", text.attrib["style"])
        assert size is not None
        place = re.search(r"translate\((-?[\d.]+) (-?[\d.]+)\)", text.attrib.get("transform", ""))
        x, y = place.groups() if place else (text.attrib["x"], text.attrib["y"])
        middle = height - float(y) + 0.365 * float(size[1])
        texts.append(Words("".join(text.itertext()), float(x), middle, float(size[1])))
    return Picture(width, height, shapes, texts)

"""Artists of a figure, found by their ids, and the step functions among them; small runs to draw."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from cdpsim import Cluster, Model, Stage, Trace
from cdpsim.cluster import Devices, Link

PAPER = ["single-dp", "single-cdp", "multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "pp-cdp", "zero-dp", "zero-cdp"]
HOSTILE = '</script><b a="$x^"&\n\x07' + "x" * 10_000
BOX = Cluster(devices=(Devices(),), link=Link(latency=1e-5, bandwidth=3e9))


def model(n: int, name: str = "toy") -> Model:
    """Return a model of equal stages with times and bytes."""
    stage = Stage(
        forward=0.1, backward=0.3, activation=3 * 10**8, boundary=10**7, parameters=10**8, optimizer=2 * 10**8
    )
    return Model(name=name, stages=(stage,) * n)


def marked(figure: Figure, gid: str) -> list[Any]:
    """Return the artists of an id; the caller knows their type."""
    return figure.findobj(lambda artist: artist.get_gid() == gid)


def one(figure: Figure, gid: str) -> Any:
    """Return the only artist of an id."""
    (artist,) = marked(figure, gid)
    return artist


def words(figure: Figure) -> list[str]:
    """Return all texts of a figure."""
    from matplotlib.text import Text

    return [artist.get_text() for artist in figure.findobj(Text) if isinstance(artist, Text) and artist.get_text()]


def at(patch: StepPatch, time: float) -> float:
    """Return the height of a drawn step function over its baseline, 0 where it is left out."""
    values, edges, baseline = patch.get_data()
    column = int(np.searchsorted(edges, time, side="right")) - 1
    value = values[column] - (0 if baseline is None else np.asarray(baseline)[column])
    return 0.0 if np.isnan(value) else float(value)


def held_at(trace: Trace, time: float) -> dict[tuple[int, str], int]:
    """Return each device's memory of each category at a time: the last row until then, found row by row."""
    columns = (trace.memory[name].tolist() for name in ("device", "category", "time", "size"))
    found = {}
    for device, category, since, size in zip(*columns, strict=True):
        if since <= time:
            found[device, category] = size
    return found


def spot(artist: Artist) -> tuple[float, float]:
    """Return the position of a mark."""
    (x,), (y,) = artist.get_xdata(), artist.get_ydata()  # type: ignore[attr-defined]
    return x, y


def saved(trace: Trace, folder: Path) -> Trace:
    """Write a trace, and return it as it is read back."""
    from cdpsim import load

    trace.save(folder)
    return load(folder)

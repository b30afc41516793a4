"""Pictures as figures of matplotlib: of their own, or in the axes of another figure."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import cdpsim
from cdpsim import RequestError, simulate
from cdpsim.draw.plots import PICTURES

RUN = simulate("1f1b", 4, m=8, steps=2)
every_picture = pytest.mark.parametrize("what", PICTURES)


@every_picture
def test_a_figure_is_of_its_own(what: str) -> None:
    """Pyplot does not know it; a notebook shows it all the same."""
    before = dict(plt.rcParams)
    figure = RUN.plot(what)
    assert isinstance(figure, Figure)
    assert figure.axes[0].has_data()
    assert figure._repr_png_()[1:4] == b"PNG"  # type: ignore[attr-defined]
    assert not plt.get_fignums()
    assert dict(plt.rcParams) == before


@pytest.mark.parametrize("what", ["memory", "traffic"])
def test_sizes_in_slots_have_the_unit_of_the_tables(what: str) -> None:
    """`simulate` prints stage-activations; so do pictures of one run and of several, and those in other figures."""
    own = Figure().subplots()
    for figure in (RUN.plot(what), cdpsim.plot(what, [RUN, RUN]), RUN.plot(what, ax=own)):
        labels = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()]
        assert labels and all("stage-activations" in each for each in labels)


@every_picture
def test_into_axes_nothing_else_of_their_figure_changes(what: str) -> None:
    figure = Figure(figsize=(8, 3))
    left, right = figure.subplots(1, 2)
    assert RUN.plot(what, ax=left) is figure
    assert figure.axes == [left, right]
    assert left.has_data()
    assert not right.has_data()
    assert tuple(figure.get_size_inches()) == (8, 3)
    assert not figure.legends and not figure.texts


@every_picture
def test_a_look_is_for_all(what: str) -> None:
    figure = RUN.plot(what, width="12 cm", dark=True, title="own words")
    assert figure.get_figwidth() == pytest.approx(12 / 2.54)
    words = [str(artist.get_text()) for artist in figure.findobj() if isinstance(artist, Text)]
    assert any(text.startswith("own words") for text in words)


def test_curves_of_several_runs_share_axes() -> None:
    axes = Figure().subplots()
    for name in ("gpipe", "1f1b"):
        simulate(name, 4, m=8, steps=1).plot("memory", ax=axes, label=name, color="black")
    gpipe, other = axes.get_lines()
    assert [line.get_label() for line in (gpipe, other)] == ["gpipe", "1f1b"]
    assert np.max(np.asarray(gpipe.get_ydata())) > np.max(np.asarray(other.get_ydata()))


def test_schedules_and_runs_are_plotted_alike() -> None:
    """In slots, on one clock: backwards take two where some are split."""
    runs = [simulate(name, 4, m=8, model="unit-split") for name in ("1f1b", "zb-h1")]
    plots = cdpsim.plot("memory", ["1f1b", "zb-h1"], n=4, m=8), cdpsim.plot("memory", runs)
    first, second = (figure.axes[0].get_children() for figure in plots)
    assert len(first) == len(second) > 4
    assert plots[0]._repr_png_() == plots[1]._repr_png_()  # type: ignore[attr-defined]
    assert cdpsim.plot("timeline", "gpipe", n=2, colour="stage").axes


@pytest.mark.parametrize(
    ("number", "options"),
    [(1, {}), (1, {"n": 4, "steps": 1}), (2, {"n": 2, "slot": 9}), ("2", {}), (4, {"n": [4, 8], "by_layer": True})],
)
def test_figures_of_the_paper(number: int | str, options: dict[str, object]) -> None:
    assert isinstance(cdpsim.figure(number, **options), Figure)  # type: ignore[arg-type]


def test_refusals_name_what_there_is() -> None:
    with pytest.raises(RequestError, match=r"'breakeven'; known are timeline, memory, traffic, [a-z, ]*$"):
        RUN.plot("breakeven")
    with pytest.raises(RequestError, match=r"did you mean 'timeline'.*there are timeline, memory"):
        RUN.plot("timelin")
    with pytest.raises(RequestError, match="ax: 3 is no Axes"):
        RUN.plot("timeline", ax=3)  # type: ignore[arg-type]
    for setting in ({"title": 3}, {"dark": "yes"}, {"legend": 0}):
        with pytest.raises(RequestError, match=f"{next(iter(setting))}: .* (no text|must be True or False)"):
            RUN.plot("timeline", **setting)
    with pytest.raises(RequestError, match="known are 1, 2, 4"):
        cdpsim.figure(3)
    with pytest.raises(TypeError, match="'colur'; did you mean 'colour'"):
        RUN.plot("timeline", colur="stage")
    with pytest.raises(TypeError, match="unexpected keyword argument 'slot'"):
        cdpsim.figure(1, slot=3)
    with pytest.raises(RequestError, match="is of one run, not of 2"):
        cdpsim.plot("snapshot", ["gpipe", "1f1b"], n=2)

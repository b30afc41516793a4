"""Pictures on the command line: every form for every schedule, and one line for what cannot be drawn."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cdpsim import simulate
from cdpsim.errors import RequestError
from cdpsim.export.pictures import EXPORTS, PLOTS, TIMELINES, write_figure, write_plot, write_snapshot, write_timeline
from cdpsim.trace import load
from tests.conftest import Command
from tests.helpers.command_line import content, refuse
from tests.helpers.every_row import every_row

PLAYING = importlib.import_module("cdpsim.runs.playing")
BEGINNINGS = {
    ".png": b"\x89PNG",
    ".svg": b"<?xml",
    ".pdf": b"%PDF",
    ".pgf": b"%% In a LaTeX document",
    ".html": b"<!doctype html>",
    ".json": b"{",
}


@pytest.mark.parametrize("ending", TIMELINES)
def test_the_ending_picks_the_form(ending: str, command: Command, here: Path) -> None:
    assert command("timeline", "multi-cdp", "-n", 3, "-o", f"x{ending}") == (0, "", "")
    assert (here / f"x{ending}").read_bytes().lower().startswith(BEGINNINGS[ending].lower())


@pytest.mark.slow
@pytest.mark.parametrize("line", ["multi-cdp -n 3", "1f1b -m 4 --model long.toml --cluster box.toml"])
def test_every_kind_of_picture_is_written(line: str, command: Command, here: Path) -> None:
    """In slots, and with real costs; `tests/draw` looks at the artists of pictures, for schedules of every kind."""
    (here / "long.toml").write_text((here / "toy.toml").read_text().replace("repeat = 2", "repeat = 3"))
    asked = [*line.split(), "--steps", "2"]
    styles = ("gantt",) if "--model" in asked else ("paper", "gantt")  # the paper's is of slots
    for style in styles:
        assert command("timeline", *asked, "--style", style, "-o", f"{style}.svg") == (0, "", "")
    slot = "9 s" if "--model" in asked else 7
    assert command("snapshot", *asked, "--slot", slot, "-o", "snapshot.svg") == (0, "", "")
    for what in PLOTS:
        assert command("plot", what, *asked, "-o", f"{what}.svg") == (0, "", "")
    for path in here.glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert len(list(here.glob("*.svg"))) == len(styles) + 1 + len(PLOTS)


def test_a_snapshot_is_by_default_of_the_slot_in_which_most_is_held(command: Command, here: Path) -> None:
    """The middle of the second of three steps, which begins in slot 8: of CDP, all slots hold as much."""
    for slot, name in (([], "a.svg"), (["--slot", 12], "b.svg"), (["--slot", 9], "c.svg")):
        assert command("snapshot", "multi-cdp", "-n", 4, "--steps", 3, *slot, "-o", name) == (0, "", "")
    default, busiest, other = ((here / f"{name}.svg").read_bytes() for name in "abc")
    assert default == busiest != other


def test_several_schedules_share_a_clock(command: Command, here: Path) -> None:
    """In slots all backwards take as long as split ones; the paper's schedules are drawn as its Fig. 1."""
    done = command("timeline", "1f1b", "gpipe", "zb-h1", "-n", 3, "-o", "x.svg")
    assert (done.code, done.out) == (0, "")
    assert "a backward takes two slots" in done.err
    drawn = (here / "x.svg").read_text()
    assert all(f">{name}<" in drawn for name in ("1f1b", "gpipe", "zb-h1"))
    assert command("timeline", "multi-dp", "multi-cdp", "-n", 3, "-o", "y.svg") == (0, "", "")
    assert "synchronisation" in (here / "y.svg").read_text()
    assert command("timeline", "1f1b", "-n", 3, "--steps", 2, "-o", "z.svg") == (0, "", "")


def test_a_page_has_two_schedules(command: Command, here: Path) -> None:
    """In slots all backwards take as long as split ones."""
    done = command("timeline", "1f1b", "zb-h1", "-n", 3, "-m", 6, "-o", "x.html")
    assert (done.code, done.out) == (0, "")
    shown = (here / "x.html").read_text()
    assert "<title>1f1b, n = 3, m = 6" in shown
    facts = json.loads(re.findall(r'<script type="application/json" id="facts">(.*?)</script>', shown)[0])
    assert [(run["name"].split(",")[0], run["devices"]) for run in facts["runs"]] == [("1f1b", 3), ("zb-h1", 3)]
    for name in ("1f1b", "gpipe"):
        assert command("simulate", name, "-n", 3, "-o", name).code == 0
    assert command("timeline", "./1f1b", "./gpipe", "-o", "y.html") == (0, "", "")


def test_several_schedules_share_axes(command: Command, here: Path) -> None:
    for what in PLOTS:
        assert command("plot", what, "multi-dp", "multi-cdp", "-n", 4, "-o", f"{what}.svg") == (0, "", "")
        drawn = (here / f"{what}.svg").read_text()
        assert "multi-dp" in drawn
        assert "multi-cdp" in drawn


@pytest.mark.parametrize("number", ["1", "2"])
def test_the_paper_s_figures_come_out_of_one_command(number: str, command: Command, here: Path) -> None:
    assert command("figure", number, "-o", "x.svg") == (0, "", "")
    assert command("figure", number, "-n", 5, "-o", "y.svg") == (0, "", "")
    assert (here / "x.svg").read_bytes() != (here / "y.svg").read_bytes()


def test_a_folder_is_drawn_as_its_run(command: Command, here: Path) -> None:
    """A saved folder and a run by the command itself give the same bytes."""
    command("simulate", "pp-cdp", "-n", 3, "--rule", "cdp-v1", "-o", "traces")
    for ending in (".svg", ".html", ".json"):
        command("timeline", "traces", "-o", f"folder{ending}")
        command("timeline", "pp-cdp", "-n", 3, "--rule", "cdp-v1", "-o", f"run{ending}")
        assert (here / f"folder{ending}").read_bytes() == (here / f"run{ending}").read_bytes()
    assert command("plot", "memory", "traces", "multi-dp", "-n", 3, "-o", "m.svg").code == 2
    assert command("plot", "memory", "traces", "traces", "-o", "m.svg").code == 0


def test_a_changed_folder_is_drawn_as_far_as_its_columns_say(command: Command, here: Path) -> None:
    command("simulate", "multi-dp", "-n", 2, "--model", "two.toml", "-o", "traces")
    command("simulate", "multi-dp", "-n", 2, "-o", "traces")
    tasks = here / "traces" / "tasks.csv"
    tasks.write_text(tasks.read_text().replace("F,0,0,0,0,0,1,0,0", "F,0,0,0,0,0,1,0,1"))
    for out in ("a.svg", "b.html", "c.json"):
        assert command("timeline", "traces", "-o", out) == (0, "", "")
    assert command("timeline", "traces", "--style", "gantt", "-o", "g.svg") == (0, "", "")
    assert command("plot", "traffic", "traces", "-o", "d.svg") == (0, "", "")
    refuse(command, here, "timeline traces --dependencies -o x.svg", "dependencies")
    refuse(command, here, "plot versions traces -o x.svg", "versions")


def test_an_option_is_for_those_of_several_that_take_it(command: Command, here: Path) -> None:
    """One line names the schedules that do without the option; an option that none takes is refused."""
    done = command("plot", "memory", "multi-dp", "multi-cdp", "-n", 3, "--prefetch", 1, "-o", "a.svg")
    assert done == (0, "", "cdpsim: --prefetch: not taken by multi-dp\n")
    line = "plot memory multi-dp mp-dp -n 4 --prefetch 1 -o x.svg"
    refuse(command, here, line, "prefetch: multi-dp does not take this option")


REFUSALS = {
    "timeline multi-cdp -n 3": ["-o: is missing"],
    "timeline -n 3 -o x.svg": ["NAME|FILE: is missing"],
    "timeline multi-cdp -n 3 -o x.txt": ["x.txt: its form is unknown; end its name in .png, .svg, .pdf, .pgf, .html"],
    "timeline multi-cdp -n 3 -o x": ["x: its form is unknown"],
    "timeline multi-cdp -n 3 -o lost/x.svg": ["there is no folder 'lost'; create it first"],
    "timeline multi-cdp -n 3 -o toy.toml": ["its form is unknown"],
    "timeline multi-cdp -n 3 -o old.svg": ["old.svg: already exists; --force overwrites"],
    "timeline multi-cdp -n 3 -o old.html": ["old.html: already exists; --force overwrites"],
    "timeline multi-cdp -o x.svg": ["n: is missing"],
    "timeline multi-cpd -n 3 -o x.svg": ["did you mean 'multi-cdp'?"],
    "timeline multi-cdp -n 3 --style papre -o x.svg": ["unknown style 'papre'; did you mean 'paper'?"],
    "timeline multi-cdp -n 3 --style paper -o x.html": ["style: is of .png, .svg, .pdf or .pgf, not of .html"],
    "timeline multi-cdp -n 3 --dependencies -o x.json": ["dependencies: is of --style gantt in .png, .svg"],
    "timeline multi-cdp -n 3 --dependencies --style paper -o x.svg": [
        "dependencies: is of --style gantt in .png, .svg"
    ],
    "timeline multi-cdp -n 3 --colour stage -o x.json": ["colour: is of --style gantt in .png"],
    "timeline multi-cdp -n 3 --colour stage --style paper -o x.svg": ["colour: is of --style gantt in .png"],
    "timeline multi-cdp --model toy.toml --style paper -o x.svg": ["style: paper is of runs in which every task takes"],
    "timeline multi-cdp -n 3 --colour red -o x.svg": ["unknown colour 'red'; known are kind, micro-batch, stage"],
    "timeline single-cdp -n 3 --links -o x.svg": ["links: have no rows, as nothing is sent; leave them out"],
    "timeline multi-cdp -n 3 --links -o x.html": ["links: is of --style gantt in .png"],
    "timeline multi-cdp multi-dp -n 3 -o x.json": ["schedules: are 2, of which a .json has one; name fewer"],
    "timeline multi-cdp multi-dp mp-dp -n 3 -o x.html": ["schedules: are 3, of which a .html has two at most"],
    "timeline multi-cdp -n 32 -o x.svg": ["--style gantt, an .html file, or fewer --steps"],
    "timeline multi-cdp -n 200 -o x.svg": ["--style gantt", ".html"],
    "timeline multi-cdp -n 200 --style gantt -o x.svg": [".html"],
    "timeline ./lost -o x.svg": ["no such file"],
    "timeline empty -o x.svg": ["tasks.csv: no such file"],
    "timeline ./empty -n 3 -o x.svg": ["-n: is of a run, but './empty' is a folder with one; leave it out"],
    "timeline ./empty --slot-order forward-first -o x.svg": ["--slot-order: is of a run"],
    "timeline idle -o x.svg": ["trace: has no tasks"],
    "timeline idle -o x.html": ["trace: has no tasks"],
    "timeline idle -o x.json": ["trace: has no tasks"],
    "timeline idle --style gantt -o x.pdf": ["trace: has no tasks"],
    "snapshot idle --slot 0 -o x.pdf": ["trace: has no tasks"],
    "plot memory idle -o x.pdf": ["trace: has no tasks"],
    "plot traffic idle -o x.pdf": ["trace: has no tasks"],
    "figure 3 -o x.svg": ["unknown figure '3'; known are 1, 2, 4"],
    "figure 1 -o x.html": ["x.html: its form is unknown; end its name in .png, .svg, .pdf"],
    "figure 1 -n 0 -o x.svg": ["n=0 must be at least 1"],
    "figure 1 -n 500 -o x.svg": ["n"],
    "figure 1 --slot 3 -o x.svg": ["slot: figure 1 does not take this option"],
    "figure 2 --steps 3 -o x.svg": ["steps: figure 2 does not take this option"],
    "figure 2 --slot 1000 -o x.svg": ["slot"],
    "figure 2 -n 100 -o x.svg": ["n"],
    "snapshot multi-cdp -n 3 --slot -1 -o x.svg": ["slot=-1 must be at least 0"],
    "snapshot multi-cdp -n 3 --slot 1.5 -o x.svg": ["slot=1.5 must be a whole number"],
    "snapshot multi-cdp -n 3 --slot 22 -o x.svg": ["slot"],
    "snapshot mp-dp -n 60 --slot 2 -o x.svg": ["devices"],
    "snapshot multi-cdp --model toy.toml --slot fast -o x.svg": ["fast"],
    "plot memroy multi-dp -n 3 -o x.svg": ["unknown plot 'memroy'; did you mean 'memory'?"],
    "plot memory -n 3 -o x.svg": ["NAME|FILE: is missing"],
    "plot memory multi-dp lost -n 3 -o x.svg": ["unknown schedule 'lost'"],
    "plot memory multi-dp -n 3 -o x.json": ["its form is unknown; end its name in .png, .svg, .pdf"],
    "plot memory multi-dp -n 3 -o empty": ["its form is unknown"],
}


@pytest.fixture
def folders(here: Path) -> Path:
    """An empty folder, a trace in which nothing happens, and files that are there already."""
    (here / "empty").mkdir()
    simulate("multi-cdp", 2).save(here / "idle")
    for name in ("tasks", "messages", "memory"):
        path = here / "idle" / f"{name}.csv"
        path.write_text(path.read_text().splitlines()[0] + "\n")
    for name in ("old.svg", "old.html"):
        (here / name).write_text("old")
    return here


@pytest.mark.parametrize("line", REFUSALS)
def test_what_cannot_be_drawn_is_one_line(line: str, command: Command, folders: Path) -> None:
    refuse(command, folders, line, *REFUSALS[line])


def test_perfettos_other_form_is_refused_with_the_one_that_is_written(command: Command, folders: Path) -> None:
    refuse(command, folders, "timeline multi-cdp -n 2 -o x.pftrace", "x.pftrace", ".json, which opens in Perfetto")


@every_row("line", [line for line in REFUSALS if "its form" in REFUSALS[line][0] or "old" in line])
def test_what_need_not_run_is_refused_before_it_does(
    line: str, command: Command, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("ran")

    monkeypatch.setattr(PLAYING, "find_engine", lambda *_: run)
    refuse(command, folders, line, *REFUSALS[line])


def test_a_file_is_overwritten_when_asked(command: Command, folders: Path) -> None:
    assert command(*["timeline", "multi-cdp", "-n", "2", "-o", "old.svg", "--force"]).code == 0
    assert (folders / "old.svg").read_text() != "old"


HOSTILE = "</script><img src=x onerror=alert(1)>\"'`$x^2$\\n\n\r\t\x01\u2028\u202e{{}}<!--" + "x" * 10_000


def test_a_hostile_name_is_only_a_name(command: Command, here: Path) -> None:
    """A model file from elsewhere: every form is whole, and holds no markup of that file."""
    model = {"name": HOSTILE, "stages": [{"forward": 1.0, "backward": 2.0, "activation": 5}] * 2}
    (here / "hostile.json").write_text(json.dumps(model))
    asked = ["multi-cdp", "--model", "hostile.json"]
    for out in ("a.svg", "a.html", "a.json", "a.pdf", "a.png"):
        assert command("timeline", *asked, "-o", out) == (0, "", "")
    command("snapshot", *asked, "--slot", 1, "-o", "s.svg")
    command("plot", "memory", *asked, "-o", "m.svg")
    for path in here.glob("*.svg"):
        texts = "".join(ElementTree.parse(path).getroot().itertext())
        assert "x" * 100 not in texts
        assert "<img" not in path.read_text()
    assert "<img" not in (here / "a.html").read_text()
    assert len(re.findall("</script>", (here / "a.html").read_text(), re.IGNORECASE)) == len(
        re.findall("<script", (here / "a.html").read_text(), re.IGNORECASE)
    )
    json.loads((here / "a.json").read_text())


def test_the_same_request_gives_the_same_bytes(command: Command, here: Path) -> None:
    for ending in (".svg", ".png", ".pdf", ".html", ".json"):
        for name in "ab":
            command("timeline", "mp-cdp", "-n", 3, "-o", f"{name}{ending}")
        assert (here / f"a{ending}").read_bytes() == (here / f"b{ending}").read_bytes()


def test_python_draws_what_the_command_line_does(command: Command, here: Path) -> None:
    trace = simulate("zero-cdp", 3)
    write_timeline(trace, here / "a.svg")
    write_timeline(trace, here / "g.svg", style="gantt", dependencies=True)
    write_snapshot(trace, 8, here / "s.svg")
    write_plot("memory", [trace], here / "m.svg")
    write_figure(1, here / "f.svg")
    lines = {
        "a": "timeline zero-cdp -n 3",
        "g": "timeline zero-cdp -n 3 --dependencies",
        "s": "snapshot zero-cdp -n 3 --slot 8",
        "m": "plot memory zero-cdp -n 3",
        "f": "figure 1",
    }
    for name, line in lines.items():
        assert command(*line.split(), "-o", f"{name}2.svg") == (0, "", "")
        assert (here / f"{name}.svg").read_bytes() == (here / f"{name}2.svg").read_bytes()
    with pytest.raises(RequestError, match="already exists"):
        write_timeline(trace, here / "a.svg")


def test_an_interrupted_picture_leaves_nothing(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cdpsim.draw import canvas

    def stop(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(canvas, "rendered", stop)
    before = content(here)
    assert command(*["timeline", "multi-cdp", "-n", "2", "-o", "x.svg"]).code == 130
    assert content(here) == before


def test_exports_do_not_need_a_run(here: Path) -> None:
    """Loaded traces are written, too."""
    simulate("multi-dp", 2).save(here / "traces")
    loaded = load(here / "traces")
    for ending in EXPORTS:
        write_timeline(loaded, here / f"x{ending}")
        assert (here / f"x{ending}").stat().st_size > 1000


# A user's own settings of matplotlib

OWN_STYLE = """font.size: 23
font.family: serif
text.usetex: True
lines.linewidth: 7
patch.linewidth: 5
hatch.linewidth: 6
axes.facecolor: red
figure.facecolor: green
savefig.facecolor: blue
savefig.bbox: tight
savefig.dpi: 40
figure.dpi: 33
figure.autolayout: True
axes.prop_cycle: cycler('color', ['y'])
axes.formatter.use_locale: True
legend.frameon: False
path.simplify: False
svg.fonttype: path
svg.hashsalt: other
pdf.compression: 0
pdf.fonttype: 3
"""
KINDS = {
    "timeline multi-cdp -n 2 --style paper": ".svg .png .pdf",
    "timeline multi-cdp -n 2 --style gantt --dependencies": ".svg",
    "timeline multi-dp --model toy.toml --cluster box.toml": ".svg",
    "snapshot mp-cdp -n 2 --slot 3": ".svg .png",
    "figure 1 -n 2": ".svg",
    "figure 2 -n 2": ".svg",
    "figure 4 -n 2": ".svg",
    "plot memory multi-cdp -n 2": ".svg",
    "plot memory multi-cdp multi-dp -n 2": ".svg",
    "plot traffic multi-cdp -n 2": ".svg",
    "plot versions pp-cdp -n 2": ".svg",
    "plot steps multi-cdp -n 2": ".svg",
    "compare multi-cdp multi-dp -n 2": ".svg",
    "compare multi-cdp multi-dp -n 2 --style points": ".svg",
    "breakeven multi-dp --model toy.toml --cluster box.toml": ".svg",
}


def _style(folder: Path) -> Any:
    """Return what matplotlib makes of a file of settings."""
    import matplotlib as mpl

    (folder / "matplotlibrc").write_text(OWN_STYLE)
    style = mpl.rc_params_from_file(folder / "matplotlibrc", use_default_template=False)
    assert len(style) == len(OWN_STYLE.splitlines())
    return style


@pytest.mark.parametrize("line", KINDS)
def test_no_setting_of_the_user_changes_a_picture(line: str, command: Command, here: Path) -> None:
    import matplotlib as mpl

    style = _style(here)
    for form in KINDS[line].split():
        assert command(*line.split(), "-o", f"a{form}").code == 0
        with mpl.rc_context(style):
            before = {name: mpl.rcParams[name] for name in mpl.rcParams}
            assert command(*line.split(), "-o", f"b{form}").code == 0
            assert {name: mpl.rcParams[name] for name in mpl.rcParams} == before, "the user's settings are no more"
        assert (here / f"a{form}").read_bytes() == (here / f"b{form}").read_bytes(), form


@pytest.mark.slow
def test_no_file_of_settings_and_no_backend_changes_a_picture(command: Command, here: Path) -> None:
    """In a process of its own, where matplotlib reads them as it is imported."""
    _style(here)
    line = ["timeline", "multi-cdp", "-n", "2", "-o"]
    assert command(*line, "a.svg").code == 0
    environment = os.environ | {"MATPLOTLIBRC": str(here / "matplotlibrc"), "MPLBACKEND": "no-such-backend"}
    done = subprocess.run(
        [sys.executable, "-m", "cdpsim", *line, "b.svg"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (here / "a.svg").read_bytes() == (here / "b.svg").read_bytes()
    (here / "matplotlibrc").write_bytes(b"font.size: \xff")
    done = subprocess.run(
        [sys.executable, "-m", "cdpsim", *line, "c.svg"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("cdpsim: error: matplotlibrc: is not UTF-8 text (byte 11); save it as UTF-8\n")
    assert not (here / "c.svg").exists()

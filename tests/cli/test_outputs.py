"""Every command that writes: an output that is there is refused before a program is made, an input not overwritten."""

import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conftest import Command

PLAYING = sys.modules["cdpsim.runs.playing"]
REAL = "--model toy.toml --cluster box.toml"
# Each writing command, but for its -o; what it writes; whether it takes the options of a run, and of real costs.
WRITING = {
    "simulate multi-cdp -n 3": ("old", True),
    f"simulate multi-cdp {REAL}": ("old", True),
    "simulate multi-cdp --model toy.toml --jitter uniform:0.1 --runs 3": ("old", True),
    "import-schedule mine.csv": ("old", True),
    "timeline multi-cdp -n 3": ("old.svg", True),
    f"timeline multi-cdp {REAL} --style gantt": ("old.pdf", True),
    "timeline 1f1b -n 3": ("old.csv", True),
    "timeline mp-cdp -n 3": ("old.html", True),
    "timeline pp-cdp -n 3": ("old.json", True),
    "snapshot multi-cdp -n 3 --slot 4": ("old.svg", True),
    "plot memory multi-cdp pp-cdp -n 3": ("old.svg", True),
    "plot traffic multi-cdp -n 3": ("old.svg", True),
    "plot versions multi-cdp -n 3": ("old.svg", True),
    f"plot steps multi-cdp {REAL} --jitter uniform:0.1 --runs 3": ("old.svg", True),
    "compare multi-cdp pp-cdp -n 3": ("old.svg", True),
    "compare -n 3": ("old.png", True),
    f"breakeven multi-cdp {REAL}": ("old.svg", True),
    "rounds acco -n 1 --replicas 2": ("old.csv", True),
    "plan --devices 2 --batch 4": ("old.csv", False),
    "published --only sc21-table-2": ("old.csv", False),
    "figure 1": ("old.svg", False),
    "figure 2": ("old.svg", False),
    "figure 4": ("old.svg", False),
}
OLDER = "0,0,0\n0,0,0\n0,0,0\n"  # a rule
# Mistakes of requests in the order in which they are found: in words, in numbers, in files.
OF_RUNS = [
    *("--engine warp", "--steps x", "--seed -1", "--collective telepathy", "--contention perhaps", "--max-memory 1"),
    *("--model missing.toml", "--cluster missing.toml", "--rule missing.csv", "--jitter often:1", "--slow 1"),
    *("--optimizer tiger", "--no-such-option"),
]
OF_ONE = {
    "simulate": ["--runs 0"],
    "snapshot": ["--slot 3x", "--slot -2"],
    "plot": ["--runs x"],
    "compare": ["--format xml", "--sort beauty", "--columns x", "--style cubist", "--within much", "nonsense"],
    "breakeven": ["--format xml", "--share 0", "--over rainbow", "-n 3 3", "nonsense"],
    "import-schedule": ["--format xml"],
    "published": ["--format xml", "--only sc21"],
    "timeline": ["--style cubist", "--dependencies --style paper"],
    "figure": ["-n 0", "--axis x", "--steps x", "--slot x", "--contents x", "--slot 99", "-n 99999999", "-n 3 3"],
}
MISTAKES = [
    (line, mistake)
    for line, (_, runs) in WRITING.items()
    for mistake in (*OF_RUNS * runs, *OF_ONE.get(line.split()[0], ()))
]


def _never(*_: object, **__: object) -> NoReturn:
    raise AssertionError("it ran")


@pytest.fixture
def place(toy: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all outputs there already."""
    monkeypatch.chdir(toy)
    assert command("timeline", "1f1b", "-n", 3, "-o", "mine.csv").code == 0
    (toy / "old").mkdir()
    (toy / "old/summary.json").write_text("precious")
    for form in ("svg", "png", "pdf", "html", "json", "csv"):
        (toy / f"old.{form}").write_text("precious")
    return toy


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("line", [line for line in WRITING if not line.startswith("figure")])
def test_what_is_there_is_refused_before_anything_runs(
    line: str, command: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _contents(place)
    monkeypatch.setattr(PLAYING, "find_engine", lambda *_: _never)
    for module in (PLAYING, sys.modules["cdpsim.runs.assembling"]):
        monkeypatch.setattr(module, "assemble_one", _never)
    code, out, err = command(*line.split(), "-o", WRITING[line][0])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.endswith("already exists; --force overwrites\n")
    assert _contents(place) == before


@pytest.mark.slow
@pytest.mark.parametrize("runs", [True, False], ids=["runs", "figures"])
def test_each_other_mistake_is_named_first(
    runs: bool, command: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the words that it has where no output is in its way; a figure takes no long run, and may be made."""
    before = _contents(place)
    if runs:
        monkeypatch.setattr(PLAYING, "find_engine", lambda *_: _never)
    for line, mistake in [(line, mistake) for line, mistake in MISTAKES if WRITING[line][1] == runs]:
        output = WRITING[line][0]
        words = [*line.split(), *mistake.split()]
        code, out, err = command(*words, "-o", output)
        assert (code, out) == (2, ""), (words, err)
        assert "already exists" not in err, words
        assert (code, out, err) == command(*words, "-o", output.replace("old", "new")), words
    assert _contents(place) == before


def test_what_is_there_is_refused_where_the_other_arguments_are_right(command: Command, toy: Path) -> None:
    """A figure of the paper takes no long run: it is drawn, and not written."""
    for number in (1, 2, 4):
        (toy / "old.svg").write_text("precious")
        code, _, err = command("figure", number, "-o", toy / "old.svg")
        assert (code, err) == (2, f"cdpsim: error: {toy / 'old.svg'}: already exists; --force overwrites\n")
        assert (toy / "old.svg").read_text() == "precious"


OVERWRITING = {
    "timeline multi-cdp --model model.json -o model.json": "model.json",
    "timeline multi-cdp --model model.json -o hard.json": "hard.json",
    "timeline multi-cdp --model soft.json -o model.json": "model.json",
    "timeline multi-cdp --model model.json --cluster box.json -o box.json": "box.json",
    "timeline mine.csv -o mine.csv": "mine.csv",
    "timeline pp-cdp -n 3 --rule rule.svg -o rule.svg": "rule.svg",
    "timeline traces -o traces/summary.json": "traces/summary.json",
    "snapshot pp-cdp -n 3 --rule rule.svg --slot 2 -o rule.svg": "rule.svg",
    "plot memory multi-cdp pp-cdp -n 3 --rule rule.svg -o rule.svg": "rule.svg",
    "compare pp-cdp -n 3 --rule rule.svg -o rule.svg": "rule.svg",
    "breakeven pp-cdp --model model.json --cluster box.json --rule rule.svg -o rule.svg": "rule.svg",
    "simulate pp-cdp -n 3 --rule out/tasks.csv -o out": "out/tasks.csv",
    "simulate out/messages.csv -o out": "out/messages.csv",
    "import-schedule out/messages.csv -o out": "out/messages.csv",
}


@pytest.fixture
def inputs(toy: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of inputs with names that outputs may have."""
    from cdpsim.cluster import Cluster
    from cdpsim.model import Model

    monkeypatch.chdir(toy)
    Model.load("toy.toml").save("model.json")
    Cluster.load("box.toml").save("box.json")
    Path("hard.json").hardlink_to("model.json")
    Path("soft.json").symlink_to("model.json")
    Path("rule.svg").write_text(OLDER)
    assert command("timeline", "1f1b", "-n", 3, "-o", "mine.csv").code == 0
    assert command("simulate", "mp-cdp", "-n", 3, "-o", "traces").code == 0
    Path("out").mkdir()
    Path("out/tasks.csv").write_text(OLDER)
    Path("out/messages.csv").write_text(Path("mine.csv").read_text())
    return toy


@pytest.mark.parametrize("line", OVERWRITING)
def test_no_command_overwrites_what_it_has_read(
    line: str, command: Command, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even by force; and it says so before it runs."""
    before = _contents(inputs)
    monkeypatch.setattr(PLAYING, "find_engine", lambda *_: _never)
    code, out, err = command(*line.split(), "--force")
    assert (code, out) == (2, "")
    assert err == f"cdpsim: error: {OVERWRITING[line]}: is read by this command; write to another name\n"
    assert _contents(inputs) == before


def test_what_one_command_has_read_another_may_overwrite(command: Command, toy: Path) -> None:
    (toy / "u.svg").write_text(OLDER)
    assert command("table1", "-n", 3).code == 0
    assert command("timeline", "pp-cdp", "-n", 3, "--rule", toy / "u.svg", "-o", toy / "v.svg").code == 0
    assert command("timeline", "pp-cdp", "-n", 3, "-o", toy / "u.svg", "--force").code == 0
    assert "<svg" in (toy / "u.svg").read_text()

"""The lowest versions: bounds of pyproject.toml are those that are tried, by ten commands, for one commit in ten."""

import re
import tomllib
from pathlib import Path

import pytest

from tests import lowest

PROJECT = Path(__file__).parent.parent


def test_every_bound_is_a_version_that_is_tried() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {line.partition(";")[0].replace(">=", "==") for line in project["dependencies"]}
    lines = (PROJECT / "lowest.txt").read_text(encoding="utf-8").splitlines()
    assert bounds == {line for line in lines if not line.startswith("#")}
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", bound) for bound in bounds)


def test_older_versions_than_fit_numpy_2_are_refused() -> None:
    """matplotlib 3.8.4 is the first that is built for numpy 2, as its release notes say."""
    lines = set((PROJECT / "lowest.txt").read_text(encoding="utf-8").splitlines())
    assert lines >= {"numpy==2", "matplotlib==3.8.4", "msgspec==0.18.6", "simpy==4.1"}


@pytest.mark.slow
@pytest.mark.parametrize("line", lowest.COMMANDS)
def test_each_command_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the versions of this environment."""
    from cdpsim.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 0
    assert len(lowest.COMMANDS) == 10


def test_one_commit_in_ten_is_drawn() -> None:
    """Of 1,000 words 100, give or take three times the root of 1,000 x 0.1 x 0.9."""
    assert 100 - 29 < sum(lowest.is_drawn(f"commit {k}") for k in range(1000)) < 100 + 29


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command lines that are run, each from its program's name on."""
    lines: list[str] = []

    def note(program: str | Path, *words: str | Path, cwd: Path) -> None:
        lines.append(" ".join([Path(program).name, *map(str, words)]))

    monkeypatch.setattr(lowest, "run", note)
    return lines


def drawn_word(wanted: bool) -> str:
    return next(word for word in map(str, range(1000)) if lowest.is_drawn(word) == wanted)


def test_a_commit_that_is_not_drawn_installs_nothing(
    called: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lowest, "commit", lambda project: drawn_word(False))
    lowest.main(["--drawn"])
    assert called == []
    assert "make lowest tries them" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "wanted"), [(["--drawn"], True), ([], False)])
def test_others_run_all_commands_with_them(
    called: list[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], wanted: bool
) -> None:
    """So does `make lowest`, whatever the commit."""
    monkeypatch.setattr(lowest, "commit", lambda project: drawn_word(wanted))
    lowest.main(arguments)
    assert f" -c {PROJECT / 'lowest.txt'} -e {PROJECT}" in called[1]
    assert called[3:] == [f"cdpsim {line}" for line in lowest.COMMANDS]


def test_ci_asks_the_draw() -> None:
    assert "-m tests.lowest --drawn\n" in (PROJECT / ".ci" / "run").read_text(encoding="utf-8")

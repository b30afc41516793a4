"""The console sessions of pages print what they say; the README's Python is doctested where it stands."""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cdpsim.cli import main

REPOSITORY = Path(__file__).parent.parent
PAGES = "README.md", "docs/reference/command-line.md"
README, COMMAND_LINE = ((REPOSITORY / page).read_text("utf-8") for page in PAGES)


def sessions(page: str) -> list[list[tuple[str, str]]]:
    """Commands and outputs of each console block."""
    blocks = re.findall(r"^```console\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    return [re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE) for block in blocks]


def played(command: str, code: int) -> tuple[int, str]:
    """Return the exit code and the output of one of the commands that pages use, but what the caller captures.

    `code` is that of the command before.
    """
    words = shlex.split(command)
    if words[0] == "cdpsim":
        return main(words[1:]), ""
    if words[0] == "head":
        return 0, "".join(Path(words[3]).read_text(encoding="utf-8").splitlines(keepends=True)[: int(words[2])])
    if words[0] == "ls":
        return 0, "".join(f"{name}\n" for name in sorted(file.name for file in Path(words[1]).iterdir()))
    assert command == "echo $?"
    return 0, f"{code}\n"


@pytest.mark.parametrize("session", [*sessions(README), *sessions(COMMAND_LINE)])
def test_a_session_prints_what_its_page_says(
    session: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word; where a command fails, the page shows its one line."""
    monkeypatch.chdir(tmp_path)
    code = 0
    for command, expected in session:
        code, printed = played(command, code)
        captured = capsys.readouterr()
        assert printed + captured.out + captured.err == expected
        assert code == 0 or expected.startswith("cdpsim: ")


def test_the_readme_s_model_cluster_and_experiment_load(tmp_path: Path) -> None:
    """And run together."""
    bodies = re.findall(r"^```toml\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    files = [tmp_path / name for name in ("toy.toml", "box.toml", "experiment.toml")]
    for file, body in zip(files, bodies, strict=True):
        file.write_text(body, encoding="utf-8")
    command = ["simulate", "multi-cdp", "--model", str(files[0]), "--cluster", str(files[1])]
    assert main([*command, "-o", str(tmp_path / "traces")]) == 0
    assert main(["simulate", str(files[2]), "-o", str(tmp_path / "experiment")]) == 0


def test_its_python_is_one_script(tmp_path: Path) -> None:
    """The examples from top to bottom, in a process of their own."""
    script = tmp_path / "readme.py"
    script.write_text(doctest.script_from_examples(README), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "F1.1/" in done.stdout  # what it prints, the timetable at its end


def test_its_commands_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stand indented; of many runs, a few."""
    monkeypatch.chdir(tmp_path)
    names = ["toy.toml", "box.toml", "experiment.toml"]
    for name, body in zip(names, re.findall(r"^```toml\n(.*?)^```", README, re.MULTILINE | re.DOTALL), strict=True):
        (tmp_path / name).write_text(body, encoding="utf-8")
    commands = re.findall(r"^    cdpsim (.*)$", README, flags=re.MULTILINE)
    assert len(commands) > 8
    for command in commands:
        writes = "-o" in shlex.split(command)
        assert main([*shlex.split(command.replace("--runs 1000", "--runs 9")), *["--force"] * writes]) == 0, command


def test_exactly_two_set_up_commands_come_first() -> None:
    """Each is one line in its own `sh` block, and they are the first two of the file."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks[:2]] == ["sh", "sh"]
    assert "sh" not in [language for language, _ in blocks[2:]]
    assert all(body.count("\n") == 1 for _, body in blocks[:2])

"""The README's console sessions print what it says they print; its Python is doctested where it stands."""

import re
import shlex
from pathlib import Path

import pytest

from cdpsim.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def sessions() -> list[list[tuple[str, str]]]:
    """Commands and outputs of each console block."""
    blocks = re.findall(r"^```console\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return [re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE) for block in blocks]


def played(command: str) -> str | None:
    """Return the output of the two commands that the README uses; None where the caller captures it."""
    words = shlex.split(command)
    if words[0] == "head":
        return "".join(Path(words[3]).read_text(encoding="utf-8").splitlines(keepends=True)[: int(words[2])])
    assert words[0] == "cdpsim"
    assert main(words[1:]) == 0
    return None


@pytest.mark.parametrize("session", sessions())
def test_a_session_prints_what_the_readme_says(
    session: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word."""
    monkeypatch.chdir(tmp_path)
    for command, expected in session:
        printed = played(command)
        assert (capsys.readouterr().out if printed is None else printed) == expected


def test_the_readme_s_model_cluster_and_experiment_load(tmp_path: Path) -> None:
    """And run together."""
    bodies = re.findall(r"^```toml\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    files = [tmp_path / name for name in ("toy.toml", "box.toml", "experiment.toml")]
    for file, body in zip(files, bodies, strict=True):
        file.write_text(body, encoding="utf-8")
    command = ["simulate", "multi-cdp", "--model", str(files[0]), "--cluster", str(files[1])]
    assert main([*command, "-o", str(tmp_path / "traces")]) == 0
    assert main(["simulate", str(files[2]), "-o", str(tmp_path / "experiment")]) == 0


def test_exactly_two_set_up_commands_come_first() -> None:
    """Each is one line in its own `sh` block, and they are the first two of the file."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks[:2]] == ["sh", "sh"]
    assert "sh" not in [language for language, _ in blocks[2:]]
    assert all(body.count("\n") == 1 for _, body in blocks[:2])

"""The README: its files load, its commands run. test_docs.py plays its sessions; pytest runs its examples."""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cdpsim.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


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

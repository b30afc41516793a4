"""Tab completes command lines, in a shell at a terminal: what is typed becomes what the shell then runs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cdpsim import cli
from cdpsim.presets import clusters, models
from cdpsim.schedules import NAMES
from tests.conftest import Command

pty = pytest.importorskip("pty", reason="needs terminals", exc_type=ImportError)

_STARTS = {"bash": ("bash", "--norc", "--noprofile", "-i"), "zsh": ("zsh", "-f", "-i")}
_SHOW_WORDS = """cdpsim() { printf '<%s>' "$@"; echo; }"""  # so that it runs nothing
_TYPED = {
    "ti\t": "timeline",
    "simulate zb-h1 --eng\tfas\t": "simulate zb-h1 --engine fast",
    "simulate pp-c\t": "simulate pp-cdp",
    "plot mem\t1f\t--mod\tresn\t": "plot memory 1f1b --model resnet50",
    "plot memory 1f1b -n 4 --dark zbv --model=resn\t": "plot memory 1f1b -n 4 --dark zbv --model=resnet50",
    "plot memory 1f1b --model = resn\t": "plot memory 1f1b --model = resnet50",
    "timeline 1f1b -o pic\t--for sl\t": "timeline 1f1b -o picture.svg --for slide",
    "timeline 1f1b --model own\t--no-l\t": "timeline 1f1b --model own.toml --no-legend",
    "simulate folder/inn\t": "simulate folder/inner.toml",
    "simulate 1f1b -o fo\tnew": "simulate 1f1b -o folder/new",
    "simulate 1f1b --rule cdp-v2 --contention que\t--opt\tadaf\t": (
        "simulate 1f1b --rule cdp-v2 --contention queue --optimizer adafactor"
    ),
    "simulate 1f1b --steps 1\t": "simulate 1f1b --steps 1",  # a number is not completed to a schedule's name
    "compare --recompute none,f\t--sort per\t": "compare --recompute none,full --sort per-device",
    "compare 1f1b gpip\t--columns bubble,makes\t": "compare 1f1b gpipe --columns bubble,makespan",
    "clusters pcie\t--form\tj\t": "clusters pcie-box --format json",
    "superpose vit\t--contents gr\t": "superpose vit-b16 --contents gradients",
    "simulate 1f1b --unknown\t": "simulate 1f1b --unknown",
    "models gpt2 > pic\t; cat picture.svg": "models gpt2",
}


def typed(shell: str, script: str, lines: list[str], folder: Path) -> list[str]:
    """Type lines into a shell at a terminal, where the script is sourced; return what it prints in angle brackets."""
    (folder / "script").write_text(script)
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "ZDOTDIR": str(folder), "HISTFILE": ""}
    with subprocess.Popen(
        _STARTS[shell], stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment, start_new_session=True
    ):
        os.close(slave)
        os.write(master, "\n".join([f"source ./script; {_SHOW_WORDS}", *lines, "exit\n"]).encode())
        printed = b""
        try:
            while part := os.read(master, 1 << 16):
                printed += part
        except OSError:  # the terminal has been closed
            pass
        os.close(master)
    return re.findall(r"^(<.*>)\r*$", printed.decode(), re.MULTILINE)


@pytest.mark.parametrize("shell", _STARTS)
def test_tab_completes_what_is_typed(shell: str, command: Command, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    (tmp_path / "folder").mkdir()
    for name in ("picture.svg", "own.toml", "folder/inner.toml"):
        (tmp_path / name).touch()
    lines = [f"cdpsim {line}" for line in _TYPED]
    words = [f"<{'><'.join(line.split())}>" for line in _TYPED.values()]
    assert typed(shell, command("completion", shell).out, lines, tmp_path) == words


def completions(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    ask = f'COMP_WORDS=("$@"); COMP_CWORD={len(words) - 1}; _cdpsim; printf "%s\\n" "${{COMPREPLY[@]}}"'
    outcome = subprocess.run(["bash", "-c", script + ask, "bash", *words], capture_output=True, text=True, check=True)
    assert outcome.stderr == ""
    return outcome.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_every_name_and_option_is_offered(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that help shows, for each command."""
    monkeypatch.chdir(tmp_path)
    script = command("completion", "bash").out
    assert completions(script, "cdpsim", "") == [each.name for each in cli.COMMANDS]
    for each in cli.COMMANDS:
        shown = re.findall(r"^  (-.*?)(?:  |$)", command(each.name, "--help-all").out, re.MULTILINE)
        flags = [flag for line in shown for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", line)]
        assert sorted(completions(script, "cdpsim", each.name, "-")) == sorted(flags), each.name
    assert completions(script, "cdpsim", "simulate", "") == [*NAMES]
    assert completions(script, "cdpsim", "timeline", "1f1b", "") == [*NAMES]
    assert completions(script, "cdpsim", "simulate", "1f1b", "--model", "") == ["unit", "unit-split", *models()]
    assert completions(script, "cdpsim", "simulate", "1f1b", "--cluster", "") == ["unit", *clusters()]
    assert completions(script, "cdpsim", "plot", "") == ["memory", "traffic", "versions", "steps"]
    assert completions(script, "cdpsim", "simulate", "1f1b", "-n", "") == []


def test_another_shell_is_refused(command: Command) -> None:
    outcome = command("completion", "fish")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "cdpsim: error: shell: unknown shell 'fish'; known are bash, zsh\n"

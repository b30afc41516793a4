"""Help teaches on one screen, has all of it under --help-all, and its examples run; -q and -v say less and more."""

import re
import shlex
from pathlib import Path

import pytest

from cdpsim import SCHEDULES, cli
from cdpsim.schedules.shape import Shape
from cdpsim.schedules.table import write_actions
from tests.conftest import Command

COMMANDS = [command.name for command in cli.COMMANDS]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_screen_and_teaches(name: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what the command answers, shows examples to copy, and names all options; all of these lead further."""
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = command(*name.split(), "--help")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 100
    assert re.search(r"^examples:\n  cdpsim ", out, re.MULTILINE)
    assert "----" not in out
    for option in re.findall(r"^  (-.*?)  ", command(*name.split(), "--help-all").out, re.MULTILINE):
        flag = re.findall(r"--?[a-z-]+", option)[0]
        assert re.search(rf"(^|\s){flag}\b", out) or re.search(r"-h|-q|-v|--help-all", option), option
    for example in re.findall(r"^  cdpsim (\S*)", out, re.MULTILINE):
        assert example in COMMANDS


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_all_help_has_all_of_the_short_one(name: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the names of the options that it does not explain."""
    monkeypatch.setenv("COLUMNS", "90")
    everything = command(*name.split(), "--help-all").out
    assert max(map(len, everything.splitlines())) <= 90
    short = re.split("more options|--help-all explains", command(*name.split(), "--help").out)[0]
    assert len(everything.splitlines()) > len(short.splitlines())
    everything = "".join(everything.split())
    for text in re.split(r"\n(?=\n|  -)", short):
        assert "".join(text.split()) in everything


def test_the_bare_command_prints_help(command: Command) -> None:
    assert command() == command("--help")
    assert command().code == 0
    assert all(re.search(rf"^    {name}\b", command().out, re.MULTILINE) for name in COMMANDS)


def test_every_example_in_help_runs(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files that `simulate --help-all` shows, every example that it and the others show is served."""
    monkeypatch.setenv("COLUMNS", "90")
    shown = command("simulate", "--help-all").out
    columns = [re.split(r" {8,}", line.strip()) for line in shown.partition("box.toml\n  [[")[2].splitlines()]
    (here / "toy.toml").write_text("\n".join(["[[" + columns[0][0], *(line[0] for line in columns[1:])]))
    (here / "box.toml").write_text("\n".join(line[1] for line in columns if len(line) == 2))
    experiment = shown.partition("any option by its name:\n")[2].partition("Other commands")[0]
    (here / "experiment.toml").write_text(experiment)
    sweep = command("sweep", "--help-all").out.partition("The file:\n")[2].partition("\n\n")[0]
    (here / "sweep.toml").write_text(sweep)
    shown += "".join(command(name, "--help-all").out for name in COMMANDS if name != "simulate")
    examples = re.findall(r"^  cdpsim ([^>\n]*?)(?:  .*| >.*)?$", shown, re.MULTILINE)
    examples += re.findall(r"^  cdpsim ([^>\n]*?)(?:  .*)?$", command("--help-all").out, re.MULTILINE)
    assert len(examples) >= 64
    write_actions(SCHEDULES["1f1b"].actions(Shape(4, 8)), "mine.csv")
    for example in examples:
        forced = ["--force"] if "-o" in example.split() and "--force" not in example else []
        assert command(*shlex.split(example), *forced).code == 0, example


def test_a_quiet_command_prints_no_notes(command: Command) -> None:
    """The data are the same."""
    words = ("simulate", "1f1b", "-n", 4, "--check")
    said, quiet = command(*words), command(*words, "-q")
    assert said.err.endswith(" invariants hold\n")
    assert quiet == (0, said.out, "")


@pytest.mark.parametrize("words", ["table1 -n 0", "compare multi-dp -n 4 --within 0"])
def test_a_quiet_command_says_why_it_fails(words: str, command: Command) -> None:
    said = command(*words.split())
    assert said.code
    assert command(*words.split(), "--quiet") == said


def test_a_verbose_command_says_what_it_reads_runs_and_writes(command: Command, toy: Path) -> None:
    """On stderr, in lines, with sizes; what it writes is the same."""
    words = f"simulate 1f1b -n 3 -m 6 --model {toy / 'toy.toml'} --steps 3 -o {toy}"
    assert command(*words.split()[:-1], str(toy / "plain")) == (0, "", "")
    outcome = command(*words.split()[:-1], str(toy / "told"), "-v")
    assert (outcome.code, outcome.out) == (0, "")
    lines = outcome.err.splitlines()
    assert all(line.startswith("cdpsim: ") for line in lines)
    size = (toy / "toy.toml").stat().st_size
    assert f"cdpsim: read {toy / 'toy.toml'}: {size} bytes" in lines
    # 3 stages, 6 micro-batches, 3 steps: forwards, backwards and updates; messages to and from each boundary
    ran = f"ran 1f1b: {3 * 6 * 3 * 2 + 3 * 3} tasks and {2 * 6 * 3 * 2} messages on 3 devices, by the fast engine"
    assert any(ran in line for line in lines)
    written = {file: file.stat().st_size for file in (toy / "told").iterdir()}
    assert {f"cdpsim: wrote {file}: {bytes_:,} bytes" for file, bytes_ in written.items()} <= set(lines)
    assert re.fullmatch(r"cdpsim: simulate: \d+\.\d{3} s, exit code 0", lines[-1])
    for file in written:
        assert file.read_bytes() == (toy / "plain" / file.name).read_bytes()


def test_lines_of_a_summary_fit_a_screen(command: Command) -> None:
    """There are six, and a long one is cut."""
    words = "--model llama2-7b --cluster a100-nodes --recompute full --optimizer adafactor --runtime torch"
    lines = command("simulate", "1f1b", "-n", 4, *words.split()).out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line[:13].strip() for line in lines] == [
        "run",
        "step time",
        "bubble",
        "peak memory",
        "staleness",
        "messages",
    ]
    assert lines[0][13:].startswith("1f1b: 4 stages, 4 micro-batches, 4 devices; llama2-7b, adafactor, ")
    assert lines[0].endswith(" …")

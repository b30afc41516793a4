"""Help teaches on one screen, has all of it under --help-all, and its examples run; -q and -v say less and more."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cdpsim import SCHEDULES, cli
from cdpsim.schedules.actions import write_actions
from cdpsim.schedules.placement import Shape
from tests.conftest import Command
from tests.helpers.help_examples import AFTER, EXAMPLES, are_said, shown_files, shown_in, words_of, written_by

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


def all_help(command: Command, name: str) -> str:
    """All help of a command."""
    return command(*name.split(), "--help-all").out


def test_every_example_in_help_has_an_expectation(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other has one."""
    monkeypatch.setenv("COLUMNS", "90")
    shown = [example for name in ("", *COMMANDS) for example in shown_in(all_help(command, name))]
    assert set(shown) == set(EXAMPLES)
    assert set(AFTER) | set(AFTER.values()) <= set(EXAMPLES)


@pytest.fixture
def shown(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has the files that help shows, and an order of 1f1b."""
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.chdir(tmp_path)
    for file, content in shown_files(all_help(command, "simulate"), all_help(command, "sweep")).items():
        Path(file).write_text(content)
    write_actions(SCHEDULES["1f1b"].actions(Shape(4, 8)), "mine.csv")


def marked(example: str) -> Any:
    """An example as the parameter of a test: to plan and to sweep takes seconds."""
    return pytest.param(example, marks=pytest.mark.slow) if example.startswith(("plan ", "sweep ")) else example


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES])
def test_an_example_in_help_does_what_is_expected(example: str, command: Command) -> None:
    """Its output, notes and files have the expected words; no file is empty."""
    if example in AFTER:
        assert command(*shlex.split(AFTER[example])).code == 0
    forced = ["--force"] if example.endswith("-o mine.csv") else []  # which is there already
    code, out, err = command(*shlex.split(example), *forced)
    assert code == 0, err
    files = list(written_by(example))
    assert all(file.stat().st_size for file in files)
    said = " ".join([out, err, *map(words_of, files)])
    assert are_said(EXAMPLES[example], said), said


def test_an_expectation_is_sought_in_its_order() -> None:
    """A word that is missing, or comes too early, is no answer; nor is an output that is empty."""
    found = [are_said(expectation, "a  b\nc d") for expectation in ("b c", "a … d", "d … a", "a c", "e")]
    assert found == [True, True, False, False, False]
    assert not any(are_said(expectation, "") for expectation in EXAMPLES.values())


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
    """There are six, one more of a model with tokens and FLOP, one of each error; and a long one is cut."""
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
        "utilization",
        "mean error",
        *[""] * 3,
    ]
    assert lines[0][13:].startswith("1f1b: 4 stages, 4 micro-batches, 4 devices; llama2-7b, adafactor, ")
    assert lines[0].endswith(" …")

"""Pages of docs/ and README: their sessions print what they say, and their pictures are what their commands draw.

The Python of pages is doctested where it stands.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from cdpsim.cli import COMMANDS
from cdpsim.cli.parser import Parser
from cdpsim.studies.comparison import MEASURED_COLUMNS
from cdpsim.trace import RUNS_HEADER
from cdpsim.trace.table import MemoryRow, MessageRow, TaskRow
from tests.helpers.pages import PAGES, PICTURES, REPOSITORY, pictures, play, sessions

FILES = sorted(PICTURES.iterdir())


SLOW = ["concepts", "data-axis", "gallery", "how-to/bring-a-hugging-face-model", "how-to/sweep-on-slurm", "layers"]
SLOW += [
    "contexts-and-experts",
    "how-to/which-parallelism",
    "how-to/which-schedule",
    "results",
    "start",
]  # pages whose commands take a second or more


def marked(page: str) -> Any:
    """Return a page as the parameter of a test."""
    slow = page in {f"docs/{name}.md" for name in SLOW}
    return pytest.param(page, marks=pytest.mark.slow) if slow else page


@pytest.mark.every_case
@pytest.mark.parametrize("page", [marked(name) for name, text in PAGES.items() if sessions(text)])
def test_the_sessions_of_a_page_print_and_draw_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word and byte by byte, from top to bottom in one folder; a page has the line of a command that fails."""
    monkeypatch.chdir(tmp_path)
    code = 0
    for command, expected in sessions(PAGES[page]):
        code, printed = play(command, code, expected)
        captured = capsys.readouterr()
        assert printed + captured.out + captured.err == expected, command
        assert code == 0 or expected.startswith("cdpsim: ")
    for name in pictures(PAGES[page]):
        drawn, shown = (folder.joinpath(name).read_text(encoding="utf-8") for folder in (tmp_path, PICTURES))
        if f"Matplotlib v{matplotlib.__version__}," in shown:  # another one may place letters elsewhere
            assert drawn == shown, f"{name} is another picture; `make pictures` draws those of all pages"


def test_the_pictures_are_of_the_matplotlib_that_is_pinned() -> None:
    """So CI, which has that one, compares them."""
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (version,) = {path.read_text(encoding="utf-8").partition("Matplotlib v")[2].partition(",")[0] for path in FILES}
    assert f"matplotlib=={version}" in pins


def test_every_picture_is_on_a_page() -> None:
    """Each page that shows it draws it."""
    assert {name for text in PAGES.values() for name in pictures(text)} == {path.name for path in FILES}


def kinds() -> Iterator[tuple[str, str]]:
    """Yield all kinds of pictures: commands that draw, the values of their options that choose a kind, their flags."""
    parsers = argparse.ArgumentParser().add_subparsers(parser_class=Parser)
    for command in COMMANDS:
        command.add_to(parsers)
    for name, parser in parsers.choices.items():
        if "--dark" not in parser._option_string_actions:
            continue
        yield name, "-o"
        for action in parser._actions:
            if action.dest in {"style", "colour", "what", "number"}:
                yield from ((name, value) for value in action.choices or [])
        for action in parser._optionals._group_actions:
            if isinstance(action, argparse._StoreTrueAction) and action.dest != "force":
                yield name, action.option_strings[0]


def test_the_gallery_has_every_kind_of_picture() -> None:
    """Sizes and the dark ground once for all commands."""
    shown = {
        (words[1], word)
        for command, _ in sessions(PAGES["docs/gallery.md"])
        for words in [shlex.split(command)]
        for word in words
    }
    assert not set(kinds()) - shown
    assert {"--for", "--dark"} <= {word for _, word in shown}


def test_the_glossary_has_all_headings_and_columns() -> None:
    """Of comparisons and of trace files."""
    terms = set(re.findall(r"^(\S.*)$", PAGES["docs/glossary.md"].partition(":sorted:")[2], flags=re.MULTILINE))
    headings = {column.name for column in MEASURED_COLUMNS.values()}
    columns = {name for row in (TaskRow, MessageRow, MemoryRow) for name in row._fields}
    assert {"schedule", "rule", *headings, *columns, *RUNS_HEADER.strip().split(",")} <= {
        term.strip() for term in terms
    }


@pytest.mark.parametrize("page", ["docs/start.md", "docs/concepts.md"])
def test_amounts_in_the_words_of_a_page_are_printed_on_it(page: str) -> None:
    """With their units; tokens of a second are a rate there."""
    blocks = "".join(re.findall(r"^```console\n.*?^```", PAGES[page], flags=re.MULTILINE | re.DOTALL))
    words = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    amounts = re.findall(r"(\d[\d,.]*) (GB|%|samples|tokens)", words)
    assert amounts
    for amount, unit in amounts:
        printed = f"{amount.replace(',', '')} {unit.replace('tokens', '/s')}"
        assert re.search(rf"(?<![\d.]){re.escape(printed)}", blocks), f"{amount} {unit}"


def anchors(text: str) -> set[str]:
    """List the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [
        *("README.md", "CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md"),
        *("benchmarks/README.md", "tests/README.md", "validation/README.md"),
    ],
)
def test_links_of_pages_outside_docs_lead_somewhere(page: str) -> None:
    """To a file, and to a heading of it; Sphinx tells of links in docs/."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)]*)\)", text):
        name, _, anchor = target.partition("#")
        file = (REPOSITORY / page).parent / name if name else REPOSITORY / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target

"""Requests that the command line refuses, and the content of folders before and after."""

import re
from pathlib import Path

from tests.conftest import Command, Outcome

FILES = ["memory.csv", "messages.csv", "summary.json", "tasks.csv"]


def content(folder: Path) -> dict[str, bytes | None]:
    """Return the content of each file below a folder, by its path; None stands for a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def assert_refused(outcome: Outcome, *fragments: str) -> None:
    """Assert one line on stderr, exit code 2 and no data."""
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert re.fullmatch(r"cdpsim: error: \S[^\n]*: [^\n]*\S\n", outcome.err), outcome.err
    for fragment in fragments:
        assert fragment in outcome.err, outcome.err


def refuse(command: Command, folder: Path, line: str, *fragments: str) -> None:
    """Assert that a request, given as on a shell, is refused and leaves the folder as it was."""
    before = content(folder)
    assert_refused(command(*line.split()), *fragments)
    assert content(folder) == before

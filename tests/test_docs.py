"""Pages of docs/ and README: their console sessions print what they say. Their Python is doctested where it stands."""

import re
import shlex
from pathlib import Path

import pytest

from cdpsim.cli import main

REPOSITORY = Path(__file__).parent.parent
PAGES = {
    str(page.relative_to(REPOSITORY)): page.read_text(encoding="utf-8")
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
}


def sessions(page: str) -> list[tuple[str, str]]:
    """List the commands of a page's console blocks, from top to bottom, each with its output."""
    blocks = re.findall(r"^```console\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    return [pair for block in blocks for pair in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)]


def played(command: str, code: int, expected: str) -> tuple[int, str]:
    """Return the exit code and the output of a command, without the output that pytest captures.

    `code` is that of the command before. `cat` of a file that does not exist writes it: the page gives its content.
    """
    words = shlex.split(command)
    if words[0] == "cdpsim":
        return main(words[1:]), ""
    if words[0] == "cat":
        file = Path(words[1])
        if not file.exists():
            file.write_text(expected, encoding="utf-8")
        return 0, file.read_text(encoding="utf-8")
    if words[0] == "head":
        return 0, "".join(Path(words[3]).read_text(encoding="utf-8").splitlines(keepends=True)[: int(words[2])])
    if words[0] == "ls":
        return 0, "".join(f"{name}\n" for name in sorted(file.name for file in Path(words[1]).iterdir()))
    assert command == "echo $?"
    return 0, f"{code}\n"


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if sessions(text)])
def test_the_sessions_of_a_page_print_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word, from top to bottom in one folder; where a command fails, the page shows its one line."""
    monkeypatch.chdir(tmp_path)
    code = 0
    for command, expected in sessions(PAGES[page]):
        code, printed = played(command, code, expected)
        captured = capsys.readouterr()
        assert printed + captured.out + captured.err == expected, command
        assert code == 0 or expected.startswith("cdpsim: ")

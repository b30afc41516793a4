"""Pages of README and docs/: their console sessions, and their pictures.

`python -m tests.helpers.pages` writes the pictures anew, and leaves the words of pages to their authors.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cdpsim.cli import main

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PICTURES = DOCS / "pictures"
PAGES = {
    str(page.relative_to(REPOSITORY)): page.read_text(encoding="utf-8")
    for page in [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
}


def sessions(page: str) -> list[tuple[str, str]]:
    """List the commands of a page's console blocks, from top to bottom, each with its output."""
    blocks = re.findall(r"^```console\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    return [pair for block in blocks for pair in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)]


def pictures(page: str) -> list[str]:
    """List the names of the files in docs/pictures that a page shows."""
    return re.findall(r"\]\((?:[\w./-]*/)?pictures/([\w.-]+)\)", page)


def play(command: str, code: int, expected: str) -> tuple[int, str]:
    """Return the exit code and the output of a command; `cdpsim` prints its output.

    `code` is that of the command before. `cat` of a file that does not exist writes it: the page gives its content.
    """
    words = shlex.split(command)
    if words[0] == "cdpsim":
        return main(words[1:]), ""
    if words[:3] == ["python", "-m", "validation"]:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        from validation.__main__ import main as validate

        return validate(words[3:]), ""
    if words[0] == "cat":
        file = Path(words[1])
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(expected, encoding="utf-8")
        return 0, file.read_text(encoding="utf-8")
    if words[0] == "head":
        return 0, "".join(Path(words[3]).read_text(encoding="utf-8").splitlines(keepends=True)[: int(words[2])])
    if words[0] == "ls":
        return 0, "".join(f"{name}\n" for name in sorted(file.name for file in Path(words[1]).iterdir()))
    assert command == "echo $?"
    return 0, f"{code}\n"


def draw_pages() -> Iterator[str]:
    """Write the pictures of all pages that show some; yield their names."""
    PICTURES.mkdir(exist_ok=True)
    for page in PAGES.values():
        if shown := pictures(page):
            with TemporaryDirectory() as folder, chdir(folder):
                for command, expected in sessions(page):
                    play(command, 0, expected)
                for name in shown:
                    (PICTURES / name).write_bytes(Path(name).read_bytes())
                    yield name


if __name__ == "__main__":
    print(*draw_pages(), sep="\n")

"""The README: short, with two commands first. test_docs.py plays its sessions; pytest runs its examples."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_exactly_two_set_up_commands_come_first() -> None:
    """Each is one line in its own `sh` block, and they are the first two of the file."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks[:2]] == ["sh", "sh"]
    assert "sh" not in [language for language, _ in blocks[2:]]
    assert all(body.count("\n") == 1 for _, body in blocks[:2])


def test_it_has_five_questions_each_with_an_answer() -> None:
    """A question is a heading, and has a session of commands."""
    _, *questions = re.split(
        r"^### ", README.partition("## Five questions")[2].partition("\n## ")[0], flags=re.MULTILINE
    )
    assert len(questions) == 5
    assert all(question.count("```console") == 1 for question in questions)


def test_its_links_lead_somewhere() -> None:
    """Files of the repository, and headings of them."""
    links = re.findall(r"\]\(((?!https:)[^)]+)\)|src=\"([^\"]+)\"", README)
    assert len(links) > 20
    for link in (first or second for first, second in links):
        path, _, anchor = link.partition("#")
        assert (REPOSITORY / path).exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, link

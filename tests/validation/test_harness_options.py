"""The reference page of the harness's options has what its own parsers say."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("sphinx")

from tests.helpers.command_options import load_extension
from tests.helpers.field_tables import PAGES
from validation.calibrate.command import calibrate_command
from validation.comparison.battery import battery_command
from validation.comparison.command import replay_command
from validation.learn.command import learn_command
from validation.peers.command import peers_command
from validation.profile.command import profile_command
from validation.report.command import report_command

COMMANDS = (
    *(replay_command, profile_command, calibrate_command, report_command, battery_command, peers_command),
    learn_command,
)


def options_page() -> str:
    """Return the text of the page: each command as the page of cdpsim's own commands has it."""
    extension = load_extension()
    page = PAGES / "harness-options.md"
    text = page.read_text(encoding="utf-8").partition("\n## ")[0]
    for name, parser in extension.parsers("python -m validation", COMMANDS).items():
        text += "\n".join(["", f"## {name}", "", *extension.option_lines(parser)])
    return text


def test_the_page_has_all_options() -> None:
    """`python -m tests.validation.test_harness_options` writes the page anew."""
    assert (PAGES / "harness-options.md").read_text(encoding="utf-8") == options_page()


if __name__ == "__main__":
    (PAGES / "harness-options.md").write_text(options_page(), encoding="utf-8")

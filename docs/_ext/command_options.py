"""Directives for Sphinx: `{options} COMMAND` writes what a command takes, `{request-options}` what a request has."""

from argparse import Action, HelpFormatter
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from cdpsim.cli import COMMANDS
from cdpsim.cli.parser import Command, Parser
from cdpsim.request.options import OPTIONS

if TYPE_CHECKING:
    from sphinx.application import Sphinx

COMMON = {"--help", "--help-all", "--quiet", "--verbose"}  # of all commands


@cache
def parsers(program: str = "cdpsim", commands: tuple[Command, ...] = COMMANDS) -> dict[str, Parser]:
    """Return the parser of each command of a program."""
    choices = Parser(prog=program).add_subparsers(parser_class=Parser)
    for command in commands:
        command.add_to(choices)
    return cast(dict[str, Parser], choices.choices)


def option_lines(parser: Parser) -> Iterator[str]:
    """Yield the lines of a page: what a command does, its usage, and what it alone takes, group by group."""
    yield from (str(parser.description), "", "```text", f"{parser.prog} {parser._synopsis()}", "```", "")
    for group in parser._action_groups:
        own = [action for action in group._group_actions if not COMMON & set(action.option_strings)]
        if own:
            yield from (f"**{str(group.title).capitalize()}**", "")
            for action in own:
                yield from _action_lines(action, parser._get_formatter())


def _action_lines(action: Action, formatter: HelpFormatter) -> tuple[str, ...]:
    """Return what is written on a command line, and below it what that means."""
    meaning = " ".join(formatter._expand_help(action).split())
    return f"`{formatter._format_action_invocation(action)}`", f": {meaning}", ""


def request_lines() -> Iterator[str]:
    """Yield the lines of the table of all options of a request: its schedule, its stages, and a row for each option."""
    yield from ("| option | default | meaning |", "|---|---|---|")
    yield "| `schedule` | required | a name of [`cdpsim schedules`](schedules.md), or a CSV file of an order |"
    yield "| `n` | – | the number of stages; a model with more is grouped into n; without it, all of the model |"
    for name, option in OPTIONS.items():
        default = option.default
        usual = f"`{default}`" if isinstance(default, str) else str(default).lower()
        about = option.help + (f"; without it {option.usual}" if option.usual else "")
        yield f"| `{name}` | {'–' if default in (None, ()) else usual} | {about} |"


class RequestOptions(SphinxDirective):
    """The directive of the table."""

    def run(self) -> list[nodes.Node]:
        """Return the table as Sphinx has it."""
        container = nodes.container()
        self.state.nested_parse(StringList(list(request_lines()), source=__name__), self.content_offset, container)
        return container.children


class Options(SphinxDirective):
    """The directive of a command, whose name is its argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the lines as Sphinx has them."""
        container = nodes.container()
        lines = option_lines(parsers()[self.arguments[0]])
        self.state.nested_parse(StringList(list(lines), source=__name__), self.content_offset, container)
        return container.children


def setup(app: "Sphinx") -> dict[str, Any]:
    """Add the directives to Sphinx."""
    app.add_directive("options", Options)
    app.add_directive("request-options", RequestOptions)
    return {"parallel_read_safe": True}

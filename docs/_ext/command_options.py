"""A directive for Sphinx: `{options} COMMAND` writes what a command of cdpsim takes, from its own parser."""

from argparse import Action, HelpFormatter
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from cdpsim.cli import COMMANDS
from cdpsim.cli.parser import Command, Parser

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


class Options(SphinxDirective):
    """The directive; its argument is the name of a command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the lines as Sphinx has them."""
        container = nodes.container()
        lines = option_lines(parsers()[self.arguments[0]])
        self.state.nested_parse(StringList(list(lines), source=__name__), self.content_offset, container)
        return container.children


def setup(app: "Sphinx") -> dict[str, Any]:
    """Add the directive to Sphinx."""
    app.add_directive("options", Options)
    return {"parallel_read_safe": True}

"""Options that several commands take: those that give the words of a request follow from the request itself."""

import argparse
import tomllib
from collections.abc import Iterable
from functools import cache
from typing import Any

from cdpsim.cli.parser import Argument, argument, argument_group, help_text
from cdpsim.errors import RequestError, whole_number
from cdpsim.files.tables import DATA_FORMATS, FORMATS, check_format
from cdpsim.request.options import DEFAULTS, MEGATRON, DisorderOptions, ScheduleOptions, TrainingOptions

RUN_WORDS = ("steps", "engine", "collective", "max_memory")
_USE_WORDS = ("model", "cluster", "expand_collectives", "contention", "ignore_memory")
_GROUPS = {
    "how a --model is trained (default: as its file says)": TrainingOptions,
    "what disturbs a run (default: as the --cluster file says)": DisorderOptions,
    "options that change the schedule (`cdpsim schedules` says which one takes which)": ScheduleOptions,
}


STAGES = argument("-n", metavar="N", help="stages (default: as many as the model has)")
FORCE = argument("--force", action="store_true", help="overwrite a file that exists")


def output(about: str, metavar: str = "FILE", *, required: bool = True) -> tuple[Argument, Argument]:
    """Return the option -o, which names what to write, and --force."""
    return argument("-o", required=required, metavar=metavar, dest="output", help=about), FORCE


def format_option(known: Iterable[str] = DATA_FORMATS) -> Argument:
    """Return the option --format of a table that has the `known` formats."""
    first, *others, last = known
    about = f"{', '.join([f'{first} (default)', *others])} or {last}"

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--format", default=first, metavar="FORM", help=about)
        parser.set_defaults(known_formats=(first, *others, last))

    return add


FORMAT = format_option()
FORMAT_OF_PAPERS = format_option(FORMATS)


def format_of(options: argparse.Namespace) -> str:
    """Return the name of the format that options give, after checking that their command has it."""
    return check_format(options.format, options.known_formats)


@cache
def _texts() -> dict[str, dict[str, str]]:
    """Read what help says of each word of a request."""
    return tomllib.loads(help_text("options.toml"))


def flag_of(word: str) -> str:
    """Return the option that gives a word of a request.

    >>> flag_of("link_jitter"), flag_of("m")
    ('--link-jitter', '-m')
    """
    return f"-{word}" if len(word) == 1 else f"--{word.replace('_', '-')}"


def add_words(parser: argparse._ActionsContainer, words: Iterable[str], **defaults: str) -> None:
    """Add the options that give these words of a request; `defaults` says what differs from the usual defaults.

    The request's own default decides what an option is: a switch for False, an option to repeat for an empty list, and
    a switch with an opposite where neither is the default. An option that is not given is None.
    """
    for word in words:
        text = _texts()[word]
        default = defaults.get(word, text.get("default"))
        settings: dict[str, Any] = {"action": "append" if DEFAULTS[word] == () else "store"}
        if "value" not in text:
            settings["action"] = "store_true" if DEFAULTS[word] is False else argparse.BooleanOptionalAction
        else:
            settings["metavar"] = text["value"]
        about = text["help"].strip() + (f" (default: {default})" if default else "")
        parser.add_argument(flag_of(word), default=None, help=about, **settings)


def word_options(words: Iterable[str], **defaults: str) -> Argument:
    """Return the options that give these words of a request, as `add_words` adds them."""
    return lambda parser: add_words(parser, words, **defaults)


def request_options(*, must_fit: bool = True, **defaults: str) -> Argument:
    """Return the options of what runs where, how a model is trained, what disturbs a run and what changes a schedule.

    Unless a model `must_fit`, what a device would need beyond its memory is ignored, and there is no option for that.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        add_words(parser, _USE_WORDS[: None if must_fit else -1])
        parser.set_defaults(**{} if must_fit else {"ignore_memory": True})
        rendezvous = parser.add_mutually_exclusive_group()
        add_words(rendezvous, ["rendezvous"])
        old_name = {"action": "store_const", "const": MEGATRON, "dest": "rendezvous"}
        rendezvous.add_argument("--defer-receives", help=f"the old name of --rendezvous {MEGATRON}", **old_name)
        for title, words in _GROUPS.items():
            known = [word for word in words.__annotations__ if word in _texts()]
            argument_group(title, word_options(known, **defaults))(parser)

    return add


def runs_option(purpose: str) -> Argument:
    """Return the option --runs, whose `purpose` a command names."""
    return argument("--runs", metavar="COUNT", help=f"with --jitter: run so often, and {purpose}")


def number_of_runs(options: argparse.Namespace, number: object = None) -> int | None:
    """Return how many runs --runs asks for, None for a single one; refuse it beside the `number` of one run."""
    if options.runs is None:
        return None
    if str(number or options.run or 0) != "0":
        raise RequestError("runs", "are those from 0 on, and --run asks for one of them; leave either out")
    return whole_number("runs", options.runs, at_least=1)

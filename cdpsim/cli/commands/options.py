"""Arguments that several commands take; those for the options of a request follow from these options."""

import argparse
import tomllib
from collections.abc import Iterable
from typing import Any

from cdpsim.cli.parser import Argument, argument, argument_group, help_text
from cdpsim.errors import RequestError, whole_number
from cdpsim.files.tables import DATA_FORMATS, FORMATS, check_format
from cdpsim.request.options import DEFAULTS, MEGATRON, DisorderOptions, ScheduleOptions, TrainingOptions

RUN_OPTIONS = ("steps", "engine", "collective", "max_memory")
_PLATFORM_OPTIONS = ("model", "cluster", "expand_collectives", "contention")
_GROUPS = {
    "how a --model is trained (default: as its file says)": TrainingOptions,
    "what disturbs a run (default: as the --cluster file says)": DisorderOptions,
    "options that change the schedule (`cdpsim schedules` says which one takes which)": ScheduleOptions,
}
# The value, help and default of each option of a request, as help shows them.
_OPTION_TEXTS: dict[str, dict[str, str]] = tomllib.loads(help_text("options.toml"))

STAGES = argument("-n", metavar="N", help="stages (default: as many as the model has)")
FORCE = argument("--force", action="store_true", help="overwrite a file that exists")


def output_arguments(about: str, metavar: str = "FILE", *, required: bool = True) -> tuple[Argument, Argument]:
    """Return the argument -o, which names the output, and --force."""
    return argument("-o", required=required, metavar=metavar, dest="output", help=about), FORCE


def format_argument(known: Iterable[str] = DATA_FORMATS) -> Argument:
    """Return the argument --format of a table that has the `known` formats."""
    first, *others, last = known
    about = f"{', '.join([f'{first} (default)', *others])} or {last}"

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--format", default=first, metavar="FORM", help=about)
        parser.set_defaults(known_formats=(first, *others, last))

    return add


FORMAT = format_argument()
FORMAT_OF_PAPERS = format_argument(FORMATS)


def format_of(args: argparse.Namespace) -> str:
    """Return the value of --format, after checking that the command has that format."""
    return check_format(args.format, args.known_formats)


def flag_of(option: str) -> str:
    """Return how a command line gives an option of a request.

    >>> flag_of("link_jitter"), flag_of("m")
    ('--link-jitter', '-m')
    """
    return f"-{option}" if len(option) == 1 else f"--{option.replace('_', '-')}"


def add_options(parser: argparse._ActionsContainer, options: Iterable[str], **defaults: str) -> None:
    """Add arguments for these options of a request; `defaults` says what differs from the usual defaults.

    The request's own default decides on the argument: a switch for False, an argument to repeat for an empty list, and
    a switch with an opposite where neither is the default. An option that is not given is None.
    """
    for option in options:
        text = _OPTION_TEXTS[option]
        default = defaults.get(option, text.get("default"))
        settings: dict[str, Any] = {"action": "append" if DEFAULTS[option] == () else "store"}
        if "value" not in text:
            settings["action"] = "store_true" if DEFAULTS[option] is False else argparse.BooleanOptionalAction
        else:
            settings["metavar"] = text["value"]
        about = text["help"].strip() + (f" (default: {default})" if default else "")
        parser.add_argument(flag_of(option), default=None, help=about, **settings)


def option_arguments(options: Iterable[str], **defaults: str) -> Argument:
    """Return arguments for these options of a request, as `add_options` adds them."""
    return lambda parser: add_options(parser, options, **defaults)


def request_arguments(*, must_fit: bool = True, **defaults: str) -> Argument:
    """Return arguments for the model and cluster, for training, for disturbances and for changes of a schedule.

    Unless a model `must_fit`, what a device would need beyond its memory is ignored, and there is no option for that.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        add_options(parser, _PLATFORM_OPTIONS)
        if must_fit:
            add_options(parser, ["ignore_memory"])
        else:
            parser.set_defaults(ignore_memory=True)
        rendezvous = parser.add_mutually_exclusive_group()
        add_options(rendezvous, ["rendezvous"])
        old_name = {"action": "store_const", "const": MEGATRON, "dest": "rendezvous"}
        rendezvous.add_argument("--defer-receives", help=f"the old name of --rendezvous {MEGATRON}", **old_name)
        for title, options in _GROUPS.items():
            known = [option for option in options.__annotations__ if option in _OPTION_TEXTS]
            argument_group(title, option_arguments(known, **defaults))(parser)

    return add


def runs_argument(purpose: str) -> Argument:
    """Return the argument --runs, whose `purpose` a command names."""
    return argument("--runs", metavar="COUNT", help=f"with --jitter: run so often, and {purpose}")


def number_of_runs(args: argparse.Namespace, number: object = None) -> int | None:
    """Return how many runs --runs asks for, None for a single one; refuse it beside the `number` of one run."""
    if args.runs is None:
        return None
    if str(number or args.run or 0) != "0":
        raise RequestError("runs", "are those from 0 on, and --run asks for one of them; leave either out")
    return whole_number("runs", args.runs, at_least=1)

"""Arguments that several commands take; those for the options of a request follow from these options."""

import argparse
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

from cdpsim.cli.parser import Argument, argument, argument_group
from cdpsim.draw.look import PLACES, Look
from cdpsim.errors import RequestError, whole_number
from cdpsim.files.tables import DATA_FORMATS, FORMATS, check_format
from cdpsim.request.options import GROUPS, OPTIONS, SimulationOptions, flag_of, literals_of

RUN_OPTIONS = tuple(SimulationOptions.__annotations__)

STAGES = argument("-n", metavar="N", help="stages (default: those of the model)")
FORCE = argument("--force", action="store_true", help="overwrite a file that exists")


def output_arguments(about: str, metavar: str = "FILE", *, required: bool = True) -> tuple[Argument, Argument]:
    """Return the argument -o, which names the output, and --force."""
    return argument("-o", required=required, metavar=metavar, dest="output", help=about), FORCE


def format_argument(known: Iterable[str] = DATA_FORMATS) -> Argument:
    """Return the argument --format of a table that has the `known` formats."""
    first, *others, last = known
    about = f"{', '.join([f'{first} (default)', *others])} or {last}"

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--format", default=first, metavar="FORM", choices=(first, *others, last), help=about)
        parser.set_defaults(known_formats=(first, *others, last))

    return add


FORMAT = format_argument()
FORMAT_OF_PAPERS = format_argument(FORMATS)


def format_of(args: argparse.Namespace) -> str:
    """Return the value of --format, after checking that the command has that format."""
    return check_format(args.format, args.known_formats)


def add_options(parser: argparse._ActionsContainer, options: Iterable[str], **defaults: str) -> None:
    """Add arguments for these options of a request; `defaults` says what differs from the usual defaults.

    The request's own default decides on the argument: a switch for False, an argument to repeat for an empty list, and
    a switch with an opposite where neither is the default. An option that is not given is None.
    """
    for name in options:
        option = OPTIONS[name]
        settings: dict[str, Any] = {"action": "append" if option.default == () else "store"}
        if option.value:
            settings |= {"metavar": option.value, "choices": literals_of(name) or tuple(option.known())}
        else:
            settings["action"] = "store_true" if option.is_switch else argparse.BooleanOptionalAction
        default = defaults.get(name, option.default_words)
        about = option.help + (f" (default: {default})" if default else "")
        parser.add_argument(flag_of(name), default=None, help=about, **settings)


def option_arguments(options: Iterable[str], title: str = "how a run is computed", **defaults: str) -> Argument:
    """Return a group of arguments for these options of a request, as `add_options` adds them."""
    return argument_group(title, lambda group: add_options(group, options, **defaults))


def request_arguments(*, must_fit: bool = True, without: Collection[str] = (), **defaults: str) -> Argument:
    """Return arguments for the model and cluster, for training, for disturbances and for changes of a schedule.

    Unless a model `must_fit`, what a device would need beyond its memory is ignored, and there is no option for that.
    Options that the command does not take are left out.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        brief = [name for name, option in OPTIONS.items() if option.brief]
        add_options(parser, brief, **defaults)
        parser.set_defaults(ignore_memory=None if must_fit else True)
        left_out = {*brief, *without, *RUN_OPTIONS, *(() if must_fit else ("ignore_memory",))}
        for group in GROUPS:
            names = [name for name in group.__annotations__ if OPTIONS[name].typed and name not in left_out]
            if names:
                about = str(group.__doc__).removesuffix(".")
                option_arguments(names, f"{about[0].lower()}{about[1:]}", **defaults)(parser)

    return add


def look_arguments(parser: Any) -> None:
    """Add arguments for how a picture looks."""
    argument_group(
        "how a picture looks",
        argument("--title", metavar="WORDS", help="its title (default: what was run); '' leaves it out"),
        argument(
            "--for",
            dest="place",
            metavar="PLACE",
            choices=PLACES,
            help="the place that its size fits: a column or a page of a paper, or a slide",
        ),
        argument("--width", metavar="SIZE", help="its width, in inches or as '17.5 cm' (default: what it needs)"),
        argument("--height", metavar="SIZE", help="its height, as --width"),
        argument("--font-size", metavar="POINTS", help="the size of its ordinary letters"),
        argument("--dpi", metavar="DOTS", help="dots per inch of a .png (default 150, for paper 300)"),
        argument("--no-legend", dest="legend", action="store_false", help="leave out the key of its marks"),
        argument("--dark", action="store_true", help="draw on black"),
    )(parser)


def look_of(args: argparse.Namespace) -> Look:
    """Return how a picture is to look; refuse it where no picture is written."""
    look = Look(**{field.name: getattr(args, field.name) for field in fields(Look)})
    if look.given and args.output is None:
        raise RequestError(look.given[0], "is of a picture; give its file with -o, or leave it out")
    return look


def runs_argument(purpose: str) -> Argument:
    """Return the argument --runs, whose `purpose` a command names."""
    return argument("--runs", metavar="COUNT", help=f"with --jitter: simulate COUNT runs, and {purpose}")


def number_of_runs(args: argparse.Namespace, number: object = None) -> int | None:
    """Return how many runs --runs asks for, None for a single one; refuse it beside the `number` of one run."""
    if args.runs is None:
        return None
    if str(number or args.run or 0) != "0":
        raise RequestError("runs", "are those from 0 on, and --run asks for one of them; leave either out")
    return whole_number("runs", args.runs, at_least=1)

"""Arguments that several commands take, and the requests and runs that they make.

Arguments for the options of a request follow from these options.
"""

import argparse
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from cdpsim.api import reopen, simulate
from cdpsim.cli.parser import Argument, argument, argument_group
from cdpsim.draw.canvas import PLACES, Look
from cdpsim.errors import RequestError, in_known_case, short_repr, whole_number
from cdpsim.files.config import preset_names
from cdpsim.files.notes import say
from cdpsim.files.tables import DATA_FORMATS, FORMATS, check_format
from cdpsim.model import UNIT_MODELS
from cdpsim.model.recomputation import core_share
from cdpsim.presets import find_model
from cdpsim.request import CheckEnded, Request, reading, requests_only
from cdpsim.request.options import GROUPS, OPTION_NAMES, OPTIONS, SimulationOptions, flag_of, literals_of
from cdpsim.request.reading import schedule_of
from cdpsim.request.sharing import refuse_taken_by_none, taken_options, untaken_by
from cdpsim.runs import Run
from cdpsim.schedules import NAMES, SCHEDULES, Schedule
from cdpsim.studies.comparison import SPLIT_NOTE, listed_values
from cdpsim.trace import Trace

RUN_OPTIONS = tuple(SimulationOptions.__annotations__)

SCHEDULE = partial(argument, "schedule", metavar="NAME|FILE", choices=NAMES)
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
        parser.add_argument(flag_of(name), *option.short, default=None, help=about, **settings)


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


look_arguments = argument_group(
    "how a picture looks",
    argument("--title", metavar="WORDS", help="its title (default: what was run); '' leaves it out"),
    argument(
        "--for",
        dest="place",
        metavar="PLACE",
        choices=PLACES,
        help="the place that its size fits: a column or a page of a paper, or a slide",
    ),
    argument("--width", metavar="SIZE", help="its width, in inches or as '17.5 cm' (default: its content's)"),
    argument("--height", metavar="SIZE", help="its height, as --width"),
    argument("--font-size", metavar="POINTS", help="the size of its ordinary letters"),
    argument("--dpi", metavar="DOTS", help="dots per inch of a .png (default 150, for paper 300)"),
    argument("--no-legend", dest="legend", action="store_false", help="leave out the key of its marks"),
    argument("--dark", action="store_true", help="draw on black"),
)


def look_of(args: argparse.Namespace) -> Look:
    """Return how a picture is to look; refuse it where no picture is written."""
    look = Look(**{field.name: getattr(args, field.name) for field in fields(Look)})
    if look.given and args.output is None:
        raise RequestError(look.given[0], "is of a picture; give its file with -o, or leave it out")
    return look


def runs_argument(purpose: str) -> Argument:
    """Return the argument --runs, whose `purpose` a command names."""
    return argument("--runs", metavar="COUNT", help=f"with --jitter: COUNT runs, to {purpose}")


def number_of_runs(args: argparse.Namespace, number: object = None) -> int | None:
    """Return how many runs --runs asks for, None for a single one; refuse it beside the `number` of one run."""
    if args.runs is None:
        return None
    if str(number or args.run or 0) != "0":
        raise RequestError("runs", "are those from 0 on, and --run asks for one of them; leave either out")
    return whole_number("runs", args.runs, at_least=1)


_SELECTIVE, _LEAST_SAVED = "selective", 0.01  # of the activations


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a request that a command line gives, but for the schedule."""
    given = vars(args)
    return {option: given[option] for option in OPTION_NAMES if option != "schedule" and given.get(option) is not None}


def listed_option(name: str, value: Any) -> Any:
    """Return the values of an option that has several, with commas between them; a file that is there is one value."""
    if not isinstance(value, str) or "," not in value or (name in OPTIONS and OPTIONS[name].is_list):
        return value
    if name in OPTIONS and OPTIONS[name].may_be_file and os.path.isfile(value):  # noqa: PTH113 - false for a name that is too long
        return value
    values: list[str] = []
    for part in value.split(","):
        if name == "runtime" and values and "=" in part and ":" not in part:  # one more behaviour of the runtime before
            values[-1] += f",{part}"
        else:
            values.append(part.strip())
    if not all(values):
        raise RequestError(flag_of(name), f"has nothing between two commas in {short_repr(value)}; give values")
    return values if len(values) > 1 else values[0]


def options_of(args: argparse.Namespace, name: str | Schedule | None = None) -> dict[str, Any]:
    """Return the options of a schedule or an experiment file, overridden by the command line's."""
    base = getattr(args, "base", None)
    if base == "":
        raise RequestError("--from", "names no file; give a summary.json or an experiment file")
    options = {} if base is None else reading.read_experiment(base)
    if isinstance(name, str) and reading.is_experiment(name):
        if options:
            raise RequestError("--from", f"asks for one run, and {name} for another; leave either out")
        options = reading.read_experiment(name)
    elif name is not None:
        options["schedule"] = name
    elif base is None:
        raise RequestError("NAME", "is missing; name a schedule or an experiment file, or give --from")
    given, name = given_options(args), options["schedule"]
    declared = SCHEDULES.get(in_known_case(name, SCHEDULES)) if isinstance(name, str) else None
    if given and declared is not None and declared.order.rounds is not None:
        options.pop("counts", None)  # those of a record are not those of other options, and are found
    return options | given


def run_of(options: Mapping[str, Any]) -> Run:
    """Simulate the request of these options, and return the run."""
    return simulate(Request.from_builtins(options))


def report_recomputation(requests: Iterable[Mapping[str, Any]]) -> None:
    """Print of which models almost nothing is saved by the selective recomputation that requests ask for."""
    asked = [one for one in requests if _SELECTIVE in listed_values("recompute", one.get("recompute"))]
    models = dict.fromkeys(str(model) for one in asked for model in listed_values("model", one.get("model", "unit")))
    for name in models:
        if name in preset_names("models") or os.path.isfile(name):  # noqa: PTH113 - a pipe is read once
            share = core_share(find_model(name))
            if 0 < share < _LEAST_SAVED:
                kept = f"the core of attention is {100 * share:.2f} % of the activations of {name}"
                say(f"--recompute {_SELECTIVE}: {kept}, so that its time is lost and no memory saved; layer saves more")


def report_untaken(requests: Iterable[Mapping[str, Any]], *notes: str) -> None:
    """Print notes, and which schedules ran without which option; refuse an option that no schedule takes."""
    asked = [(schedule_of(options), options) for options in requests]
    refuse_taken_by_none(asked)
    for note in notes:
        say(note)
    for option, schedules in untaken_by(asked).items():
        say(f"{flag_of(option)}: not taken by {', '.join(schedules)}")


def trace_of(args: argparse.Namespace, name: str) -> Trace:
    """Return the trace in the folder of that name, or the trace of a run of the request of that name."""
    if not _is_folder(name):
        return run_of(options_of(args, name))
    for option in given_options(args):
        raise RequestError(flag_of(option), f"is of a run, but {name!r} is a folder with one; leave it out")
    return reopen(name)


def traces_of(args: argparse.Namespace, names: Sequence[str]) -> list[Trace]:
    """Return the traces of those names in one unit of time: in slots, all backwards take as long as split ones."""
    asked = {name: options_of(args, name) for name in names if not _is_folder(name)}
    traces = [_partial_run(asked[name]) if name in asked else trace_of(args, name) for name in names]
    models = [trace.request.get("model") for trace in traces]
    if not all(model in models for model in UNIT_MODELS):
        report_untaken(asked.values())
        return traces
    traces = [
        _partial_run(asked[name] | {"model": UNIT_MODELS[1]}) if model == UNIT_MODELS[0] and name in asked else trace
        for name, model, trace in zip(names, models, traces, strict=True)
    ]
    report_untaken(asked.values(), SPLIT_NOTE)
    return traces


def _is_folder(name: str) -> bool:
    """Return whether a name is that of a folder of a run, and not of a request."""
    is_file = name.endswith(".csv") or reading.is_experiment(name)
    return not (name in NAMES or is_file) and ("/" in name or Path(name).is_dir())


def _partial_run(options: Mapping[str, Any]) -> Run:
    """Simulate the request of those options that its schedule takes, and return the run."""
    return run_of(taken_options(schedule_of(options), options))


def check_output(path: str | None, check: Callable[[], object], runs: Iterable[Callable[[], object]]) -> None:
    """Refuse an output that cannot be written, before it is computed, and after what is wrong with its requests.

    `check` may refuse it. Where its path exists, the requests of the runs are read first, so that `check` knows their
    files. Without a path nothing is written or checked.
    """
    if path is None:
        return
    for run in runs if os.path.lexists(path) else ():
        with requests_only(), suppress(CheckEnded):
            run()
    check()

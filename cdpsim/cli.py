"""The command line: data to stdout, everything else to stderr, one line and exit 2 for what cannot be served."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cdpsim.errors import RequestError, nearest
from cdpsim.version import __version__

_EXAMPLES = """examples:
  cdpsim table1 -n 8                         the paper's Table 1, as printed, exact and simulated
  cdpsim simulate mp-cdp -n 4 -o traces      when every task runs, what devices hold, what links carry
  cdpsim simulate multi-cdp --model toy.toml --cluster box.toml -o traces

`cdpsim COMMAND --help` explains a command. Exit codes: 0 done, 1 the answer is no, 2 the request cannot be served.
"""


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as every other refusal: one line."""

    def error(self, message: str) -> NoReturn:
        subject, _, problem = message.removeprefix("argument ").partition(": ")
        if not problem or not message.startswith("argument "):
            subject, problem = "arguments", message
        raise RequestError(subject, f"{problem}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return its exit code."""
    try:
        options = _parse(list(sys.argv[1:] if arguments is None else arguments))
        code: int = options.serve(options)
        sys.stdout.flush()
    except RequestError as error:
        print(f"cdpsim: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cdpsim: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, `head` perhaps, has seen enough
        sys.stdout = None
        return 0
    except OSError as error:  # such as standard output on a full disk
        print(f"cdpsim: error: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    return code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="cdpsim",
        description="Simulate training schedules: when every task runs, what devices hold, what links carry.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cdpsim {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _add_schedules(commands)
    _add_table1(commands)
    _add_simulate(commands)
    known = list(commands.choices)
    first = next((word for word in arguments if not word.startswith("-")), None)
    if first is not None and first not in known and not arguments[0].startswith("-"):
        raise RequestError("command", f"unknown command {first!r}; {nearest(first, known)}")
    return parser.parse_args(arguments)


def _command(
    commands: Any, name: str, serve: Callable[[argparse.Namespace], int], about: str, **more: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **more,
    )
    parser.set_defaults(serve=serve)
    return parser


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="text", metavar="FORM", help="text, json, csv, markdown or latex")


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Options that every command that runs schedules takes."""
    parser.add_argument("--steps", default="3", metavar="T", help="training steps to simulate (default 3)")
    parser.add_argument("--engine", default="auto", help="auto, fast or simpy (default auto); the times are the same")
    parser.add_argument(
        "--collective",
        default="recursive-doubling",
        metavar="NAME",
        help="how all-reduces run: recursive-doubling (default), ring or tree",
    )


def _add_schedules(commands: Any) -> None:
    parser = _command(commands, "schedules", _serve_schedules, "every schedule by name, one line each")
    _add_format(parser)


def _serve_schedules(options: argparse.Namespace) -> int:
    from cdpsim import tables
    from cdpsim.schedules import SCHEDULES

    form = tables.check_format(options.format)
    header = ("schedule", "order", "placement", "rule", "state", "options", "about")
    rows = [
        (s.name, s.order.name, s.placement.name, s.rule.name, s.state.value, " ".join(s.options), s.about)
        for s in SCHEDULES.values()
    ]
    if form == "json":
        print(tables.as_json([dict(zip(header, row, strict=True)) for row in rows]), end="")
    else:
        print(tables.FORMATS[form](header, rows), end="")
    return 0


def _add_table1(commands: Any) -> None:
    parser = _command(
        commands,
        "table1",
        _serve_table1,
        "the paper's Table 1 for any N: paper | exact | simulated",
        epilog="Exits with 1 if a row's exact and simulated cells disagree.",
    )
    parser.add_argument("-n", required=True, metavar="N", help="stages, and micro-batches")
    _add_run(parser)
    parser.add_argument(
        "--shared-parameters",
        action="store_true",
        help="single-*: micro-batches share the parameters, instead of a copy each from forward to backward",
    )
    _add_format(parser)


def _serve_table1(options: argparse.Namespace) -> int:
    from cdpsim import table1_forms, tables
    from cdpsim.table1 import compute

    form = tables.check_format(options.format)
    table = compute(
        options.n,
        steps=options.steps,
        collective=options.collective,
        shared_parameters=options.shared_parameters,
        engine=options.engine,
    )
    print(table1_forms.FORMS[form](table), end="")
    disagreeing = [row["schedule"] for row in table.rows if not row["agree"]]
    if disagreeing:
        print(f"cdpsim: exact and simulated disagree: {', '.join(disagreeing)}", file=sys.stderr)
    return 1 if disagreeing else 0


def _add_simulate(commands: Any) -> None:
    parser = _command(
        commands,
        "simulate",
        _serve_simulate,
        "run one schedule and write its traces",
        epilog="Writes tasks.csv, messages.csv, memory.csv and summary.json into DIR, all or none.",
    )
    parser.add_argument("schedule", metavar="NAME", help="a schedule; `cdpsim schedules` lists them")
    parser.add_argument("-n", metavar="N", help="stages (default: as many as the model has)")
    parser.add_argument("-m", metavar="M", help="micro-batches (default N)")
    parser.add_argument("--chunks", default="1", metavar="V", help="stages per device (default 1)")
    parser.add_argument("-o", required=True, metavar="DIR", dest="output", help="the folder to write into")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    _add_run(parser)
    parser.add_argument("--rule", metavar="RULE", help="dp, cdp-v1, cdp-v2, or a CSV file of 0/1: row i, column j")
    parser.add_argument(
        "--prefetch",
        default="0",
        metavar="K",
        help="let parameters arrive K tasks before their reader (default 0)",
    )
    parser.add_argument(
        "--slot-order",
        metavar="ORDER",
        help="what one device does first in a slot: forward-first (default) or backward-first",
    )
    parser.add_argument("--model", default="unit", metavar="NAME|FILE", help="unit (default), or a .toml or .json file")
    parser.add_argument(
        "--cluster", default="unit", metavar="NAME|FILE", help="unit (default), or a .toml or .json file"
    )
    parser.add_argument("--seed", default="0", metavar="S", help="recorded with the run (default 0); nothing is random")
    parser.add_argument(
        "--ignore-memory", action="store_true", help="run although a device would need more than it has"
    )


def _serve_simulate(options: argparse.Namespace) -> int:
    from cdpsim import files
    from cdpsim.simulate import simulate, whole
    from cdpsim.trace import FILES

    files.check_writable(options.output, FILES, options.force)
    trace = simulate(
        options.schedule,
        None if options.n is None else whole("n", options.n, at_least=1),
        m=None if options.m is None else whole("m", options.m, at_least=1),
        chunks=whole("chunks", options.chunks, at_least=1),
        steps=whole("steps", options.steps, at_least=1),
        rule=options.rule,
        engine=options.engine,
        prefetch=whole("prefetch", options.prefetch, at_least=0),
        slot_order=options.slot_order,
        model=options.model,
        cluster=options.cluster,
        collective=options.collective,
        seed=whole("seed", options.seed, at_least=0),
        ignore_memory=options.ignore_memory,
    )
    trace.save(options.output, force=options.force)
    return 0

"""The command `learn`: networks trained by the lags of schedules, and what may be said of their test accuracy."""

import argparse
from collections.abc import Sequence
from math import isfinite
from typing import Any

import msgspec
import torch

from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, argument_group
from cdpsim.draw import canvas
from cdpsim.errors import RequestError, choose, short_repr, whole_number
from cdpsim.files import writing as files
from cdpsim.files.notes import explain
from cdpsim.files.progress import ticker
from cdpsim.files.tables import as_csv, format_table
from cdpsim.schedules import ZERO_NAMES, find_schedule

from ..program import harness_command
from ..report.environment import environment
from .data import DATA, Data, load_data
from .figure import draw_learned
from .lags import Learner, read_learner
from .networks import NETWORKS, Sizes
from .results import (
    ANSWERS_HEADER,
    CURVES_HEADER,
    Learned,
    ScheduleLags,
    answer_row,
    answers_of,
    curve_rows,
)
from .statistics import VERDICTS
from .training import Course, check_course, train_all
from .updates import KINDS, Update

FILES = ("curves.csv", "learn.svg", "learn.json")  # the last one is the seal
_ASKED = (  # of the options, what learn.json has
    *("names", "n", "m", "margin", "data", "network", "layers", "width", "dtype", "optimizer", "lr", "momentum"),
    *("weight_decay", "drops", "drop_by", "epochs", "batch", "seeds"),
)
_TYPES = {"float32": torch.float32, "float64": torch.float64}

_NETWORK = argument_group(
    "the network and its data",
    argument("--data", default="digits", metavar="DATA", help=f"{', '.join(DATA)} (default digits)"),
    argument("--network", metavar="NAME", help=f"{' or '.join(NETWORKS)} (default: as the data are)"),
    argument("--layers", metavar="K", help="its layers, cut into stages evenly (default 8, or N)"),
    argument("--width", default="32", metavar="K", help="numbers between layers (default 32)"),
    argument("--dtype", default="float32", metavar="TYPE", help="float32 (default) or float64"),
)
_COURSE = argument_group(
    "how it is trained",
    argument("--optimizer", default="momentum", metavar="NAME", help=f"{', '.join(KINDS)} (default momentum)"),
    argument("--lr", default="0.05", metavar="RATES", help="rates, with commas between them (default 0.05)"),
    argument("--momentum", default="0.9", metavar="MU", help="of momentum, nesterov and muon (default 0.9)"),
    argument("--weight-decay", default="0", metavar="DECAY", help="(default 0)"),
    argument("--drops", default="", metavar="SHARES", help="of the training, after which rates are lower: 0.3,0.6,0.9"),
    argument("--drop-by", default="0.2", metavar="FACTOR", help="by which rates are multiplied then (default 0.2)"),
    argument("--epochs", default="20", metavar="E", help="times that all samples are seen (default 20)"),
    argument("--batch", default="64", metavar="B", help="samples of a training step (default 64)"),
    argument("--seeds", default="10", metavar="S", help="runs with other starts and orders (default 10)"),
    argument("--no-vmap", action="store_true", help="train runs one by one, which takes longer"),
)


@harness_command(
    "learn",
    argument("names", nargs="+", metavar="NAME[:RULE]", help="schedules, each with its own rule or another one"),
    argument("-n", required=True, metavar="N", help="stages"),
    argument("-m", metavar="M", help="micro-batches (default: the schedules' own)"),
    argument("-o", "--output", required=True, metavar="DIR", help="the folder to write"),
    argument("--margin", default="0.5", metavar="POINTS", help="of accuracy that do not matter (default 0.5)"),
    argument(
        "--expect", action="append", default=[], metavar="NAME=VERDICT", help="exit with 1 if another one comes out"
    ),
    argument("--force", action="store_true", help="overwrite files that exist"),
    _NETWORK,
    _COURSE,
)
def learn_command(options: argparse.Namespace) -> int:
    """Train networks with the staleness of schedules: what it does to their accuracy."""
    n = whole_number("n", options.n, at_least=1)
    given = {} if options.m is None else {"m": whole_number("m", options.m, at_least=1)}
    expected = [_expected(text, options.names) for text in options.expect]
    margin, course, data = _read_number("margin", options.margin), _course(options, n), load_data(options.data)
    learners = [read_learner(name, n, _own(name, given)) for name in dict.fromkeys(options.names)]
    micro_batches = check_course(course, learners, data)
    files.check_writable(options.output, FILES, force=options.force)
    learned = learn(learners, course, data, micro_batches, margin, _request(options, course))
    with canvas.defaults():
        picture = canvas.rendered(draw_learned(learned, margin), FILES[1])
    table = as_csv(CURVES_HEADER, [*curve_rows(learned.curves)])
    content = msgspec.json.format(msgspec.json.encode(learned), indent=1), "\n"
    files.write_folder(
        options.output, dict(zip(FILES, ([table], [picture], content), strict=True)), force=options.force
    )
    write_stdout(format_table("text", (), ANSWERS_HEADER, [answer_row(answer, margin) for answer in learned.answers]))
    return _judge(learned, expected)


def learn(
    learners: Sequence[Learner], course: Course, data: Data, micro_batches: int, margin: float, request: dict[str, Any]
) -> Learned:
    """Train with all schedules, and say what may be said."""
    done = ticker(len(learners) * course.epochs, "learn")
    curves = [curve for learner in learners for curve in train_all(learner, course, data, micro_batches, done)]
    done(0)
    return Learned(
        request=request,
        environment=environment(),
        data=", ".join([data.name, f"{data.samples} samples, {len(data.test)} in the test", *data.about]),
        lags={each.name: ScheduleLags(*(own.tolist() for own in each.lags)) for each in learners},
        curves=curves,
        answers=answers_of(curves, {each.name: each.mean for each in learners}, margin),
    )


def _course(options: argparse.Namespace, n: int) -> Course:
    network = options.network or ("mlp" if options.data == "digits" else "transformer")
    layers = max(n, 8) if options.layers is None else whole_number("layers", options.layers, at_least=max(n, 2))
    optimizer = choose("optimizer", options.optimizer, KINDS)
    return Course(
        network=choose("network", network, NETWORKS),
        sizes=Sizes(layers, whole_number("width", options.width, at_least=1)),
        stages=n,
        update=Update(
            optimizer, _read_number("momentum", options.momentum), _read_number("weight-decay", options.weight_decay)
        ),
        rates=_read_numbers("lr", options.lr),
        seeds=whole_number("seeds", options.seeds, at_least=1),
        epochs=whole_number("epochs", options.epochs, at_least=1),
        batch=whole_number("batch", options.batch, at_least=1),
        drops=_read_numbers("drops", options.drops) if options.drops else (),
        drop_by=_read_number("drop-by", options.drop_by),
        dtype=_TYPES[choose("dtype", options.dtype, _TYPES)],
        one_by_one=options.no_vmap,
    )


def _own(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the number of micro-batches where a schedule takes one."""
    schedule = name.partition(":")[0]
    declared = None if schedule in ZERO_NAMES else find_schedule(schedule)
    return given if declared is None or "m" in declared.options else {}


def _request(options: argparse.Namespace, course: Course) -> dict[str, object]:
    """Return what was asked, and what it means where nothing was given."""
    return {name: getattr(options, name) for name in _ASKED} | {
        "network": course.network,
        "layers": course.sizes.layers,
    }


def _read_numbers(name: str, text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(_read_number(name, part) for part in text.split(",")))


def _read_number(name: str, text: str) -> float:
    """Return a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise RequestError(name, f"{short_repr(text)} is no number of at least 0")
    return value


def _expected(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, _, verdict = text.rpartition("=")
    if name not in names[1:]:
        raise RequestError("expect", f"{short_repr(text)} names no schedule behind the first; write NAME=VERDICT")
    return name, choose("expect", verdict, VERDICTS)


def _judge(learned: Learned, expected: Sequence[tuple[str, str]]) -> int:
    """Return 1 if a verdict is another one than expected at any rate, and say which."""
    wrong = [
        f"{answer.schedule} at {answer.rate:g} is {answer.verdict}, not {verdict}"
        for name, verdict in expected
        for answer in learned.answers
        if answer.schedule == name and answer.verdict != verdict
    ]
    for line in wrong:
        explain(line)
    return int(bool(wrong))

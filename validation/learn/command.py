"""The command `learn`: networks trained by the lags of schedules, and what may be said of their test accuracy."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from cdpsim.cli.arguments import add_options, report_untaken
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, argument_group
from cdpsim.draw import canvas
from cdpsim.errors import RequestError, choose, short_repr, whole_number
from cdpsim.files import writing as files
from cdpsim.files.notes import explain, ticker
from cdpsim.files.tables import as_csv, format_table
from cdpsim.request.options import flag_of
from cdpsim.request.reading import schedule_of
from cdpsim.request.sharing import accepts

from ..program import harness_command
from ..report.environment import environment, source_hash
from .data import Data, load_data
from .figure import draw_learned, draw_limits
from .lags import Learner, options_of_learner, read_learner
from .limits import LIMITS_HEADER, FoundLimits, Limit, find_limits, limit_row
from .results import ANSWERS_HEADER, CURVES_HEADER, Learned, ScheduleLags, answer_row, answers_of, curve_rows
from .settings import (
    OF_MACHINE,
    OF_NETWORK,
    OF_TRAINING,
    OF_VERDICTS,
    SETTINGS,
    Settings,
    course_of,
    read_best_of,
    read_number,
    recorded,
    settings_of,
)
from .statistics import VERDICTS
from .training import Course, check_course, train_all
from .unfinished import Unfinished

FILES = ("curves.csv", "learn.svg", "learn.json")  # the last one is the seal
LIMIT_FILES = ("limits.csv", "limits.svg", "limits.json")
LAG_OPTIONS = ("m", "chunks", "replicas", "local_steps", "outer")  # of a request, which lags depend on


@harness_command(
    "learn",
    argument("names", nargs="+", metavar="NAME[:RULE]", help="schedules, each with its own rule or another one"),
    argument("-n", required=True, metavar="N", help="stages"),
    argument("-o", "--output", required=True, metavar="DIR", help="the folder to write, where a killed run goes on"),
    *(each.argument for each in OF_VERDICTS),
    argument(
        "--expect", action="append", default=[], metavar="NAME=VERDICT", help="exit with 1 if another one comes out"
    ),
    argument(
        "--limits", action="store_true", help="find the largest rate at which four of five seeds end below their start"
    ),
    argument(
        "--force", action="store_true", help="overwrite files that exist; drop what another request left unfinished"
    ),
    argument_group(
        "options of the schedules that take them",
        lambda group: add_options(group, LAG_OPTIONS),
        argument(
            "--schedule-warm-up", metavar="W", help="steps before rounds or local steps whose updates are waited for"
        ),
    ),
    argument_group(
        "the network and its data",
        *(each.argument for each in OF_NETWORK),
        argument(
            "--batch-norm", action="store_true", help="of images: each micro-batch's own statistics (default: groups)"
        ),
    ),
    argument_group(
        "how it is trained",
        argument("--like-paper", action="store_true", help="as Fournier and Oyallon: cifar10 or imagenet, a ResNet"),
        *(each.argument for each in OF_TRAINING),
    ),
    argument_group(
        "how it is computed",
        *(each.argument for each in OF_MACHINE),
        argument("--no-vmap", action="store_true", help="train runs one by one, which takes longer"),
    ),
)
def learn_command(options: argparse.Namespace) -> int:
    """Train networks with the staleness of schedules: what it does to their accuracy."""
    asked = _read_asked(options)
    if options.limits:
        return _find_limits(options, asked)
    expected = [_expected(text, options.names) for text in options.expect]
    margin = read_number("margin", asked.settings["margin"])
    best_of = read_best_of(asked.settings, asked.course)
    files.check_writable(options.output, FILES, force=options.force)
    state = Unfinished(options.output, asked.of_states, force=options.force)
    runs = len(asked.learners) * len(asked.course.rates) * asked.course.seeds
    done = ticker(runs * asked.course.epochs, "learn")
    curves = train_all(asked.learners, asked.course, asked.data, asked.micro_batches, done, state)
    done(0)
    learned = Learned(
        request=asked.request,
        environment=environment(asked.course.device),
        data=asked.about,
        lags={each.name: ScheduleLags(*(own.tolist() for own in each.lags)) for each in asked.learners},
        curves=curves,
        answers=answers_of(curves, {each.name: each.mean for each in asked.learners}, margin, best_of),
    )
    table = as_csv(CURVES_HEADER, [*curve_rows(learned.curves)])
    _write(options, FILES, table, lambda: draw_learned(learned, margin), learned)
    state.drop()
    write_stdout(format_table("text", (), ANSWERS_HEADER, [answer_row(answer, margin) for answer in learned.answers]))
    return _judge(learned, expected)


class _Asked(NamedTuple):
    """A command line, read and checked."""

    settings: Settings
    course: Course
    data: Data
    learners: list[Learner]
    micro_batches: int
    request: dict[str, object]

    @property
    def about(self) -> str:
        """The data in a line: name, sizes, and how they can be told from others."""
        sizes = f"{self.data.samples} samples, {len(self.data.test)} in the test"
        return ", ".join([self.data.name, sizes, *self.data.about])

    @property
    def of_states(self) -> dict[str, object]:
        """All on which unfinished states depend."""
        named = {name: own for name, own in self.request.items() if name not in ("margin", "best_of")}
        means: dict[str, list[object]] = {}
        for each in self.learners:
            lags = [own.tolist() for own in each.lags]
            means[each.name] = [*lags, each.waits, each.workers, each.outer, each.steps_per_update]
        return {**named, "means": means, "data_is": self.about, "torch": str(torch.__version__), "code": source_hash()}


def _read_asked(options: argparse.Namespace) -> _Asked:
    n = whole_number("n", options.n, at_least=1)
    given = {name: own for name in SETTINGS if (own := getattr(options, name)) is not None}
    for name in ("lr", "drops", "drop_by", "warm_up", "margin", "best_of", "expect"):
        if options.limits and getattr(options, name):
            raise RequestError(name.replace("_", "-"), f"says nothing with --limits; leave {flag_of(name)} out")
    settings = settings_of(given, like_paper=options.like_paper)
    data, batch_norm = load_data(settings["data"]), options.batch_norm or options.like_paper
    course = course_of(settings, data, n, batch_norm=batch_norm, one_by_one=options.no_vmap)
    learners, asked = _read_learners(options, n)
    micro_batches = check_course(course, learners, data)
    report_untaken(asked)
    more = {"of_schedules": own} if (own := _of_schedules(options) | _warm_up_of(options)) else {}
    request = {"names": options.names, "n": n, **more, **settings, **recorded(course)}
    return _Asked(settings, course, data, learners, micro_batches, request)


def _read_learners(options: argparse.Namespace, n: int) -> tuple[list[Learner], list[dict[str, Any]]]:
    """Return the learners, each with the options that its schedule takes, and all options given for each."""
    if twice := [name for name in options.names if options.names.count(name) > 1]:
        raise RequestError(twice[0], "is named twice; name it once")
    given, warm_up = _of_schedules(options), _warm_up_of(options)
    learners = [read_learner(name, n, given | warm_up) for name in options.names]
    asked = [options_of_learner(name, n, given) for name in options.names]
    if warm_up and not any(accepts(schedule_of(each), "warm_up") for each in asked):
        raise RequestError("schedule-warm-up", "none of these schedules takes it; leave it out")
    return learners, asked


def _find_limits(options: argparse.Namespace, asked: _Asked) -> int:
    files.check_writable(options.output, LIMIT_FILES, force=options.force)
    done = ticker(len(asked.learners), "limits")
    limits = find_limits(asked.learners, asked.course, asked.data, asked.micro_batches, done)
    done(0)
    found = FoundLimits(asked.request, environment(asked.course.device), asked.about, limits)
    columns = [*Limit.__struct_fields__]
    table = as_csv(columns, [[getattr(each, name) for name in columns] for each in limits])
    _write(options, LIMIT_FILES, table, lambda: draw_limits(limits), found)
    write_stdout(format_table("text", (), LIMITS_HEADER, [limit_row(limit) for limit in limits]))
    return 0


def _write(
    options: argparse.Namespace,
    names: Sequence[str],
    table: str | bytes,
    draw: Callable[[], Any],
    content: FoundLimits | Learned,
) -> None:
    with canvas.defaults():
        picture = canvas.rendered(draw(), names[1])
    text = msgspec.json.format(msgspec.json.encode(content), indent=1), "\n"
    files.write_folder(options.output, dict(zip(names, ([table], [picture], text), strict=True)), force=options.force)


def _of_schedules(options: argparse.Namespace) -> dict[str, Any]:
    return {name: own for name in LAG_OPTIONS if (own := getattr(options, name)) is not None}


def _warm_up_of(options: argparse.Namespace) -> dict[str, str]:
    return {} if options.schedule_warm_up is None else {"warm_up": options.schedule_warm_up}


def _expected(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, _, verdict = text.rpartition("=")
    if name not in names[1:]:
        raise RequestError("expect", f"{short_repr(text)} names no schedule behind the first; write NAME=VERDICT")
    return name, choose("expect", verdict, VERDICTS)


def _judge(learned: Learned, expected: Sequence[tuple[str, str]]) -> int:
    wrong = [
        f"{answer.schedule} at {answer.rate:g} is {answer.verdict}, not {verdict}"
        for name, verdict in expected
        for answer in learned.answers
        if answer.schedule == name and answer.verdict != verdict
    ]
    for line in wrong:
        explain(line)
    return int(bool(wrong))

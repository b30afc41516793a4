"""Options that several commands take, and the runs that they ask for."""

import argparse
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from cdpsim.cli.console import say
from cdpsim.errors import RequestError
from cdpsim.model import UNIT_MODELS

if TYPE_CHECKING:
    from cdpsim.request import Request
    from cdpsim.runs import Run
    from cdpsim.schedules import Schedule
    from cdpsim.trace import Trace

Done = TypeVar("Done")

# How many steps are simulated where no number is given.
STEPS = "3, or two more than pass until all tasks read versions as old as they always will"
# Why a time is not what it would be alone.
SPLIT = "a backward takes two slots, because some of these schedules split it (--model unit-split)"


def add_format(parser: argparse.ArgumentParser, *, papers: bool = False) -> None:
    """Add the format of a table; one that goes into `papers` also has Markdown and LaTeX."""
    forms = "text (default), json, csv, markdown or latex" if papers else "text (default), json or csv"
    parser.add_argument("--format", default="text", metavar="FORM", help=forms)


def _word(parser: argparse._ActionsContainer, *flags: str, **settings: Any) -> None:
    """Add an option that is a word of a request: what is not given is not there."""
    parser.add_argument(*flags, default=argparse.SUPPRESS, **settings)


def add_run(parser: argparse._ActionsContainer, default: str = STEPS) -> None:
    """Add the options that every command that runs schedules takes; `default` says what no number of steps means."""
    _word(parser, "--steps", metavar="T", help=f"training steps to simulate (default {default})")
    _word(parser, "--engine", metavar="ENGINE", help="auto (default), fast or simpy; both give the same times")
    _word(
        parser,
        "--collective",
        metavar="NAME",
        help="how all-reduces run: recursive-doubling, ring (one for each network card of a node), tree, "
        "halving-doubling, double-tree, hierarchical, hierarchical-rails, or best: the fastest for each size, group "
        "and link (default: best on a cluster with a topology, else recursive-doubling; table1: recursive-doubling, "
        "ring or tree)",
    )
    _word(
        parser,
        "--max-memory",
        metavar="SIZE",
        help="refuse to start what would take more memory on this machine, such as '8 GB' (default: what is free)",
    )


def add_request(
    parser: argparse.ArgumentParser, *, must_fit: bool = True, prefetch: str = "0", experiments: bool = False
) -> None:
    """Add what runs where: the model, the cluster, and options that change a schedule if it takes them.

    What does not fit into its devices is refused unless that is to be ignored, or need not be (`must_fit`). `--from`
    begins with an experiment, where a command takes `experiments`.
    """
    if experiments:
        parser.add_argument(
            "--from",
            metavar="FILE",
            dest="base",
            help="ask for what a summary.json records, or an experiment file says; options that are given win",
        )
    for part in ("model", "cluster"):
        _word(
            parser,
            f"--{part}",
            metavar="NAME|FILE",
            help=f"unit (default), one that `cdpsim {part}s` lists, or a .toml or .json file",
        )
    _word(
        parser,
        "--expand-collectives",
        action="store_true",
        help="run every collective as the messages of its algorithm",
    )
    meeting = parser.add_mutually_exclusive_group()
    _word(
        meeting,
        "--rendezvous",
        metavar="HOW",
        help="where nothing overlaps, let both ends of a message wait for each other: megatron (a receive stands right "
        "before the task that reads it) or torch (where its _add_send_recv places it); default: neither end waits",
    )
    _word(
        meeting,
        "--defer-receives",
        action="store_const",
        const="megatron",
        dest="rendezvous",
        help="the old name of --rendezvous megatron",
    )
    _word(
        parser,
        "--contention",
        metavar="HOW",
        help="messages on one link: none (default; they do not slow each other down), fair (they share its bandwidth) "
        "or queue (one after another); fair and queue run collectives as their messages, and by SimPy",
    )
    if must_fit:
        _word(parser, "--ignore-memory", action="store_true", help="run although a device would need more than it has")
    else:
        parser.set_defaults(ignore_memory=True)
    _add_training(parser)
    _add_disorder(parser)
    _add_changes(parser, prefetch)


def _add_changes(parser: argparse.ArgumentParser, prefetch: str) -> None:
    """Add what changes a schedule."""
    group = parser.add_argument_group(
        "options that change the schedule (`cdpsim schedules` says which one takes which)"
    )
    _word(
        group,
        "--rule",
        metavar="RULE",
        help="which parameters are read: dp, cdp-v1, cdp-v2, or a CSV file of 0 and 1 where 1 in row i, column j lets "
        "micro-batch i read the newest parameters of stage j (default: the schedule's own)",
    )
    _word(group, "-m", metavar="M", help="micro-batches of each replica in a training step (default N)")
    _word(
        group,
        "--chunks",
        metavar="V",
        help="stages per device, so N/V devices (default 1, or what the schedule is made for)",
    )
    _word(group, "--replicas", metavar="R", help="as many pipelines side by side (default 1)")
    _word(
        group,
        "--overlap-all-reduce",
        action="store_true",
        help="all-reduce a stage's gradients as soon as they are there (default: at the end of its devices' training "
        "step, which is the same where they have one stage)",
    )
    _word(
        group,
        "--vertical-sync",
        action="store_true",
        help="a micro-batch reads in all stages the version that it has read in the first one",
    )
    _word(
        group,
        "--prefetch",
        metavar="K",
        help=f"let parameters arrive K tasks before their reader (default {prefetch})",
    )
    _word(
        group,
        "--slot-order",
        metavar="ORDER",
        help="what a device does first if a slot has several tasks for it: forward-first (default) or backward-first",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add how a model is trained."""
    group = parser.add_argument_group("how a --model is trained (default: as its file says)")
    _word(group, "--optimizer", metavar="NAME", help="whose state is held: sgd, momentum, adam or adafactor")
    _word(
        group,
        "--mixed-precision",
        action=argparse.BooleanOptionalAction,
        help="hold a copy of the parameters and the optimizer's state in fp32, of a model in bf16 or fp16; or do not",
    )
    _word(
        group,
        "--recompute",
        metavar="HOW",
        help="compute activations again in the backward: none, full (a stage keeps its input), or sqrt (a stage of l "
        "layers keeps the inputs of the square root of l segments)",
    )
    _word(
        group,
        "--offload",
        metavar="WHAT",
        help="what devices leave to their hosts, to which the cluster's [host] leads: none, optimizer (its state, and "
        "updates), activations (from forward to backward), or all",
    )


def _add_disorder(parser: argparse.ArgumentParser) -> None:
    """Add what disturbs a run, and what decides its chances."""
    group = parser.add_argument_group("what disturbs a run (default: as the --cluster file says)")
    _word(
        group,
        "--slow",
        action="append",
        metavar="DEVICE:FACTOR",
        help="a device whose tasks take FACTOR times as long; for several devices, several times",
    )
    _word(
        group,
        "--jitter",
        metavar="DISTRIBUTION:C",
        help="let each task take a random number of times as long, of mean 1 and standard deviation C: uniform, "
        "exponential (1 - C at least, and the rest exponential) or lognormal",
    )
    _word(group, "--link-jitter", metavar="DISTRIBUTION:C", help="the same of each message")
    _word(
        group,
        "--stop",
        action="append",
        metavar="DEVICE:AT[:FOR]",
        help="a device that does nothing from AT on, FOR so long or for good, such as '3:2 s:500 ms', in slots 3:12:2; "
        "its task under way goes on afterwards",
    )
    _word(group, "--seed", metavar="S", help="what decides all that is random (default 0)")
    _word(group, "--run", metavar="R", help="which of the runs of that seed (default 0)")


def add_runs(parser: argparse.ArgumentParser, what: str) -> None:
    """Add how often chance is asked."""
    parser.add_argument("--runs", metavar="COUNT", help=f"with --jitter: run so often, and {what}")


def runs_of(options: argparse.Namespace, words: Mapping[str, Any] = MappingProxyType({})) -> int | None:
    """How many runs the options ask for; None for the one. Words of a file may ask for one of them, too."""
    from cdpsim.errors import whole_number

    if options.runs is None:
        return None
    if str(words.get("run", getattr(options, "run", 0))) != "0":
        raise RequestError("runs", "are those from 0 on, and --run asks for one of them; leave either out")
    return whole_number("runs", options.runs, at_least=1)


def add_output(parser: argparse.ArgumentParser, forms: str) -> None:
    """Add the file to write, in one of `forms`."""
    parser.add_argument("-o", required=True, metavar="FILE", dest="output", help=f"what to write: {forms}")
    parser.add_argument("--force", action="store_true", help="overwrite a file that exists")


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """The words of a request that options give."""
    from cdpsim.request.options import OPTION_NAMES

    given = vars(options)
    return {word: given[word] for word in OPTION_NAMES if word != "schedule" and given.get(word) is not None}


def in_slots(words: Mapping[str, Any]) -> bool:
    """Whether words ask for a model of slots."""
    return words.get("model", UNIT_MODELS[0]) in UNIT_MODELS


class InPart:
    """Runs of several schedules, each with as much of what is asked for as it takes."""

    def __init__(self) -> None:
        self._served: dict[str, None] = {}
        self._untaken: dict[str, dict[str, RequestError]] = {}  # by option and schedule

    def served(
        self,
        words: Mapping[str, Any],
        do: "Callable[[Request], Done]",
        needs: Collection[str] = (),
        unasked: Collection[str] = (),
    ) -> "Done":
        """Do something with a request of these words without those that it does not take, but for what it `needs`.

        Of words that are `unasked`, as a command has them by default, nothing is said.
        """
        from cdpsim.request.options import InapplicableOption

        words, without = dict(words), {}
        while True:
            try:
                done = do(request := request_of(words))
            except InapplicableOption as error:
                word = error.subject.replace("-", "_")
                if error.subject in needs or word not in words:
                    raise
                del words[word]
                if word not in unasked:
                    without[error.subject] = error
            else:
                self._served[request.schedule.name] = None
                for option, refusal in without.items():
                    self._untaken.setdefault(option, {})[request.schedule.name] = refusal
                return done

    def tell(self, *notes: str) -> None:
        """Say some notes, and who ran without which option; or refuse an option that no schedule took."""
        for refusals in self._untaken.values():
            if len(refusals) == len(self._served):
                raise next(iter(refusals.values()))
        for note in notes:
            say(note)
        for option, refusals in self._untaken.items():
            say(f"{_flag(option)}: not taken by {', '.join(refusals)}")


def _flag(option: str) -> str:
    return f"-{option}" if len(option) == 1 else f"--{option.replace('_', '-')}"


def words_of(options: argparse.Namespace, name: "str | Schedule | None" = None) -> dict[str, Any]:
    """The words of the request that a name and options make: of a schedule, or of an experiment file."""
    from cdpsim.request import experiment

    base = getattr(options, "base", None)
    if base == "":
        raise RequestError("--from", "names no file; give a summary.json or an experiment file")
    words = {} if base is None else experiment.read_experiment(base)
    if isinstance(name, str) and experiment.is_experiment(name):
        if words:
            raise RequestError("--from", f"asks for one run, and {name} for another; leave either out")
        words = experiment.read_experiment(name)
    elif name is not None:
        words["schedule"] = name
    elif base is None:
        raise RequestError("NAME", "is missing; name a schedule or an experiment file, or give --from")
    given = asked(options)
    if "rendezvous" in given:  # of which this is an old name
        words.pop("defer_receives", None)
    return words | given


def request_of(words: Mapping[str, Any]) -> "Request":
    """Make the request that words ask for; of one in slots, say what is missing as the command line does."""
    from cdpsim.request import Request
    from cdpsim.schedules import find_schedule

    if words.get("n") is None and in_slots(words) and find_schedule(words["schedule"]).shape is None:
        raise RequestError("-n", "is missing; give the number of stages, or a --model file that says it")
    return Request.from_builtins(words)


def simulated(words: Mapping[str, Any]) -> "Run":
    """Run what words ask for."""
    from cdpsim.front import simulate

    return simulate(request_of(words))


def traced(options: argparse.Namespace, name: str, runs: InPart | None = None) -> "Trace":
    """The trace in the folder of that name, or of the run that the options ask for, as one of several `runs`."""
    from cdpsim.front import reopen, simulate
    from cdpsim.request import experiment
    from cdpsim.schedules import SCHEDULES

    is_file = name.endswith(".csv") or experiment.is_experiment(name)
    if name in SCHEDULES or is_file or not ("/" in name or Path(name).is_dir()):
        words = words_of(options, name)
        return simulated(words) if runs is None else runs.served(words, simulate)
    for option in (*asked(options), *["from"] * (getattr(options, "base", None) is not None)):
        raise RequestError(_flag(option), f"is of a run, but {name!r} is a folder with one; leave it out")
    return reopen(name)


def all_traced(options: argparse.Namespace, names: Sequence[str]) -> "list[Trace]":
    """The traces of those names, by one clock: in slots, all backwards take as long as those that are split."""
    from cdpsim.front import simulate

    runs = InPart()
    traces = [traced(options, name, runs) for name in names]
    models = [trace.request.get("model") for trace in traces]
    if {model for model in models if model in UNIT_MODELS} != set(UNIT_MODELS):
        runs.tell()
        return traces
    traces = [
        runs.served(words_of(options, name) | {"model": UNIT_MODELS[1]}, simulate)
        if model == UNIT_MODELS[0] and not Path(name).is_dir()
        else trace
        for name, model, trace in zip(names, models, traces, strict=True)
    ]
    runs.tell(SPLIT)
    return traces


def refuse_output(path: str, check: Callable[[], object], runs: Iterable[Callable[[], object]]) -> None:
    """Refuse an output that cannot be written, before it is computed, and after all else that is wrong with its runs.

    `check` may refuse it. Where something is there already, first the requests of the runs are read, so that `check`
    knows their files; where it is refused, their programs are made, too.
    """
    from cdpsim.front import CheckEnded, check_until

    if os.path.lexists(path):
        what = "request"
        try:
            check()
        except RequestError:
            what = "program"
        for run in runs:
            with check_until(what), suppress(CheckEnded):
                run()
    check()

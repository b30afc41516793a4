"""The requests that options make, and their runs."""

import argparse
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from cdpsim.cli.commands.options import flag_of
from cdpsim.cli.console import say
from cdpsim.errors import RequestError
from cdpsim.front import CheckEnded, check_until, reopen, simulate
from cdpsim.model import UNIT_MODELS
from cdpsim.request import Request, experiment
from cdpsim.request.options import OPTION_NAMES, InapplicableOption
from cdpsim.runs import Run
from cdpsim.schedules import SCHEDULES, Schedule, find_schedule
from cdpsim.trace import Trace

Outcome = TypeVar("Outcome")

# Why a time is not that of the schedule alone.
SPLIT_NOTE = "a backward takes two slots, because some of these schedules split it (--model unit-split)"


def given_words(options: argparse.Namespace) -> dict[str, Any]:
    """Return the words of a request that options give, but for the schedule."""
    given = vars(options)
    return {word: given[word] for word in OPTION_NAMES if word != "schedule" and given.get(word) is not None}


def in_slots(words: Mapping[str, Any]) -> bool:
    """Return whether words ask for a model of slots."""
    return words.get("model", UNIT_MODELS[0]) in UNIT_MODELS


def words_of(options: argparse.Namespace, name: str | Schedule | None = None) -> dict[str, Any]:
    """Return the words of the request that options and a name make, which is a schedule's or an experiment file's."""
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
    given = given_words(options)
    if "rendezvous" in given:
        words.pop("defer_receives", None)  # the old name of one rendezvous
    return words | given


def request_of(words: Mapping[str, Any]) -> Request:
    """Make the request that words ask for; where its size is missing, refuse it by the name of the option."""
    if words.get("n") is None and in_slots(words) and find_schedule(words["schedule"]).shape is None:
        raise RequestError("-n", "is missing; give the number of stages, or a --model file that says it")
    return Request.from_builtins(words)


def run_of(words: Mapping[str, Any]) -> Run:
    """Simulate the request that words ask for, and return the run."""
    return simulate(request_of(words))


class PartialRequests:
    """Requests of several schedules that ask each of them for those words only that it takes."""

    def __init__(self) -> None:
        self._schedules: set[str] = set()
        self._untaken: dict[str, dict[str, RequestError]] = {}  # by option and schedule

    def serve(
        self,
        words: Mapping[str, Any],
        action: Callable[[Request], Outcome],
        *,
        needed: Collection[str] = (),
        silent: Collection[str] = (),
    ) -> Outcome:
        """Return what the action makes of the request of those words that its schedule takes.

        A schedule that does not take a `needed` option is refused. A dropped option that is `silent`, because it is a
        default of the command, is not reported.
        """
        words, dropped = dict(words), {}
        while True:
            try:
                outcome = action(request := request_of(words))
            except InapplicableOption as error:
                word = error.subject.replace("-", "_")
                if error.subject in needed or word not in words:
                    raise
                del words[word]
                if word not in silent:
                    dropped[error.subject] = error
            else:
                self._schedules.add(request.schedule.name)
                for option, refusal in dropped.items():
                    self._untaken.setdefault(option, {})[request.schedule.name] = refusal
                return outcome

    def report(self, *notes: str) -> None:
        """Print notes, and which schedules ran without which option; refuse an option that no schedule takes."""
        for refusals in self._untaken.values():
            if len(refusals) == len(self._schedules):
                raise next(iter(refusals.values()))
        for note in notes:
            say(note)
        for option, refusals in self._untaken.items():
            say(f"{flag_of(option)}: not taken by {', '.join(refusals)}")


def trace_of(options: argparse.Namespace, name: str, requests: PartialRequests | None = None) -> Trace:
    """Return the trace in the folder of that name, or of the run that options ask for, as one of several requests."""
    is_file = name.endswith(".csv") or experiment.is_experiment(name)
    if name in SCHEDULES or is_file or not ("/" in name or Path(name).is_dir()):
        words = words_of(options, name)
        return run_of(words) if requests is None else requests.serve(words, simulate)
    for word in given_words(options):
        raise RequestError(flag_of(word), f"is of a run, but {name!r} is a folder with one; leave it out")
    return reopen(name)


def traces_of(options: argparse.Namespace, names: Sequence[str]) -> list[Trace]:
    """Return the traces of those names in one unit of time: in slots, all backwards take as long as split ones."""
    requests = PartialRequests()
    traces = [trace_of(options, name, requests) for name in names]
    models = [trace.request.get("model") for trace in traces]
    if not all(model in models for model in UNIT_MODELS):
        requests.report()
        return traces
    traces = [
        requests.serve(words_of(options, name) | {"model": UNIT_MODELS[1]}, simulate)
        if model == UNIT_MODELS[0] and not Path(name).is_dir()
        else trace
        for name, model, trace in zip(names, models, traces, strict=True)
    ]
    requests.report(SPLIT_NOTE)
    return traces


def check_output(path: str | None, check: Callable[[], object], runs: Iterable[Callable[[], object]]) -> None:
    """Refuse an output that cannot be written, before it is computed, and after all else that is wrong with its runs.

    `check` may refuse it. Where its path exists, the requests of the runs are read first, so that `check` knows their
    files; where it is refused, their programs are made, too. Without a path nothing is written or checked.
    """
    if path is None:
        return
    if os.path.lexists(path):
        stage = "request"
        try:
            check()
        except RequestError:
            stage = "program"
        for run in runs:
            with check_until(stage), suppress(CheckEnded):
                run()
    check()

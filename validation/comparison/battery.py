"""All trials of one machine, and one file that has each result as soon as there is one.

A failed trial is a result, too, and the battery continues with the next one.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument
from cdpsim.errors import RequestError, choose
from cdpsim.files import tables
from cdpsim.files import writing as files
from cdpsim.files.notes import explain, progress, say

from .. import PROGRAM
from ..program import harness_command
from ..ranks.member import DEVICES, check_device
from ..report import schema as reportform
from ..report.environment import environment
from ..report.schema import MEASURED, Battery, Report, TrialResult
from .trials import Trial, list_trials, select_trials, trial_names
from .worker import Answer, Calibrated, Failed, Worker

TIMEOUT = 300.0
# The parts of an environment that may differ between the results of one file.
_CHANGES = ("date", "commit", "memory_bytes")


class Journal:
    """The results of a battery's trials, and their file."""

    def __init__(self, path: str | Path, device: str, found: list[Trial]) -> None:
        self.results = {trial.name: TrialResult(name=trial.name, state="left out") for trial in found}
        self._path, self._environment = path, environment(device)
        self._calibration: dict[str, Any] | None = None
        self._reports: dict[str, Report] = {}
        self._models: dict[str, dict[str, object]] = {}

    def resume(self) -> None:
        """Take over the results in the file, if it exists; refuse one of other code or another kind of machine."""
        if not Path(self._path).exists():
            return
        before = reportform.load_report(self._path, rewritten=True)
        if not isinstance(before, Battery):
            raise RequestError(str(self._path), "has one report and no battery; choose another file")
        if differs := _difference(before.environment, self._environment):
            raise RequestError(str(self._path), f"{differs}; choose another file, or --force measures all of it again")
        self._calibration, self._models, self._reports = before.calibration, before.models, before.by_name
        self.results |= {result.name: result for result in before.trials if result.name in self.results}

    def expected(self, trial: Trial) -> float:
        """Return the seconds that a trial may take: the median of its group in this file, else a guess."""
        own = (each for each in self.results.values() if each.name.partition("/")[0] == trial.group.name)
        taken = [result.seconds for result in own if result.state in MEASURED]
        return statistics.median(taken) if taken else trial.group.seconds

    def add(self, trial: Trial, answer: Answer, seconds: float) -> None:
        """Add the result of a trial, and write the file."""
        name, said = trial.name, dict[str, Any](state="ok")
        self._reports.pop(name, None)
        if isinstance(answer, Failed):
            said = {"state": "failed", **answer._asdict()}
        elif isinstance(answer, Calibrated):
            self._calibration = answer.calibration
        else:
            self._reports[name] = answer.report
            self._models[answer.model_hash] = answer.model
            said = {"state": "ok" if answer.report.ok else "not within tolerance"}
        self.results[name] = TrialResult(name=name, seconds=round(seconds, 2), **said)
        reportform.write_report(self._path, self.battery, force=True)

    @property
    def battery(self) -> Battery:
        """The battery with all results, in the order of the trials."""
        reports = [self._reports[name] for name in self.results if name in self._reports]
        used = {str(report.request["model_sha256"]) for report in reports}
        return Battery(
            environment=self._environment,
            seconds=round(sum(result.seconds for result in self.results.values()), 1),
            calibration=self._calibration,
            models={name: model for name, model in self._models.items() if name in used},
            reports=reports,
            trials=list(self.results.values()),
        )


def _difference(before: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Return the difference for which results of another environment are not comparable, None without one."""
    for name in sorted({*before, *here} - {*_CHANGES}):
        was, now = before.get(name), here.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            if differs := _difference(was, now):
                return differs
        elif was != now:
            before_and_now = ("some" if isinstance(each, dict) else each or "none" for each in (was, now))
            return "was measured elsewhere or by other code ({}: {}, now {})".format(name, *before_and_now)
    return None


def run_battery(
    output: str | Path,
    device: str,
    *,
    patterns: Iterable[str] = (),
    minutes: float | None = None,
    resume: bool = False,
    force: bool = False,
    timeout: float = TIMEOUT,
) -> Battery:
    """Make all trials, or the ones of the patterns that fit into the minutes; write the file after each."""
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    check_device(choose("device", device, DEVICES), "gloo", 1)
    known = list_trials(device)
    chosen = select_trials(known, patterns) if patterns else known
    files.check_writable(output, force=force or resume)
    journal = Journal(output, device, known)
    if resume:
        journal.resume()
    late = []
    with Worker(device, timeout) as worker:
        for trial in progress([trial for trial in chosen if journal.results[trial.name].state != "ok"], "battery"):
            left = deadline - time.monotonic()
            if journal.expected(trial) > left or not _make(trial, worker, left, journal):
                late.append(trial)
    if late:
        say(f"left out for want of time: {trial_names(late, known)}")
    return journal.battery


def _make(trial: Trial, worker: Worker, within: float, journal: Journal) -> bool:
    """Make a trial and add its result; return whether it was not cut short because the battery's time is over."""
    begun = time.monotonic()
    answer = worker.make(trial, within)
    seconds = time.monotonic() - begun
    if isinstance(answer, Failed) and answer.failure == "timeout" and seconds >= within:
        return False
    journal.add(trial, answer, seconds)
    result = journal.results[trial.name]
    if result.state == "failed":
        explain(str(RequestError(trial.name, f"failed ({result.failure}): {result.reason}")))
    elif result.state != "ok":
        explain(f"{trial.name}: {result.state}")
    return True


def trials_table(found: list[Trial]) -> str:
    """Return a table of trials in their order, with what they show and about how long they take."""
    rows = [(trial.name, trial.group.shows, f"{trial.group.seconds:g}") for trial in found]
    total = sum(trial.group.seconds for trial in found)
    return f"{tables.as_text(('trial', 'shows', 'seconds'), rows)}{len(found)} trials, about {total:.0f} s\n"


def battery_summary(found: Battery) -> str:
    """Return a summary of a battery in a line."""
    states = [result.state for result in found.trials]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(("ok", *states)) if state != "left out"]
    left = f", {states.count('left out')} left out" if "left out" in states else ""
    return f"{len(states) - states.count('left out')} trials in {found.seconds:g} s: {', '.join(counts)}{left}\n"


@harness_command(
    "battery",
    argument("-o", "--output", metavar="FILE.json", help="the file to write"),
    argument("--device", metavar="DEVICE", help="cpu or cuda (default: cuda where there is a GPU)"),
    argument("--only", nargs="+", metavar="PATTERN", help="make these trials or groups alone, such as 'timed*'"),
    argument("--minutes", metavar="M", help="start no trial that would end later than in M minutes"),
    argument("--timeout", metavar="SECONDS", help="how long ranks may take for a run (default 300)"),
    argument("--list", action="store_true", help="show the trials, and make none"),
    argument("--resume", action="store_true", help="make the trials without a good result in the file"),
    argument("--force", action="store_true", help="overwrite a file that exists"),
)
def battery_command(options: argparse.Namespace) -> int:
    """Replay what this machine can show, into one file of reports."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    patterns = options.only or ()
    if options.list:
        known = list_trials(choose("device", device, DEVICES))
        write_stdout(trials_table(select_trials(known, patterns) if patterns else known))
        return 0
    if options.output is None:
        raise RequestError("-o/--output", f"is missing; see {PROGRAM} battery --help")
    if options.resume and options.force:
        raise RequestError("--resume", "goes on with a file that --force overwrites; leave out one of them")
    found = run_battery(
        options.output,
        device,
        patterns=patterns,
        minutes=None if options.minutes is None else positive("--minutes", options.minutes),
        resume=options.resume,
        force=options.force,
        timeout=TIMEOUT if options.timeout is None else positive("--timeout", options.timeout),
    )
    write_stdout(battery_summary(found))
    return 1 if any(result.state not in ("ok", "left out") for result in found.trials) else 0


def positive(name: str, given: str) -> float:
    """Return the number above 0 in an option's value."""
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise RequestError(name, f"{given!r} is no number above 0; give one such as 8")
    return number

"""Every report of a replay below a folder, as one table and one figure."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument
from cdpsim.draw import canvas
from cdpsim.errors import RequestError
from cdpsim.files import tables
from cdpsim.files import writing as files
from cdpsim.files.notes import explain, say

from .. import PROGRAM
from ..program import harness_command
from . import schema as reportform
from .schema import LiveReport, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = {".txt": "text", ".json": "json", ".csv": "csv", ".tex": "latex"}
PATTERNS = ("report*.json", "battery*.json")
PEER_FILES = "peers*.json"  # of runtimes that others wrote


class StoredReport(NamedTuple):
    """A report and its file, named from the folder on."""

    file: str
    report: Report


class Reports(NamedTuple):
    """All reports below a folder, in the order of their requests, and lines on missing ones."""

    found: list[StoredReport]
    refused: list[str]  # files that are no reports
    unmeasured: list[str]  # trials of batteries that failed or were left out, and files that another command shows
    live: list[str]  # reports of rounds that ranks found, in a line each


def find_reports(folder: str | Path) -> Reports:
    """Return every report below a folder; refuse a folder without one that can be read."""
    home = Path(folder)
    if not home.is_dir():
        remedy = "give a folder" if home.exists() else "check its spelling"
        problem = "is no folder" if home.exists() else "there is no such folder"
        raise RequestError(str(folder), f"{problem}; {remedy}")
    paths = sorted(path for pattern in PATTERNS for path in home.rglob(pattern))
    reports = Reports([], [], [], [])
    for path in paths:
        _add(path, str(path.relative_to(home)), reports)
    for path in sorted(home.rglob(PEER_FILES)):
        reports.unmeasured.append(f"{path.relative_to(home)}: is shown by `{PROGRAM} peers --from {path}`")
    if not any(reports):
        problem = f"has no {' or '.join(PATTERNS)} below it; write one with `{PROGRAM} replay -o`"
        raise RequestError(str(folder), problem)
    if not reports.found:
        lines = [*reports.refused, *reports.unmeasured, *reports.live]
        raise RequestError(str(folder), f"has no report that can be shown ({'; '.join(lines)}); replay again")
    return reports._replace(found=sorted(reports.found, key=_order))


def _add(path: Path, name: str, reports: Reports) -> None:
    """Add the reports in one file, and lines on what it lacks."""
    try:
        content = reportform.load_report(path)
    except RequestError as error:
        reports.refused.append(str(error))
        return
    if isinstance(content, Report):
        reports.found.append(StoredReport(name, content))
        return
    if isinstance(content, LiveReport):
        reports.live.append(f"{name}: {content}")
        return
    reports.found.extend(StoredReport(name, report) for report in content.reports)
    failed = [trial for trial in content.unmeasured if trial.state == "failed"]
    reports.unmeasured.extend(f"{name}: {each.name} failed ({each.failure}): {each.reason}" for each in failed)
    if left := len(content.unmeasured) - len(failed):
        reports.unmeasured.append(f"{name}: {left} of {len(content.trials)} trials were left out")


def _order(found: StoredReport) -> tuple[object, ...]:
    asked = found.report.asked
    where = asked.model, asked.device, asked.single_process, asked.n
    return *where, asked.schedule, asked.rule or "", found.report.options_text, found.file


OPTIONS = "options"
ALLOCATED = ("allocated bytes", "unnamed bytes")  # the allocator's account
WHERE_USED = (OPTIONS, *ALLOCATED)  # columns that a table has if a row has something there
HEADER = (
    "schedule",
    "rule",
    OPTIONS,
    "n",
    "model",
    "on",
    "simulated bytes",
    "measured bytes",
    "error %",
    "worst device %",
    *ALLOCATED,
    "parameters",
    "messages",
    "time %",
    "ok",
    "file",
)


def reports_table(found: list[StoredReport], form: str) -> str:
    """Return a table with a row for each report, in one of the formats of `cdpsim.files.tables`."""
    if tables.check_format(form) == "json":
        return tables.as_json([_values(each) for each in found])
    if form == "csv":
        rows = [_data(each) for each in found]
        return tables.as_csv([*rows[0]], [[*row.values()] for row in rows])
    cells = [_row(each) for each in found]
    shown = [k for k, name in enumerate(HEADER) if name not in WHERE_USED or any(row[k] != "-" for row in cells)]
    write = tables.as_latex if form == "latex" else tables.as_text
    return write([HEADER[k] for k in shown], [[row[k] for k in shown] for row in cells])


def _allocated(report: Report) -> list[str]:
    """Return the largest account of a process by its allocator, and the most bytes in any event that have no name."""
    if report.allocator is None:
        return ["-", "-"]
    processes = report.allocator.processes
    peak, unnamed = max(p.measured_bytes for p in processes), max(p.largest_difference for p in processes)
    return [str(peak), str(unnamed)]


def _values(found: StoredReport) -> dict[str, object]:
    """Return the results of a report for programs, by JSON's keys."""
    report = found.report
    return {
        "file": found.file,
        "request": report.request,
        "options": report.options_text,
        "simulated_bytes": report.memory.total.simulated_bytes,
        "measured_bytes": report.memory.total.measured_bytes,
        "relative_error": report.memory.total.relative_error,
        "max_relative_error": report.memory.max_relative_error,
        "method": report.memory.method,
        "allocator": msgspec.to_builtins(report.allocator),
        "max_abs_difference": report.parameters.max_abs_difference,
        "bit_equal": report.parameters.bit_equal,
        "nearest_rule": msgspec.to_builtins(report.parameters.nearest),
        "messages_agree": report.messages.agree,
        "needs": None if report.messages.differences is None else len(report.messages.differences),
        "lives": None if report.lives is None else len(report.lives),
        "time_relative_error": report.time.relative_error if report.time else None,
        "ok": report.ok,
    }


def _row(found: StoredReport) -> list[str]:
    """Return the cells of a report for people."""
    report, asked = found.report, found.report.asked
    total = report.memory.total
    return [
        asked.schedule,
        asked.rule or "-",
        report.options_text or "-",
        str(asked.n),
        asked.model,
        platform_text(report),
        str(total.simulated_bytes),
        str(total.measured_bytes),
        percent(total.relative_error),
        percent(report.memory.max_relative_error),
        *_allocated(report),
        _parameters(report),
        _messages(report),
        percent(report.time.relative_error) if report.time else "-",
        "yes" if report.ok else "NO",
        found.file,
    ]


def _data(found: StoredReport) -> dict[str, object]:
    """Return the cells of a report for programs, under the headings of a table; errors are shares."""
    report, asked = found.report, found.report.asked
    total = report.memory.total
    return {
        "schedule": asked.schedule,
        "rule": asked.rule,
        OPTIONS: report.options_text or None,
        "n": asked.n,
        "model": asked.model,
        "on": platform_text(report),
        "simulated bytes": total.simulated_bytes,
        "measured bytes": total.measured_bytes,
        "error": total.relative_error,
        "worst device": report.memory.max_relative_error,
        **dict(zip(ALLOCATED, (None if text == "-" else int(text) for text in _allocated(report)), strict=True)),
        "parameters": report.parameters.max_abs_difference,
        "simulated messages": report.messages.simulated,
        "messages": report.messages.measured,
        "time": report.time.relative_error if report.time else None,
        "ok": report.ok,
        "file": found.file,
    }


def platform_text(report: Report) -> str:
    """Return the device and backend of a replay, in words."""
    asked = report.asked
    how = "one process" if asked.single_process else asked.backend
    return " ".join(word for word in (asked.device, how) if word) or "-"


def percent(share: float) -> str:
    """Return a share in percent: 0 is exact, and a share that would be rounded to it is not 0."""
    text = f"{100 * share:.2f}"
    return "0" if share == 0 else f"{100 * share:.0e}" if float(text) == 0 else text


def _parameters(report: Report) -> str:
    difference = report.parameters.max_abs_difference
    if report.parameters.bit_equal:
        return "bit-equal"
    return "not a number" if difference is None else f"within {difference:.0e}"


def _messages(report: Report) -> str:
    messages = report.messages
    if messages.agree:
        return f"{messages.measured}"
    same = messages.measured == messages.simulated
    return f"{messages.measured}, {'others' if same else f'not {messages.simulated}'}"


def write_reports_table(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    form: str | None = None,
    picture: str | Path | None = None,
    force: bool = False,
    missing: Callable[[Reports], object] = lambda reports: None,
) -> str:
    """Write table and figure where they are wanted, and return the table; `missing` is called with all reports."""
    form = tables.check_format(form or _form_of(output))
    if picture is not None:
        canvas.check_form(picture)
    reports = find_reports(folder)
    for path in (output, picture):
        if path is not None:
            files.check_writable(path, force=force)
    missing(reports)
    table = reports_table(reports.found, form)
    drawn = None if picture is None else canvas.rendered(reports_figure(reports.found), picture)
    if output is not None:
        files.write_file(output, [table], force=force)
    if picture is not None and drawn is not None:
        files.write_file(picture, [drawn], force=force)
    return table


def reports_figure(found: list[StoredReport]) -> "Figure":
    """Return the figure of simulated against measured values."""
    from .figure import draw_reports

    with canvas.defaults():
        return draw_reports([each.report for each in found])


def _form_of(output: str | Path | None) -> str:
    if output is None:
        return "text"
    ending = Path(output).suffix.lower()
    if ending not in ENDINGS:
        raise RequestError(str(output), f"its form is unknown; end its name in {', '.join(ENDINGS)}, or give --format")
    return ENDINGS[ending]


@harness_command(
    "report",
    argument("folder", metavar="DIR", help="where to look, and in all folders below it"),
    argument("-o", "--output", metavar="FILE", help="write the table there (default: standard output)"),
    argument("--figure", metavar="FILE", help="draw a figure: .svg, .png or .pdf"),
    argument("--format", metavar="FORM", help="text (default), json, csv or latex; else as FILE's ending says"),
    argument("--force", action="store_true", help="overwrite files that exist"),
)
def report_command(options: argparse.Namespace) -> int:
    """Show every report of a replay below a folder, as one table and one figure."""
    refused: list[str] = []

    def tell(reports: Reports) -> None:
        refused.extend(reports.refused)
        for line in refused:
            explain(f"error: {line}")
        for line in (*reports.unmeasured, *reports.live):
            say(line)

    table = write_reports_table(
        options.folder,
        options.output,
        form=options.format,
        picture=options.figure,
        force=options.force,
        missing=tell,
    )
    if options.output is None:
        write_stdout(table)
    return 1 if refused else 0

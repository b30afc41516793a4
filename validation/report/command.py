"""Every report of a replay below a folder, as one table and one figure."""

import argparse
from pathlib import Path
from typing import NamedTuple

import msgspec

from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument
from cdpsim.draw import canvas
from cdpsim.errors import RequestError, choose
from cdpsim.files import tables
from cdpsim.files import writing as files
from cdpsim.files.notes import explain, say

from .. import PROGRAM
from ..program import harness_command
from . import schema as reportform
from .figure import draw_reports
from .schema import LiveReport, Report

ENDINGS = {".txt": "text", ".json": "json", ".csv": "csv"}
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

    def order(stored: StoredReport) -> tuple[object, ...]:
        asked = stored.report.asked
        where = asked.model, asked.device, asked.single_process, asked.n
        return *where, asked.schedule, asked.rule or "", stored.report.options_text, stored.file

    return reports._replace(found=sorted(reports.found, key=order))


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


class Cell(NamedTuple):
    """A cell of a report's row: its value for programs, and its text for people, under a heading of each.

    Without a heading for people, tables for people leave it out. The text is usually the value.
    """

    name: str
    value: object
    heading: str | None
    text: str | None = None
    is_usual: bool = True  # whether a table for people has it where no row has a value in it


def reports_table(found: list[StoredReport], form: str) -> str:
    """Return a table with a row for each report, as text, JSON or CSV."""
    if choose("format", form, ENDINGS.values()) == "json":
        return tables.as_json([_values(each) for each in found])
    rows = [_report_cells(each) for each in found]
    if form == "csv":
        return tables.as_csv([cell.name for cell in rows[0]], [[cell.value for cell in row] for row in rows])
    columns = zip(*rows, strict=True)
    shown = [own for own in columns if own[0].heading and any(each.is_usual or each.value is not None for each in own)]
    texts = [[each.text or ("-" if each.value is None else str(each.value)) for each in own] for own in shown]
    return tables.as_text([str(own[0].heading) for own in shown], [*zip(*texts, strict=True)])


def _report_cells(found: StoredReport) -> list[Cell]:
    report, asked = found.report, found.report.asked
    total, worst, parameters = report.memory.total, report.memory.max_relative_error, report.parameters
    processes = report.allocator.processes if report.allocator else []
    allocated, unnamed = (
        max((getattr(each, name) for each in processes), default=None)
        for name in ("measured_bytes", "largest_difference")
    )
    time = report.time.relative_error if report.time else None
    return [
        *(Cell(name, getattr(asked, name), name) for name in ("schedule", "rule")),
        Cell("options", report.options_text or None, "options", is_usual=False),
        *(Cell(name, getattr(asked, name), name) for name in ("n", "model")),
        Cell("on", platform_text(report), "on"),
        Cell("simulated bytes", total.simulated_bytes, "simulated bytes"),
        Cell("measured bytes", total.measured_bytes, "measured bytes"),
        Cell("error", total.relative_error, "error %", percent(total.relative_error)),
        Cell("worst device", worst, "worst device %", percent(worst)),
        Cell("allocated bytes", allocated, "allocated bytes", is_usual=False),
        Cell("unnamed bytes", unnamed, "unnamed bytes", is_usual=False),
        Cell("parameters", parameters.max_abs_difference, "parameters", _parameters(report)),
        Cell("simulated messages", report.messages.simulated, None),
        Cell("messages", report.messages.measured, "messages", _messages(report)),
        Cell("time", time, "time %", None if time is None else percent(time)),
        Cell("ok", report.ok, "ok", "yes" if report.ok else "NO"),
        Cell("file", found.file, "file"),
    ]


def _values(found: StoredReport) -> dict[str, object]:
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
    reports: Reports,
    output: str | Path | None = None,
    *,
    form: str | None = None,
    picture: str | Path | None = None,
    force: bool = False,
) -> str:
    """Write table and figure where they are wanted, and return the table."""
    form = choose("format", form or _form_of(output), ENDINGS.values())
    if picture is not None:
        canvas.check_form(picture)
    for path in (output, picture):
        if path is not None:
            files.check_writable(path, force=force)
    table = reports_table(reports.found, form)
    written: dict[str | Path, str | bytes] = {} if output is None else {output: table}
    if picture is not None:
        written[picture] = canvas.rendered(draw_reports([each.report for each in reports.found]), picture)
    for file, content in written.items():
        files.write_file(file, [content], force=force)
    return table


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
    argument("--format", metavar="FORM", help="text (default), json or csv; else as FILE's ending says"),
    argument("--force", action="store_true", help="overwrite files that exist"),
)
def report_command(options: argparse.Namespace) -> int:
    """Show every report of a replay below a folder, as one table and one figure."""
    reports = find_reports(options.folder)
    for line in reports.refused:
        explain(f"error: {line}")
    for line in (*reports.unmeasured, *reports.live):
        say(line)
    named = {"form": options.format, "picture": options.figure, "force": options.force}
    table = write_reports_table(reports, options.output, **named)
    if options.output is None:
        write_stdout(table)
    return 1 if reports.refused else 0

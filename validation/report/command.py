"""Every report of a replay below a folder, as one table and one figure."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cdpsim.cli.console import say, write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.draw import canvas
from cdpsim.errors import RequestError
from cdpsim.files import tables
from cdpsim.files import writing as files
from validation.report import schema as reportform
from validation.report.schema import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = {".txt": "text", ".json": "json", ".csv": "csv", ".md": "markdown", ".tex": "latex"}
PATTERNS = ("report*.json", "battery*.json")


class StoredReport(NamedTuple):
    """A report and its file, named from the folder on."""

    file: str
    report: Report


class Reports(NamedTuple):
    """All reports below a folder, in the order of their requests, and lines on missing ones."""

    found: list[StoredReport]
    refused: list[str]  # files that are no reports
    unmeasured: list[str]  # trials of batteries that failed or were left out


def find_reports(folder: str | Path) -> Reports:
    """Return every report below a folder; refuse a folder without one that can be read."""
    home = Path(folder)
    if not home.is_dir():
        remedy = "give a folder" if home.exists() else "check its spelling"
        problem = "is no folder" if home.exists() else "there is no such folder"
        raise RequestError(str(folder), f"{problem}; {remedy}")
    paths = sorted(path for pattern in PATTERNS for path in home.rglob(pattern))
    reports = Reports([], [], [])
    for path in paths:
        _add(path, str(path.relative_to(home)), reports)
    if not any(reports):
        problem = f"has no {' or '.join(PATTERNS)} below it; write one with `python -m validation replay -o`"
        raise RequestError(str(folder), problem)
    if not reports.found:
        lines = [*reports.refused, *reports.unmeasured]
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
    reports.found.extend(StoredReport(name, report) for report in content.reports)
    failed = [trial for trial in content.unmeasured if trial.state == "failed"]
    reports.unmeasured.extend(f"{name}: {each.name} failed ({each.failure}): {each.reason}" for each in failed)
    if left := len(content.unmeasured) - len(failed):
        reports.unmeasured.append(f"{name}: {left} of {len(content.trials)} trials were left out")


def _order(found: StoredReport) -> tuple[object, ...]:
    asked = found.report.asked
    return asked.model, asked.device, asked.single_process, asked.n, asked.schedule, asked.rule or "", found.file


HEADER = (
    "schedule",
    "rule",
    "n",
    "model",
    "on",
    "simulated bytes",
    "measured bytes",
    "error %",
    "worst device %",
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
    return tables.FORMATS[form](HEADER, [_row(each) for each in found])


def _values(found: StoredReport) -> dict[str, object]:
    """Return the results of a report for programs, by JSON's keys."""
    report = found.report
    return {
        "file": found.file,
        "request": report.request,
        "simulated_bytes": report.memory.total.simulated_bytes,
        "measured_bytes": report.memory.total.measured_bytes,
        "relative_error": report.memory.total.relative_error,
        "max_relative_error": report.memory.max_relative_error,
        "method": report.memory.method,
        "max_abs_difference": report.parameters.max_abs_difference,
        "bit_equal": report.parameters.bit_equal,
        "messages_agree": report.messages.agree,
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
        str(asked.n),
        asked.model,
        platform_text(report),
        str(total.simulated_bytes),
        str(total.measured_bytes),
        percent(total.relative_error),
        percent(report.memory.max_relative_error),
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
        "n": asked.n,
        "model": asked.model,
        "on": platform_text(report),
        "simulated bytes": total.simulated_bytes,
        "measured bytes": total.measured_bytes,
        "error": total.relative_error,
        "worst device": report.memory.max_relative_error,
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
    return f"{messages.measured}" if messages.agree else f"{messages.measured}, not {messages.simulated}"


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
    from validation.report.figure import draw_reports

    with canvas.defaults():
        return draw_reports([each.report for each in found])


def _form_of(output: str | Path | None) -> str:
    if output is None:
        return "text"
    ending = Path(output).suffix.lower()
    if ending not in ENDINGS:
        raise RequestError(str(output), f"its form is unknown; end its name in {', '.join(ENDINGS)}, or give --format")
    return ENDINGS[ending]


@command(
    "report",
    argument("folder", metavar="DIR", help="where to look, and in all folders below it"),
    argument("-o", "--output", metavar="FILE", help="write the table there (default: standard output)"),
    argument("--figure", metavar="FILE", help="draw a figure: .svg, .png or .pdf"),
    argument(
        "--format", metavar="FORM", help="text (default), json, csv, markdown or latex; else as FILE's ending says"
    ),
    argument("--force", action="store_true", help="overwrite files that exist"),
    package="validation",
)
def report_command(options: argparse.Namespace) -> int:
    """Show every report of a replay below a folder, as one table and one figure."""
    refused: list[str] = []

    def tell(reports: Reports) -> None:
        refused.extend(reports.refused)
        for line in (*(f"error: {each}" for each in refused), *reports.unmeasured):
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

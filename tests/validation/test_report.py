"""Reports of replays as one table and one figure, and what is none of them."""

import csv
import json
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import SCHEDULES
from cdpsim.draw import canvas
from cdpsim.errors import RequestError
from tests.validation.made_reports import Made
from validation.__main__ import main
from validation.report import command as report
from validation.report import schema as reportform
from validation.report.figure import CURVES, draw_reports
from validation.report.schema import (
    Account,
    AllocatorComparison,
    Battery,
    Curve,
    Remainder,
    Report,
    Scalar,
    TrialResult,
)

reports = st.builds(
    Made,
    schedule=st.sampled_from([*SCHEDULES, "one-of-tomorrow"]),
    n=st.integers(1, 5),
    model=st.sampled_from(["mlp", "transformer"]),
    stage=st.integers(1, 10**12),
    off=st.floats(-0.5, 0.5),
    seconds=st.none() | st.floats(1e-6, 1e6),
    agree=st.booleans(),
).map(Made.report)


@given(reports)
def test_a_report_comes_back_as_it_was_written(made: Report) -> None:
    assert reportform.decode_report(reportform.encode_report(made).decode(), "it") == made


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two reports, one of them further down."""
    (tmp_path / "deep").mkdir()
    reportform.write_report(tmp_path / "report.json", Made("multi-dp", off=0.002).report())
    reportform.write_report(tmp_path / "deep" / "report-2.json", Made("multi-cdp", seconds=2.0, agree=False).report())
    (tmp_path / "cluster.json").write_text("{}")  # which is no report, and does not say that it is
    return tmp_path


def shown_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of a folder's table for people, by its headings."""
    lines = report.write_reports_table(report.find_reports(folder)).splitlines()
    header, _, *rows = (re.split(r"\s{2,}", line.strip()) for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_every_report_below_a_folder_is_a_row(results: Path) -> None:
    told = shown_rows(results)
    assert [(row["schedule"], row["file"], row["ok"]) for row in told] == [
        ("multi-cdp", str(Path("deep", "report-2.json")), "NO"),
        ("multi-dp", "report.json", "yes"),
    ]
    assert [(row["messages"], row["time %"], row["error %"]) for row in told] == [
        ("23, not 24", "0", "0"),
        ("24", "-", "0.20"),
    ]


def test_the_allocators_account_has_columns_where_there_is_one(results: Path) -> None:
    """The largest process, and the bytes in it that have no name; a figure has a hollow mark for each process."""
    accounts = [
        Account(
            device=device,
            simulated_bytes=100,
            remainders=[Remainder(name="packed", size=20)],
            measured_bytes=120 + device,
            peak_at="U(t=0,j=0) on device 0",
            largest_difference=device,
            differs_at="U(t=0,j=0) on device 0" if device else None,
        )
        for device in range(2)
    ]
    comparison = AllocatorComparison(processes=accounts, tolerance_bytes=64, tolerance=0.0, method="profiler")
    made = replace(Made("zero-cdp").report(), allocator=comparison)
    reportform.write_report(results / "report-3.json", made)
    rows = list(csv.DictReader(StringIO(report.write_reports_table(report.find_reports(results), form="csv"))))
    assert [(row["allocated bytes"], row["unnamed bytes"]) for row in rows] == [("", ""), ("", ""), ("121", "1")]
    *_, last = shown_rows(results)
    assert (last["allocated bytes"], last["unnamed bytes"]) == ("121", "1")
    drawn = draw_reports([made])
    hollow = [dots for dots in drawn.axes[0].collections if not len(dots.get_facecolor())]
    assert [np.asarray(dots.get_offsets()).tolist() for dots in hollow] == [[[120, 120], [121, 120]]]


OPTIONS: dict[str, Scalar] = {"recompute": "sqrt", "prefetch": 1, "reduce": "last", "dtype": "bfloat16"}


def test_options_have_a_column_where_a_run_has_some(results: Path) -> None:
    """Usual values are left out; options that were not replayed, or only in part, are marked."""
    usual: dict[str, Scalar] = {"recompute": "none", "dtype": "float32", "autocast": None, "optimizer": "sgd"}
    before = Made("zero-cdp").report()
    reportform.write_report(results / "report-3.json", replace(before, request=before.request | usual))
    assert "options" not in report.write_reports_table(report.find_reports(results))
    made = replace(before, request=before.request | OPTIONS, options={"prefetch": "replayed"})
    reportform.write_report(results / "report-4.json", made)
    left = {"prefetch": "not replayed, as it is", "recompute": "only full replayed, as so"}
    reportform.write_report(results / "report-5.json", replace(made, options=left))
    assert [row["options"] for row in shown_rows(results)] == [
        "-",
        "-",
        "-",
        "reduce=last recompute=sqrt (only full replayed) prefetch=1 (not replayed) bfloat16",
        "reduce=last recompute=sqrt prefetch=1 bfloat16",
    ]
    rows = csv.DictReader(StringIO(report.write_reports_table(report.find_reports(results), form="csv")))
    said = json.loads(report.write_reports_table(report.find_reports(results), form="json"))
    assert [row["options"] for row in rows] == [each["options"] for each in said]


OLD_NAMES = {"overlap_all_reduce": ("reduce", "last"), "vertical_sync": ("rule", "vertical-sync")}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_reports_and_trials_of_before_are_read_by_the_names_of_today(name: str, results: Path) -> None:
    """In a report of its own, and in a battery."""
    option, value = OLD_NAMES[name]
    made, path = Made("multi-dp").report(), results / "report-3.json"
    reportform.write_report(path, replace(made, request=made.request | {option: value}))
    new, old = path.read_text(), json.loads(path.read_text())
    old["request"] |= {option: None, name: True}
    assert reportform.decode_report(json.dumps(old), "old") == reportform.decode_report(new, "new")
    trial = reportform.TrialResult(name=f"options/multi-dp+replicas=2+{name.replace('_', '-')}+adam", state="ok")
    assert trial.name == f"options/multi-dp+replicas=2+{option}={value}+adam"


def test_a_file_of_peers_is_named_with_the_command_that_shows_it(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "peers-cpu.json").write_text("{}")
    assert main(["report", str(results)]) == 0
    output = capsys.readouterr()
    path = results / "peers-cpu.json"
    assert output.err == f"cdpsim: peers-cpu.json: is shown by `python -m validation peers --from {path}`\n"
    assert "peers" not in output.out


def test_csv_has_numbers_and_shares(results: Path) -> None:
    """The same as JSON, to the last digit."""
    rows = list(csv.DictReader(StringIO(report.write_reports_table(report.find_reports(results), form="csv"))))
    said = json.loads(report.write_reports_table(report.find_reports(results), form="json"))
    assert [(row["messages"], row["simulated messages"], row["ok"]) for row in rows] == [
        ("23", "24", "false"),
        ("24", "24", "true"),
    ]
    same = {
        "simulated bytes": "simulated_bytes",
        "measured bytes": "measured_bytes",
        "error": "relative_error",
        "worst device": "max_relative_error",
        "parameters": "max_abs_difference",
        "time": "time_relative_error",
        "ok": "ok",
    }
    for row, values in zip(rows, said, strict=True):
        for heading, name in same.items():
            assert (json.loads(row[heading]) if row[heading] else None) == values[name], heading
        assert (row["file"], row["n"]) == (values["file"], str(values["request"]["n"]))


def test_json_has_the_numbers_unrounded(results: Path) -> None:
    rows = json.loads(report.write_reports_table(report.find_reports(results), form="json"))
    simulated, measured = rows[1]["simulated_bytes"], rows[1]["measured_bytes"]
    assert rows[1]["relative_error"] == (simulated - measured) / measured
    assert [row["time_relative_error"] for row in rows] == [0.0, None]


@pytest.mark.parametrize(
    ("ending", "start"),
    [(".json", "["), (".csv", "schedule,"), (".txt", "schedule  ")],
)
def test_the_ending_of_the_output_says_its_form(results: Path, tmp_path: Path, ending: str, start: str) -> None:
    table = report.write_reports_table(report.find_reports(results), tmp_path / f"table{ending}")
    assert table == (tmp_path / f"table{ending}").read_text()
    assert table.startswith(start)


@pytest.mark.parametrize("share", [0.0, 1e-7, -1e-7, 0.0123, -0.5])
def test_only_what_is_exact_reads_zero(share: float) -> None:
    assert (float(report.percent(share)) == 0) == (share == 0)


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_same_reports_give_the_same_picture(results: Path, tmp_path: Path, ending: str, start: bytes) -> None:
    drawn = [tmp_path / f"{name}{ending}" for name in "ab"]
    for picture in drawn:
        report.write_reports_table(report.find_reports(results), picture=picture)
    first, second = (picture.read_bytes() for picture in drawn)
    assert first == second
    assert first.startswith(start)


def test_a_picture_shows_every_device_of_every_report() -> None:
    made = [Made(name, n, seconds=1.0).report() for name in ("mp-cdp", "zero-dp", "one-of-tomorrow") for n in (2, 3)]
    drawn = draw_reports(made)
    scatter, errors, times = drawn.axes[:3]
    for panel in (scatter, errors):
        assert sum(np.shape(dots.get_offsets())[0] for dots in panel.collections) == 3 * (2 + 3)
    assert len(times.collections) == len(made)
    curves = [axes.get_title("left") for axes in drawn.axes[3:] if axes.get_visible()]
    assert curves == [f"{name}, n = 3, mlp" for name in ("mp-cdp", "zero-dp", "one-of-tomorrow")]


@pytest.mark.slow
def test_a_picture_of_all_schedules_has_a_colour_and_a_curve_for_each() -> None:
    """And of others that are new, as many as fit; the run without options. The key is within the figure."""
    names = [*SCHEDULES, *(f"z-new-{k}" for k in range(8))]
    made = [Made(name, 2).report() for name in names]
    made += [replace(each, request=each.request | {"n": 3, "prefetch": 1}) for each in made[:2]]
    drawn = draw_reports(made)
    curves = [axes.get_title("left") for axes in drawn.axes[2:] if axes.get_visible()]
    assert curves == [f"{name}\nn = 2, mlp" for name in names[:CURVES]]
    shown = [axes for axes in drawn.axes[2:] if axes.get_visible()]
    assert len({axes.get_lines()[0].get_color() for axes in shown}) == CURVES
    canvas.rendered(drawn, "report.png")
    (key,) = drawn.legends
    assert drawn.bbox.x0 <= key.get_window_extent().x0 and key.get_window_extent().x1 <= drawn.bbox.x1


ODD = {
    "no stage weighs much": Made("single-dp", n=1, stage=1),
    "everything is off": Made("zero-cdp", n=2, stage=10**12, off=-0.5, seconds=1e-6),
    "many stages": Made("mp-dp", n=40, off=0.1, seconds=1e6),
}


@pytest.mark.slow
@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
def test_no_report_is_too_odd_to_be_drawn(made: Made) -> None:
    drawn = draw_reports([made.report()])
    assert canvas.rendered(drawn, "report.png")


def test_a_report_of_nothing_measured_can_be_drawn() -> None:
    full = Made(n=1).report()
    device = replace(full.memory.devices[0], measured_bytes=0)
    bare = replace(full.memory, devices=[device], curve=Curve(slot=[], simulated_bytes=[], measured_bytes=[]))
    assert canvas.rendered(draw_reports([replace(full, memory=bare)]), "report.png")


FOREIGN = {
    "a list": "[]",
    "half a report": '{"request": {"schedule": "multi-dp"',
    "another report": '{"request": {"schedule": "multi-dp", "n": 2, "model": "mlp"}, "score": 3}',
    "nothing": " ",
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_named_and_the_others_are_shown(
    results: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line on stderr, and the exit code says that something is missing."""
    assert main(["report", str(results)]) == 0
    whole = capsys.readouterr()
    (results / "report-of-something.json").write_text(text)
    assert main(["report", str(results)]) == 1
    output = capsys.readouterr()
    assert (output.out, whole.err) == (whole.out, "")
    assert re.fullmatch(r"cdpsim: error: .*report-of-something\.json: is .*[;?].*\n", output.err)


def test_where_no_file_can_be_read_the_folder_is_refused(tmp_path: Path) -> None:
    for name in ("report-a.json", "report-b.json"):
        (tmp_path / name).write_text("{")
    with pytest.raises(RequestError, match=r"no report that can be shown \(.*report-a\.json: .*report-b\.json: "):
        report.find_reports(tmp_path)


def battery(reports: list[Report], *trials: TrialResult) -> Battery:
    """The file of a battery of that many trials."""
    return Battery(environment={}, seconds=1.0, calibration=None, models={}, reports=reports, trials=list(trials))


FAILED = TrialResult(name="vit/single-dp", state="failed", failure="out of memory", reason="too few bytes")
LEFT_OUT = TrialResult(name="vit/single-cdp", state="left out")


def test_a_battery_that_did_not_come_to_its_end_is_shown_as_far_as_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what failed and how much was left out; that is no fault of the table."""
    measured = TrialResult(name="mlp/multi-cdp", state="ok")
    reportform.write_report(tmp_path / "battery.json", battery([Made().report()], measured, FAILED, LEFT_OUT))
    assert main(["report", str(tmp_path), "--format", "csv"]) == 0
    output = capsys.readouterr()
    assert [row["file"] for row in csv.DictReader(StringIO(output.out))] == ["battery.json"]
    assert output.err.splitlines() == [
        "cdpsim: battery.json: vit/single-dp failed (out of memory): too few bytes",
        "cdpsim: battery.json: 1 of 3 trials were left out",
    ]


def test_a_battery_in_which_nothing_was_measured_is_refused_with_the_reason(tmp_path: Path) -> None:
    reportform.write_report(tmp_path / "battery.json", battery([], FAILED))
    with pytest.raises(RequestError, match=r"shown \(battery\.json: vit/single-dp failed \(out of memory\): too few"):
        report.find_reports(tmp_path)


def test_a_battery_has_a_trial_for_each_report() -> None:
    made = Made().report()
    with pytest.raises(ValueError, match="has not one entry for each"):
        battery([made], FAILED)
    one = battery([made], FAILED, TrialResult(name="mlp/multi-cdp", state="not within tolerance"))
    assert (one.by_name, one.unmeasured) == ({"mlp/multi-cdp": made}, [FAILED])


def test_unequal_curves_are_no_report() -> None:
    text = reportform.encode_report(Made().report()).decode().replace('"slot": [', '"slot": [7,')
    with pytest.raises(RequestError, match="differ in length"):
        reportform.decode_report(text, "it")


def test_a_folder_without_reports_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="replay -o"):
        report.find_reports(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="give a folder"):
        report.find_reports(tmp_path / "file")
    with pytest.raises(RequestError, match="check its spelling"):
        report.find_reports(tmp_path / "nowhere")


def test_refusals_come_before_anything_is_written(results: Path, tmp_path: Path) -> None:
    found = report.find_reports(results)
    for output, picture, problem in (
        ("table.md", None, "its form is unknown"),
        ("table.txt", "figure.gif", "its form is unknown"),
        ("report.json", None, "--force"),
        ("table.txt", "report.svg", "--force"),
    ):
        (tmp_path / "report.svg").touch()
        with pytest.raises(RequestError, match=problem):
            report.write_reports_table(found, tmp_path / output, picture=picture and tmp_path / picture)
        assert not (tmp_path / "table.txt").exists()
    with pytest.raises(RequestError, match="format: unknown format 'markdown'; known are text, json, csv"):
        report.write_reports_table(report.find_reports(results), form="markdown")

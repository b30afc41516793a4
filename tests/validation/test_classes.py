"""The table of errors is made of reports: the committed one byte by byte, and what a calibration adds to it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import validation.comparison.classes as classes
from cdpsim import RequestError
from tests.validation.measured_tables import PAGE, RESULTS
from validation.comparison.classes import errors_of_calibration, table_of_errors, write_table_of_errors
from validation.profile.hugging_face import HuggingFaceStep
from validation.profile.whole import WholeStep
from validation.report.schema import Calibration

TABLE = RESULTS / "classes.toml"


def shown(step: HuggingFaceStep) -> WholeStep:
    """What a profile says, by the page of results: to make it takes a minute, and is a test of `hugging_face`."""
    after = PAGE.read_text(encoding="utf-8").partition(f"  {step.activations:,}  ")[2]
    return WholeStep(int(after.split()[0].replace(",", "")), 0, 0)


def test_the_committed_table_is_made_of_the_committed_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "predict_step", shown)
    assert table_of_errors(RESULTS) == TABLE.read_text(encoding="utf-8")


def test_a_folder_of_other_reports_has_another_table(tmp_path: Path) -> None:
    """Of one report, with a run less; all other classes are not measured."""
    content = json.loads((RESULTS / "peers-data-ranks-cpu-2026-11-23.json").read_bytes())
    content["peers"].pop()
    (tmp_path / "peers.json").write_text(json.dumps(content))
    assert write_table_of_errors([str(tmp_path)]) == 0
    text = (tmp_path / "classes.toml").read_text()
    assert Counter(line for line in text.splitlines() if line.startswith("runs")) == {"runs = 59": 2, "runs = 0": 8}
    with pytest.raises(RequestError, match="has no battery"):
        table_of_errors(tmp_path / "results")
    with pytest.raises(RequestError, match="DIR: give one folder"):
        write_table_of_errors([])


def calibration(**changed: Any) -> Calibration:
    """The calibration of the battery on a CPU, with other content."""
    [content] = [json.loads(path.read_bytes())["calibration"] for path in RESULTS.glob("battery-cpu*.json")]
    return msgspec.convert(content | changed, Calibration)


def test_collectives_are_of_nccl_where_it_was_calibrated() -> None:
    """By the times of messages point to point, to which no collective is fitted."""
    found = calibration()
    assert [*errors_of_calibration(found)] == []
    request = found.request | {"backend": "nccl"}
    errors = [error for own in found.collectives for error in own.on_link[own.best].relative_errors]
    assert [*errors_of_calibration(calibration(request=request))] == [
        ("nccl", found.environment, error) for error in errors
    ]
    assert len(errors) == 39


def test_a_whole_layer_is_of_shapes_and_kernels() -> None:
    """By a calibration's kernels, of which none is fitted to it."""
    overlap = {"size": 1, "product": 1.0, "exchange": 1.0, "both": 1.0}
    speeds = dict.fromkeys(("speed", "memory_bandwidth", "products", "core", "passes", "launch", "meet", "beside"), 1.0)
    kernels = {"operations": [], "overlap": overlap, **speeds}
    errors = [*errors_of_calibration(calibration(kernels=kernels | {"layer_relative_error": -0.07}))]
    assert [(name, error) for name, _, error in errors] == [("kernels", -0.07)]
    assert [*errors_of_calibration(calibration(kernels=kernels))] == []

"""The harness needs torch, and says so."""

import sys

import pytest

from validation import __main__ as harness


def test_a_harness_without_torch_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert harness.main(["replay", "multi-cdp", "-n", "2", "-o", "report.json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("cdpsim: error: torch: is not installed; 2.6 or newer fits: run `pip install ")
    assert said.err.count("\n") == 1

"""Each of many faults is said no to, by words that tell what is wrong."""

import re

import pytest

pytest.importorskip("torch")

from tests.validation.faults import FAULTS, Fault
from tests.validation.known import known
from validation.comparison.command import report_summary
from validation.comparison.replays import SingleProcess, compare_replay
from validation.replay.case import Case
from validation.replay.contents import ReplayError

CASES = {repr(fault.case): fault.case for fault in FAULTS}


@pytest.mark.parametrize("case", CASES.values(), ids=[case.schedule for case in CASES.values()])
def test_nothing_is_wrong_without_a_fault(case: Case) -> None:
    report = compare_replay(known(case), SingleProcess(), repeats=0)
    assert report is not None
    assert report.ok, report_summary(report)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_is_named(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the report, which is not within tolerance, or in the error for which there is no report."""
    case = known(fault.case)
    fault.seed(monkeypatch)
    try:
        report = compare_replay(case, SingleProcess(), repeats=0)
    except ReplayError as error:
        told = str(error)
        assert "\n" not in told
    else:
        assert report is not None
        told = report_summary(report)
        assert not report.ok, told
    assert re.search(fault.told, told), told


def test_there_are_faults_of_every_kind() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20

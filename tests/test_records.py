"""The comparison of what two revisions print finds a changed figure, and nothing else."""

import json
from pathlib import Path

from tests import records


def test_a_figure_that_changes_is_named_and_a_format_that_changes_is_not() -> None:
    before = {"exit code": "0", "stdout": json.dumps({"period": 14, "cdpsim": "1.0"}), "t.csv": "a,b\n1,2\n"}
    after = before | {"stdout": json.dumps({"cdpsim": "2.0", "period": 14}, indent=1)}
    assert records.difference("simulate", before, after) == ""
    said = records.difference("simulate", before, after | {"t.csv": "a,b\n1,3\n"})
    assert said == "simulate\n  t.csv:\n    - 1,2\n    + 1,3"
    assert "stdout" in records.difference("simulate", before, after | {"stdout": '{"period": 15}'})


def test_what_a_command_prints_and_writes_is_kept() -> None:
    """Three steps of six slots each, in four files; a rule that does not go with the schedule is refused."""
    said = records.outputs_of("simulate 1f1b -n 2 -m 2 -o OUT", Path(records.ROOT))
    assert said["exit code"] == "0" and json.loads(said["summary.json"])["makespan"] == 18
    assert {"tasks.csv", "messages.csv", "memory.csv"} < said.keys()
    assert records.outputs_of("simulate 1f1b -n 2 --rule cdp-v1", Path(records.ROOT))["exit code"] == "2"


def test_there_are_as_many_commands_as_were_asked_for() -> None:
    """80 requests, all of them different, 20 plans and 3 sweeps."""
    assert (len({*records.REQUESTS}) >= 80, len({*records.PLANS}), len(records.SWEEPS)) == (True, 20, 3)

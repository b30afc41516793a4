"""Rounds whose lengths ranks find: they end where the equation and a replay do for the counts that came out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.validation.cases import OPTIMIZERS
from tests.validation.known import known
from validation.__main__ import main
from validation.comparison.live import compare_live, counts_found, live_summary
from validation.ranks.launcher import Ranks
from validation.ranks.member import play_live
from validation.replay.case import Case, Outcome, expected_parameters, largest_difference, play_in_process, prepare
from validation.replay.contents import Calls
from validation.replay.live import LiveOutcome, NumberedByWorker, with_counts_found
from validation.report.schema import LiveReport, LiveRound, ParameterComparison, encode_report
from validation.training.models import make_training

every_schedule = pytest.mark.parametrize("schedule", ["dpu", "wp", "acco"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as two:
        yield two


def case_of(schedule: str, optimizer: str = "adam", **how: Any) -> Case:
    return known(Case(schedule, 2, optimizer=OPTIMIZERS[optimizer], **{"steps": 4, "replicas": 2, "m": 2, **how}))


def outcomes_of(case: Case, ranks: Ranks) -> list[LiveOutcome]:
    return [outcome for outcome in ranks.call(play_live, case) if outcome is not None]


def ends_of(outcomes: list[LiveOutcome]) -> list[Outcome]:
    return [Outcome(own.parameters, own.places, Calls(), [], [], []) for own in outcomes]


@every_schedule
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_ranks_end_where_the_equation_does_for_the_counts_that_came_out(
    schedule: str, optimizer: str, ranks: Ranks
) -> None:
    """To the bit, as two numbers have one sum; with other counts the equation ends elsewhere."""
    prepared = prepare(case_of(schedule, optimizer))
    outcomes = outcomes_of(prepared.case, ranks)
    counts = counts_found(outcomes)
    found = with_counts_found(prepared, counts)
    assert found.plan.program.counts.tolist() == [sum(step) for step in counts]
    assert largest_difference(ends_of(outcomes), expected_parameters(found)) == 0
    assert largest_difference(play_in_process(found), expected_parameters(found)) == 0
    others = [*counts[:2], [counts[2][0] + 2, *counts[2][1:]], *counts[3:]]
    assert largest_difference(ends_of(outcomes), expected_parameters(with_counts_found(prepared, others))) > 1e-6


@every_schedule
def test_rounds_are_whole_blocks_behind_one_micro_batch(schedule: str, ranks: Ranks) -> None:
    """A slow rank has fewer; all have a block or more."""
    counts = np.array(counts_found(outcomes_of(case_of(schedule, m=2, slow=("1:20",), steps=6), ranks)))
    assert counts.shape == (13 if schedule == "acco" else 7, 2)
    assert counts[0].tolist() == [1, 1]
    assert (counts[1:] >= 2).all()
    assert (counts[1:] % 2 == 0).all()
    assert counts[1:, 0].sum() > counts[1:, 1].sum()


def test_steps_may_wait_before(ranks: Ranks) -> None:
    prepared = prepare(case_of("dpu", warm_up=2))
    outcomes = outcomes_of(prepared.case, ranks)
    counts = counts_found(outcomes)
    assert counts[:3] == [[2, 2]] * 3
    assert largest_difference(ends_of(outcomes), expected_parameters(with_counts_found(prepared, counts))) == 0


def test_a_rank_alone_does_so(ranks: Ranks) -> None:
    report = compare_live(case_of("acco", replicas=1, m=1), ranks)
    assert report is not None
    assert report.parameters.bit_equal
    assert live_summary(report).endswith("\nok\n")


def test_a_worker_knows_its_data_without_the_others() -> None:
    """Micro-batch 3 of the second step is the second worker's first, whose number is 1 of 2 workers' first ones."""
    training = make_training("mlp", 1)
    numbered = NumberedByWorker(**vars(training), counts=[[1, 1], [3, 2]])
    numbers = [0, 2, 4, 1, 3]
    for micro_batch, number in enumerate(numbers):
        assert torch.equal(numbered.data(1, micro_batch)[0], training.data(1, number)[0])
        assert torch.equal(numbered.data(1, micro_batch)[1], training.data(1, number)[1])


def test_the_command_writes_what_came_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live.json"
    asked = ["acco", "-n", "1", "--replicas", "2", "-m", "1", "--slow", "1:2", "--live", "-o", str(path)]
    assert main(["replay", *asked]) == 0
    report = msgspec.json.decode(path.read_bytes(), type=LiveReport)
    assert report.ok
    assert report.request["live"] is True
    assert (report.request["replicas"], report.request["slow"]) == (2, "1:2")
    assert len(report.rounds) == 7
    told = capsys.readouterr().out
    assert told.startswith("parameters  bit-equal, for the rounds that came out\nrounds      0: 1 1 micro-batches\n")


def test_all_reports_below_a_folder_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for a live one; in the table it has nothing."""
    live = LiveReport(
        request={"schedule": "acco"},
        environment={},
        rounds=[LiveRound(micro_batches=[1, 1]), LiveRound(micro_batches=[5, 2])],
        parameters=ParameterComparison(max_abs_difference=0.0, bit_equal=True, tolerance=0.0, nearest=None),
        ok=True,
    )
    (tmp_path / "report-live.json").write_bytes(encode_report(live))
    assert main(["report", str(tmp_path)]) == 2
    line = "acco, live: 1 to 5 micro-batches of a rank in 2 rounds; parameters bit-equal; ok"
    assert line in capsys.readouterr().err
    case = ["local-sgd", "-n", "1", "--replicas", "2", "--single-process", "--repeats", "0"]
    assert main(["replay", *case, "-o", str(tmp_path / "report.json")]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert f"report-live.json: {line}" in told.err
    assert told.out.count("local-sgd") == 1


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["1f1b", "--live"], "live: 1f1b has no rounds whose lengths are found in its run; leave it out, or take one"),
        (["acco", "--live", "--single-process"], "live: is for ranks, each of which looks for itself"),
        (
            ["acco", "--live", "--offload", "optimizer"],
            "live: makes updates beside the tasks of a device, and --offload has them on a host; leave either out",
        ),
        (["acco", "--replicas", "2", "--slow", "7:4"], "slow: there is no device 7 for acco; take one from 0 to 1"),
        (["acco", "--warm-up", "2"], "warm-up: acco does not take this option"),
    ],
)
def test_what_cannot_be_is_refused(
    asked: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *asked, "-n", "2", "-o", str(tmp_path / "live.json")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert told in lines[0]

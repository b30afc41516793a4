"""The same programs by processes with gloo, one a device; and ranks that die, hang or fail."""

import os
import signal

import pytest

pytest.importorskip("torch")

from cdpsim.errors import RequestError
from cdpsim.schedules import TABLE_1
from tests.validation.cases import OPTIMIZERS, rules_of, tolerance
from tests.validation.known import known
from validation.ranks.launcher import Ranks
from validation.replay.case import Case, expected_parameters, largest_difference, prepare
from validation.replay.contents import ReplayError


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_end_where_the_equation_does(n: int) -> None:
    """All nine schedules on ranks that stay alive: parameters, and calls device by device."""
    with Ranks(n * n) as ranks:
        for schedule in TABLE_1:
            for rule in rules_of(schedule):
                for optimizer in ("momentum", "adam")[: 4 - n]:
                    case = known(Case(schedule, n, rule=rule, optimizer=OPTIMIZERS[optimizer], model="transformer"))
                    prepared, outcomes = prepare(case), ranks.run(case)
                    assert largest_difference(outcomes, expected_parameters(prepared)) <= tolerance(schedule), case
                    assert len(outcomes) == prepared.plan.program.devices
                    for device, outcome in enumerate(outcomes):
                        assert outcome.calls == prepared.plan.calls(device), case


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (signal.SIGKILL, r"rank 1: is gone \(killed by SIGKILL\)"),
        (signal.SIGSTOP, r"rank 0: .*waited for p2p .* between devices .*rank 1 has not answered"),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_gone_is_named(harm: int, named: str) -> None:
    """Within the timeout and a little more, and no process is left."""
    with Ranks(2) as ranks:
        ranks.run(Case("multi-cdp", 2))
        os.kill(ranks.pids[1], harm)
        with pytest.raises(ReplayError, match=named):
            ranks.run(Case("multi-cdp", 2), timeout=3)
        for pid in ranks.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_too_few_ranks_are_told() -> None:
    with (
        Ranks(2) as ranks,
        pytest.raises(RequestError, match="ranks: pp-cdp has 3 devices at n=3; start as many, not 2"),
    ):
        ranks.run(Case("pp-cdp", 3))


def test_what_a_rank_raises_reaches_the_launcher() -> None:
    with Ranks(1) as ranks, pytest.raises(RequestError, match="model: unknown model 'nlp'"):
        ranks.run(Case("single-cdp", 2, model="nlp"))


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_ranks_need_linux(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet in a file without a name, and end with the process that started them."""
    monkeypatch.setattr("sys.platform", platform)
    with pytest.raises(RequestError, match=r"^ranks: are started on Linux alone; take a machine that has it, or --"):
        Ranks(2)
